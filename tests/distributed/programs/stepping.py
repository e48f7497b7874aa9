"""Builds the trainer's own step for a compiled model, without data and config files, for the rank programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.settings import Config
from horovod_train.data.batch_source import Batch, StepSize
from horovod_train.distributed.group import WorkerGroup
from horovod_train.optim.schedules import Horizon
from horovod_train.training.build import build_state, build_training
from horovod_train.training.compiled import compile_model
from horovod_train.training.state import TrainState
from horovod_train.training.steps.step import TrainStep
from horovod_train.training.sync import SyncStrategy

ANY_SIZE = StepSize(rows=None, is_full=False)
"""Of steps of which only the data tells how many records a rank has."""


@dataclass(frozen=True)
class Batches:
    """What a step is built for: batches as they are. scaled_spec: of tf.TensorSpec."""

    scaled_spec: Batch
    has_weights: bool = False

    def scaled(self, batch: Batch) -> Batch:
        return batch


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
    training = build_training(config, group, compiled, Batches(spec, has_weights))
    state = build_state(config, group, model, training, {})
    if synchronization is not None:
        state = TrainState(model, training.optimizers, averages=state.averages, synchronization=synchronization)
    return training.make_step(state)
