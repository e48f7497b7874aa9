"""Give all ranks one rank's values: of variables, layers, models and optimizers."""

from __future__ import annotations

import hashlib
import itertools
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.tensorflow.mpi_ops import MPI_LIB

from horovod_train.distributed import objects
from horovod_train.distributed.allreduce import in_turn
from horovod_train.distributed.group import (
    BROADCASTS,
    as_tf_variable,
    broadcast_by_position,
    check_sendable,
    name_of,
    run_as_graph,
)
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.layer_contents import finalize
from horovod_train.distributed.objects import HOST
from horovod_train.errors import UserError
from horovod_train.tensorflow.lifetime import begin_watch, exchanging
from horovod_train.tensorflow.sharding import check_given, take_given

_SEED = "seed_generator_state"
"""Part of the names of the variables in which Keras' random layers keep their seed."""


def broadcast_variables(
    variables: Any, root_rank: int, process_set: hvd.ProcessSet = hvd.global_process_set, inplace: bool = False
) -> None:
    """Collective: set variables on every rank to root_rank's values.

    variables: Keras or TensorFlow variables, layers, models, optimizers, or a sequence of these. The seeds of random
    layers are left as they are, because dropout masks must differ by rank. Layers derive anew what they derive from
    weights, as Normalization does; where only their variables are given, call finalize_state of such layers.
    process_set: the ranks that take part. inplace: without a copy of each variable in memory.

    Raises UserError for a dtype that Horovod cannot send, for an argument of another kind, and on all ranks if they
    give different variables, or have given hvd.shard different arrays.
    """
    targets = [variable for variable in _variables_in(variables) if _SEED not in name_of(variable)]
    check_sendable(targets)
    is_checked = _is_checked_here()
    with tf.init_scope():  # a script may broadcast inside its compiled step
        if process_set is hvd.global_process_set:
            begin_watch()
        if is_checked:
            with exchanging("hvd.broadcast_variables"):
                _check_alike(targets, root_rank, process_set)
    tf_variables = [as_tf_variable(variable) for variable in targets]
    with exchanging("hvd.broadcast_variables") if tf.executing_eagerly() else nullcontext():
        _broadcast(tf_variables, root_rank, process_set, inplace)
    if tf.executing_eagerly():
        for given in variables if isinstance(variables, list | tuple) else [variables]:
            if isinstance(given, keras.Layer):
                finalize(given)


def _check_alike(variables: Sequence[Any], root_rank: int, process_set: hvd.ProcessSet) -> None:
    """Collective: raise UserError on all ranks of the set if they would broadcast different variables.

    Their number, and by position their shapes, dtypes and the last words of their names, must be equal: Keras numbers
    names in each process, and those of a model that was loaded may begin otherwise. On the way ranks compare what they
    have given hvd.shard.
    """
    kinds = [_kind(variable) for variable in variables]
    given = take_given() if process_set is hvd.global_process_set else []
    digests = [hashlib.sha256(text.encode()).digest() for text in ("\n".join([str(root_rank), *kinds]), repr(given))]
    with tf.device(HOST):
        own = tf.constant([[list(digest) for digest in digests]], tf.uint8)
        of_ranks = hvd.allgather(own, name="broadcast_variables.check", process_set=process_set).numpy()
    are_alike, shard_alike = (of_ranks == of_ranks[0]).all(axis=(0, 2))
    # All ranks take the same branch. The full lists are gathered only here, because they may be long.
    if not shard_alike:
        check_given(objects.gather(given, "broadcast_variables.shard"))
    if are_alike:
        return
    names = [name_of(variable) for variable in variables]
    gathered = objects.gather([root_rank, kinds, names], "broadcast_variables.names", process_set)
    members = list(process_set.ranks or range(len(gathered)))
    raise _difference(dict(zip(members, gathered, strict=True)))


def _kind(variable: Any) -> str:
    tf_variable = as_tf_variable(variable)
    word = re.split(r"[/_]", re.sub(r"[\d_:]+$", "", name_of(variable)))[-1]
    return f"{word}, {tf_variable.dtype.name} of shape {tf_variable.shape}"


