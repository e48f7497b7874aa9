"""When hooks are due, and which users' hooks are refused before training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import keras
import pytest
import tensorflow as tf
import user_callbacks
import user_hooks

from horovod_train.checkpoint.layout import Checkpoint, Facts
from horovod_train.config.loader import as_dict
from horovod_train.config.settings import Config, ModelSpec, Spec
from horovod_train.data.audit import Audit
from horovod_train.errors import InUse, RunError, UserError
from horovod_train.output.lease import Lease
from horovod_train.training import run as training_run
from horovod_train.training.callbacks import load_callbacks
from horovod_train.training.fine_tuning import Freezing
from horovod_train.training.hooks import Hook, StopReason, at, every, failing_as, load_hooks
from horovod_train.training.hooks.evaluate import (
    begin_callbacks,
    build_callback_hooks,
    end_callbacks,
    evaluate,
    is_evaluated,
    tell,
)
from horovod_train.training.run import DONE, _call_at_end, fit
from horovod_train.training.state import Averages
from horovod_train.training.sync import SyncStrategy

REQUEST = StopReason("SIGTERM", restartable=True)


@pytest.mark.parametrize(
    ("every_steps", "due"),
    [(3, [3, 6, 9]), (4, [4, 8]), (None, []), (10, [10])],
)
def test_hooks_are_due_at_multiples(every_steps: int | None, due: list[int]) -> None:
    hook = every(every_steps, lambda run, step: None)
    assert [step for step in range(1, 11) if hook.is_due(step)] == due
    assert [hook.next_step(step - 1) for step in due] == due


def test_hooks_at_chosen_steps_are_due_there_and_nowhere_else() -> None:
    hook = at([7, 3], lambda run, step: None)
    assert [step for step in range(1, 11) if hook.is_due(step)] == [3, 7]
    assert [hook.next_step(step) for step in (0, 3, 6, 7)] == [3, 7, 7, float("inf")]


def test_a_function_is_due_at_the_given_steps_and_a_hook_of_the_user_at_its_own() -> None:
    plain, own = load_hooks(["user_hooks:note", "user_hooks:note_every_5"], every_steps=100)
    assert (plain.every_steps, own.every_steps) == (100, 5)
    assert user_hooks.called == []  # loading calls nothing


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("note", "hooks[0]: expected package.module:function; received 'note'"),
        ("no_such_module:note", "hooks[0]: cannot import 'no_such_module:note'"),
        ("user_hooks:nota", "hooks[0]: user_hooks has no 'nota'; did you mean note"),
        ("user_hooks:not_a_function", "user_hooks:not_a_function must be a function (run, step); it is int."),
        ("user_hooks:takes_too_little", "must be a function (run, step): too many positional arguments"),
        ("user_hooks:at_no_time", "user_hooks:at_no_time is never due: give every_steps, at_steps or at_end."),
        ("user_hooks:at_another_end", "at_end must be one of no, done, stopped, always; received 'finish'."),
        ("user_hooks:never", "user_hooks:never must be due every 1 or more steps; received 0."),
        ("user_hooks:twice_in_five", "must be due at whole numbers of steps; received 2.5."),
        ("user_hooks:at_a_half", "must be due at whole numbers of steps; received 7.0."),
    ],
)
def test_what_is_not_a_hook_is_refused(name: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        load_hooks([name], every_steps=100)
    assert said in str(refused.value)


def test_a_module_that_fails_when_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_hooks.py").write_text("import math\n\nmath.sqrt(-1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError, match=r"hooks\[0\]: failing_hooks cannot be imported: ValueError: .*failing_hooks.py:3"
    ):
        load_hooks(["failing_hooks:note"], every_steps=1)


def called_at_end(
    stop: StopReason | None, *, told_at: int = -1, last: int = 9, evaluation: StopReason | None = None
) -> list[str]:
    """Which hooks are called at the end of a run at step 9. told_at: the step of an end that was saved."""
    called: list[str] = []

    def noting(name: str, gives: StopReason | None = None) -> Any:
        return lambda run, step: (called.append(name), gives)[1]

    users = tuple(every(None, noting(f"user's {at_end}"), at_end=at_end) for at_end in ("done", "stopped", "always"))
    hooks = [
        every(None, noting("evaluate", evaluation), at_end="done"),
        every(None, noting("callbacks"), at_end="done"),
        *users,
        every(None, noting("save"), at_end="always"),
    ]
    callbacks = SimpleNamespace(train_ended_at=told_at, hooks_left_at=-1)
    parts = SimpleNamespace(users_hooks=users, callbacks=callbacks, last_step=last)
    _call_at_end(SimpleNamespace(parts=parts), 9, hooks, stop)  # type: ignore[arg-type]
    return called


def failing_run(lease: Lease) -> Any:
    heartbeat = SimpleNamespace(has_stepped=False)
    return SimpleNamespace(group=SimpleNamespace(heartbeat=heartbeat), stopping=SimpleNamespace(lease=lease))


@pytest.mark.parametrize("error", [KeyError("loss"), RunError("mine")])
def test_a_run_that_has_lost_its_directory_ends_for_that_though_a_hook_fails(error: Exception) -> None:
    class Taken(Lease):
        def is_ours(self) -> bool:
            return False

    with pytest.raises(InUse, match="another run has taken"), failing_as(failing_run(Taken()), "hooks: a:b", "then"):
        raise error


@pytest.mark.parametrize(
    "text", ["Horovod has been shut down", "ncclAllReduce failed: unhandled system error (run with NCCL_DEBUG=INFO)"]
)
def test_what_an_exchange_ends_with_in_users_code_is_raised_as_it_is(text: str) -> None:
    """Before the first step, too: as a mistake of the user it would end with 2, and not be started again."""
    run = failing_run(Lease())
    with pytest.raises(tf.errors.UnknownError, match=f"^{re.escape(text)}"), failing_as(run, "hooks: a:b", "at step 0"):
        raise tf.errors.UnknownError(None, None, text)
    with pytest.raises(UserError, match=r"^hooks: a:b failed at step 0: "), failing_as(run, "hooks: a:b", "at step 0"):
        raise ValueError("mine")


def test_hooks_at_the_end_are_those_of_how_a_run_ends() -> None:
    done = ["evaluate", "callbacks", "user's done", "user's always", "save"]
    stopped = ["user's stopped", "user's always", "save"]
    assert called_at_end(None) == done
    assert called_at_end(DONE) == done
    assert called_at_end(REQUEST) == stopped
    # A request interrupts the last evaluation: the next start ends the run.
    assert called_at_end(None, evaluation=REQUEST) == ["evaluate", *stopped]
    # What they changed at this step has been saved; a stop of a run that was extended is another end.
    assert called_at_end(None, told_at=9) == ["evaluate", "callbacks", "save"]
    assert called_at_end(REQUEST, told_at=9) == ["save"]
    assert called_at_end(REQUEST, told_at=9, last=20) == stopped


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[StopReason | None]:
    """What the next evaluations give; REQUEST: one is interrupted."""
    given: list[StopReason | None] = []

    def evaluate(run: Any, step: int) -> StopReason | None:
        reason = given.pop(0)
        run.called.append("evaluate")
        if reason is not REQUEST:
            run.parts.evaluated = step
        return reason

    monkeypatch.setattr(training_run, "evaluate", evaluate)
    return given


def fitted_with(users: Sequence[Hook], *, last: int, stop: StopReason | None = None, state: Any = None) -> Any:
    """A run that evaluates every 3 steps, at its end. state: what it resumes with. stop: what votes give."""
    run: Any = SimpleNamespace(called=[], clock=SimpleNamespace(start=lambda: None), config=Config())
    callbacks = load_callbacks([])
    step = state["step"] if state else 0
    callbacks.restore(state["callbacks"] if state else {}, step)
    run.parts = SimpleNamespace(
        callbacks=callbacks,
        early_stopping=SimpleNamespace(ended=lambda: None),
        evaluated=state["evaluated"] if state else -1,
        last_step=last,
        train=SimpleNamespace(same_size_until=lambda position, step, until: until),
        train_step=SimpleNamespace(phase_variable=None),
        users_hooks=tuple(users),
    )
    run.group = SimpleNamespace(heartbeat=SimpleNamespace(phase=lambda name: None, set_probe=lambda probe: None))
    run.state = SimpleNamespace(step=step, synchronization=SyncStrategy(), check_finite=lambda group: None)
    votes = iter([None])
    run.stopping = SimpleNamespace(vote=lambda: next(votes, stop), vote_periodically=lambda: None)
    noting = every(3, lambda run, step: run.called.append("save"))
    evaluation = every(3, vars(training_run)["evaluate"], is_done=is_evaluated)
    run.reason = fit(run, [evaluation, evaluation, *users, noting], Audit())  # due by steps and by epochs
    run.saved = {"step": run.state.step, "callbacks": callbacks.state(), "evaluated": run.parts.evaluated}
    return run


@pytest.fixture(autouse=True)
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training computes nothing."""
    monkeypatch.setattr(training_run, "_remaining_batches", lambda run: None)
    monkeypatch.setattr(
        training_run, "_train_until", lambda run, step, batches, audit: vars(run.state).update(step=step) or step
    )
    monkeypatch.setattr(training_run, "position", lambda state, train: 0)


