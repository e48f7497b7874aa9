"""Sum tensors over the ranks: by Horovod's allreduce, or by slices, where each rank adds up one slice and sends it on.

The sum by slices consists of the two halves of a ring allreduce (Patarasuk & Yuan 2009). It therefore moves the same
number of bytes: 2 (n - 1) / n of the tensor for each of n ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError

T = TypeVar("T")
Collective = TypeVar("Collective", bound=Callable[..., Any])
_step: ContextVar[tuple[Any, tf.Tensor] | None] = ContextVar("step", default=None)
"""The graph in which a step is traced, and `unknown` of in_step."""
_name_counts: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""How often each name has been used for an exchange in a graph."""
_turns: dict[str, tf.Variable] = {}
"""By the name of exchanges: what each of them in a graph writes before and after it. The value means nothing."""


def exchange_name(name: str) -> str:
    """Return `name`, numbered from its second exchange in a graph on; for Horovod operations with ignore_name_scope.

    The name is then the same on all ranks, whatever their graphs look like, and differs between exchanges of a graph;
    those of several graphs, or of a graph that runs several times in a step, need in_turn too.
    Raises UserError in a graph that XLA is to compile, because XLA cannot compile an exchange.
    """
    if tf.executing_eagerly():
        return name
    _check_not_in_xla()
    counts = _name_counts.setdefault(tf.compat.v1.get_default_graph(), Counter())
    counts[name] += 1
    return name if counts[name] == 1 else f"{name}.{counts[name]}"


def _check_not_in_xla() -> None:
    if not tf.executing_eagerly() and _is_compiled_by_xla():
        raise UserError(
            "XLA cannot compile the exchange between ranks: give compile(..., jit_compile=False), or the callback "
            "BroadcastGlobalVariablesCallback(), which does so; a tf.function around the exchange must not have "
            "jit_compile=True."
        )


def in_turn(name: str, values: T, exchange: Callable[[T], T], ranks: hvd.ProcessSet = hvd.global_process_set) -> T:
    """Return exchange(values), begun after the exchanges with this `name` here that come before it in the program.

    Those may be in other graphs, such as a branch of tf.cond, or in the same one, as a function that is called twice or
    the body of a loop. TensorFlow would run them at the same time, but keeps writes to one variable in order.
    values, and what is returned: any structure of tensors. The exchanges of one call wait for none of each other. In
    the gradient of a tf.while_loop nothing can be written, and its passes come in turn by themselves.
    """
    if tf.executing_eagerly() or is_alone(ranks) or _is_gradient_of_a_loop():
        return exchange(values)
    if name not in _turns:
        _turns[name] = make_outside_graphs(_make_turn)
    turn = _turns[name]
    with tf.control_dependencies([turn.assign(True, read_value=False)]):
        values = tf.nest.map_structure(tf.identity, values, expand_composites=True)
    results = exchange(values)
    with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
        turn.assign(False, read_value=False)
    return results


def _make_turn() -> tf.Variable:
    with tf.device("cpu:0"):  # a write on a GPU would be one more kernel to start
        return tf.Variable(False, trainable=False, name="turn")


