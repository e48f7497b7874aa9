"""Calls the user's function of a stream, (rank, size, epoch, seed, training) → tf.data.Dataset of single records.

The function alone decides which rank gets which record. Checks the form of the records, and names the call in errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from horovod_train.config.registry import call, load_function
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.pipeline.loader import Ranks
from horovod_train.data.random_access.store import describe_error
from horovod_train.errors import UserError

WHERE = "data.dataset"
_COUNT_BATCH = 1024


def open_stream(config: DataConfig, ranks: Ranks, *, seed: int, training: bool) -> Stream | None:
    """Call the function for epoch 0; return None if it gives None, as it may with training=False. Raises UserError."""
    assert config.dataset is not None
    stream = Stream(config.dataset, ranks, seed, training)
    return stream if stream.elements else None


class Stream:
    """One rank's part of the user's stream, epoch by epoch."""

    def __init__(self, spec: Spec, ranks: Ranks, seed: int, training: bool) -> None:
        """Call the function for epoch 0. Raises UserError if its records have another form than is required."""
        self.spec, self.ranks, self.seed, self._training = spec, ranks, seed, training
        self._function = load_function(spec.name, WHERE)
        self._first = self._call(0)
        if self._first is None and training:
            raise UserError(f"{WHERE}: {self.name(0)} must return a tf.data.Dataset; received None.")
        self.elements = () if self._first is None else _check_elements(self._first, spec.name)
        """The specs of a record: (inputs, targets), and its weight if it has one; () if there are no records."""

    def dataset(self, epoch: int) -> tf.data.Dataset:
        """Return the records of an epoch: (inputs, targets, weight). Raises UserError."""
        data, self._first = (self._first if epoch == 0 else None), None
        data = self._call(epoch) if data is None else data
        if data is None or _check_elements(data, self.spec.name) != self.elements:
            elements = None if data is None else data.element_spec
            raise UserError(f"{WHERE}: {self.name(epoch)} gives {elements}; epoch 0 gave {self.elements}.")
        return data.map(_with_weight, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def count(self) -> int:
        """Return the number of records of epoch 0; reads all of them if the dataset does not know it.

        Raises UserError for a stream that never ends.
        """
        data = self.dataset(0)
        cardinality = int(data.cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY:
            raise UserError(
                f"{WHERE}: {self.name(0)} never ends. Give data.steps_per_epoch: how many steps an epoch has."
            )
        if cardinality >= 0:
            return cardinality
        with self.explaining(0):
            return int(data.batch(_COUNT_BATCH).reduce(tf.constant(0, tf.int64), _add_rows))

    def name(self, epoch: int) -> str:
        """Return the call as users would write it."""
        arguments = f"rank={self.ranks.rank}, size={self.ranks.size}, epoch={epoch}, training={self._training}"
        return f"{self.spec.name.partition(':')[2]}({arguments})"

    @contextmanager
    def explaining(self, epoch: int) -> Iterator[None]:
        """Raise UserError that names the call, in place of what the user's code raises in the block."""
        try:
            yield
        except (UserError, MemoryError):
            raise
        except Exception as error:
            raise UserError(f"{WHERE}: {self.name(epoch)}: {_describe(error)}.") from error

    def _call(self, epoch: int) -> tf.data.Dataset | None:
        arguments = {"rank": self.ranks.rank, "size": self.ranks.size, "seed": self.seed, "training": self._training}
        with self.explaining(epoch), tf.device("cpu:0"):
            result = call(self._function, self.spec, WHERE, epoch=epoch, **arguments)
        if not isinstance(result, tf.data.Dataset | None):
            raise UserError(
                f"{WHERE}: {self.name(epoch)} must return a tf.data.Dataset; received {type(result).__name__}."
            )
        return result


def _describe(error: Exception) -> str:
    """Return what was raised in one line, and where in the user's code if Python knows it."""
    if not isinstance(error, tf.errors.OpError):
        return describe_error(error)
    # TensorFlow names its node, and quotes what a generator raised with its traceback.
    text = re.sub(r"\{\{.*?\}\}", "", str(error.message)).strip()
    return text.splitlines()[0].strip().rstrip(".")


@tf.autograph.experimental.do_not_convert
def _with_weight(*element: Any) -> tuple[Any, Any, tf.Tensor]:
    inputs, targets, *weight = element
    return inputs, targets, tf.cast(weight[0], tf.float32) if weight else tf.constant(1.0)


@tf.autograph.experimental.do_not_convert
def _add_rows(count: tf.Tensor, element: tuple[Any, ...]) -> tf.Tensor:
    return count + tf.shape(element[-1], tf.int64)[0]


def _check_elements(data: tf.data.Dataset, name: str) -> tuple[Any, ...]:
    """Return the specs of a record. Raises UserError unless it is (inputs, targets) or (inputs, targets, weight)."""
    spec = data.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise UserError(
            f"{WHERE}: {name} must give records (inputs, targets) or (inputs, targets, weight); received {spec}."
        )
    for part, what in zip(spec[:2], ("inputs", "targets"), strict=True):
        leaves = list(part.values()) if isinstance(part, dict) else [part]
        if not leaves or not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves):
            raise UserError(
                f"{WHERE}: {name}: {what} must be a tensor, or tensors by name, of known shapes; received {part}. "
                "Pad what differs in length, and batch nothing: each element is one record."
            )
    if len(spec) == 3 and not (isinstance(spec[2], tf.TensorSpec) and spec[2].shape.rank == 0):
        raise UserError(f"{WHERE}: {name}: the weight of a record must be one number; received {spec[2]}.")
    return spec
