"""Non-finite numbers: detect them, tell the other ranks, remember where they began."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from horovod_train.data.batch_source import Batch
from horovod_train.distributed.allreduce import with_values
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import DivergedError
from horovod_train.shown_text import listed

_MOST_NUMBERS = 1 << 14
"""Of a small gradient."""
_ADVICE = "lower lr_schedule.base_lr, or see train.non_finite"
_IN_RECORD = (
    "",
    "an input is not finite",
    "a target or the weight is not finite",
    "the model has no output for its label",
)
"""What is wrong with a record, by the number that `note` stores."""


class Failure:
    """Records where this rank's numbers became non-finite for good, in variables, which a compiled step can set.

    step: int64; 0 without a failure. is_cause: bool: caused by this rank's own gradients, not by those of others.
    loss: float32, of that step; last_loss: of the last step. Both are this rank's part of the mean, penalties included.
    skips: int32, the updates skipped in a row before it. record: int64, the first record of the step with which
    something is wrong, and in_record: int32, what; see _IN_RECORD.
    """

    def __init__(self, knows_loss: bool = True) -> None:
        """knows_loss: whether `loss` says anything; not where a model's own step computes it."""
        self.knows_loss = knows_loss
        self.step, self.is_cause, self.loss, self.last_loss, self.skips = (
            tf.Variable(value, trainable=False) for value in (tf.constant(0, tf.int64), False, 0.0, 0.0, 0)
        )
        self.record, self.in_record = (tf.Variable(value, trainable=False) for value in (tf.constant(-1, tf.int64), 0))
        self.name_record: Callable[[int, str], str] = lambda record, problem: f"record {record}: {problem}."
        """(record, what is wrong with it) → the sentence that tells where it is."""
        self._variable = ""
        """The name of the non-finite variable; "" for loss or gradients."""

    def note(
        self,
        step: tf.Tensor,
        is_cause: tf.Tensor,
        loss: tf.Tensor,
        skips: tf.Tensor | int,
        batch: Batch | None,
        labels: Mapping[str, int],
    ) -> None:
        """In the compiled step or after it: note that combined gradients are not finite. is_cause: bool, see above.

        batch: that the gradients are of, if it is known. labels: of targets that are labels, how many there are.
        """
        if batch is not None:
            self._note_record(batch, labels)
        self.step.assign(step)
        self.is_cause.assign(is_cause)
        self.loss.assign(loss)
        self.skips.assign(skips)

    def _note_record(self, batch: Batch, labels: Mapping[str, int]) -> None:
        targets = batch.targets if isinstance(batch.targets, dict) else {"": batch.targets}
        outside = [
            _any_of_row((label < 0) | (label >= count))
            for name, count in labels.items()
            if name in targets and targets[name].dtype.is_integer
            for label in [tf.cast(targets[name], tf.int64)]  # uint8 cannot hold every count
        ]
        rows = tf.shape(batch.ids)
        found = tf.zeros(rows, tf.int32)
        for number, bad in (
            (3, outside),
            (2, _nonfinite_rows((batch.targets, batch.weights))),
            (1, _nonfinite_rows(batch.inputs)),
        ):
            for each in bad:
                found = tf.where(each & (batch.ids >= 0), number, found)
        first = tf.argmax(tf.cast(found > 0, tf.int32), output_type=tf.int32)
        self.in_record.assign(found[first])
        self.record.assign(tf.where(found[first] > 0, batch.ids[first], -1))

    def note_variables(self, step: int, variables: Mapping[str, tf.Variable], *, is_cause: bool = True) -> None:
        """Between steps: note the first non-finite variable, unless the run has already failed.

        is_cause: whether these are this rank's own numbers; else ranks have just combined theirs, which were finite.
        """
        names = nonfinite_names(variables)
        if names and not int(self.step):
            self._variable = names[0]
            # 0 means no failure, but a run may be resumed at step 0.
            self.step.assign(max(1, step))
            self.is_cause.assign(is_cause)
            self.loss.assign(self.last_loss)

    def divergence(self, group: WorkerGroup) -> DivergedError:
        """Collective: return the error for the user, with the ranks on which numbers became non-finite."""
        loss = float(self.loss)
        facts = group.gather(
            [
                int(self.step),
                bool(self.is_cause),
                math.isfinite(loss),
                "NaN" if math.isnan(loss) else f"{loss:g}",
                int(self.skips),
                self._variable,
                self._describe_record(),
            ]
        )
        failed = [rank for rank, (step, *_) in enumerate(facts) if step]
        causes = [rank for rank in failed if facts[rank][1]]
        # A rank whose own records are to blame tells more than the others.
        first = min(causes or failed, key=lambda rank: not facts[rank][-1])
        step, _, loss_is_finite, shown, skips, variable, record = facts[first]
        ranks = listed(map(group.name, causes), 4)
        tried = f", after {skips} skipped updates in a row" if skips else ""
        state = f"Nothing of it has been saved; {_ADVICE if self.knows_loss else 'lower the learning rates'}."
        if not causes:
            return DivergedError(
                f"Model diverged at step {step}: gradients are finite on each rank, but not once they are combined"
                f"{tried}. horovod.compression: fp16 overflows above 65504; use bf16 or none. {state}"
            )
        shows_loss = self.knows_loss and not loss_is_finite
        lead = f"Model diverged{f' with loss = {shown}' if shows_loss else ''} at step {step}"
        if variable:
            return DivergedError(f"{lead}: {variable} is not finite on {ranks}. {state}")
        if record:
            return DivergedError(
                f"{lead}: loss or gradients are not finite on {ranks}{tried}, because of a record: {record} Nothing of "
                "the step has been saved. Correct such records, or leave them out: check-data names those that are not "
                "finite, and counts labels."
            )
        but = ", but not the loss," if self.knows_loss else ""
        numbers = f"gradients{but}" if loss_is_finite else "loss or gradients"
        return DivergedError(f"{lead}: {numbers} are not finite on {ranks}{tried}. {state}")

    def _describe_record(self) -> str:
        """Return the sentence about the record that was noted; "" if there is none."""
        if not int(self.in_record) or not int(self.step):
            return ""
        record, problem = int(self.record), _IN_RECORD[int(self.in_record)]
        try:
            return self.name_record(record, problem)
        except Exception:  # reading where it is may fail in any way; the error to show is that the run diverged
            return f"record {record}: {problem}."


