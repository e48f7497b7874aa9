"""Give all ranks one rank's values: of variables, layers, models and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_train.distributed.group import as_tf_variable, check_sendable
from horovod_train.errors import UserError
from horovod_train.tensorflow import watch
from horovod_train.tensorflow.names import name_of

_SEED = "seed_generator_state"
"""Part of the names of the variables in which Keras' random layers keep their seed."""


def broadcast_variables(
    variables: Any, root_rank: int, process_set: hvd.ProcessSet = hvd.global_process_set, inplace: bool = False
) -> None:
    """Collective: set variables on every rank to root_rank's values.

    variables: Keras or TensorFlow variables, layers, models, optimizers, or a sequence of these. The seeds of random
    layers are left as they are, because dropout masks must differ by rank.
    process_set: the ranks that take part. inplace: without a copy of each variable in memory.

    Raises UserError for a dtype that Horovod cannot send, and for an argument of another kind.
    """
    targets = [variable for variable in _variables_in(variables) if _SEED not in name_of(variable)]
    check_sendable(targets)
    if process_set is hvd.global_process_set:
        with tf.init_scope():  # a script may broadcast inside its compiled step
            watch.begin()
    tf_variables = [as_tf_variable(variable) for variable in targets]
    if inplace:
        hvd.broadcast_variables(tf_variables, root_rank, process_set, inplace)
    else:
        _broadcast_by_position(tf_variables, root_rank, process_set)


def broadcast_model(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, root_rank: int = 0
) -> None:
    """Collective: set the weights of a model, and the state of its optimizer, on every rank to root_rank's.

    optimizer: default the one the model was compiled with, if any. Its slots are created first.
    """
    if not model.variables:
        raise UserError("hvd.broadcast_model: the model has no variables yet. Build it, or call it once.")
    optimizer = optimizer or getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    broadcast_variables([model, *([optimizer] if optimizer is not None else [])], root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise UserError: TensorFlow 2 has no global variables."""
    raise UserError(
        "hvd.broadcast_global_variables: TensorFlow 2 has no global variables. Call hvd.broadcast_model(model), or "
        "hvd.broadcast_variables(model.variables, root_rank=0) and the same with optimizer.variables."
    )


def _broadcast_by_position(variables: Sequence[tf.Variable], root_rank: int, process_set: hvd.ProcessSet) -> None:
    """Broadcast variables under names by position: Keras numbers their names in each process separately."""
    # Broadcasts of one compiled step overlap, so they need different names.
    prefix = "broadcast_variables"
    if not tf.executing_eagerly():
        prefix = tf.compat.v1.get_default_graph().unique_name(prefix)

    def broadcast_all() -> None:
        for number, variable in enumerate(variables):
            name = f"{prefix}.{number}"
            value = hvd.broadcast(variable, root_rank, name=name, ignore_name_scope=True, process_set=process_set)
            variable.assign(value)

    # One graph, so that the exchanges overlap. Not called as a tf.function: TensorFlow would warn of retracing.
    tf.function(broadcast_all, autograph=False).get_concrete_function()()


def _variables_in(argument: Any) -> Iterator[Any]:
    if isinstance(argument, keras.Variable | tf.Variable):
        yield argument
    elif isinstance(argument, keras.Layer | keras.optimizers.Optimizer):
        yield from argument.variables
    elif isinstance(argument, Iterable) and not isinstance(argument, str):
        for part in argument:
            yield from _variables_in(part)
    else:
        raise UserError(
            f"hvd.broadcast_variables: expected variables, layers or optimizers; received {type(argument).__name__}."
        )
