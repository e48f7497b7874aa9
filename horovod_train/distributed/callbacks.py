"""For `model.fit` with the DistributedOptimizer: equal weights at the start, means over ranks in the logs."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.group import as_tf_variable


class BroadcastVariables(keras.callbacks.Callback):
    """Gives every rank root's weights and optimizer state before the first step.

    The optimizer's slots are built first, so that they are broadcast too. Seeds of dropout are not: masks are to
    differ by rank.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [as_tf_variable(variable) for variable in [*self.model.weights, *optimizer.variables]]
        hvd.broadcast_variables(variables, root_rank=self.root_rank)


class AverageMetrics(keras.callbacks.Callback):
    """Replaces each logged value at the end of an epoch by its mean over ranks.

    A mean of means: exact where every rank has seen the same number of records. Put it before callbacks that read
    the logs.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(logs or {})
        if logs and names:
            values = tf.constant(np.array([float(logs[name]) for name in names]))
            means = hvd.allreduce(values, op=hvd.Average, name="AverageMetrics").numpy()
            logs.update(zip(names, means.tolist(), strict=True))
