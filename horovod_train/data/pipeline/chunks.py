"""Takes batches out of chunks: tensors of several steps, because passing on each batch would cost more than a step.

Does not know where chunks come from; see pipeline and stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_train.data.pipeline.batch import Batch


class Cursor(NamedTuple):
    """A position in a sequence of chunks: which batches have been taken."""

    chunks: Iterator[Batch]
    """The chunks that follow."""
    chunk: Batch
    """Some steps: every tensor is that of a batch with one more axis in front."""
    taken: tf.Tensor
    """int32 scalar: how many of the steps have been taken."""


Wait = Callable[[Callable[[], Batch]], Batch]
"""(what takes the next chunk) → the chunk that it gave."""

Act = Callable[..., tuple[Any, ...]]
"""(batch, its number, int32 scalar counted from 0, *state) → the new state."""


class Batches(Iterator[Batch]):
    """One rank's batches in their order. Compiled calls take them by `for_each_batch`; Python iterates."""

    def __init__(self, chunks: tf.data.Dataset) -> None:
        """chunks: of what Cursor.chunk describes, with any number of steps each."""
        specs = chunks.element_spec
        empty_chunk = tf.nest.map_structure(
            lambda spec: tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype), specs
        )
        any_steps = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), specs)
        self._cursor = Cursor(iter(chunks), empty_chunk, tf.constant(0))
        self._spec = Cursor(tf.data.IteratorSpec(specs), any_steps, tf.TensorSpec([], tf.int32))
        self._function: Any = None

    def call(self, function: Any, *arguments: tf.Tensor) -> Any:
        """Return the result of a tf.function: (cursor, *arguments) → (the cursor after it, result)."""
        if self._function is not function:
            self._function = function
            # Not by a call: that would compile again for each length of a chunk.
            self._traced = function.get_concrete_function(self._spec, *map(tf.TensorSpec.from_tensor, arguments))
        after, result = self._traced(self._cursor, *arguments)
        self._cursor = self._cursor._replace(chunk=after.chunk, taken=after.taken)
        return result

    def __next__(self) -> Batch:
        cursor = _advance_if_used_up(self._cursor, lambda take: take())
        self._cursor = cursor._replace(taken=cursor.taken + 1)
        return _batch_at(cursor.chunk, cursor.taken)


def for_each_batch(
    cursor: Cursor,
    steps: tf.Tensor,
    act: Act,
    state: tuple[Any, ...],
    *,
    continues: Callable[..., tf.Tensor] = lambda *_: tf.constant(True),
    wait: Wait = lambda take: take(),
) -> tuple[Cursor, tuple[Any, ...]]:
    """In a compiled call: act on each of the next `steps` batches, in order. Return the new cursor and state.

    continues: state → whether to take another batch. wait: what is done where a chunk is taken.
    """

    def act_on_chunk(step: tf.Tensor, chunk: Batch, taken: tf.Tensor, state: tuple[Any, ...]) -> tuple[Any, ...]:
        current = _advance_if_used_up(Cursor(cursor.chunks, chunk, taken), wait)
        offset = current.taken - step
        end = tf.minimum(steps, _steps(current.chunk) - offset)

        def act_on_batch(step: tf.Tensor, state: tuple[Any, ...]) -> tuple[Any, ...]:
            return step + 1, act(_batch_at(current.chunk, step + offset), step, *state)

        # Steps run one after the other: otherwise two exchanges with the same name could run concurrently.
        step, state = tf.while_loop(
            lambda step, state: tf.logical_and(step < end, continues(*state)),
            act_on_batch,
            (step, state),
            parallel_iterations=1,
        )
        return step, current.chunk, step + offset, state

    _, chunk, taken, state = tf.while_loop(
        lambda step, _chunk, _taken, state: tf.logical_and(step < steps, continues(*state)),
        act_on_chunk,
        (tf.constant(0), cursor.chunk, cursor.taken, state),
        parallel_iterations=1,
    )
    return cursor._replace(chunk=chunk, taken=taken), state


def _advance_if_used_up(cursor: Cursor, wait: Wait) -> Cursor:
    """Return the cursor, in the next chunk if no step is left in the current one."""

    def next_chunk() -> tuple[Batch, tf.Tensor]:
        return wait(lambda: next(cursor.chunks)), tf.constant(0)

    chunk, taken = tf.cond(cursor.taken < _steps(cursor.chunk), lambda: (cursor.chunk, cursor.taken), next_chunk)
    return cursor._replace(chunk=chunk, taken=taken)


def _steps(chunk: Batch) -> tf.Tensor:
    return tf.shape(chunk.count)[0]


def _batch_at(chunk: Batch, step: tf.Tensor) -> Batch:
    return tf.nest.map_structure(lambda values: values[step], chunk)
