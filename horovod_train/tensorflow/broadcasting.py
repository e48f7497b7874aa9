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
"""How Keras names the variables in which its random layers keep their seed."""


def broadcast_variables(
    variables: Any, root_rank: int, process_set: hvd.ProcessSet = hvd.global_process_set, inplace: bool = False
) -> None:
    """Collective: set variables on every rank to root_rank's values.

    variables: Keras or TensorFlow variables, layers, models, optimizers, or a sequence of these. The seeds of random
    layers are left as they are, because dropout masks must differ by rank.
    process_set: the ranks that take part. inplace: without a copy of each variable in memory.

    Raises UserError for a dtype that Horovod cannot send, and for anything else.
    """
    found = [variable for variable in _variables(variables) if _SEED not in name_of(variable)]
    check_sendable(found)
    if process_set is hvd.global_process_set:
        with tf.init_scope():  # a script may broadcast inside its compiled step
            watch.begin()
    own = [as_tf_variable(variable) for variable in found]
    if inplace:
        hvd.broadcast_variables(own, root_rank, process_set, inplace)
    else:
        _by_position(own, root_rank, process_set)


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


def _by_position(variables: Sequence[tf.Variable], root_rank: int, process_set: hvd.ProcessSet) -> None:
    """Named by position: the names of variables contain numbers that Keras gives in each process by itself."""
    # Broadcasts of one compiled step overlap, so they need different names.
    prefix = "broadcast_variables"
    if not tf.executing_eagerly():
        prefix = tf.compat.v1.get_default_graph().unique_name(prefix)

    def together() -> None:
        for number, variable in enumerate(variables):
            name = f"{prefix}.{number}"
            value = hvd.broadcast(variable, root_rank, name=name, ignore_name_scope=True, process_set=process_set)
            variable.assign(value)

    # As a whole, so that the exchanges overlap. TensorFlow would warn of a function that is made again and again.
    tf.function(together, autograph=False).get_concrete_function()()


def _variables(given: Any) -> Iterator[Any]:
    if isinstance(given, keras.Variable | tf.Variable):
        yield given
    elif isinstance(given, keras.Layer | keras.optimizers.Optimizer):
        yield from given.variables
    elif isinstance(given, Iterable) and not isinstance(given, str):
        for part in given:
            yield from _variables(part)
    else:
        raise UserError(
            f"hvd.broadcast_variables: expected variables, layers or optimizers; received {type(given).__name__}."
        )
