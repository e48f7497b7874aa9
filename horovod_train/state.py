"""TrainState: all that a run is made of while it trains, all of it variables. Neither saves nor exchanges it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.agreement import digest
from horovod_train.distributed.group import WorkerGroup, as_tf_variable


class TrainState:
    """A model, its optimizer with slots built, and where in the data the run is.

    step: updates tried so far (int64). With a LossScaleOptimizer `optimizer.iterations` counts those applied.
    epoch: whole passes done; records: those used in the present epoch over all ranks (int64).
    followed: what else goes on across a resume, by name, such as the best value so far.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        followed: Mapping[str, tf.Variable] | None = None,
    ) -> None:
        # Slots must exist before the broadcast, or each rank would make its own at its first step.
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self.model, self.optimizer = model, optimizer
        self.followed = dict(followed or {})
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
            *((f"progress/{name}", variable) for name, variable in self.followed.items()),
        ]
        return dict(_unique((name, as_tf_variable(variable)) for name, variable in named))

    @property
    def statistics(self) -> list[tf.Variable]:
        """What each rank gathers for itself: BatchNorm's moving statistics. Only inference reads them."""
        own = [as_tf_variable(weight) for weight in self.model.non_trainable_weights]
        return [variable for variable in own if variable.dtype.is_floating]

    def average_statistics(self, group: WorkerGroup) -> list[np.ndarray]:
        """Collective: gives all ranks the mean of their statistics; returns this rank's own, for `set_statistics`."""
        own = [variable.numpy() for variable in self.statistics]
        self.set_statistics(group.average(own))
        return own

    def set_statistics(self, values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self.statistics, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def snapshot(self, group: WorkerGroup) -> dict[str, np.ndarray]:
        """Collective: a copy of every variable, statistics averaged; and under `ranks/` those of each rank.

        With the latter a resume at the same number of ranks goes on bit for bit; at another it takes the mean.
        """
        own = self.average_statistics(group)
        arrays = {name: np.array(variable.numpy()) for name, variable in self.variables().items()}
        self.set_statistics(own)
        if own:
            by_rank = group.gather(own)
            for index in range(len(own)):
                arrays[f"ranks/{index}"] = np.stack([statistics[index] for statistics in by_rank])
        return arrays

    def restore_statistics(self, group: WorkerGroup, arrays: Mapping[str, np.ndarray]) -> None:
        """Collective: gives each rank the statistics that it had, where root's `ranks/` arrays are of as many ranks."""
        by_rank = group.broadcast_object([arrays[f"ranks/{index}"] for index in range(len(arrays))])
        if by_rank and len(by_rank[0]) == group.size:
            self.set_statistics([statistics[group.rank] for statistics in by_rank])

    def digests(self) -> dict[str, str]:
        """Name of each variable that must be equal on all ranks at every step → SHA-256 of its bytes."""
        own = {variable.ref() for variable in self.statistics}
        return {
            name: digest(_bytes(variable)) for name, variable in self.variables().items() if variable.ref() not in own
        }

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
