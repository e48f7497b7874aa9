"""What training gets of its data: a batch for each step, cut out of chunks, from a BatchSource.

A chunk is the tensors of several steps, because passing on each batch would cost more than a step. A Python thread
feeds chunks into a TensorFlow queue. tf.data could call Python itself (from_generator, numpy_function), but its threads
would then wait for an interpreter that is shutting down, and the process would never end. Here TensorFlow never enters
Python.

Sources of batches are in pipeline and stream.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from horovod_train.data.model_inputs import ModelInputs
from horovod_train.data.schema import Feature
from horovod_train.data.subsets import DataSet
from horovod_train.errors import UserError

HOST = "CPU:0"
"""The device on which data are read and decoded."""
_BATCHES_ON_DEVICE = 1
"""Batches that wait on the device of the steps, if it is not the host: device memory is scarce."""
Tensors: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"
_LABEL = re.compile(r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
"""What TensorFlow says on a CPU of a label for which a model has no output."""
FRACTION = "a label that is no whole number"
"""What a step says of one, before the label."""
_FRACTION = re.compile(rf"{FRACTION}\W+([-+.\w]+)")


class Batch(NamedTuple):
    """One rank's part of a step. Shapes are static; rows without a record have weight 0 and repeat another record.

    A pipeline gives inputs and targets as they are stored, such as uint8; Pipeline.scaled converts them for the model.
    """

    inputs: Tensors
    """One tensor [rows, …], or a dict of them if the schema names several inputs."""
    targets: Tensors
    weights: tf.Tensor
    """float32 [rows]: the record's weight by data.weight, or 1; 0 for padding."""
    ids: tf.Tensor
    """int64 [rows]: the record's number, -1 for padding, and less for a skipped record; see source.mark_skipped."""
    count: tf.Tensor
    """int64 scalar: the records of this step over all ranks."""

    @property
    def real(self) -> tf.Tensor:
        """float32 [rows]: 1 for a record, whatever its weight, 0 for padding and skipped records."""
        return tf.cast(self.ids >= 0, tf.float32)


def pick(tensors: dict[str, tf.Tensor], names: tuple[str, ...]) -> Tensors:
    """Return the named tensors as a model gets them: the only one, or a dict of them."""
    return tensors[names[0]] if len(names) == 1 else {name: tensors[name] for name in names}


def tensors_by_name(tensors: Tensors, names: tuple[str, ...]) -> dict[str, tf.Tensor]:
    """Return a result of pick as a dict."""
    return {names[0]: tensors} if len(names) == 1 else tensors


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
        self._cursor = Cursor(iterate(chunks), empty_chunk, tf.constant(0))
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

    def last_taken(self) -> Batch:
        """Return the batch that was taken last; one must have been."""
        return _batch_at(self._cursor.chunk, self._cursor.taken - 1)

    def __next__(self) -> Batch:
        cursor = _advance_if_used_up(self._cursor, lambda take: take())
        self._cursor = cursor._replace(taken=cursor.taken + 1)
        return _batch_at(cursor.chunk, cursor.taken)


def iterate(data: tf.data.Dataset) -> Iterator[Any]:
    """Return an iterator over a dataset, without tf.data's autotuner unless the dataset asks for it."""
    return iter(_without_autotuner(data))


def _without_autotuner(data: tf.data.Dataset) -> tf.data.Dataset:
    """Return the dataset, without tf.data's autotuner unless it asks for it.

    That one's thread at times misses that its iterator goes, which then waits for the thread's next turn: up to a
    minute at the end of a run or an epoch (seen in TensorFlow 2.21). Without it AUTOTUNE means one call for each core.
    """
    options = tf.data.Options()
    options.autotune.enabled = bool(data.options().autotune.enabled)
    return data.with_options(options)


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


class StepRange(NamedTuple):
    """Steps [first, last) of an epoch."""

    epoch: int
    first: int
    last: int


class StepSize(NamedTuple):
    """How many records a step has, as far as the plan of the epoch tells; a step is compiled once for each size."""

    rows: int | None
    """Of this rank; None: only the data tells."""
    is_full: bool
    """Whether all ranks have all rows of their batches."""
    records: int | None = None
    """Of all ranks: so a size changes at the same steps on all of them, also where the rows of some stay."""