def test_users_hooks_are_called_after_the_evaluation_that_a_stop_interrupts_once(
    evaluations: list[StopReason | None],
) -> None:
    def noting(name: str) -> Any:
        return lambda run, step: run.called.append(name)

    users = [every(3, noting("mine")), every(3, noting("mine, or at a stop"), at_end="stopped"), every(2, noting("no"))]
    evaluations += [REQUEST, REQUEST, None]
    stopped = fitted_with(users, last=3, stop=REQUEST)
    assert stopped.reason == REQUEST
    assert [name for name in stopped.called if name != "no"] == ["evaluate", "save", "mine, or at a stop"]
    again = fitted_with(users, last=3, stop=REQUEST, state=stopped.saved)  # which is interrupted there again
    assert again.called == ["evaluate", "mine, or at a stop"]
    done = fitted_with(users, last=3, state=again.saved)
    assert done.reason == DONE
    assert done.called == ["evaluate", "mine", "mine, or at a stop"]
    assert fitted_with(users, last=3, state=done.saved).called == []
    # Which evaluations are due may have changed: that hooks were called at a step is known all the same.
    evaluations.append(None)
    assert fitted_with(users, last=3, state=done.saved | {"evaluated": -1}).called == ["evaluate"]


@pytest.mark.parametrize("stop", [None, REQUEST])
def test_a_run_that_a_users_hook_has_ended_is_over_for_later_starts(
    evaluations: list[StopReason | None], stop: StopReason | None
) -> None:
    """Also where a stop request comes at the same step."""
    enough, pause = StopReason("enough"), StopReason("a pause", restartable=True)
    evaluations += [None, None, None, None]
    ended = fitted_with([every(3, lambda run, step: enough)], last=9, stop=stop)
    assert ended.reason == (stop or enough)
    again = fitted_with([every(3, lambda run, step: enough)], last=9, state=ended.saved)
    assert (again.reason, again.called) == (enough, [])
    paused = fitted_with([every(3, lambda run, step: pause)], last=9)
    on = fitted_with([every(30, lambda run, step: pause)], last=9, state=paused.saved)
    assert (on.reason, len(on.called)) == (DONE, 4)


