"""Two models and two optimizers: a GAN that learns to draw digits. Each optimizer combines its own gradients.

horovodrun --gloo -np 2 python examples/gan.py
"""

from __future__ import annotations

import digits
import keras
import tensorflow as tf

import horovod_train.tensorflow as hvd

NOISE = 16
hvd.init()
(x, y), _ = digits.load()
x, _, _ = hvd.shard(x, y)
dataset = tf.data.Dataset.from_tensor_slices(x).shuffle(len(x), seed=hvd.rank()).batch(32, drop_remainder=True)

layers = keras.layers
generator = keras.Sequential([keras.Input((NOISE,)), layers.Dense(64, "relu"), layers.Dense(64, "sigmoid")])
generator.add(layers.Reshape((8, 8, 1)))
discriminator = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(1)])
of_generator = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
of_discriminator = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
loss_of = keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def step(real: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    noise = tf.random.normal([len(real), NOISE])
    with tf.GradientTape(persistent=True) as tape:
        of_real, of_drawn = discriminator(real), discriminator(generator(noise))
        fooled = loss_of(tf.ones_like(of_drawn), of_drawn)
        caught = loss_of(tf.ones_like(of_real), of_real) + loss_of(tf.zeros_like(of_drawn), of_drawn)
    for optimizer, loss, model in ((of_generator, fooled, generator), (of_discriminator, caught, discriminator)):
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    return fooled, caught


tf.random.set_seed(hvd.rank())  # other noise on each rank
hvd.broadcast_model(generator, of_generator)
hvd.broadcast_model(discriminator, of_discriminator)
for epoch in range(10):
    means = tf.reduce_mean([step(batch) for batch in dataset], axis=0)
    fooled, caught = hvd.allreduce(means, name="losses").numpy()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: generator {fooled:.3f}, discriminator {caught:.3f}", flush=True)
