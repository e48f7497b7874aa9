"""The compiled training and evaluation steps; one call runs several steps.

A step is the model's own `train_step` or `test_step`, Keras' or the user's, on the rows that this rank has; where XLA
compiles it, Keras' own in two pieces. Around it are passes whose gradients are added up, seeds, phases, and what the
forward pass has assigned. Shares of rows are in shares, what happens to gradients in optimizers. Knows no epochs or
hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from horovod_train.data.batch_source import Batch, Batches, Cursor, StepSize, for_each_batch
from horovod_train.data.counter_rng import mix
from horovod_train.distributed.allreduce import in_step
from horovod_train.distributed.group import as_tf_variable
from horovod_train.distributed.sync_batch_norm import rows_that_count, synchronised_statistics
from horovod_train.distributed.watchdog.heartbeat import FINE_PHASES, files_being_read
from horovod_train.keras_seams import loss_in_training, loss_tracker, losses_weighed, mask_of, set_mask
from horovod_train.training.nonfinite import restored_if, restored_if_nonfinite, variables_are_finite
from horovod_train.training.state import TrainState
from horovod_train.training.steps.figures import Figures, ForwardState
from horovod_train.training.steps.optimizers import Update, add_lists, only_count
from horovod_train.training.steps.shares import Data, Part, Rows, Shares, first_rows, parts_of
from horovod_train.training.steps.trial import noting_loss

Values = list[tuple[keras.Variable, tf.Tensor]]
"""Variables of a model, and their values at some place of a step."""

DRAWS_PER_STEP = 1 << 10
"""Counter values reserved per step for the random draws of one layer, which draws once or twice."""

MAX_OVERFLOWS_IN_A_ROW = 50
"""Updates in a row that a loss scale may leave out: halved 50 times, a scale of 2^15 is about 1e-11."""


class PhaseVariable:
    """The probe of a Heartbeat for compiled training. step: the variable in which steps are counted."""

    def __init__(self, step: tf.Variable) -> None:
        self._step = step
        # On the host, because a device that is stuck could not be read.
        with tf.device("CPU:0"):
            self._phase = tf.Variable(0, dtype=tf.int32, trainable=False)

    def enter(self, phase: str, after: Any = ()) -> tf.Operation:
        """Record inside the step that it is in `phase` ("input", "compute" or "exchange") from now on.

        after: tensors, in any structure, that must exist before. An operation that must run after this needs a control
        dependency on the returned operation: TensorFlow keeps no order between different resources.
        """
        tensors = [tensor for tensor in tf.nest.flatten(after, expand_composites=True) if tensor is not None]
        with tf.name_scope("watch"), tf.control_dependencies(tensors):
            return self._phase.assign(FINE_PHASES.index(phase), read_value=False)

    def phase(self) -> str:
        """Return the phase that the step has entered last; may be called from any thread."""
        return FINE_PHASES[int(self._phase)]

    def __call__(self) -> tuple[int, str, str]:
        phase = self.phase()
        return int(self._step), phase, files_being_read() if phase == "input" else ""


class Seeds:
    """Sets the model's random generators, such as dropout's, by (seed, rank, layer, step).

    Masks differ between ranks, and a resumed run draws the same again.
    """

    def __init__(self, variables: Sequence[tf.Variable], seed: int, rank: int) -> None:
        """variables: the states of the generators, uint32 [2] each."""
        self._variables = variables
        bits = seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9
        mixed = mix(
            np.array([(bits + index * 0x94D049BB133111EB) % 2**64 for index in range(len(variables))], np.uint64)
        )
        self.keys: list[int] = (mixed % 2**32).tolist()
        """By generator, 32 well-mixed bits."""

    def set(self, step: tf.Tensor) -> None:
        """In the compiled step: set all of them. step: int64 scalar."""
        with tf.name_scope("dropout_seeds"):
            counter = step * DRAWS_PER_STEP
            # The cast below takes the lower 32 bits, which repeat after 2^22 steps; the upper ones change the key.
            turn = tf.bitwise.right_shift(counter, tf.constant(32, tf.int64)) * 0x9E3779B1
            for variable, key in zip(self._variables, self.keys, strict=True):
                state = tf.stack([tf.bitwise.bitwise_xor(tf.constant(key, tf.int64), turn), counter])
                variable.assign(tf.cast(tf.cast(state, tf.uint32), variable.dtype))


class PassResult(NamedTuple):
    """What a pass gives."""

    logs: Mapping[str, Any]
    """What `train_step` returned."""
    loss: tf.Tensor | None
    """float32 scalar: the loss of the model's `compute_loss` times the share; None if the step does not call it."""
    gradients: dict[str, list[Any]]
    """Of a pass that does not apply them: by optimizer, times the share."""

    def add_loss(self, loss: tf.Tensor | None) -> tf.Tensor | None:
        """Return the loss of the passes so far, this one included."""
        return self.loss if loss is None or self.loss is None else loss + self.loss