def run_with(*callbacks: str) -> Any:
    """What `tell` needs of a run."""
    loaded = load_callbacks([Spec(f"user_callbacks:{name}") for name in callbacks])
    return SimpleNamespace(
        group=SimpleNamespace(heartbeat=SimpleNamespace(has_stepped=True)),
        outside_training=lambda *about: nullcontext(),
        stopping=SimpleNamespace(lease=Lease()),
        parts=SimpleNamespace(
            train_step=SimpleNamespace(figures=SimpleNamespace(names=(), kept=nullcontext)),
            callbacks=loaded,
            freezing=SimpleNamespace(trained=()),
        ),
    )


def test_a_callback_sees_the_figures_that_those_before_it_add() -> None:
    user_callbacks.told.clear()
    logs = {"loss": 0.5}
    tell(run_with("Recorder", "Adds", "Recorder"), 20, "on_epoch_end", 3, logs=logs)
    assert [seen for *_, seen in user_callbacks.told] == [{"loss": 0.5}, {"loss": 0.5, "falling": -3}]
    assert logs == {"loss": 0.5}


PER_EPOCH = 5


class Started(NamedTuple):
    """What one start of a run does with a callback that notes what it is told."""

    told: list[tuple[str, int | None]]
    weight: float
    """To which each beginning adds 1."""
    figures: list[set[str]]
    """That on_epoch_end got."""
    saved: dict[str, Any]


