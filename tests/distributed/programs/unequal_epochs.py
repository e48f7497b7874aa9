"""Ranks in `model.fit` that would not take the same steps; all of them learn of it, so that they can go on here."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave
from in_model_fit import build_model, data, error_of, fit, group, rank, sgd, sha

from horovod_train.keras.callbacks import BroadcastGlobalVariablesCallback
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


class StopOneRank(keras.callbacks.Callback):
    """As EarlyStopping on what one rank has seen."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = rank == 0


facts: dict[str, Any] = {"rank": rank}
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


def steps_of_short_epochs(optimizer: Any, callbacks: Any) -> int:
    """Of three epochs of 3 steps, over 4 batches that do not repeat: Keras ends the second after one, and warns."""
    model = build_model(0)
    model.compile(optimizer, "mse")
    batches = tf.data.Dataset.from_tensor_slices(data(rank)).batch(8)
    model.fit(batches, steps_per_epoch=3, epochs=3, verbose=0, callbacks=callbacks)
    return int(model.optimizer.iterations)


facts["short_alike"] = [
    steps_of_short_epochs(sgd(), in_step),
    steps_of_short_epochs(keras.optimizers.SGD(0.1), []),
]
leave(rank, facts)
group.close()
