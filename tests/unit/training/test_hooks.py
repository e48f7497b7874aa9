"""When hooks are due, and which users' hooks are refused before training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
import user_callbacks
import user_hooks

from horovod_train.config.settings import Config, ModelSpec, Spec
from horovod_train.data.audit import Audit
from horovod_train.errors import RunError, UserError
from horovod_train.training import run as training_run
from horovod_train.training.callbacks import load_callbacks
from horovod_train.training.fine_tuning import Freezing
from horovod_train.training.hooks import Hook, StopReason, at, every, failing_as, load_hooks
from horovod_train.training.hooks.evaluate import (
    _evaluate_all,
    build_callback_hooks,
    end_callbacks,
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


@pytest.mark.parametrize(
    "text", ["Horovod has been shut down", "ncclAllReduce failed: unhandled system error (run with NCCL_DEBUG=INFO)"]
)
def test_what_an_exchange_ends_with_in_users_code_is_raised_as_it_is(text: str) -> None:
    """Before the first step, too: as a mistake of the user it would end with 2, and not be started again."""
    run = SimpleNamespace(group=SimpleNamespace(heartbeat=SimpleNamespace(has_stepped=False)))
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
    run.reason = fit(run, [evaluation, *users, noting], Audit())
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


def test_an_epoch_ends_in_the_order_of_fit() -> None:
    """A batch that ends after the evaluation would seem to have taken as long."""
    user_callbacks.told.clear()
    run = run_with("Batches", "Recorder")
    run.parts.train, run.parts.last_step, run.parts.eval_step = SimpleNamespace(steps_per_epoch=5), 5, None
    run.parts.train_step, run.output = SimpleNamespace(figures=SimpleNamespace(names=(), kept=nullcontext)), None
    run.state = SimpleNamespace(model=SimpleNamespace(stop_training=False), averages=Averages([]))
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
    run.state = SimpleNamespace(averages=Averages([(weight, average)], are_of_optimizer=True))
    end_callbacks(run, 20)
    assert (average.numpy().tolist(), weight.numpy().tolist()) == ([4.0], [2.0])


@pytest.mark.parametrize(("reason", "left"), [(REQUEST, 1.0), (None, 3.0)])
def test_an_evaluation_that_is_interrupted_leaves_no_weight_that_it_assigns(
    reason: StopReason | None, left: float
) -> None:
    """The run that resumes evaluates from the first record."""
    weight = tf.Variable(1.0)
    state = SimpleNamespace(variables=[weight], values=lambda: [weight.read_value()])
    step: Any = SimpleNamespace(
        counter=SimpleNamespace(step=0),
        forward_state=state,
        run=lambda *batch: weight.assign_add(1.0),
        has_compiled=lambda size: True,
    )
    asked: Iterator[StopReason | None] = iter([None, reason])
    run: Any = SimpleNamespace(
        state=SimpleNamespace(step=5),
        config=SimpleNamespace(train=SimpleNamespace(steps_per_call=1)),
        group=SimpleNamespace(heartbeat=SimpleNamespace(probing=lambda counter: nullcontext())),
        stopping=SimpleNamespace(vote_periodically=lambda: next(asked)),
    )
    pipeline: Any = SimpleNamespace(one_epoch=lambda steps: [(None, 1, None)] * 2, explaining=nullcontext)
    assert _evaluate_all(run, pipeline, step) == reason
    assert float(weight) == left