def callbacks_told(
    *,
    until: int,
    last: int,
    saved: Mapping[str, Any] | None = None,
    stops_in: str = "",
    evaluates: bool = True,
    option: str = "",
    is_rate: bool = False,
) -> Started:
    """Start a run of epochs of five steps, which saves after step `until`. saved: what it resumes with.

    stops_in: the method in which its callback stops it. evaluates: False if a request interrupts the evaluations, of
    which one is due after each second epoch. option: that the callback has in the config. is_rate:
    whether the weight is a learning rate.
    """
    told, figures = list[tuple[str, int | None]](), list[set[str]]()
    run, step, weight = run_with(), saved["step"] if saved else 0, tf.Variable(saved["weight"] if saved else 0.0)

    def noting(method: str) -> Any:
        def note(*arguments: Any) -> None:
            *number, logs = arguments
            told.append((method.removeprefix("on_"), number[0] if number else None))
            run.state.model.stop_training = method == stops_in
            if method.endswith("begin"):
                weight.assign_add(1.0)
            if method == "on_epoch_end":
                figures.append(set(logs))

        return note

    methods = [f"on_{what}_{when}" for what in ("train", "epoch", "train_batch") for when in ("begin", "end")]
    run.config = Config(callbacks=(Spec("LambdaCallback", {"option": option}),))
    run.parts.callbacks = load_callbacks([Spec("LambdaCallback", {m: noting(m) for m in methods})])
    run.parts.train, run.parts.last_step = SimpleNamespace(steps_per_epoch=PER_EPOCH), last
    run.parts.train_step.figures.names, run.parts.evaluated = ("loss",), -1
    run.parts.eval_step = SimpleNamespace(metrics=SimpleNamespace(names=("loss",)))
    run.output = SimpleNamespace(last_metrics=lambda split: {"loss": 0.5})
    run.group.broadcast_object, run.group.sum = lambda value: value, list
    run.state = SimpleNamespace(
        settle=lambda group: None,
        step=step,
        epoch=step // PER_EPOCH,
        model=SimpleNamespace(stop_training=False),
        averages=Averages([]),
        rates={"weight": weight} if is_rate else {},
        variables=lambda: {"weight": weight},
    )
    run.checkpoint = None
    if saved:
        facts = Facts(step, 0, 0, 1, config=saved["config"], versions={}, callbacks=saved["callbacks"])
        run.checkpoint = Checkpoint(Path("any"), facts, {})

    def evaluation(run: Any, step: int) -> None:
        run.parts.evaluated = step if evaluates else -1

    hooks = build_callback_hooks(run, [every(2 * PER_EPOCH, evaluation, is_done=is_evaluated)])
    begin_callbacks(run)
    for hook in hooks:  # which an earlier start may have left
        if step and hook.is_due(step) and not hook.is_done(run, step):
            hook.function(run, step)
    for now in range(step + 1, until + 1):
        run.state.step = now
        for hook in hooks:
            if hook.is_due(now):
                hook.function(run, now)
    for _ in range(2 * (until == last)):  # the second time it is told already
        end_callbacks(run, last)
    config = as_dict(run.config)
    state = {"step": until, "weight": float(weight), "callbacks": run.parts.callbacks.state(), "config": config}
    return Started(told, float(weight), figures, state)


def beginnings(told: Sequence[tuple[str, int | None]]) -> int:
    return sum(method.endswith("begin") for method, _ in told)


def told_by_fit(last: int) -> list[tuple[str, int | None]]:
    expected: list[tuple[str, int | None]] = [("train_begin", None)]
    for step in range(last):
        epoch, batch = divmod(step, PER_EPOCH)
        expected += [("epoch_begin", epoch)] * (batch == 0) + [("train_batch_begin", batch), ("train_batch_end", batch)]
        expected += [("epoch_end", epoch)] * (batch == PER_EPOCH - 1)
    return [*expected, ("train_end", None)]


