"""Which rows of a step are this rank's, and how much of the step they are: its share.

No row is computed that is not a record. Every gradient is multiplied by share = N · rows here / rows of all N ranks,
and then averaged. That is the gradient of a mean over the rows of all. A loss that is divided by something else (by
what a mask keeps, by Σ weight, by nothing) is multiplied by N · divisor here / divisor of all / share first, which its
gradient then has too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from horovod_train.data.batch_source import Batch, StepSize
from horovod_train.distributed.allreduce import exchange_name, with_values
from horovod_train.distributed.group import WorkerGroup
from horovod_train.keras_seams import mask_of, take_class
from horovod_train.training.losses import ends_in_logits, refuse_logits, takes_logits
from horovod_train.training.nonfinite import restored_if

T = TypeVar("T")
IF_ANY = "if_any_record"
"""The name, in graphs, of the condition for a step that only the data tell to have records."""
Data = Any
"""What a step gets, as from `fit`: x, (x, y) or (x, y, sample_weight)."""


@dataclass(eq=False, repr=False)
class Rows:
    """How a split's batches become what a step gets."""

    group: WorkerGroup
    data_of: Callable[[Batch], Data]
    """x, (x, y) or (x, y, sample_weight), as `fit` hands them over."""
    scaled: Callable[[Batch], Batch]
    """Casts and scales a batch of the iterator; see Pipeline.scaled."""
    are_counted: bool = False
    """Whether only the ranks together know how many records a step has, because some are skipped or a stream ends."""

    def total(self, batch: Batch, name: str) -> tf.Tensor:
        """Collective, in a compiled step, if the rows are counted: return the records of all ranks, float32."""
        if not self.are_counted:
            return tf.cast(batch.count, tf.float32)
        return self.group.sum_in_step(tf.reduce_sum(batch.real), name)

    def unless_empty(self, total: tf.Tensor, act: Callable[[], T], leave_out: Callable[[], T]) -> T:
        """In a compiled step: call `act` if it has records, else `leave_out`; the same on all ranks.

        total: the number of records, from `total`.
        """
        return tf.cond(total > 0, act, leave_out, name=IF_ANY) if self.are_counted else act()


class Part(NamedTuple):
    """What one pass of a step computes on."""

    batch: Batch
    """The records; one borrowed row if there are none."""
    count: tf.Tensor
    """float32 scalar: the number of records; 0 if the row is borrowed."""
    share: tf.Tensor | None
    """float32 scalar: N · count / records of all ranks in the step; None: 1."""
    may_be_borrowed: bool

    def identity(self) -> Part:
        """Return the same, computed after the control dependencies at this point."""
        identical = tf.nest.map_structure(tf.identity, (self.batch, self.count))
        return self._replace(batch=identical[0], count=identical[1])

    def row_weights(self) -> tf.Tensor:
        """Return 1 for each row that is a record of this pass and 0 for a borrowed one, float32 [rows]."""
        if not self.may_be_borrowed:
            return self.batch.real
        return self.batch.real * self.is_counted()

    def is_counted(self) -> tf.Tensor:
        """Return 1 if the pass has a record here and else 0, a float32 scalar.

        By the share, which is no constant as `count` may be: TensorFlow makes an exchange of constants once, in place
        of once a step, and then on this rank only.
        """
        return tf.cast((self.count if self.share is None else self.share) > 0, tf.float32)

    @contextmanager
    def without_borrowed(self, variables: Sequence[tf.Variable]) -> Iterator[None]:
        """In the compiled step: set variables back after the block if the row is borrowed."""
        if not self.may_be_borrowed:
            yield
            return
        with restored_if(lambda: tf.equal(self.count, 0.0), variables):
            yield


