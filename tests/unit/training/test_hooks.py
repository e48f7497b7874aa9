"""When hooks are due, and which users' hooks are refused before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import user_hooks

from horovod_train.errors import UserError
from horovod_train.training.hooks import at, every, load_hooks


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
