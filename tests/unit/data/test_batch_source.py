"""Batches come out of chunks in order, whatever the lengths of chunks and of compiled calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from horovod_train.data.batch_source import Batch, Batches, Cursor, for_each_batch, iterate, prefetch_to

ROWS = 2


def chunks(*lengths: int) -> tf.data.Dataset:
    """Steps numbered from 0, in chunks of these lengths: both ids of a step are its number."""
    firsts = tf.data.Dataset.from_tensor_slices([sum(lengths[:at]) for at in range(len(lengths))])

    def chunk(first: tf.Tensor, length: tf.Tensor) -> Batch:
        numbers = first + tf.range(length)
        rows = tf.ensure_shape(tf.repeat(numbers[:, None], ROWS, axis=1), [None, ROWS])
        inputs = {"image": tf.cast(rows, tf.float32), "text": tf.as_string(rows)}
        return Batch(inputs, {}, tf.ones_like(rows, tf.float32), tf.cast(rows, tf.int64), tf.cast(numbers, tf.int64))

    return tf.data.Dataset.zip(firsts, tf.data.Dataset.from_tensor_slices(list(lengths))).map(chunk)


class Taker:
    """A compiled call that returns what it took, and counts how often it was compiled and waited for a chunk."""

    def __init__(self, last: int = 1000) -> None:
        self.traces, self._last = 0, last
        self.waits = tf.Variable(0)
        self._run = tf.function(self._take, autograph=False)

    def __call__(self, batches: Batches, steps: int) -> list[int]:
        ids, texts, numbers = batches.call(self._run, tf.constant(steps))
        assert [int(text) for text in texts[:, 0].numpy()] == ids[:, 1].numpy().tolist()
        assert numbers.numpy().tolist() == list(range(len(ids)))
        taken: list[int] = ids[:, 0].numpy().tolist()
        return taken

    def _take(self, cursor: Cursor, steps: tf.Tensor) -> tuple[Cursor, Any]:
        self.traces += 1

        def act(batch: Batch, number: tf.Tensor, _: tf.Tensor, *arrays: tf.TensorArray) -> tuple[Any, ...]:
            values = (batch.ids, batch.inputs["text"], number)
            written = [array.write(number, value) for array, value in zip(arrays, values, strict=True)]
            return batch.ids[0] < self._last, *written

        arrays = [tf.TensorArray(dtype, 0, dynamic_size=True) for dtype in (tf.int64, tf.string, tf.int32)]
        state = (tf.constant(True), *arrays)
        cursor, (_, *arrays) = for_each_batch(
            cursor, steps, act, state, continues=lambda more, *_: more, wait=self._wait
        )
        return cursor, [array.stack() for array in arrays]

    def _wait(self, take: Callable[[], Batch]) -> Batch:
        with tf.control_dependencies([self.waits.assign_add(1)]):
            return take()


@pytest.mark.parametrize("lengths", [(9,), (1,) * 9, (3, 1, 5), (4, 5)])
def test_steps_follow_each_other_over_calls_and_chunks(lengths: tuple[int, ...]) -> None:
    batches, take = Batches(chunks(*lengths)), Taker()
    assert [take(batches, steps) for steps in (2, 1, 5)] == [[0, 1], [2], [3, 4, 5, 6, 7]]
    assert (take.traces, int(take.waits)) == (1, len(lengths) - (lengths[-1] == 1))
    assert next(batches).ids.numpy().tolist() == [8, 8]
    with pytest.raises(tf.errors.OutOfRangeError):
        take(batches, 1)
    assert list(batches) == []


def test_a_call_that_stops_early_takes_no_further_batch() -> None:
    batches, take = Batches(chunks(2, 5)), Taker(last=3)
    assert take(batches, 6) == [0, 1, 2, 3]
    assert [int(batch.count) for batch in batches] == [4, 5, 6]


def test_other_batches_of_the_same_kind_need_no_second_compilation() -> None:
    take = Taker()
    assert [take(Batches(chunks(*lengths)), 3) for lengths in ((3,), (1, 2), (7,))] == [[0, 1, 2]] * 3
    assert take.traces == 1


class Iterated(list[int]):
    """What a dataset gives, and the options it is iterated with."""

    def __init__(self, autotune: bool | None = None) -> None:
        super().__init__([1, 2])
        self._options = tf.data.Options()
        if autotune is not None:
            self._options.autotune.enabled = autotune

    def options(self) -> tf.data.Options:
        return self._options

    def with_options(self, options: tf.data.Options) -> Iterated:
        self._options = options
        return self


@pytest.mark.parametrize(("asked", "given"), [(None, False), (False, False), (True, True)])
def test_the_autotuner_whose_end_is_waited_for_runs_only_if_a_dataset_asks(asked: bool | None, given: bool) -> None:
    data = Iterated(asked)
    assert list(iterate(data)) == [1, 2]
    assert data.options().autotune.enabled is given


def test_what_copies_to_a_device_leaves_nothing_in_the_graph_of_the_process() -> None:
    """Each evaluation makes one."""

    def kept() -> int:
        return len(tf.compat.v1.get_default_graph().as_graph_def().library.function)

    before, numbers = kept(), tf.data.Dataset.range(3)
    assert [int(number) for number in iterate(prefetch_to(numbers, "/device:CPU:0"))] == [0, 1, 2]
    assert kept() == before
    plain = numbers.apply(tf.data.experimental.prefetch_to_device("/device:CPU:0", 1))
    assert [int(number) for number in iterate(plain)] == [0, 1, 2]
    assert kept() > before


TUNED = """
import sys
import tensorflow as tf
from horovod_train.data.batch_source import iterate, prefetch_to

def squares():
    return tf.data.Dataset.range(99).map(lambda number: number * number, num_parallel_calls=tf.data.AUTOTUNE)

plain = squares().apply(tf.data.experimental.prefetch_to_device("/device:CPU:0", 1))
for name, data in (("plain", plain), ("ours", prefetch_to(squares(), "/device:CPU:0"))):
    print(f"\\nBEGIN {name}", file=sys.stderr, flush=True)
    assert len(list(iterate(data))) == 99
"""


@pytest.mark.long
def test_the_autotuner_does_not_run_below_the_copy_to_a_device_either() -> None:
    """As TensorFlow's own log of it says; that of a copy without more shows that there is one."""
    environment = {**os.environ, "TF_CPP_VMODULE": "model=3", "TF_CPP_MIN_LOG_LEVEL": "0"}
    command = [sys.executable, "-c", TUNED]
    done = subprocess.run(command, capture_output=True, env=environment, check=True, timeout=300)
    _, plain, ours = done.stderr.decode(errors="replace").split("\nBEGIN ")
    assert "model.cc" in plain
    assert "model.cc" not in ours