def _difference(given: Mapping[int, Any]) -> UserError:
    """Return the error that names the first difference. given: by rank, its root_rank, and kinds and names."""
    root_ranks = {rank: root_rank for rank, (root_rank, _, _) in given.items()}
    first_rank, root_rank = next(iter(root_ranks.items()))
    for rank, other in root_ranks.items():
        if other != root_rank:
            return UserError(
                f"hvd.broadcast_variables: root_rank must be equal on all ranks; received {root_rank} on rank "
                f"{first_rank}, {other} on rank {rank}."
            )
    reference_rank = root_rank if root_rank in given else first_rank
    _, root_kinds, root_names = given[reference_rank]
    differing = [rank for rank, (_, kinds, _) in given.items() if kinds != root_kinds]
    _, kinds, names = given[differing[0]]
    pairs = itertools.zip_longest(kinds, root_kinds)
    position = next(number for number, (kind, root_kind) in enumerate(pairs) if kind != root_kind)
    more = "" if len(differing) == 1 else f" (and {len(differing) - 1} more ranks differ)"
    return UserError(
        f"hvd.broadcast_variables: all ranks must give the same variables; variable {position + 1} is "
        f"{_one(kinds, names, position)} on rank {differing[0]}{more}, and {_one(root_kinds, root_names, position)} on "
        f"rank {reference_rank}. Build the same model and optimizer on all ranks, with the same code; also where only "
        "root loads their values."
    )


def _one(kinds: Sequence[str], names: Sequence[str], position: int) -> str:
    if position >= len(kinds):
        return "missing"
    return f"{names[position]}, {kinds[position].partition(', ')[2]},"


_first_graph: weakref.ref[Any] | None = None
"""The graph of the compiled step that broadcast first."""


def _is_checked_here() -> bool:
    """Return whether ranks can compare what they broadcast here: the same answer on all ranks.

    In a compiled step they can while it is traced for the first time; later one rank may trace it alone, as for a
    smaller batch. Ranks that join an elastic script trace it alone too.
    """
    global _first_graph
    if tf.executing_eagerly():
        return True
    if launcher.detect().is_elastic:
        return False
    graph = tf.compat.v1.get_default_graph()
    if _first_graph is None:
        _first_graph = weakref.ref(graph)
    return _first_graph() is graph


def broadcast_model(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, root_rank: int = 0
) -> None:
    """Collective: set the weights of a model, and the state of its optimizer, on every rank to root_rank's.

    optimizer: default the one the model was compiled with, if any. Its slots are created first. All are sent, those of
    local variables too, whose values BroadcastGlobalVariablesCallback leaves to each rank.
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


def _broadcast(variables: Sequence[tf.Variable], root_rank: int, process_set: hvd.ProcessSet, inplace: bool) -> None:
    # Broadcasts of one compiled step overlap, so they need different names.
    prefix = "broadcast_variables"
    if not tf.executing_eagerly():
        prefix = tf.compat.v1.get_default_graph().unique_name(prefix)

    def broadcast_in_place() -> None:
        by_device: dict[str, list[tuple[str, Any]]] = {}
        for number, variable in enumerate(variables):
            by_device.setdefault(variable.device, []).append((f"{prefix}.{number}", variable.handle))

        def exchange(before: list[Any]) -> list[Any]:
            # Each operation holds a thread until all ranks run it: the same one first on all.
            for named in by_device.values():
                names, handles = zip(*named, strict=True)
                with tf.control_dependencies(before):
                    # Not hvd.broadcast_, which takes the variables' names.
                    operation = MPI_LIB.horovod_broadcast_inplace_resource(
                        handles, variable_names=names, root_rank=root_rank, process_set_id=process_set.process_set_id
                    )
                before = [operation]
            return before

        in_turn(BROADCASTS, [tf.constant(0)], exchange, process_set)

    def broadcast_copies() -> None:
        broadcast_by_position(variables, root_rank, prefix, process_set)

    run_as_graph(broadcast_in_place if inplace else broadcast_copies)


def _variables_in(argument: Any) -> Iterator[Any]:
    if isinstance(argument, keras.Variable | tf.Variable):
        yield argument
    elif isinstance(argument, keras.Layer | keras.optimizers.Optimizer):
        yield from argument.variables
    elif isinstance(argument, Iterable) and not isinstance(argument, str | tf.Tensor):
        for part in argument:
            yield from _variables_in(part)
    else:
        raise UserError(
            f"hvd.broadcast_variables: expected variables, layers or optimizers; received {type(argument).__name__}."
        )