def parts_of(batch: Batch, total: tf.Tensor, size: StepSize, passes: int, ranks: int) -> list[Part]:
    """Return what each pass computes on: the records in their order, in `passes` parts that differ by at most one.

    total: the records of all ranks, float32 scalar.
    """
    rows_in_batch = batch.ids.shape[0]
    if size.is_full:
        assert rows_in_batch is not None
        full = []
        for number in range(passes):
            first, last = number * rows_in_batch // passes, (number + 1) * rows_in_batch // passes
            share = None if passes == 1 else tf.constant((last - first) / rows_in_batch)
            rows = _rows(batch, slice(first, last))
            full.append(Part(rows, tf.constant(float(last - first)), share, may_be_borrowed=False))
        return full
    real = tf.where(batch.ids >= 0)[:, 0]
    if size.rows is not None:
        real = tf.ensure_shape(real, [size.rows])
    parts = []
    # On several ranks as many as on the others, since passes may exchange.
    passes_here = passes if size.rows is None or ranks > 1 else max(1, min(passes, size.rows))
    for number in range(passes_here):
        if size.rows is None:
            count = tf.size(real)
            first, last = number * count // passes, (number + 1) * count // passes
            indices = tf.concat([real[first:last], [0]], axis=0)[: tf.maximum(last - first, 1)]
            records = tf.cast(last - first, tf.float32)
        else:
            first, last = number * size.rows // passes_here, (number + 1) * size.rows // passes_here
            indices = real[first:last] if last > first else tf.constant([0], tf.int64)
            records = tf.constant(float(last - first))
        is_whole = ranks == passes == 1 and bool(size.rows)
        share = None if is_whole else tf.math.divide_no_nan(ranks * records, total)
        may_be_borrowed = size.rows is None or first == last
        parts.append(Part(_gather(batch, indices), records, share, may_be_borrowed))
    return parts