def make_outside_graphs(make: Callable[[], T]) -> T:
    """Call `make` outside any tf.function that is being traced; return its result.

    In a thread, because TensorFlow lets a function make variables only in its first trace, even in an init_scope.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


@contextmanager
def in_step(unknown: tf.Tensor) -> Iterator[None]:
    """Inside the block, a step of the trainer is traced in the present graph; for named_by_call.

    unknown: bool scalar, computed from data of the step, so that TensorFlow does not know it beforehand.
    """
    token = _step.set((tf.compat.v1.get_default_graph(), unknown))
    try:
        yield
    finally:
        _step.reset(token)


def named_by_call(collective: Collective) -> Collective:
    """Return a collective of Horovod that a step of the trainer names by the number of its call.

    Horovod names it after tensors and scopes. Those differ between ranks where one has fewer records in a step, or
    none, and ranks would wait for each other's names forever. Elsewhere it is what it was; so it is in a function
    inside the step, of which two calls may be under way.
    """
    signature = inspect.signature(collective)
    (first, *_) = signature.parameters

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph, unknown = _step.get() or (None, None)
        if graph is None or graph is not tf.compat.v1.get_default_graph():
            _check_not_in_xla()
            return collective(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        name = exchange_name(given.get("name") or f"step.{collective.__name__}")
        # TensorFlow would exchange what is constant on one rank, such as 0 in place of root's number, there only once
        # for all steps, and on the other ranks in each.
        values = tf.nest.map_structure(
            lambda value: tf.where(unknown, value, value), given[first], expand_composites=True
        )
        return collective(**{**given, first: values, "name": name, "ignore_name_scope": True})

    return call  # type: ignore[return-value]


def mean_with_fractions(collective: Collective) -> Collective:
    """Return a collective of Horovod that gives means of integers as float64; Horovod drops their fractions.

    Those are not compressed, as Horovod compresses no integers: float16 would make infinity of 70 000.
    """
    signature = inspect.signature(collective)
    (first, *_) = signature.parameters

    def is_integer(value: Any) -> bool:
        dtype = getattr(value, "dtype", None)
        return dtype is not None and tf.as_dtype(dtype).is_integer

    def as_fractions(value: Any) -> Any:
        return tf.cast(value, tf.float64) if is_integer(value) else value

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given["op"] == hvd.Average or (given["op"] is None and given.get("average") is not False):
            before = given[first]
            given[first] = tf.nest.map_structure(as_fractions, before)
            if "compression" in given and any(map(is_integer, tf.nest.flatten(before))):
                given["compression"] = hvd.Compression.none
        return collective(**given)

    return call  # type: ignore[return-value]


def gathers_unknown_rows(collective: Collective) -> Collective:
    """Return an allgather of Horovod whose gradient tells the ranks' numbers of rows in each step, not while traced.

    The gradient gathers these numbers, and splits by them. Where tf.shape of the value is a constant, TensorFlow's
    shape functions want the result already in tracing, and exchange it for that; ranks that come to several such
    exchanges in different orders wait for each other forever.
    """
    signature = inspect.signature(collective)
    (first, *_) = signature.parameters

    def of_unknown_rows(value: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        shape = tf.TensorShape([None]).concatenate(value.shape[1:]) if value.shape.rank else value.shape
        return tf.raw_ops.PlaceholderWithDefault(input=value, shape=shape)

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not tf.executing_eagerly():
            given[first] = tf.nest.map_structure(of_unknown_rows, given[first])
        return collective(**given)

    return call  # type: ignore[return-value]


def _graphs() -> Iterator[Any]:
    """Yield the present graph and those around it. TensorFlow has no public way to ask of what kind they are."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def _is_gradient_of_a_loop() -> bool:
    # Without this private name, TensorFlow refuses the write with an error of its own.
    return any(type(graph).__name__ == "_WhileBodyGradFuncGraph" for graph in _graphs())


def _is_compiled_by_xla() -> bool:
    # Without this private method, TensorFlow raises its own error at the first step.
    contexts = (getattr(graph, "_get_control_flow_context", lambda: None)() for graph in _graphs())
    return any(context is not None and context.IsXLAContext() for context in contexts)


def number_of_ranks(ranks: hvd.ProcessSet) -> Any:
    """Return how many ranks there are, for a graph: an int, or an int32 [] if ranks may be lost or join."""
    return hvd.size_op() if launcher.detect().is_elastic else ranks.size()


def over_ranks(total: tf.Tensor, ranks: hvd.ProcessSet = hvd.global_process_set) -> tf.Tensor:
    """Return a sum over ranks divided by their number, with the same bits on all of them.

    It multiplies by the reciprocal: of a division TensorFlow's optimizer of graphs makes that on some ranks only.
    """
    reciprocal = 1.0 / tf.cast(number_of_ranks(ranks), tf.float64)
    return total * tf.cast(reciprocal, total.dtype)


def is_alone(ranks: hvd.ProcessSet = hvd.global_process_set) -> bool:
    """Return whether an exchange may be left out of a graph, because there will never be another rank."""
    return ranks.size() == 1 and not launcher.detect().is_elastic


def sum_over_ranks(values: tf.Tensor, name: str, *, deterministic: bool) -> tf.Tensor:
    """Collective: return the sum over the ranks, of the same shape and dtype. deterministic: add as sum_in_order does.

    name: from exchange_name, if two exchanges with one name could be under way.
    """
    if deterministic or is_alone():
        return sum_in_order(values, name)
    return hvd.allreduce(values, op=hvd.Sum, name=name, ignore_name_scope=True)


