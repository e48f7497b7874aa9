"""MetricAverageCallback: means of logged values over ranks. BestModelCheckpoint: the best model, in one file."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed import objects
from horovod_train.errors import UserError
from horovod_train.tensorflow import watch


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace each logged value at the end of an epoch by its mean over ranks.

    The result is a mean of means: exact if every rank has seen the same number of records. Put this callback before
    those that read the logs, so that all ranks decide alike. device: TensorFlow device of the exchange.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = {name: np.asarray(value, np.float64) for name, value in sorted((logs or {}).items())}
        with watch.exchanging("MetricAverageCallback"):
            names = objects.gather(list(values), "MetricAverageCallback.names")
        if differing := [rank for rank, rank_names in enumerate(names) if rank_names != names[0]]:
            raise UserError(
                f"model.fit: all ranks must log the same metrics; rank 0 logs {', '.join(names[0])}, rank "
                f"{differing[0]} logs {', '.join(names[differing[0]])}. Give validation_data to all ranks or to none."
            )
        if logs and values:
            packed = tf.constant(np.concatenate([value.ravel() for value in values.values()]))
            with watch.exchanging("MetricAverageCallback"), tf.device(self._device):
                means = hvd.allreduce(packed, op=hvd.Average, name="MetricAverageCallback").numpy()
            ends = np.cumsum([value.size for value in values.values()])
            for (name, value), mean in zip(values.items(), np.split(means, ends[:-1]), strict=True):
                logs[name] = mean.reshape(value.shape) if value.ndim else float(mean[0])


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint with save_best_only, which writes on rank 0 only.

    filepath: default best.keras, or best.weights.h5 with save_weights_only; Horovod's has none. The other arguments are
    Keras'. Put it after MetricAverageCallback.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        super().__init__(
            filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose if hvd.rank() == 0 else 0,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if hvd.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if hvd.rank() == 0:
            super().on_epoch_end(epoch, logs)
