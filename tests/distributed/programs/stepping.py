"""Builds the trainer's own step for a compiled model, without data and config files, for the rank programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import keras
import tensorflow as tf

from horovod_train.config.settings import Config
from horovod_train.data.batch_source import Batch, BatchSource, StepSize
from horovod_train.distributed.group import WorkerGroup
from horovod_train.optim.schedules import Horizon
from horovod_train.training.build import build_training
from horovod_train.training.compiled import compile_model
from horovod_train.training.steps.shares import Shares
from horovod_train.training.steps.step import TrainStep
from horovod_train.training.sync import SyncStrategy

ANY_SIZE = StepSize(rows=None, is_full=False)
"""Of steps of which only the data tells how many records a rank has."""


def ignore_shares(shares: Shares) -> None:
    """Have the shares of all ranks count as 1, to show what they are for."""
    of_pass = shares.of_pass
    shares.of_pass = lambda share, totals=None: of_pass(None, totals)  # type: ignore[method-assign]


def like(spec: Batch, *, has_weights: bool = False) -> BatchSource:
    """Return what a step is built for: batches as they are. spec: of tf.TensorSpec."""
    return cast(BatchSource, SimpleNamespace(scaled_spec=spec, has_weights=has_weights, scaled=lambda batch: batch))


def build_step(
    model: keras.Model,
    batch: Any,
    group: WorkerGroup,
    config: Config,
    *,
    synchronization: SyncStrategy | None = None,
    has_weights: bool = False,
) -> TrainStep:
    """Return the step of a compiled model, with the settings of `config`; its state is that of `step.state`.

    batch: one like those to come. synchronization: default as the config says.
    """
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, batch)
    compiled = compile_model(config, model, Horizon(1, 1, 1))
    step = build_training(config, group, compiled, like(spec, has_weights=has_weights), Shares(group), {})
    if synchronization is not None:
        step.state.synchronization = step.update.synchronization = synchronization
    return step