def sum_in_order(values: tf.Tensor, name: str, ranks: hvd.ProcessSet = hvd.global_process_set) -> tf.Tensor:
    """Collective: return the sum over the ranks, of the same shape and dtype, with the same bits over gloo and MPI.

    From three ranks on, the result of an allreduce depends on the order in which the library adds. That order depends
    on what else the library exchanges at that time. name: unique among the exchanges under way.
    """
    return _reduce_by_slices(values, lambda slices: tf.reduce_sum(slices, axis=0), name, ranks)


def combine_bf16(values: tf.Tensor, name: str, ranks: hvd.ProcessSet, *, divisor: Any) -> tf.Tensor:
    """Collective: return the sum over the ranks / divisor; values are sent as bfloat16 and added as float32.

    values: float32 or float64. Horovod 0.28.1 cannot add bfloat16, but it can send 16-bit words.
    """

    def reduce(words: tf.Tensor) -> tf.Tensor:
        total = tf.reduce_sum(tf.cast(tf.bitcast(words, tf.bfloat16), tf.float32), axis=0)
        return tf.bitcast(tf.cast(total / tf.cast(divisor, tf.float32), tf.bfloat16), tf.uint16)

    combined = _reduce_by_slices(tf.cast(values, tf.bfloat16), reduce, name, ranks, wire_dtype=tf.uint16)
    return tf.cast(combined, values.dtype)


def with_values(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return a gradient with changed values; of a sparse one those of its rows. None stays None."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)


def add_up_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return the same gradient with each row index once: rows with the same index are added up.

    Squares and norms over repeated rows are not those of the gradient, so Adam and clipping would compute wrong values.
    On a GPU the order of additions may change from call to call, and with it the last bit.
    """
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def add_up_rows_in_order(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return the same as add_up_rows, but add rows with one index in their order in the gradient. For few rows each.

    Ranks with the same rows get the same bits, on GPUs too: no operation here adds two numbers into one element, which
    GPUs do in any order.
    """
    indices, positions, counts = tf.unique_with_counts(gradient.indices)
    order = tf.argsort(positions, stable=True)
    sorted_positions = tf.gather(positions, order)
    first_rows = tf.cast(tf.where(sorted_positions != tf.concat([[-1], sorted_positions], axis=0)[:-1])[:, 0], tf.int32)

    def add_next_rows(next_row: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        unfinished = tf.where(counts > next_row)[:, 0]
        rows = tf.gather(gradient.values, tf.gather(order, tf.gather(first_rows, unfinished) + next_row))
        return next_row + 1, tf.tensor_scatter_nd_add(total, unfinished[:, tf.newaxis], rows)

    values = tf.gather(gradient.values, tf.gather(order, first_rows))
    max_count = tf.reduce_max(tf.concat([counts, [0]], axis=0))
    _, values = tf.while_loop(
        lambda next_row, _: next_row < max_count, add_next_rows, (tf.constant(1), values), parallel_iterations=1
    )
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _reduce_by_slices(
    values: tf.Tensor,
    reduce: Callable[[tf.Tensor], tf.Tensor],
    name: str,
    ranks: hvd.ProcessSet,
    *,
    wire_dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Collective: apply `reduce` to all ranks' values of each slice: [size, n] → [n], of the same dtype.

    wire_dtype: the dtype as which the bits of the values are sent and reduced; default that of the values.
    """
    dtype = wire_dtype or values.dtype
    if is_alone(ranks):
        reduced = reduce(tf.bitcast(tf.reshape(values, [1, -1]), dtype))
        return tf.reshape(tf.bitcast(reduced, values.dtype), tf.shape(values))
    size = number_of_ranks(ranks)
    length = tf.size(values)
    slice_length = -(-length // size)
    # Padded before the bits are taken: GPUs cannot pad uint16.
    padded = tf.pad(tf.reshape(values, [-1]), [[0, slice_length * size - length]])
    slices = hvd.alltoall(tf.bitcast(padded, dtype), name=f"{name}.scatter", ignore_name_scope=True, process_set=ranks)
    reduced = reduce(tf.reshape(slices, [size, -1]))
    gathered = hvd.allgather(reduced, name=f"{name}.gather", ignore_name_scope=True, process_set=ranks)
    return tf.reshape(tf.bitcast(gathered, values.dtype)[:length], tf.shape(values))
