"""Texts of errors, of this package and of libraries, are shown as one line."""

from __future__ import annotations

import ast

import pytest
from test_architecture import FILES

from horovod_train.errors import UserError, one_line


@pytest.mark.parametrize(
    "error",
    [UserError("a line  that\n  goes on\n"), "a line\tthat goes on", ValueError("\r\n a line that\n\n goes on")],
)
def test_a_text_of_several_lines_becomes_one(error: object) -> None:
    assert one_line(error) == "a line that goes on"


def test_an_error_without_a_text_is_an_empty_line() -> None:
    assert one_line(ValueError()) == ""


def test_no_other_function_makes_one_line_of_a_text() -> None:
    """`" ".join(text.split())` is one_line(text)."""
    found = []
    for path in FILES:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            words = ast.unparse(call)
            if words.startswith("' '.join(") and words.endswith(".split())"):
                found.append(path.name)
    assert found == ["errors.py"]
