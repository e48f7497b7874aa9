"""Text of others is shown without secrets and without orders to the terminal, and is short in errors."""

from __future__ import annotations

import ast
import io

import pytest
from rich.console import Console
from test_architecture import FILES

from horovod_train.commands.cli import build_table
from horovod_train.errors import RunError, UserError, one_line
from horovod_train.shown_text import error_line, listed, printable, without_secrets

SECRETS = {
    "http://user:pw@host/x": "http://…@host/x",
    "postgresql://u:p/w@h/db": "postgresql://…@h/db",
    "mysql+pymysql://a:b@h": "mysql+pymysql://…@h",
    "http://u:p@ss@host/a@b": "http://…@host/a@b",
    "http://user:1234@host": "http://…@host",
    "https://0123456789abcdef0123456789@sentry.io/1": "https://…@sentry.io/1",
    "s3://b/x?key=SECRET&region=a": "s3://b/x?key=…&region=a",
    "https://h/x?X-Amz-Signature=ab;b=1&sig=q&design=3": "https://h/x?X-Amz-Signature=…;b=1&sig=…&design=3",
    "{'uri': 'http://user:pw@127.0.0.1:9'}, http://a:b@c": "{'uri': 'http://…@127.0.0.1:9'}, http://…@c",
}
NO_SECRETS = ["hdfs://host:9000/x@y", "hdfs://user@host/x", "a:b@c", "s3://host:9000", "user_models:build", "k=v?key=1"]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_in_addresses_are_not_shown(text: str) -> None:
    assert without_secrets(text) == SECRETS[text] == without_secrets(SECRETS[text])
    assert without_secrets(text) != text
    assert str(UserError(f"x: received {text!r}.")) == f"x: received {SECRETS[text]!r}."


@pytest.mark.parametrize("text", NO_SECRETS)
def test_other_addresses_are_shown_as_they_are(text: str) -> None:
    assert without_secrets(text) == text


def test_only_tabs_and_ends_of_lines_remain_of_control_characters() -> None:
    assert printable("a\x1b]0;b\x07\x9b\r\n\tc\udcff\u2028ä…") == "a\\x1b]0;b\\x07\\x9b\\x0d\n\tc\\udcff\\u2028ä…"
    kept = [chr(code) for code in range(0x2100) if printable(chr(code)) == chr(code) and not chr(code).isprintable()]
    assert all(len(f"a{character}b".splitlines()) == 1 or character == "\n" for character in kept)


LONG = ["a" * 1_000_000, "a://" * 250_000, "x://u:" * 150_000, "{{function_node " * 60_000, "@a://?key" * 100_000]
"""Texts for which a search that begins anew at each character would take hours."""


@pytest.mark.parametrize("text", ["x" * 5000, "x " * 5000, *LONG, f"received {'x' * 5000}.", "a\nb\rc"])
def test_an_error_is_one_short_line(text: str) -> None:
    line = error_line(text)
    assert len(line.splitlines()) == len(one_line(text).splitlines()) == 1
    assert len(line) <= 2000
    assert max(map(len, line.split())) <= 200
    assert error_line(line) == line == str(RunError(text))


def test_an_address_is_hidden_in_a_long_text_too() -> None:
    text = f"{'a://' * 20_000}u:pw@h {'b' * 20_000}://u:pw@h?{'c' * 9000}&key=pw"
    assert "pw" not in without_secrets(text)


def test_cells_of_a_table_are_text_and_not_markup() -> None:
    file = io.StringIO()
    Console(file=file, width=40).print(build_table(("type",), [("list[str]",)], left=("type",)))
    assert "list[str]" in file.getvalue()


def test_what_is_drawn_or_written_passes_the_one_place_for_it() -> None:
    """Other Consoles, and print of text that is not ours, would let control characters through."""
    consoles, prints = set(), set()
    for path in FILES:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            consoles |= {path.name} if name in ("Console", "rich.console.Console") else set()
            prints |= {path.name} if name == "print" and path.name != "bench.py" else set()
            assert name not in ("traceback.print_exc", "traceback.print_exception"), path
    assert not consoles
    of_ours_or_json = {
        "doctor.py",
        "plan.py",
        "kubernetes.py",
        "slurm.py",
        "settings.py",
        "build_horovod.py",
        "learning_rate.py",
        "tensorboard.py",
    }
    assert prints == of_ours_or_json


def test_of_many_names_the_first_are_shown_and_how_many_more_there_are() -> None:
    assert (listed(()), listed([3, 4]), listed("abc", 3)) == ("", "3, 4", "a, b, c")
    assert (listed("abcde", 3), listed("abcd", 2, "files")) == ("a, b, c and 2 more", "a, b and 2 more files")
