"""TrainState: all that a run is made of while it trains, all of it variables. Neither saves nor exchanges it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.agreement import digest
from horovod_train.distributed.group import WorkerGroup, as_tf_variable


class TrainState:
    """A model, its optimizer with slots built, and where in the data the run is.

    step: updates tried so far (int64). With a LossScaleOptimizer `optimizer.iterations` counts those applied.
    epoch: whole passes done; records: those used in the present epoch over all ranks (int64).
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        # Slots must exist before the broadcast, or each rank would make its own at its first step.
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self.model, self.optimizer = model, optimizer
        self.step, self.epoch, self.records = (
            tf.Variable(0, dtype=tf.int64, trainable=False, name=name) for name in ("step", "epoch", "records")
        )
        # Unlike model.weights, model.variables has the seeds of dropout: they are not to be equal on all ranks.
        weights = {id(weight) for weight in model.weights}
        self.seeds = [
            as_tf_variable(variable)
            for variable in model.variables
            if id(variable) not in weights and "seed" in variable.path
        ]

    def variables(self) -> dict[str, tf.Variable]:
        """Every variable that ranks must agree on and a checkpoint must hold, by a name that is unique and stable."""
        named = [
            *((f"model/{weight.path}", weight) for weight in self.model.weights),
            *((f"optimizer/{slot.path}", slot) for slot in self.optimizer.variables),
            *((f"progress/{name}", getattr(self, name)) for name in ("step", "epoch", "records")),
        ]
        return dict(_unique((name, as_tf_variable(variable)) for name, variable in named))

    def average_statistics(self, group: WorkerGroup) -> None:
        """Collective: gives all ranks the mean of what each has gathered for itself: BatchNorm's moving statistics.

        They are the only weights that ranks may hold differently between steps, and only inference reads them.
        """
        own = [as_tf_variable(weight) for weight in self.model.non_trainable_weights]
        floating = [variable for variable in own if variable.dtype.is_floating]
        means = group.average([tf.cast(variable, tf.float64).numpy() for variable in floating])
        for variable, mean in zip(floating, means, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))

    def digests(self) -> dict[str, str]:
        """Name of each variable → SHA-256 of its bytes."""
        return {name: digest(_bytes(variable)) for name, variable in self.variables().items()}

    def weights_sha256(self) -> str:
        """One SHA-256 over the bytes of all weights of the model, in its order."""
        total = hashlib.sha256()
        for weight in self.model.weights:
            total.update(_bytes(as_tf_variable(weight)))
        return total.hexdigest()

    def move_to(self, epoch: int, records: int) -> None:
        """Notes the place in the data; the compiled step counts `step` itself."""
        self.epoch.assign(epoch)
        self.records.assign(records)


def _bytes(variable: tf.Variable) -> bytes:
    return np.ascontiguousarray(variable.numpy()).tobytes()


def _unique(named: Iterator[tuple[str, tf.Variable]]) -> Iterator[tuple[str, tf.Variable]]:
    """Paths can repeat, where a model holds two layers of one name."""
    seen: dict[str, int] = {}
    for name, variable in named:
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), variable