def first_rows(batch: Batch, passes: int) -> Batch:
    """Return the rows of a batch, records or not, that the largest of several passes of a full step has."""
    rows = batch.ids.shape[0] or tf.shape(batch.ids)[0]
    return _rows(batch, slice(0, (rows + passes - 1) // passes))


def _rows(batch: Batch, rows: slice) -> Batch:
    """Return some rows; `count` stays that of all ranks."""
    if rows == slice(0, batch.ids.shape[0]):
        return batch
    part: Batch = tf.nest.map_structure(lambda values: values[rows], batch._replace(count=()))
    return part._replace(count=batch.count)


def _gather(batch: Batch, indices: tf.Tensor) -> Batch:
    part: Batch = tf.nest.map_structure(lambda values: tf.gather(values, indices), batch._replace(count=()))
    return part._replace(count=batch.count)


class Shares:
    """The share of this rank in the pass that is being traced, and what its losses are divided by.

    share: float32 scalar; None: 1, because all ranks have equally many rows.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.share: tf.Tensor | None = None
        self._in_step = False
        self._noted: list[tf.Tensor] | None = None
        self.totals: list[tf.Tensor] | None = None
        """The divisors of all ranks that are left for the losses to come; None: they are not known."""
        # By the names of losses, in the order of their calls outside of steps; known after a trial.
        self.exchanged: dict[str, None] = {}
        """Those that are divided by something else than rows, so that ranks exchange by what."""
        self.given_logits: dict[str, None] = {}
        """Those that take probabilities and got what is none."""
        self.given_as_one: dict[str, None] = {}
        """Those that gave one number for a batch, which may be divided by anything."""
        self.weighted_as_one: dict[str, None] = {}
        """Those that gave one number for weighted records."""

    @contextmanager
    def of_pass(self, share: tf.Tensor | None, totals: Sequence[tf.Tensor] | None = None) -> Iterator[None]:
        """Inside the block, in a compiled step: the share of the pass, and the divisors of all ranks if they are known.

        totals: in the order in which the losses are called; None: the losses exchange theirs.
        """
        before = self.share, self._in_step, self.totals
        self.share, self._in_step, self.totals = share, True, None if totals is None else list(totals)
        try:
            yield
        finally:
            self.share, self._in_step, self.totals = before

    @contextmanager
    def noting_divisors(self) -> Iterator[list[tf.Tensor]]:
        """Inside the block: note what each loss is divided by here, float32 scalars; the losses give zeros."""
        self._noted, self._in_step = [], True
        try:
            yield self._noted
        finally:
            self._noted, self._in_step = None, False

    def note_outputs(self, loss: keras.losses.Loss, outputs: Any) -> None:
        if not self._in_step and takes_logits(loss) is False and ends_in_logits(outputs):
            self.given_logits[loss.name] = None

    def scaled(self, gradient: Any) -> Any:
        """Return a gradient times the share; 0 if that is 0, whatever the rows are that were computed instead."""
        share = self.share
        if share is None:
            return gradient
        return with_values(gradient, lambda values: tf.math.multiply_no_nan(values, tf.cast(share, values.dtype)))

    def take_on(self, loss: keras.losses.Loss) -> None:
        """Make a loss that of all ranks inside a step; elsewhere, and saved, it is what it was."""
        if not isinstance(loss, _OfAllRanks):
            take_class(loss, _of_all_ranks(type(loss)))
        loss.__dict__["_shares"] = self

    def of_all_ranks(self, loss: keras.losses.Loss, value: Any, values: Any, outputs: Any, weights: Any) -> Any:
        """Return the value of a loss times N · divisor here / divisor of all / share, if it is not divided by rows.

        Where the divisor of all is that of a pass among several, N is the sum of the ranks' shares in it instead: the
        pass counts as its rows do. values: what the loss gave before its reduction; None: its `call` was not called.
        """
        if values is None or loss.reduction in (None, "none"):
            return value
        if not len(values.shape):
            if not self._in_step:
                (self.given_as_one if weights is None else self.weighted_as_one)[loss.name] = None
            return value
        if not self._in_step:
            if loss.reduction != "sum" and _divisor(loss, values, outputs, weights) is not None:
                self.exchanged[loss.name] = None
            return value
        if self.group.size == 1 and self.share is None and self._noted is None:
            return value  # bit for bit what Keras computes
        share = tf.constant(1.0) if self.share is None else self.share
        if loss.reduction == "sum":
            factor = tf.math.divide_no_nan(float(self.group.size), share)
            return value if self._noted is not None else value * tf.cast(factor, value.dtype)
        divisor = _divisor(loss, values, outputs, weights)
        if divisor is None:
            return value
        divisor = tf.cast(divisor, tf.float32)
        if self._noted is not None:
            self._noted.append(divisor)
            return tf.zeros_like(value)
        divisor *= tf.cast(share > 0, tf.float32)
        if self.totals is None:
            sums = self.group.sum_in_step(tf.stack([divisor, share]), exchange_name("loss.divisor"))
            total, whole = tf.unstack(sums)
        else:
            total, whole = self.totals.pop(0), tf.constant(float(self.group.size))
        factor = tf.math.divide_no_nan(whole * divisor, total * share)
        return value * tf.cast(factor, value.dtype)


class _OfAllRanks:
    """Marks the subclasses that take_on makes."""


def _of_all_ranks(base: type) -> type:
    class OfAllRanks(base, _OfAllRanks):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            if getattr(self, "from_logits", False):
                refuse_logits(y_pred, self.name)
            self._shares.note_outputs(self, y_pred)
            values = super().call(y_true, y_pred)
            _check_is_of_rows(self.name, values, y_true, y_pred)
            self.__dict__["_unreduced"] = values
            return values

        def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            value = super().__call__(y_true, y_pred, sample_weight=sample_weight)
            values = self.__dict__.pop("_unreduced", None)
            return self._shares.of_all_ranks(self, value, values, y_pred, sample_weight)

    return OfAllRanks


def _divisor(loss: keras.losses.Loss, values: Any, outputs: Any, weights: Any) -> tf.Tensor | None:
    """Return what Keras divides the sum of the values by, as in keras.losses.Loss; None: by rows alone."""
    # Masks count in the dtype of the loss, as there.
    masks = [tf.cast(mask, tf.bool) for mask in (mask_of(outputs), mask_of(values)) if mask is not None]
    counted = tf.cast(functools.reduce(tf.logical_and, masks), tf.float32) if masks else None
    if loss.reduction != "mean_with_sample_weight" or weights is None:
        return None if counted is None else tf.reduce_sum(counted)
    weights = tf.cast(weights, tf.float32)
    if counted is None:
        return tf.reduce_sum(weights)
    if len(weights.shape) == len(counted.shape) + 1:
        weights = tf.squeeze(weights, -1)
    elif len(counted.shape) == len(weights.shape) + 1 and counted.shape[-1] == 1:
        weights = weights[..., tf.newaxis]
    return tf.reduce_sum(weights * counted)


def _check_is_of_rows(name: str, values: Any, targets: Any, outputs: Any) -> None:
    """Raise ValueError for a loss that compares each record with all others, because of a missing axis."""
    shapes = [list(getattr(tensor, "shape", ())) for tensor in (targets, outputs)]
    is_square = len(values.shape) == 2 and values.shape[0] == values.shape[1] != 1
    if is_square and sorted(map(len, shapes)) == [1, 2] and {1} == {*shapes[0][1:], *shapes[1][1:]}:
        raise ValueError(
            f"loss {name} compares each record with all others: it gave {values.shape} for targets {shapes[0]} and "
            f"outputs {shapes[1]}; reshape one of them to the shape of the other"
        )
