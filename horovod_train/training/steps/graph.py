"""Builds the graph of one training step, as TensorFlow compiles it, with the names of layers and parts of the step.

Traces the step again and never runs it. Does not write it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import suggest
from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.batch_source import StepSize
from horovod_train.errors import UserError
from horovod_train.output.graph import PARTS, fold, show_branches
from horovod_train.training.steps.step import TrainStep


def check_names(model: keras.Model, names: Mapping[str, Any]) -> None:
    """Raise UserError if `log.graph_names` has a part that does not exist, or a name that is not valid."""
    known = [*PARTS, model.name, *(layer.name for layer in model.layers)]
    for part, name in names.items():
        if part not in known:
            raise UserError(f"log.graph_names.{part}: the graph has no such part; {suggest(part, known)}")
        if name is not None and not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9.][\w./-]*", name)):
            raise UserError(
                f"log.graph_names.{part}: expected a name of letters, digits and _ - . /, or null; received {name!r}."
            )


def draw_step(
    train_step: TrainStep, batch: Batch, size: StepSize, *, rank: int, names: Mapping[str, str | None]
) -> Any:
    """Return the GraphDef of one step of a size on a batch like `batch` (of tf.TensorSpec).

    Its top-level folds are `input_data`, `rank_N` with the model and its layers, `exchange`, `update_parameters`, and
    the variables of each layer. names: other names for these or for layers; None: remove the fold, keep its content.
    """

    def one_step(batches: Any) -> tf.Tensor:
        with tf.name_scope("input_data"):
            batch = train_step.rows.scaled(next(batches))
        return train_step.train_on(batch, size)

    traced = tf.function(one_step, autograph=False).get_concrete_function(tf.data.IteratorSpec(batch))
    model = train_step.state.model
    return fold(
        show_branches(traced.graph.as_graph_def()),
        variables=_variables(train_step, traced),
        names={"rank": f"rank_{rank}"} | dict(names),
        layers={model.name, *(layer.name for layer in model.layers)},
    )


def _variables(train_step: TrainStep, traced: Any) -> dict[str, str]:
    """Map each node that stands for a variable to the variable's name under its fold."""
    state = {id(variable.handle): name for name, variable in train_step.state.variables().items()}
    others = {id(variable.handle): f"counters/{variable.name.split(':')[0]}" for variable in traced.graph.variables}
    names = {}
    handles = traced.captured_inputs
    for handle, node in zip(handles, traced.inputs[-len(handles) :], strict=True):
        name = (others | state).get(id(handle))
        if name:
            name = name.removeprefix("model/")
            for prefix, part in (("optimizer/", "update_parameters/"), ("ema/", "moving_average/")):
                name = part + name.removeprefix(prefix) if name.startswith(prefix) else name
            names[node.op.name] = re.sub(r"[^\w./\\-]", "_", name)
    return names
