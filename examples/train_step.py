"""A model with a train_step of its own: an autoencoder whose loss has two parts.

horovodrun --gloo -np 2 python examples/train_step.py
"""

from __future__ import annotations

from typing import Any

import digits
import keras
import tensorflow as tf

import horovod_train.keras as hvd


class Autoencoder(keras.Model):
    """Reproduces its input through eight numbers, which it keeps small."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(32, "relu"), keras.layers.Dense(8)])
        self.decoder = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(64, "sigmoid")])

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            code = self.encoder(data)
            error = tf.reduce_mean(tf.square(self.decoder(code) - tf.reshape(data, [-1, 64])))
            loss = error + 1e-4 * tf.reduce_mean(tf.square(code))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)  # combined over the ranks here
        return {"loss": loss, "error": error}


hvd.init()
(x, _), (held_out, _) = digits.load()
x, _ = hvd.shard(x)  # the weights are not needed: one record more or less
model = Autoencoder()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * hvd.size())))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(x, batch_size=32, epochs=10, verbose=2 if hvd.rank() == 0 else 0, callbacks=callbacks)
if hvd.rank() == 0:
    error = tf.reduce_mean(tf.square(model(held_out) - held_out.reshape(-1, 64)))
    print(f"held-out error {float(error):.4f}", flush=True)
