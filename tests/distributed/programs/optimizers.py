"""Weights after a few steps on different data per rank, with our optimizer, and with parts left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave
from in_model_fit import build_model, data, facts_of, fit, fit_with, group, rank, sha

from horovod_train.distributed.optimizer import GradientExchange
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.errors import UserError
from horovod_train.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
from horovod_train.tensorflow import DistributedOptimizer
from horovod_train.tensorflow.agreement import guards


class Parts(keras.utils.PyDataset):
    """Batches that Keras fetches one by one in threads, which it must stop between epochs."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__(workers=2)
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x) // 8

    def __getitem__(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        return self._x[8 * batch : 8 * batch + 8], self._y[8 * batch : 8 * batch + 8]


def error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except UserError as error:
        return str(error)
    return "accepted"


def sgd() -> keras.optimizers.Optimizer:
    return DistributedOptimizer(keras.optimizers.SGD(0.01))


class StopOneRank(keras.callbacks.Callback):
    """As EarlyStopping on what one rank has seen."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = rank == 0


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

# Ranks that would not take the same steps; all of them learn of it, so that they can go on here.
in_step = [BroadcastGlobalVariablesCallback()]
few = 32 - 8 * (rank == 0)
facts["uneven"] = {
    "arrays": sha(fit(sgd(), callbacks=in_step, rows=few)),
    "steps_of_parts": int(fit(sgd(), callbacks=in_step, rows=few, kind=Parts).optimizer.iterations),
    "two_steps_a_call": sha(fit(sgd(), callbacks=in_step, rows=few, compiled={"steps_per_execution": 2})),
}
facts["even"] = {batches: sha(fit(sgd(), rows=8 * batches)) for batches in (2, 3)}
guards.end_epochs_together = False
facts["uneven_refused"] = error_of(lambda: fit(sgd(), callbacks=in_step, rows=few))
guards.end_epochs_together = True
facts["stopped_alone"] = error_of(lambda: fit(sgd(), callbacks=[*in_step, StopOneRank()]))
stream = tf.data.Dataset.from_tensor_slices(data(rank)).batch(8).filter(lambda *_: True)
endless = build_model(0)
endless.compile(sgd(), "mse")
facts["unknown_length"] = error_of(lambda: endless.fit(stream, verbose=0, callbacks=in_step))
facts["known_length"] = error_of(lambda: endless.fit(stream.repeat(), steps_per_epoch=3, verbose=0, callbacks=in_step))
steps_before = int(endless.optimizer.iterations)
endless.fit(stream.repeat(), steps_per_epoch=3 + (rank == 0), epochs=3, verbose=0, callbacks=in_step)
facts["uneven"]["steps_given"] = int(endless.optimizer.iterations) - steps_before
facts["bfloat16"] = error_of(
    lambda: fit(
        sgd(), model=keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, dtype="bfloat16")]), callbacks=in_step
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