@pytest.mark.parametrize("last", [8, 10])
def test_callbacks_are_told_each_beginning_and_end_once_as_by_fit(last: int) -> None:
    """No batch begins after the last, whether or not an epoch ends with it. What callbacks change remains."""
    found = callbacks_told(until=last, last=last)
    assert found.told == told_by_fit(last)
    assert found.weight == beginnings(found.told)
    assert found.figures == [{"loss"}, {"loss", "val_loss"}][: last // PER_EPOCH]


@pytest.mark.parametrize(
    ("stopped", "again", "left"),
    [
        (3, [("epoch_begin", 0), ("train_batch_begin", 3)], [("train_batch_end", 3)]),
        (5, [("epoch_begin", 1), ("train_batch_begin", 0)], [("train_batch_end", 0)]),
        (8, [], []),
    ],
)
def test_callbacks_of_a_run_that_resumes_are_told_again_what_had_begun_and_then_what_is_left(
    stopped: int, again: list[Any], left: list[Any]
) -> None:
    """What they change when they are told again is in the checkpoint already. A run that was over is over."""
    before = callbacks_told(until=stopped, last=8)
    found = callbacks_told(until=8, last=8, saved=before.saved)
    assert found.told[: 1 + len(again)] == [("train_begin", None), *again]
    assert [*before.told, *found.told[1 + len(again) :]] == told_by_fit(8)
    assert found.told[1 + len(again) :][: len(left)] == left
    assert found.weight == beginnings(told_by_fit(8))


@pytest.mark.parametrize(("stopped", "again"), [(3, 3), (5, 3), (8, 1)])
@pytest.mark.parametrize("is_rate", [False, True])
def test_rates_that_a_callback_of_other_options_sets_when_a_run_resumes_remain(
    stopped: int, again: int, is_rate: bool
) -> None:
    """They are not in the checkpoint. So those that a new one sets; what they do to weights is undone."""
    before = callbacks_told(until=stopped, last=8)
    found = callbacks_told(until=8, last=8, saved=before.saved, option="another", is_rate=is_rate)
    assert found.weight == beginnings(told_by_fit(8)) + is_rate * again


def test_an_epoch_whose_evaluation_was_interrupted_ends_after_it() -> None:
    before = callbacks_told(until=10, last=15, evaluates=False)
    assert before.told[-1] == ("train_batch_end", 4)
    found = callbacks_told(until=15, last=15, saved=before.saved)
    assert found.told[:3] == [("train_begin", None), ("epoch_begin", 1), ("epoch_end", 1)]
    assert [*before.told, *found.told[2:]] == told_by_fit(15)
    assert found.weight == beginnings(told_by_fit(15))


def test_an_epoch_in_whose_end_a_callback_stops_is_the_last_that_begins() -> None:
    found = callbacks_told(until=5, last=15, stops_in="on_epoch_end")
    assert found.told == told_by_fit(5)[:-1]
    assert found.saved["callbacks"].pop("have_stopped")
    # With other callbacks it trains on; what they change where the next epoch begins is new.
    on = callbacks_told(until=15, last=15, saved=found.saved)
    assert on.told == [("train_begin", None), *told_by_fit(15)[len(found.told) :]]
    assert on.weight == beginnings(told_by_fit(15))


def test_a_run_that_a_callback_has_stopped_is_over_though_another_one_takes_that_back() -> None:
    """Before the first step, too; here the end of a batch sets stop_training to False."""
    assert callbacks_told(until=0, last=15, stops_in="on_train_batch_begin").saved["callbacks"]["have_stopped"]
    assert callbacks_told(until=5, last=15, stops_in="on_train_batch_begin").told == told_by_fit(5)[:-1]


@pytest.mark.parametrize(("at_end", "is_noted"), [("no", False), ("done", True), ("stopped", True), ("always", True)])
def test_a_run_without_callbacks_notes_its_end_if_users_hooks_are_called_there(at_end: Any, is_noted: bool) -> None:
    """What they change is saved after it, and a later start must not have them change it again."""
    run = run_with()
    run.parts.train, run.parts.users_hooks = SimpleNamespace(steps_per_epoch=5), [every(3, print, at_end=at_end)]
    run.parts.eval_step, run.output = None, SimpleNamespace(last_metrics=lambda split: {})
    run.state = SimpleNamespace(averages=Averages([]), settle=lambda group: None)
    run.group.broadcast_object = lambda value: value
    for hook in build_callback_hooks(run, []):
        hook.function(run, 9)
    assert (run.parts.callbacks.train_ended_at == 9) == is_noted


def test_an_epoch_ends_in_the_order_of_fit() -> None:
    """A batch that ends after the evaluation would seem to have taken as long."""
    user_callbacks.told.clear()
    run = run_with("Batches", "Recorder")
    run.parts.train, run.parts.last_step, run.parts.eval_step = SimpleNamespace(steps_per_epoch=5), 5, None
    run.parts.train_step, run.output = SimpleNamespace(figures=SimpleNamespace(names=(), kept=nullcontext)), None
    model = SimpleNamespace(stop_training=False)
    run.state = SimpleNamespace(model=model, averages=Averages([]), settle=lambda group: None)
    run.group.broadcast_object, run.group.sum = lambda value: value, list
    evaluations = [every(5, lambda run, step: user_callbacks.told.append(["evaluated"]))]
    for hook in build_callback_hooks(run, evaluations):
        if hook.is_due(5):
            hook.function(run, 5)
    assert [what for what, *_ in user_callbacks.told] == ["batch ends", "evaluated", "epoch ends"]


def test_what_is_trainable_changes_before_training_only() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    run = run_with("Freezes")
    (named,) = run.parts.callbacks.named
    run.parts.freezing = Freezing(model, ModelSpec("any"))
    named.callback.set_model(model)
    named.callback.on_train_begin = named.callback.freeze
    with pytest.raises(RunError, match="Freezes changed what is trainable in on_epoch_end after step 20"):
        tell(run, 20, "on_epoch_end", 3)
    tell(run, 21, "on_epoch_end", 3)  # which changes nothing any more
    model.layers[-1].trainable = True
    tell(run, 0, "on_train_begin")
    assert not model.layers[-1].trainable


def test_what_callbacks_make_of_averages_at_the_end_remains() -> None:
    """And the trained weights remain what they were."""
    weight, average = keras.Variable([2.0], name="weight"), tf.Variable([8.0])
    run = run_with("Halves")
    run.parts.callbacks.named[0].callback.set_model(SimpleNamespace(trainable_weights=[weight]))
    run.parts.train_step = SimpleNamespace(figures=SimpleNamespace(names=(), kept=nullcontext))
    run.parts.eval_step, run.output = None, SimpleNamespace(last_metrics=lambda split: {})
    run.group.broadcast_object = lambda value: value
    averages = Averages([(weight, average)], are_of_optimizer=True)
    run.state = SimpleNamespace(averages=averages, settle=lambda group: None)
    end_callbacks(run, 20)
    assert (average.numpy().tolist(), weight.numpy().tolist()) == ([4.0], [2.0])


class HalvesInTests(keras.callbacks.Callback):
    """Halves the weight and the rate where an evaluation begins, doubles them where it ends, and counts evaluations."""

    begun = 0

    def on_test_begin(self, logs: Any = None) -> None:
        self.begun += 1
        self._scale(0.5)

    def on_test_end(self, logs: Any = None) -> None:
        self._scale(2)

    def _scale(self, factor: float) -> None:
        for variable in (*self.model.weights, self.model.rate):
            variable.assign(factor * variable)

    def get_state(self) -> int:
        return self.begun

    def set_state(self, state: int) -> None:
        self.begun = state


class Evaluated(NamedTuple):
    """What an evaluation of a weight of 2 with an average of 8, at a rate of 0.5, has seen and left."""

    weights_seen: list[float]
    weight: float
    rate: float
    assigned: float
    """What the forward pass has added 1 to."""
    callback_states: list[Any]
    done: list[Any]
    """What was told of its values, in order."""
    reasons: list[StopReason | None]


def evaluated(*callbacks: str, of_optimizer: bool, request: StopReason | None = None, times: int = 1) -> Evaluated:
    weight, rate, seen, done = keras.Variable([2.0], name="weight"), tf.Variable(0.5), list[float](), list[Any]()
    assigned = keras.Variable(0.0, trainable=False, name="assigned")
    model = SimpleNamespace(weights=[weight, assigned], rate=rate, stop_training=False)

    def run_batch(*batch: Any) -> None:
        seen.append(float(weight.numpy()[0]))
        assigned.assign_add(1.0)

    run = run_with()
    run.parts.callbacks = loaded = load_callbacks([Spec(name) for name in callbacks])
    averages = Averages([(weight, tf.Variable([8.0]))], are_of_optimizer=of_optimizer)
    for named in loaded.named:
        vars(named.callback)["averages"] = averages
        named.callback.set_model(model)
    run.state = SimpleNamespace(step=5, epoch=1, model=model, rates={"rate": rate}, averages=averages)
    run.state.settle = lambda group: done.append("settled")
    run.config = SimpleNamespace(train=SimpleNamespace(steps_per_call=1))
    run.stopping = SimpleNamespace(vote_periodically=lambda: request)
    run.group.heartbeat.probing = lambda counter: nullcontext()
    run.group.broadcast_object, run.group.union, run.group.sum = lambda value: value, set, list
    run.output = SimpleNamespace(append_metrics=lambda split, step, epoch, values: done.append((split, step, values)))
    parts, of_eval = run.parts, {"one_epoch": lambda steps: [(None, 1, None)], "explaining": nullcontext}
    parts.eval = SimpleNamespace(
        skipped={3, 4}, check_used=lambda number, key: done.append(f"{number} left out of {key}"), **of_eval
    )
    parts.eval_step = SimpleNamespace(
        counter=None,
        begin=lambda trained_steps: None,
        forward_state=SimpleNamespace(variables=[assigned.value]),
        run=run_batch,
        has_compiled=lambda size: True,
        metrics=SimpleNamespace(result=lambda group: {"loss": 0.25}),
    )
    parts.evaluated = tf.Variable(-1)
    parts.best = SimpleNamespace(update=lambda step, values: done.append("best"))
    parts.early_stopping = SimpleNamespace(update=lambda step, values: done.append("early stopping"))
    reasons = [evaluate(run, 5) for _ in range(times)]
    states = [named.state() for named in loaded.named if hasattr(named.callback, "get_state")]
    return Evaluated(seen, float(weight.numpy()[0]), float(rate), float(assigned), states, done, reasons)


SWAPS, HALVES = "SwapEMAWeights", "test_hooks:HalvesInTests"
NOTED = [
    "settled",
    "2 left out of data.eval",
    ("eval", 5, {"loss": 0.25, "skipped_records": 2}),
    "best",
    "early stopping",
]


@pytest.mark.parametrize(
    ("callbacks", "of_optimizer", "weight_seen"),
    [((), False, 8), ((), True, 2), ((SWAPS,), True, 8), ((HALVES,), True, 1)],
)
def test_an_evaluation_sees_the_weights_that_are_asked_for_once_a_step(
    callbacks: tuple[str, ...], of_optimizer: bool, weight_seen: float
) -> None:
    """The averages of train.ema_decay, and those of an optimizer if a callback asks for it."""
    found = evaluated(*callbacks, of_optimizer=of_optimizer, times=2)
    assert (found.weights_seen, found.done) == ([weight_seen], NOTED)
    assert (found.weight, found.rate) == (2, 0.5)
    assert found.assigned == (2 if HALVES in callbacks else 1)  # which doubles all weights
    assert found.callback_states == [1] * (HALVES in callbacks)


@pytest.mark.parametrize("callbacks", [(), (SWAPS,), (HALVES,), (HALVES, SWAPS), (SWAPS, HALVES)])
def test_an_evaluation_that_is_interrupted_leaves_everything_as_it_was(callbacks: tuple[str, ...]) -> None:
    """The run is saved so, and evaluates anew when it resumes."""
    found = evaluated(*callbacks, of_optimizer=True, request=REQUEST)
    assert (found.weight, found.rate, found.done, found.reasons) == (2, 0.5, ["settled"], [REQUEST])
    assert found.assigned == 0
    assert found.callback_states == [0] * (HALVES in callbacks)