class BatchSource(ABC):
    """One rank's batches, epoch by epoch, in steps that all ranks take together."""

    num_records: int
    """Over all ranks in an epoch; of a stream, as many as its steps have room for."""
    global_batch_size: int
    steps_per_epoch: int
    steps_per_chunk: int
    """How many steps are read in one piece; fewer at the end of an epoch."""
    batch_size_per_rank: int
    scaled_spec: Batch
    """Specs of what `scaled` returns."""
    model_inputs: ModelInputs
    """What the model gets of them, and of what it is made."""
    fingerprint: str
    """Equal for two sources, of any rank and size, if a position in an epoch means the same records."""
    content: str
    """A digest of what the records hold; "" if it is not known."""
    has_weights: bool = False
    """Whether the records have weights in the loss."""
    data_sets: Sequence[DataSet] = ()
    """The data sets that the records are from."""
    class_names: Mapping[str, Sequence[str]]
    """The names of classes, by feature; none of a stream."""
    features: Mapping[str, Feature]
    """What the records hold, by name; none of a stream."""
    files: str
    """The parts as source.pack packs them; "" if there are none."""
    order_settings: str
    """The settings on which the order of the records depends, for messages."""
    _failure: Exception | None = None
    """What ended a Feed early."""

    def chunks(self, epoch: int, first_step: int = 0, epochs: int | None = None) -> tf.data.Dataset:
        """Return the batches as a dataset of chunks: one or several steps each, with one more axis in front, steps.

        Reading starts immediately. The dataset can be iterated once; call this again for another pass.
        """
        steps, chunk = self.steps_per_epoch, self.steps_per_chunk
        count = -1 if epochs is None else -(-(steps - first_step) // chunk) + (epochs - 1) * -(-steps // chunk)
        items = self._load(self.step_ranges(epoch, first_step, epochs))
        feed = Feed(items, self._specs, self._set_failure, self._free_queues)
        data = self._dataset(feed.dataset(count))
        feed.start()
        return data

    def step_ranges(self, epoch: int, first_step: int, epochs: int | None) -> Iterator[StepRange]:
        """Yield the steps of each chunk, from a step of an epoch on; see `batches`."""
        for number in itertools.count(epoch) if epochs is None else range(epoch, epoch + epochs):
            for first in range(first_step if number == epoch else 0, self.steps_per_epoch, self.steps_per_chunk):
                yield StepRange(number, first, min(first + self.steps_per_chunk, self.steps_per_epoch))

    @cached_property
    def element_spec(self) -> Batch:
        chunks = self._dataset(Feed(iter(()), self._specs, self._set_failure, self._free_queues).dataset(0))
        return tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), chunks.element_spec)

    @cached_property
    def _free_queues(self) -> list[tf.queue.FIFOQueue]:
        """Of passes that have ended, for the next."""
        return []

    @property
    @abstractmethod
    def _specs(self) -> list[tf.TensorSpec]:
        """What a chunk holds on its way from Python into tf.data; the first axis of each is steps."""

    @abstractmethod
    def _load(self, ranges: Iterator[StepRange]) -> Iterator[list[np.ndarray | tf.Tensor]]:
        """Yield the chunks of these steps, each as `_specs` describes it."""

    @abstractmethod
    def _dataset(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """Turn a dataset of such chunks into the dataset that `chunks` returns."""

    def batches(self, epoch: int, first_step: int = 0, epochs: int | None = None) -> Batches:
        """Return batches from a step of an epoch on, through `epochs` epochs (including that one) or without end.

        Reading starts immediately.
        """
        return Batches(self.chunks(epoch, first_step, epochs))

    @abstractmethod
    def count(self, step: int) -> int:
        """Return the number of records over all ranks in a step of an epoch, counted from 0."""

    def size_of(self, step: int) -> StepSize:
        """Return the size of a step of an epoch, counted from 0."""
        return StepSize(None, False)

    def same_size_until(self, step: int, first: int, last: int) -> int:
        """Return the last of the steps first + 1 … last of a run such that all up to it have one size.

        step: that of the epoch which comes after `first` steps of the run.
        """
        size = self.size_of(step % self.steps_per_epoch)
        for ahead in range(1, last - first):
            if self.size_of((step + ahead) % self.steps_per_epoch) != size:
                return first + ahead
        return last

    def scaled(self, batch: Batch) -> Batch:
        """Return the batch as the model gets it: cast, scaled and offset.

        Call it in the compiled step, so that fewer bytes are batched and copied to the device, which then scales.
        """
        return batch

    @property
    def skipped(self) -> set[int]:
        """The records that this rank has skipped so far; runs a few batches ahead of what was consumed."""
        return set()

    def check_used(self, skipped: int, setting: str) -> None:
        """Raise UserError if all records were skipped, of which nothing can be learned. skipped: by all ranks."""
        if skipped and skipped >= self.num_records:
            raise UserError(
                f"{setting}: none of its {self.num_records} records can be used, and data.on_bad_record: skip leaves "
                "out all of them; check-data names what is wrong with them."
            )

    def explain(self, error: BaseException) -> Exception | None:
        """Return the failure behind an error from iterating, naming the record; None if data did not cause it."""
        if not isinstance(error, tf.errors.OpError):
            return None
        label, fraction = (pattern.search(str(error.message)) for pattern in (_LABEL, _FRACTION))
        if fraction and self._failure is None:
            return UserError(
                f"data.targets: a record has the label {fraction[1]}; a class is a whole number. For a quantity write "
                "loss: mean_squared_error, and give the model one output."
            )
        if self._failure is not None or label is None:
            return self._failure
        return UserError(
            f"data.targets: a record has the label {label[1]}; the model has outputs for labels from 0 to "
            f"{int(label[2]) - 1}. Build the model with more outputs, or correct the records: check-data counts their "
            "labels, and with classes of a feature in data.features it names the records."
        )

    def name_record(self, record: int, problem: str) -> str:
        """Return a sentence with the place of a record and what is wrong with it."""
        return f"record {record}: {problem}."

    def _set_failure(self, failure: Exception) -> None:
        self._failure = failure

    def one_epoch(self, max_steps: int) -> Iterator[tuple[Batches, int, StepSize]]:
        """Yield (batches, steps, their size) for one epoch.

        The caller takes `steps` batches each time, at most `max_steps`.
        """
        batches, first = self.batches(epoch=0, epochs=1), 0
        while first < self.steps_per_epoch:
            last = self.same_size_until(first, first, min(first + max_steps, self.steps_per_epoch))
            yield batches, last - first, self.size_of(first)
            first = last

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise data failures instead of TensorFlow's errors, inside a block that takes the batches."""
        try:
            yield
        except tf.errors.OpError as error:
            raise self.explain(error) or error from error


class Feed:
    """Enqueues the iterator's items, one item ahead. If it raises, or ends before its reader does, closes the queue."""

    def __init__(
        self,
        items: Iterator[Sequence[np.ndarray | tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
        on_failure: Callable[[Exception], None],
        free_queues: list[tf.queue.FIFOQueue],
    ) -> None:
        """Call `on_failure` with the error if the items end early; the reader of the queue only sees that it is closed.

        specs: of what each item holds. free_queues: of such items; gets the queue back when all items have been taken.
        """
        self._items, self._specs, self._on_failure = items, specs, on_failure
        # TensorFlow keeps each queue until the process ends, with what is in it: its cache of kernels refers to it.
        self._free_queues = free_queues
        if free_queues:
            self.queue = free_queues.pop()
        else:
            with tf.device("cpu:0"):
                self.queue = tf.queue.FIFOQueue(1, [spec.dtype for spec in specs])
        self._left = -1
        """How many items its reader still waits for; negative: for all."""
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def dataset(self, items: int) -> tf.data.Dataset:
        """Return this many items as elements; -1 for all. The thread ends with the dataset. Starts nothing.

        Call it once; iterate the dataset once.
        """
        self._left = items
        data = tf.data.Dataset.range(2**62 if items < 0 else items)
        data = data.map(tf.autograph.experimental.do_not_convert(self._dequeue))
        # The thread must not outlive the dataset, nor wait on a full queue when the interpreter ends.
        weakref.finalize(data, self.stop)
        return data

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, even in the middle of an item; free the queue, or at least what it holds.

        Call it once, when nothing is read any more. Safe at any time.

        Also when Python frees a dataset while a function is traced: as a part of that graph the call would wait for
        ever for a lock that the trace holds.
        """
        with tf.init_scope():
            if self._left == 0 and self.queue.size() == 0:
                self._free_queues.append(self.queue)
                return
            # Its reader may still wait for an item, and would take one of the next Feed.
            self.queue.close(cancel_pending_enqueues=True)
            with contextlib.suppress(tf.errors.OutOfRangeError):
                self.queue.dequeue()  # the only item: TensorFlow keeps the queue

    def _run(self) -> None:
        with contextlib.suppress(tf.errors.CancelledError):  # stopped
            try:
                with tf.device("cpu:0"):
                    for item in self._items:
                        self.queue.enqueue(item)
                        self._left -= 1
            except tf.errors.CancelledError:
                raise
            except Exception as error:
                self._on_failure(error)
            finally:
                if self._left != 0:
                    self.queue.close()

    def _dequeue(self, _: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = self.queue.dequeue()
        for value, spec in zip(values, self._specs, strict=True):
            value.set_shape(spec.shape)
        return tuple(values)


def prefetch_to(data: tf.data.Dataset, device: str) -> tf.data.Dataset:
    """Return the batches on a device: the next batch is copied there while a step runs."""
    is_text = any(spec.dtype == tf.string for spec in tf.nest.flatten(data.element_spec))
    if device == HOST or is_text:  # other devices cannot hold strings
        return data
    # The copy has an iterator of its own, to which options that are set after it do not apply.
    source, copied = _without_autotuner(data), []

    def copy() -> None:
        with tf.init_scope():
            copied.append(source.apply(tf.data.experimental.prefetch_to_device(device, _BATCHES_ON_DEVICE)))

    # TensorFlow adds the functions that copy to the default graph. That of a trace is freed; that of the process is
    # not, and would grow by 450 KB with each pass over data.
    tf.function(copy, autograph=False).get_concrete_function()
    return copied[0]
