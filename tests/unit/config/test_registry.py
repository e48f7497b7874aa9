"""What a config names: how it is called, and which line of the user's code an error is about."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from conftest import PROJECT

from horovod_train.config.registry import call, raised_at
from horovod_train.config.settings import Spec
from horovod_train.errors import kind_of, one_line


@pytest.mark.parametrize("left_out", ["", "/", f"{PROJECT.parent}/", f"{PROJECT}/"])
def test_a_line_in_a_traceback_in_a_text_is_found_whatever_folders_its_files_leave_out(
    left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA leaves out those that all files of a traceback have in common."""
    monkeypatch.chdir(tmp_path)
    users = f"{PROJECT}/tests/user_faults.py"
    frames = {f"{PROJECT}/horovod_train/main.py": 7, users: 40}
    lines = [f'File "{file.removeprefix(left_out)}", line {number}, in call' for file, number in frames.items()]
    assert raised_at(ValueError("\n".join(["unsupported operations", *lines]))) == f" (at {users}:40)"


def look_up(records: tf.Tensor) -> tf.Tensor:
    return {"a": records}["z"]


def look_up_inside(records: tf.Tensor) -> tf.Tensor:
    return look_up(records) if records.shape.rank else records


def test_an_error_under_autograph_is_about_the_users_line() -> None:
    """AutoGraph runs a temporary file, and tells the user's lines in the message."""
    line = inspect.getsourcelines(look_up)[1] + 1
    for function in (look_up, look_up_inside):
        with pytest.raises(KeyError) as raised:
            tf.function(function).get_concrete_function(tf.TensorSpec([None]))
        assert raised_at(raised.value) == f" (at {__file__}:{line})"
        assert f"{kind_of(raised.value)}: {one_line(raised.value)}" == "KeyError: 'z'"


def of_the_fifth(records: Any) -> Any:
    return [records][5]


def test_an_error_whose_class_autograph_cannot_make_is_named_all_the_same() -> None:
    with pytest.raises(Exception, match="list index out of range") as raised:
        tf.function(of_the_fifth).get_concrete_function(tf.TensorSpec([None]))
    assert f"{kind_of(raised.value)}: {one_line(raised.value)}" == "IndexError: list index out of range"


def test_a_class_that_does_not_tell_what_it_takes_is_called_all_the_same() -> None:
    """As one in C++ may be; so is `dict`."""
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(dict)
    assert call(dict, Spec("records:Read", {"size": 3}), "data.source") == {"size": 3}