def _any_of_row(values: tf.Tensor) -> tf.Tensor:
    """Return for each row of bools whether any is true: bool [rows]."""
    return tf.reduce_any(tf.reshape(values, [tf.shape(values)[0], -1]), axis=1)


def _nonfinite_rows(tensors: Any) -> list[tf.Tensor]:
    """Return for each floating tensor [rows, …] which rows have a number that is not finite: bool [rows]."""
    floating = [tensor for tensor in tf.nest.flatten(tensors) if tensor.dtype.is_floating]
    return [_any_of_row(tf.logical_not(tf.math.is_finite(tensor))) for tensor in floating]


def gradient_values(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return the values of all gradients that are not None; for sparse ones, of the rows that they contain."""
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    return [value for value in values if value is not None]


def seem_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Return whether the sum of all numbers is finite, which takes one reading, and so is done in each step.

    It is not if one of them is NaN or infinite; nor if float32 cannot hold the sum, past 3.4e38.
    """
    return tf.math.is_finite(
        tf.add_n([tf.reduce_sum(tf.cast(value, tf.float32)) for value in gradient_values(gradients)])
    )


def are_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Return whether all gradients are free of NaN and infinity, as a LossScaleOptimizer finds it."""
    finite = [tf.reduce_all(tf.math.is_finite(value)) for value in gradient_values(gradients)]
    return tf.reduce_all(tf.stack(finite))


def variables_are_finite(variables: Sequence[tf.Variable]) -> tf.Tensor:
    """Return whether all of some floating-point variables are free of NaN and infinity, as `nonfinite_names` finds it.

    Looks at each number only if their sum is not finite: large numbers are.
    """
    values = [variable.read_value() for variable in variables]
    return tf.cond(seem_finite(values), lambda: tf.constant(True), lambda: are_finite(values))


def small_gradient_values(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return the values of the small gradients, at least one: what is looked at in each step.

    A number that is not finite spreads in the backward pass to the gradients of biases and norms, which are small.
    Reading all gradients costs 5 % of a step on a CPU. If only a large one overflows, its weight shows it when the
    compiled call ends.
    """
    values = sorted(gradient_values(gradients), key=lambda value: value.shape.num_elements() or math.inf)
    return [value for value in values if (value.shape.num_elements() or math.inf) <= _MOST_NUMBERS] or values[:1]


def nonfinite_names(variables: Mapping[str, tf.Variable]) -> list[str]:
    """Return the names of the floating-point variables that contain a NaN or an infinity."""
    floating = {name: variable for name, variable in variables.items() if variable.dtype.is_floating}
    if not floating:
        return []
    finite = tf.stack([tf.reduce_all(tf.math.is_finite(variable)) for variable in floating.values()])
    return [name for name, is_finite in zip(floating, finite.numpy(), strict=True) if not is_finite]


@contextmanager
def restored_if_nonfinite(variables: Sequence[tf.Variable], checked: Sequence[tf.Variable]) -> Iterator[None]:
    """In the compiled step: restore `variables` if one of `checked` becomes non-finite inside the block.

    A moving average or a sum stays NaN once it is NaN, although training continues, because training does not read it.
    A maximum that begins at -inf may stay there.
    """
    if not checked:
        yield
        return
    before = [variable.read_value() for variable in checked]

    def is_poisoned() -> tf.Tensor:
        after = [variable.read_value() for variable in checked]

        def look() -> tf.Tensor:
            pairs = zip(after, before, strict=True)
            return tf.reduce_any(
                tf.stack([tf.reduce_any(~tf.math.is_finite(new) & (new != old)) for new, old in pairs])
            )

        return tf.cond(seem_finite(after), lambda: tf.constant(False), look)

    with restored_if(is_poisoned, variables):
        yield


@contextmanager
def restored_if(condition: Callable[[], tf.Tensor], variables: Sequence[tf.Variable]) -> Iterator[None]:
    """In a compiled step: set variables back to their values before the block, if a condition holds after it."""
    before = [variable.read_value() for variable in variables]
    yield

    def restore() -> None:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)

    tf.cond(condition(), restore, lambda: None)


def poison_if_nonfinite(loss: tf.Tensor, gradients: Sequence[Any]) -> list[Any]:
    """Return the gradients, non-finite if the loss is, so that the usual exchange tells all ranks.

    loss: float32 scalar. Zero times the loss is added to the smallest gradient, which costs least.
    """
    poisoned = list(gradients)
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if indices:
        smallest = min(indices, key=lambda index: gradients[index].shape.num_elements() or math.inf)
        poisoned[smallest] = with_values(poisoned[smallest], lambda values: values + tf.cast(0.0 * loss, values.dtype))
    return poisoned
