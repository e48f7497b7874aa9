"""A training loop of one's own, with a tape.

horovodrun --gloo -np 2 python examples/tape.py
"""

from __future__ import annotations

import digits
import keras
import tensorflow as tf

import horovod_train.tensorflow as hvd

hvd.init()
(x, y), held_out = digits.load()
x, y, weights = hvd.shard(x, y)
dataset = tf.data.Dataset.from_tensor_slices((x, y, weights)).shuffle(len(x), seed=hvd.rank()).batch(32)

model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(64, "relu")])
model.add(keras.layers.Dense(10))
optimizer = keras.optimizers.Adam(0.002 * hvd.size())
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(x: tf.Tensor, y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True), sample_weight=weights)
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


hvd.broadcast_model(model, optimizer)
for epoch in range(12):
    losses = [step(*batch) for batch in dataset]
    mean = hvd.allreduce(tf.reduce_mean(losses), name="loss")  # over all ranks
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {float(mean):.4f}", flush=True)
if hvd.rank() == 0:
    right = tf.equal(tf.argmax(model(held_out[0]), axis=1), held_out[1])
    print(f"held-out accuracy {float(tf.reduce_mean(tf.cast(right, tf.float32))):.3f}", flush=True)
