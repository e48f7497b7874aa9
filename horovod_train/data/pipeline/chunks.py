"""Takes batches out of chunks: several steps lie in one tensor, because handing over each would cost more than a step.

Does not know where chunks come from; see pipeline and stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_train.data.pipeline.batch import Batch


class Place(NamedTuple):
    """How far batches have been taken."""

    chunks: Iterator[Batch]
    """Those that follow."""
    chunk: Batch
    """Some steps: every tensor is that of a batch with one more axis in front."""
    taken: tf.Tensor
    """int32 scalar: how many of them have been taken."""


Act = Callable[..., tuple[Any, ...]]
"""(batch, its number, int32 scalar counted from 0, *state) → the new state."""


class Batches(Iterator[Batch]):
    """One rank's batches in their order. A compiled call takes several by `each`; from Python they come one by one."""

    def __init__(self, chunks: tf.data.Dataset) -> None:
        """chunks: of what Place.chunk describes, with any number of steps each."""
        specs = chunks.element_spec
        nothing = tf.nest.map_structure(
            lambda spec: tf.zeros([0, *(size or 0 for size in spec.shape[1:])], spec.dtype), specs
        )
        any_steps = tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), specs)
        self._place = Place(iter(chunks), nothing, tf.constant(0))
        self._spec = Place(tf.data.IteratorSpec(specs), any_steps, tf.TensorSpec([], tf.int32))
        self._function: Any = None

    def call(self, function: Any, *arguments: tf.Tensor) -> Any:
        """Return the result of a tf.function: (place, *arguments) → (the place after it, result)."""
        if self._function is not function:
            self._function = function
            # Not by a call: that would compile again for each length of a chunk.
            self._traced = function.get_concrete_function(self._spec, *map(tf.TensorSpec.from_tensor, arguments))
        after, result = self._traced(self._place, *arguments)
        self._place = self._place._replace(chunk=after.chunk, taken=after.taken)
        return result

    def __next__(self) -> Batch:
        place = _with_a_step(self._place, nullcontext)
        self._place = place._replace(taken=place.taken + 1)
        return _at(place.chunk, place.taken)


def each(
    place: Place,
    steps: tf.Tensor,
    act: Act,
    state: tuple[Any, ...],
    *,
    continues: Callable[..., tf.Tensor] = lambda *_: tf.constant(True),
    waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Place, tuple[Any, ...]]:
    """In a compiled call: act on each of the next `steps` batches, one after the other. Return the place and the state.

    continues: state → whether to take another batch. waiting: the scope of waiting for a chunk.
    """

    def act_on_chunk(done: tf.Tensor, chunk: Batch, taken: tf.Tensor, state: tuple[Any, ...]) -> tuple[Any, ...]:
        now = _with_a_step(Place(place.chunks, chunk, taken), waiting)
        ahead = now.taken - done
        last = tf.minimum(steps, _steps(now.chunk) - ahead)

        def act_on_one(done: tf.Tensor, state: tuple[Any, ...]) -> tuple[Any, ...]:
            return done + 1, act(_at(now.chunk, done + ahead), done, *state)

        # Steps run one after the other: otherwise two exchanges with the same name could run concurrently.
        done, state = tf.while_loop(
            lambda done, state: tf.logical_and(done < last, continues(*state)),
            act_on_one,
            (done, state),
            parallel_iterations=1,
        )
        return done, now.chunk, done + ahead, state

    _, chunk, taken, state = tf.while_loop(
        lambda done, _chunk, _taken, state: tf.logical_and(done < steps, continues(*state)),
        act_on_chunk,
        (tf.constant(0), place.chunk, place.taken, state),
        parallel_iterations=1,
    )
    return place._replace(chunk=chunk, taken=taken), state


def _with_a_step(place: Place, waiting: Callable[[], AbstractContextManager[Any]]) -> Place:
    """Return the place with the next chunk if no step is left in the present one."""

    def next_chunk() -> tuple[Batch, tf.Tensor]:
        with waiting():
            return next(place.chunks), tf.constant(0)

    chunk, taken = tf.cond(place.taken < _steps(place.chunk), lambda: (place.chunk, place.taken), next_chunk)
    return place._replace(chunk=chunk, taken=taken)


def _steps(chunk: Batch) -> tf.Tensor:
    return tf.shape(chunk.count)[0]


def _at(chunk: Batch, step: tf.Tensor) -> Batch:
    return tf.nest.map_structure(lambda values: values[step], chunk)
