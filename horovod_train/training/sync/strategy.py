"""SyncStrategy: what a training step asks of a strategy for exchanging between ranks. It has no implementation here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from horovod_train.config.settings import TrainConfig
from horovod_train.distributed.group import WorkerGroup

CombineList = Callable[[Sequence[Any]], list[Any]]
"""(gradients) → gradients combined over the ranks."""


class Exchanged(NamedTuple):
    """Gradients of a step. Each list has one entry for each trainable variable, or None."""

    gradients: list[Any]
    """Combined gradients, to apply now."""
    local: Sequence[Any]
    """This rank's part of them."""


class Moves(NamedTuple):
    """How far one parameter moved on each rank between two averages. Each list has one entry per rank."""

    changed: list[float]
    """Change of the mean of its elements; 0.0 if unchanged."""
    apart: list[float]
    """Root mean square, over its elements, of value − mean over ranks."""


class Drift(NamedTuple):
    """How far ranks had moved apart at their last average."""

    ranks_apart: float
    """The root mean square over ranks of ‖value − mean‖."""
    moves: Mapping[str, Moves]
    """By the path of each parameter; only on root, and empty before the first average."""


class SyncStrategy(Protocol):
    """When ranks exchange, and what. Keeps its state in variables, so that a run can resume.

    Does not compute or apply gradients; see step.
    """

    delay: int
    """Steps between computing and applying a gradient: 0 or 1."""

    @property
    def variables(self) -> Mapping[str, tf.Variable]:
        """Variables that a checkpoint needs for this strategy, by name; equal on all ranks after `settle`."""

    @property
    def must_be_finite(self) -> Sequence[tf.Variable]:
        """Those of `variables` that hold numbers not applied yet."""

    def exchange(
        self, combine: CombineList, local_gradients: Sequence[Any], variables: Sequence[Any] | None, step: tf.Tensor
    ) -> Exchanged:
        """Collective, in the compiled step: return the gradients to apply now, given those of this rank.

        combine: the exchange. local_gradients: of one optimizer, one for each of `variables`, or None; the same ones
        are None on every rank. variables: None: all that are trained, in their order. step: int64, steps done.
        """

    def end_step(self, failed: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Collective, in the compiled step, after applying gradients: return whether all ranks must stop.

        failed: bool, whether this rank has failed, in this step or before. step: int64, this step included.
        """

    def settle(self, step: int) -> bool:
        """Collective, between steps: make checkpointed variables equal on all ranks; return whether it had to.

        Call it only through TrainState.settle, which checks first whether a rank has failed.
        """

    def next_sync_step(self, step: int) -> int:
        """Return the first step ≥ `step` at which the run can stop and resume with identical results."""

    def drift(self) -> Drift | None:
        """Collective: return how far ranks move apart between exchanges; None if they do not."""


@dataclass(frozen=True)
class SyncParts:
    """What a strategy is built from."""

    config: TrainConfig
    group: WorkerGroup
    model: keras.Model
    combine: CombineList
    """Combines gradients over the ranks, outside of a step."""
    slots: Sequence[Any] = ()
    """The variables of the optimizers."""
    rates: Sequence[Any] = ()
    """Those of them that are learning rates."""
    forward_state: Sequence[tf.Variable] = ()
    """Weights that are not trained and that the forward pass assigns, as BatchNormalization does."""
    averages: Sequence[tf.Variable] = ()
    """Moving averages of the weights, if any."""
    sparse_as_dense: bool = True
    """Whether sparse gradients may become dense tables; only those can wait a step."""


def settled_step() -> tf.Variable:
    """Create the variable for the step at which ranks were last made equal; the broadcast does it before step 1."""
    return tf.Variable(0, dtype=tf.int64, trainable=False, name="settled_step")


def by_unique_name(named: Iterable[tuple[str, tf.Variable]]) -> dict[str, tf.Variable]:
    """Append #2, #3, … to repeated names: paths can repeat if a model has two layers of one name."""
    counts: Counter[str] = Counter()
    unique = {}
    for name, variable in named:
        counts[name] += 1
        unique[name if counts[name] == 1 else f"{name}#{counts[name]}"] = variable
    return unique
