"""What a run trains and evaluates with: built by build, or by own.build for a model that has its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from horovod_train.distributed.optimizer import CombiningOptimizer
from horovod_train.training.parts.averages import OptimizerAverages
from horovod_train.training.state import TrainState
from horovod_train.training.steps.own.step import OwnEvalStep, OwnTrainStep
from horovod_train.training.steps.step import EvalStep, TrainStep


@dataclass(frozen=True)
class Training:
    """What a state is built with, and then a step with the state. The optimizer has its slots."""

    optimizer: CombiningOptimizer
    losses: list[str]
    """Those of which the state keeps averages."""
    make_step: Callable[[TrainState], TrainStep | OwnTrainStep]
    origins: tuple[str, ...]
    warnings: tuple[str, ...]
    averages: OptimizerAverages | None = None
    """Those that the optimizer keeps, if it does."""


@dataclass(frozen=True)
class Evaluation:
    """The step of an evaluation."""

    step: EvalStep | OwnEvalStep
    origins: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
