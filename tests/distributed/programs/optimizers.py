"""Weights after a few steps on different data per rank, with our optimizer, and with parts left out."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from facts import leave
from in_model_fit import data, error_of, facts_of, fit, fit_with, group, rank, sgd, sha

from horovod_train.distributed.optimizer import GradientExchange
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
from horovod_train.tensorflow import DistributedOptimizer

facts: dict[str, Any] = {"rank": rank}
facts |= facts_of(fit_with(("sgd", "adam", "clipped", "loss_scale")))
facts["unwrapped"] = sha(fit(keras.optimizers.SGD(0.01)))
facts["accumulating"] = sha(fit(DistributedOptimizer(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2))))

different_start: dict[str, Any] = {"seed": rank, "optimizer": DistributedOptimizer(keras.optimizers.Adam(0.01))}
facts["without_broadcast"] = sha(fit(**different_start))
different_start["optimizer"] = DistributedOptimizer(keras.optimizers.Adam(0.01))
facts["with_broadcast"] = sha(fit(**different_start, callbacks=[BroadcastGlobalVariablesCallback()]))

# XLA: what Keras chooses where there is a GPU.
with_xla: dict[str, Any] = {"compiled": {"jit_compile": True}}
facts["xla_with_broadcast"] = sha(fit(sgd(), callbacks=[BroadcastGlobalVariablesCallback()], **with_xla))
facts["xla_without_broadcast"] = error_of(lambda: fit(sgd(), **with_xla))
normed = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
synchronise_batch_norm(normed)
facts["xla_with_synchronised_batch_norm"] = error_of(lambda: fit("sgd", model=normed, **with_xla))

facts["bfloat16"] = error_of(
    lambda: fit(
        sgd(),
        model=keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, dtype="bfloat16")]),
        callbacks=[BroadcastGlobalVariablesCallback()],
    )
)

logs: dict[str, float] = {"loss": float(rank)}
MetricAverageCallback().on_epoch_end(0, logs)
facts["averaged_log"] = logs["loss"]

# A layer that takes no part in the loss has no gradient on any rank.
inputs = keras.Input((6,))
hidden = keras.layers.Dense(3)(inputs)
spare = keras.layers.Dense(2, name="spare")(hidden)
two_headed = keras.Model(inputs, [keras.layers.Dense(1)(hidden), spare])
optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(0.1))
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(two_headed(data(rank)[0])[0])
optimizer.apply(tape.gradient(loss, two_headed.trainable_variables), two_headed.trainable_variables)
facts["none_gradients"] = int(optimizer.iterations)

# An overflow on one rank: the scale must fall on all, and no weights move.
growing = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2)
scaled: Any = DistributedOptimizer(growing)
weight = keras.Variable([1.0, 2.0])
scaled.build([weight])
scaled.apply([tf.constant([float("inf") if rank == 0 else 1.0, 1.0])], [weight])
facts["overflow"] = {"scale": float(scaled.dynamic_scale), "weight": weight.numpy()}
scaled.apply([tf.constant([2.0, 2.0 * (rank + 1)])], [weight])
facts["after_overflow"] = {"scale": float(scaled.dynamic_scale), "weight": weight.numpy()}
scaled.apply([tf.constant([0.0, 0.0])], [weight])
facts["recovered_scale"] = float(scaled.dynamic_scale)

for name, attempt in {
    "wrapped_twice": lambda: DistributedOptimizer(sgd()),
    "unknown_op": lambda: GradientExchange(op="mean"),
    "predivided_sum": lambda: GradientExchange(op="sum", predivide=2.0),
    "unknown_compression": lambda: GradientExchange(compression="zip"),
}.items():
    facts[name] = error_of(attempt)

leave(rank, facts)
group.close()