@dataclass(eq=False, repr=False)
class TrainStep:
    """Updates a TrainState by the model's `train_step`, several times in one compiled call; adds to `figures`."""

    state: TrainState
    rows: Rows
    update: Update
    shares: Shares
    forward_state: ForwardState
    figures: Figures
    _: KW_ONLY
    seed: int
    phase_variable: PhaseVariable
    accumulate_steps: int = 1
    counts_ahead: bool = False
    """Whether ranks exchange what losses are divided by before the passes: where there are several, and for XLA."""
    jit_compile: bool = False
    """Whether XLA compiles the forward and the backward pass, and nothing else."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """Of targets that are labels, for how many of those the model has outputs; "" for a single target."""
    assigned: Sequence[tf.Variable] = ()
    """What the model's step changes besides its optimizers: weights, trained or not, and states of metrics."""
    max_skips_in_a_row: int = 0
    """Non-finite updates to skip before `run` ends; 0: end at the first.

    With a LossScaleOptimizer the limit is at least MAX_OVERFLOWS_IN_A_ROW: it finds its scale by skipping.
    """
    placement: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The scope in which an update is traced; for a model in stages, see model_parallel.follow_inputs."""

    def __post_init__(self) -> None:
        self._model = self.state.model
        # It counts ranks that have records: to Adasum a gradient of 0 is none.
        self._counts_ranks = self.update.exchange.op == "adasum"
        self.seeds = Seeds(self.state.seeds, self.seed, self.rows.group.rank)
        if self.update.optimizers.scales_loss:
            self.max_skips_in_a_row = max(self.max_skips_in_a_row, MAX_OVERFLOWS_IN_A_ROW)
        self.skipped, self.skipped_in_a_row = (tf.Variable(0, trainable=False) for _ in range(2))
        """int32: steps whose update was left out: in all, and since the last that was not."""
        self.traces = 0
        self.retrace()

    def retrace(self) -> None:
        """Compile the step when it runs next: for when other variables are trained than before."""
        self.update.variables.clear()
        self._runs: dict[Any, Any] = {}
        self._collect_function = tf.function(self._collect_in_function, autograph=False)
        self._forward_backward_by_xla = tf.function(self._forward_backward, autograph=False, jit_compile=True)
        self.traces += 1

    def has_compiled(self, size: StepSize) -> bool:
        """Return whether `run` need not compile first for steps of this size."""
        return size in self._runs

    def run(self, batches: Batches, steps: int, size: StepSize) -> tuple[int, bool, np.ndarray]:
        """Train on the next `steps` batches in one compiled call; stop early where gradients are no longer finite.

        size: of each of them. Returns the steps done, whether to continue, and the ids of the records used by this
        rank, int64 [steps, rows].
        """
        if size not in self._runs:
            self._runs[size] = _compiled(self._run_steps, size)
        continues, ids = batches.call(self._runs[size], tf.constant(steps, tf.int32))
        # Else it is noted in the step. A branch in each step is costly.
        if not continues and not self.update.holds_back and self.update.optimizers.failed:
            failure = self.state.failure
            self._note_failure(self.state.step, failure.last_loss, 0, self.rows.scaled(batches.last_taken()))
        used = ids.numpy()
        self.figures.count(int((used >= 0).sum()))
        return len(used), bool(continues), used

    def _run_steps(
        self, cursor: Cursor, steps: tf.Tensor, size: StepSize
    ) -> tuple[Cursor, tuple[tf.Tensor, tf.Tensor]]:
        def one_step(
            batch: Batch, number: tf.Tensor, _: tf.Tensor, ids: tf.TensorArray
        ) -> tuple[tf.Tensor, tf.TensorArray]:
            with tf.name_scope("input_data"):
                batch = self.rows.scaled(batch)
            with self.placement():
                continues = self.train_on(batch, size)
            return continues, ids.write(number, batch.ids)

        ids = tf.TensorArray(tf.int64, size=0, dynamic_size=True, element_shape=[None])
        cursor, (continues, ids) = for_each_batch(
            cursor,
            steps,
            one_step,
            (tf.constant(True), ids),
            continues=lambda continues, _: continues,
            wait=self._wait,
        )
        trained = self.state.finite([as_tf_variable(each) for each in self.state.model.trainable_variables])
        if trained and not self.update.holds_back:
            continues = tf.logical_and(continues, variables_are_finite(trained))
        return cursor, (continues, ids.stack())

    def _wait(self, take: Callable[[], Batch]) -> Batch:
        """Take a chunk of batches in the phase "input"; then, until the first exchange, the phase is "compute"."""
        enter = self.phase_variable.enter
        with tf.control_dependencies([enter("input")]):
            chunk = take()
        with tf.control_dependencies([enter("compute", after=chunk)]):
            identical: Batch = tf.nest.map_structure(tf.identity, chunk)
        return identical

    def train_on(self, batch: Batch, size: StepSize) -> tf.Tensor:
        """In a compiled call: run one update. Return whether to continue; the same on all ranks."""
        self.seeds.set(self.state.step)
        with tf.control_dependencies([self.phase_variable.enter("exchange", after=batch)] if self._counts else []):
            total = self.rows.total(batch, "step.count")
        forward_state = self.forward_state.variables

        def update() -> tf.Tensor:
            # Around the exchange of it too: what one rank has poisoned, all undo.
            with self._without_poison(forward_state, self.state.finite(forward_state)):
                return self._update_on(batch, total, size)

        has_failed = self.rows.unless_empty(total, update, self._leave_out)
        with tf.name_scope("exchange"):
            return tf.logical_not(self.state.synchronization.end_step(has_failed, tf.identity(self.state.step)))

    def _update_on(self, batch: Batch, total: tf.Tensor, size: StepSize) -> tf.Tensor:
        """Run one update on records, of which all ranks have `total`. Return whether this rank has failed for good."""
        state = self.state
        if self.update.holds_back:
            self.update.optimizers.failed.assign(False)
        with tf.name_scope("rank"):
            parts = parts_of(batch, total, size, self.accumulate_steps, self.rows.group.size)
            totals, factor = self._total_divisors(parts), self._ranks_with_records(parts, size)
            if self._counts:
                with tf.control_dependencies([self.phase_variable.enter("compute", after=(total, totals, factor))]):
                    parts = [part.identity() for part in parts]  # what computes waits until the phase is recorded
            before = self.forward_state.values()
            self.update.factor = factor
            with self._without_poison(self.figures.variables, self.figures.floating):
                loss = self._compute(parts, totals)
            self.update.factor = None
        if loss is not None:
            before_last = state.failure.last_loss.read_value() if state.synchronization.delay else loss
            state.failure.last_loss.assign(loss)
            state.note_loss(loss, tf.logical_not(tf.math.is_finite(loss)) if self.update.holds_back else None)
        else:
            before_last = tf.constant(0.0)
        failed = self.update.optimizers.failed.read_value()
        with tf.control_dependencies([failed]):  # a step counts only after its exchanges
            state.step.assign_add(1)
        with tf.name_scope("exchange"), self.shares.of_pass(_share_of_step(parts)):
            self.forward_state.combine(before, self.shares)
        with tf.name_scope("update_parameters"):
            return self._end_update(failed, before_last, None if state.synchronization.delay else batch)

    def _leave_out(self) -> tf.Tensor:
        """Count a step without any record, which changes nothing. Return whether this rank has failed for good."""
        for key in self.update.variables:  # tf.cond traces a step with records first: each `apply` of it counts
            path, _, _ = key.partition("#")
            only_count(self.update.optimizers.by_path[path])
        self.state.synchronization.leave_out(self.state.step.assign_add(1))
        return self.state.failure.step > 0

    def _compute(self, parts: Sequence[Part], totals: Sequence[tf.Tensor] | None) -> tf.Tensor | None:
        """Run the passes of a step; the last one applies. Return this rank's part of the mean loss times the ranks."""
        earlier: dict[str, list[Any]] = {}
        loss: tf.Tensor | None = None
        result: PassResult | None = None
        for part in parts[:-1]:
            part = _after((earlier, result), part)
            with tf.name_scope("pass"):  # traced once for all passes of its shape
                result = self._collect_function(part, totals, by_xla=self.jit_compile)
            for path, gradients in result.gradients.items():
                earlier[path] = add_lists(earlier.get(path), gradients)
            self.figures.add(result.logs, part.count)
            loss = result.add_loss(loss)
        self.update.earlier = earlier
        result = self._apply(_after((earlier, result), parts[-1]), totals, by_xla=self.jit_compile)
        self.update.earlier = {}
        self.figures.add(result.logs, parts[-1].count)
        return result.add_loss(loss)

    def _apply(self, part: Part, totals: Sequence[tf.Tensor] | None, *, by_xla: bool) -> PassResult:
        """Run a pass whose optimizers apply what they are given. by_xla: whether XLA compiles it."""
        self.update.begin_pass()
        with (
            part.without_borrowed(self._kept_variables),
            self.shares.of_pass(part.share, totals),
            rows_that_count(part.row_weights(), self.shares.share),
            losses_weighed(self._model, part.count),
            self._noting_losses(by_xla=by_xla) as losses,
        ):
            train_step = self._train_step_by_xla if by_xla else self._model.train_step
            data = self.rows.data_of(part.batch)
            # In a scope of its own, by which tensors have the same names on all ranks: Horovod makes names of exchanges
            # of those, and names the gradient of one like that in any case.
            with tf.name_scope("train_step"), in_step(part.batch.ids[0] >= 0):
                logs = train_step(data)
        loss = tf.cast(losses[-1], tf.float32) if losses else None
        if loss is not None and part.share is not None:
            loss = tf.math.multiply_no_nan(loss, part.share)
        return PassResult(logs, loss, {})

    def _collect_in_function(self, part: Part, totals: Sequence[tf.Tensor] | None, *, by_xla: bool) -> PassResult:
        """Run a pass whose gradients are returned."""
        with self.update.collecting() as gradients:
            result = self._apply(part, totals, by_xla=by_xla)
        return PassResult(dict(result.logs), result.loss, dict(gradients))

    def _total_divisors(self, parts: Sequence[Part]) -> list[tf.Tensor] | None:
        """Collective, if `counts_ahead`: return what each loss is divided by over all ranks and passes."""
        if not self.counts_ahead:
            return None
        sums: list[tf.Tensor] | None = None
        values = [(variable, as_tf_variable(variable).read_value()) for variable in self._model.variables]
        for part in parts:
            noted, values = self._divisors(part.batch, values)
            if not noted:
                return None
            divisors = [divisor * part.is_counted() for divisor in noted]
            sums = divisors if sums is None else [a + b for a, b in zip(sums, divisors, strict=True)]
        assert sums is not None, "a step without a pass"
        return tf.unstack(self.shares.group.sum_in_step(tf.stack(sums), "step.divisors"))

    def _ranks_with_records(self, parts: Sequence[Part], size: StepSize) -> tf.Tensor | None:
        """Collective, with Adasum: return which part of the ranks has records in a step; None: all have.

        Adasum of equal gradients is their mean, and that of ranks without records leaves it as it is: there the shares
        of the others, N · rows here / rows of all, are to be M · rows here / rows of all, with M ranks that have some.
        """
        share, ranks = _share_of_step(parts), self.rows.group.size
        if not self._counts_ranks or size.is_full or share is None or ranks == 1:
            return None
        return self.rows.group.sum_in_step(tf.cast(share > 0, tf.float32), "step.ranks") / ranks

    def _divisors(self, batch: Batch, values: Values) -> tuple[list[tf.Tensor], Values]:
        """In a tf.function: return what each loss that is not divided by rows is divided by in a pass, float32 scalars.

        values: of the model's variables before the pass. Also returns those after it: masks may follow from seeds.
        """
        x, y, weights = keras.utils.unpack_x_y_sample_weight(self.rows.data_of(batch))
        # Only masks and weights are used: TensorFlow leaves out the rest of the pass, and with variables as tensors
        # also the loops of recurrent layers, which would be stateful if they read variables.
        with keras.StatelessScope(values) as scope, self.shares.noting_divisors() as noted:
            outputs = self._model(x, training=True)
            loss_in_training(self._model, x, y, outputs, weights)
        after = [(variable, scope.get_current_value(variable)) for variable, _ in values]
        return noted, [(variable, tf.ensure_shape(value, variable.shape)) for variable, value in after]

    def _train_step_by_xla(self, data: Data) -> Mapping[str, Any]:
        """Do what Keras' own `train_step` does. XLA can compile the pass, but neither the exchange nor its wait."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        model, totals = self._model, self.shares.totals
        gradients, outputs, masks, loss = self._forward_backward_by_xla(x, y, weights, self.shares.share, totals)
        for output, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
            set_mask(output, mask)
        self._note_loss(loss)
        loss_tracker(model).update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return model.compute_metrics(x, y, outputs, sample_weight=weights)

    def _forward_backward(
        self, x: Any, y: Any, weights: Any, share: tf.Tensor | None, totals: Sequence[tf.Tensor] | None
    ) -> tuple[list[Any], Any, list[Any], tf.Tensor]:
        # Not those of `_apply`, which are tensors of another graph at each trace of that.
        rows = tf.cast(tf.shape(keras.tree.flatten(x)[0])[0], tf.float32)
        with tf.GradientTape() as tape, self.shares.of_pass(share, totals), losses_weighed(self._model, rows):
            outputs = self._model(x, training=True)
            with tf.name_scope("loss_function"):
                loss = tf.reshape(loss_in_training(self._model, x, y, outputs, weights), [])
            scaled = self._model.optimizer.scale_loss(loss)
        masks = [mask_of(output) for output in keras.tree.flatten(outputs)]
        return tape.gradient(scaled, self._model.trainable_weights), outputs, masks, loss

    @contextmanager
    def _noting_losses(self, *, by_xla: bool) -> Iterator[list[tf.Tensor]]:
        """Inside the block, note what `compute_loss` returns, for the list and for `update`."""
        losses: list[tf.Tensor] = []

        def note(loss: tf.Tensor) -> None:
            losses.append(loss)
            self.update.loss = self.shares.scaled(loss)

        self._note_loss = note
        with nullcontext() if by_xla else noting_loss(self._model, note):
            yield losses
        self.update.loss = None

    def gradients(self, batch: Batch, size: StepSize, inside_pass: AbstractContextManager[Any]) -> dict[str, list[Any]]:
        """In a tf.function: return this rank's gradients by optimizer, times its share; change nothing.

        With accumulate_steps, of the first of the batch's rows alone, as many as are computed together. inside_pass:
        entered around the model's step alone, which XLA does not compile, so that layers can be watched.
        """
        if self.accumulate_steps > 1:
            batch = first_rows(batch, self.accumulate_steps)
            size = StepSize(batch.ids.shape[0] if size.is_full else None, size.is_full)
            total = self.rows.group.sum_in_step(tf.reduce_sum(batch.real), "histograms.count")
        else:
            total = self.rows.total(batch, "histograms.count")
        (part,) = parts_of(batch, total, size, 1, self.rows.group.size)
        known = [*self.figures.variables, *self.forward_state.variables, *self.state.seeds, *self.assigned]
        changed = {variable.ref(): variable for variable in known}
        totals, self.update.factor = self._total_divisors([part]), self._ranks_with_records([part], size)
        with restored_if(lambda: tf.constant(True), list(changed.values())), inside_pass, tf.name_scope("pass"):
            result = self._collect_in_function(part, totals, by_xla=False)
        self.update.factor = None
        return result.gradients

    @property
    def _kept_variables(self) -> list[tf.Variable]:
        """What a borrowed row does not change: states of metrics and, save for counters of passes, forward state.

        Nor statistics of synchronised layers, in which it does not count: they are those of the rows of other ranks.
        """
        shared = {as_tf_variable(variable).ref() for variable in synchronised_statistics(self._model)}
        own = [variable for variable in self.forward_state.of_records if variable.ref() not in shared]
        return [*self.figures.variables, *own]

    @property
    def _counts(self) -> bool:
        """Whether ranks exchange numbers of records or ranks, or what losses are divided by, before they compute."""
        return self.rows.group.size > 1 and (self.rows.are_counted or self.counts_ahead or self._counts_ranks)

    def _end_update(self, failed: tf.Tensor, loss: tf.Tensor, batch: Batch | None) -> tf.Tensor:
        """Note whether the update has failed; update averages if not. Return whether this rank has failed for good.

        loss, batch: of the step in which the gradients were computed; None: they are of an earlier batch.
        """
        if self.update.holds_back:
            self._end_update_or_skip(failed, loss, batch)
            return self.state.failure.step > 0
        self._update_averages(None)
        return failed

    def _note_failure(self, step: tf.Tensor, loss: tf.Tensor, skips: tf.Tensor | int, batch: Batch | None) -> None:
        self.state.failure.note(step, self.update.optimizers.is_cause, loss, skips, batch, self.labels)

    def _end_update_or_skip(self, skips: tf.Tensor, loss: tf.Tensor, batch: Batch | None) -> None:
        state = self.state
        self._update_averages(skips)

        def note() -> tf.Tensor:
            self.skipped.assign_add(1)
            in_a_row, step = self.skipped_in_a_row.read_value(), state.step - state.synchronization.delay
            is_first = tf.logical_and(in_a_row >= self.max_skips_in_a_row, state.failure.step == 0)
            tf.cond(is_first, lambda: self._note_failure(step, loss, in_a_row, batch), lambda: None)
            self.update.optimizers.is_cause.assign(False)
            return in_a_row + 1

        self.skipped_in_a_row.assign(tf.cond(skips, note, lambda: tf.constant(0)))

    def _update_averages(self, is_left_out: tf.Tensor | None) -> None:
        averages, step = self.state.averages, tf.identity(self.state.step)
        if averages.decay is None:
            return
        if is_left_out is None:
            averages.update(step)
        else:
            tf.cond(is_left_out, lambda: None, lambda: averages.update(step))

    def _without_poison(
        self, variables: Sequence[tf.Variable], checked: Sequence[tf.Variable]
    ) -> AbstractContextManager[None]:
        """In the compiled step: undo what the block does to averages and sums if some of them become non-finite."""
        # Otherwise the run ends at the first such step without saving. With a delay it does not.
        may_go_on = self.max_skips_in_a_row or self.state.synchronization.delay
        return restored_if_nonfinite(variables, checked) if may_go_on else nullcontext()


@dataclass(eq=False, repr=False)
class EvalStep:
    """Evaluates batches by the model's `test_step`: adds what it returns, and its metrics, to `metrics`.

    A loss is that of the records of all ranks in a step, as in training.
    """

    model: keras.Model
    rows: Rows
    shares: Shares
    forward_state: ForwardState
    """Weights that the step assigns also in evaluation."""
    metrics: Figures
    seeds: Seeds

    def __post_init__(self) -> None:
        self.trained_steps = 0
        with tf.device("CPU:0"):  # as in PhaseVariable
            self._batches = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._rows_per_batch = 0
        self.retrace()

    def retrace(self) -> None:
        """Compile the step when it runs next: a loss has the penalties of the weights that are trained then."""
        self._runs: dict[Any, Any] = {}

    def has_compiled(self, size: StepSize) -> bool:
        """Return whether `run` need not compile first for steps of this size."""
        return size in self._runs

    def begin(self, trained_steps: int) -> None:
        """Begin an evaluation, which draws the same numbers each time. trained_steps: before it, for `counter`."""
        self.trained_steps = trained_steps
        self.metrics.reset()
        self.seeds.set(tf.constant(0, tf.int64))

    def counter(self) -> tuple[int, None, str]:
        """Tell how far the evaluation is: a probe of a Heartbeat, which calls it in a thread."""
        return self.trained_steps, None, f"batch {int(self._batches)}"

    def run(self, batches: Batches, steps: int, size: StepSize) -> None:
        """Evaluate the next `steps` batches in one compiled call."""
        if size not in self._runs:
            self._runs[size] = _compiled(self._run_steps, size)
        batches.call(self._runs[size], tf.constant(steps, tf.int32))
        self.metrics.count(steps * self._rows_per_batch)

    def _run_steps(self, cursor: Cursor, steps: tf.Tensor, size: StepSize) -> tuple[Cursor, tuple[()]]:
        def one_step(batch: Batch, _: tf.Tensor) -> tuple[()]:
            self._rows_per_batch = batch.ids.shape[0]
            batch = self.rows.scaled(batch)
            total = self.rows.total(batch, "evaluation.count")
            self.rows.unless_empty(total, lambda: evaluate(batch, total), lambda: None)
            self._batches.assign_add(1, read_value=False)
            return ()

        def evaluate(batch: Batch, total: tf.Tensor) -> None:
            (part,) = parts_of(batch, total, size, 1, self.rows.group.size)
            before = self.forward_state.values()
            with (
                part.without_borrowed([*self.metrics.variables, *self.forward_state.of_records]),
                self.shares.of_pass(part.share),
                losses_weighed(self.model, part.count),
            ):
                data = self.rows.data_of(part.batch)
                with tf.name_scope("test_step"), in_step(part.batch.ids[0] >= 0):
                    logs = self.model.test_step(data)
            with self.shares.of_pass(part.share):
                self.forward_state.combine(before, self.shares)
            self.metrics.add(logs, part.count)

        return for_each_batch(cursor, steps, one_step, ())


def _compiled(run_steps: Callable[[Cursor, tf.Tensor, StepSize], Any], size: StepSize) -> Any:
    # Not a partial, whose `size` tf.function would take for an argument.
    return tf.function(lambda cursor, steps: run_steps(cursor, steps, size), autograph=False)


def _after(results: Any, part: Part) -> Part:
    """Return a part that is computed after the results of passes: to bound memory, and as passes exchange by one name.

    results: any structure with tensors.
    """
    tensors = [tensor for tensor in tf.nest.flatten(results, expand_composites=True) if tf.is_tensor(tensor)]
    if not tensors:
        return part
    # A dependency on the call of a function, whose results they may be, would not wait for results, only for effects.
    before = [tf.identity(tensor) for tensor in tensors]
    with tf.control_dependencies(before):
        return part.identity()


def _share_of_step(parts: Sequence[Part]) -> tf.Tensor | None:
    """Return the rank's share of the step, given those of its passes; None: 1."""
    return parts[0].share if len(parts) == 1 else tf.add_n([part.share for part in parts])
