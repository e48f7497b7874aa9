"""A run whose words nobody takes goes on, and ends as if they had been taken."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod_train.output.console import to_stderr, to_stdout
from horovod_train.output.run_dir import RunOutput

SAYS = """
import sys
from horovod_train.output.console import let_go, to_stderr, to_stdout
for _ in range(3):
    to_stdout("word")
    to_stderr("word")
{last}
sys.exit(75)
"""


def exit_code(stream: int, last: str) -> int:
    """Of a process whose standard output and error are this file descriptor."""
    script = SAYS.format(last=last)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, stdout=stream, stderr=stream, env=environment, check=False).returncode


@pytest.mark.parametrize("listener", ["full disk", "gone"])
def test_words_that_are_lost_do_not_change_how_a_process_ends(listener: str) -> None:
    if listener == "gone":
        reader, stream = os.pipe()
        os.close(reader)
    else:
        stream = os.open("/dev/full", os.O_WRONLY)
    assert exit_code(stream, "let_go()") == 75
    assert exit_code(stream, "") == 120  # the negative: Python tries once more
    os.close(stream)


class Written(io.RawIOBase):
    """Keeps what each write to it had."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.pieces.append(bytes(piece))
        return len(piece)


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of the watchdog's thread and of the main thread do not mix."""
    for name, show in (("stdout", to_stdout), ("stderr", to_stderr)):
        written: Any = Written()  # typeshed knows no TextIOWrapper over a RawIOBase
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, write_through=True))
        show("a line")
        monkeypatch.undo()
        assert written.pieces == [b"a line\n"]


@pytest.mark.parametrize("show", [to_stdout, to_stderr])
def test_lines_give_no_orders_to_a_terminal_and_show_no_password(
    show: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    show("a \x1b]0;b\x07\x9b31m\r of http://me:pw@host\n\tb")
    said = capsys.readouterr()
    assert said.out + said.err == "a \\x1b]0;b\\x07\\x9b31m\\x0d of http://…@host\n\tb\n"


def test_where_the_locale_knows_ascii_only_no_line_is_lost() -> None:
    script = "from horovod_train.output.console import to_stdout\nto_stdout('größer …')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    shown = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "gr\\xf6\\xdfer \\u2026\n"


@pytest.mark.parametrize("bar", [False, True])
def test_metrics_are_written_though_the_screen_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bar: bool
) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        output = RunOutput(tmp_path, bar=bar)
        output.start_progress(0, 20)
        output.append_metrics("train", 10, 0, {"loss": 1.0})
        output.append_metrics("train", 20, 0, {"loss": 0.5})
        output.close()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
