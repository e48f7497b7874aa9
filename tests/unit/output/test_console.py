"""A run whose words nobody takes goes on, and ends as if they had been taken."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod_train.output import console
from horovod_train.output.console import Screen, to_stderr, to_stdout
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


COMMANDS: list[list[str]] = [
    ["settings", "loss"],
    ["settings", "--json-schema"],
    ["slurm", "--config", "{config}", "--nodes", "1", "--time", "01:00:00"],
    [
        "kubernetes",
        "--config",
        "{config}",
        "--image",
        "an/image",
        "--output-dir",
        "/data/run",
        "--volume",
        "claim:/data",
    ],
    ["--config", "{config}", "--print-config"],
    ["--config", "{config}", "--print-output-dir"],
    ["--help"],
    ["evaluate", "--help"],
]


def run_command(words: list[str], tmp_path: Path, shell: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the project in a shell that does this with its streams."""
    config = Path(__file__).parents[3] / "configs" / "digits_convnet.yaml"
    command = [sys.executable, "-m", "horovod_train", *(word.format(config=config) for word in words)]
    return subprocess.run(
        ["sh", "-c", shell, "sh", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_whose_result_is_not_whole_says_so_and_fails(words: list[str], tmp_path: Path) -> None:
    ended = run_command(words, tmp_path, '"$@" > /dev/full')
    why = "error: standard output: cannot be written: No space left on device. What was written is not whole.\n"
    assert ended.returncode == 1
    assert ended.stderr.endswith(why), ended.stderr


@pytest.mark.parametrize("words", COMMANDS[1:3], ids=" ".join)
def test_a_command_whose_reader_has_seen_enough_ends_well(words: list[str], tmp_path: Path) -> None:
    ended = run_command(words, tmp_path, '{ "$@"; echo $? >&2; } | true')
    assert ended.stderr.endswith("\n0\n") or ended.stderr == "0\n", ended.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(closed: str, tmp_path: Path) -> None:
    """Nor does a file get the number of one, into which libraries write."""
    whole = run_command(["settings", "loss"], tmp_path, '"$@"').stdout
    ended = run_command(["settings", "loss"], tmp_path, f'"$@" {closed}')
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == ("" if " >&-" in f" {closed}" else whole)
    script = "from horovod_train.output import console\nconsole.make_streams_unfailing()\nfile = open('new', 'w')\n"
    command = [sys.executable, "-c", f"{script}assert file.fileno() > 2\nimport os\nos.write(1, b'lost')"]
    subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], cwd=tmp_path, check=True)
    assert (tmp_path / "new").read_text() == ""


def test_users_code_finds_streams_that_it_can_use() -> None:
    script = """
import copy, sys
from horovod_train.output import console
console.make_streams_unfailing()
with sys.stdout as out:
    out.writelines(["a ", "b"])
    print(" c", file=copy.copy(out))
print(sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.fileno())
print(list(sys.stdin))
"""
    command = [sys.executable, "-c", script]
    shown = subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout
    assert shown == "a b c\nFalse utf-8 1\n[]\n"
    with open("/dev/full", "w") as full:
        lost = [sys.executable, "-c", f"{script}sys.stdout.writelines(['x'] * 100_000)\nconsole.let_go()"]
        assert subprocess.run(lost, input="", text=True, stdout=full).returncode == 0


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


WITH_A_BAR = """
import os, signal, sys, time
from pathlib import Path
from horovod_train.distributed.watchdog.watch_thread import end_process
from horovod_train.output.run_dir import RunOutput
from horovod_train.training.stopping import collected_signals
with collected_signals():
    RunOutput(Path(sys.argv[1]), bar=True).start_progress(0, 20)
    {last}
    time.sleep(60)
"""
SECOND_SIGINT = "os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1); os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(("last", "expected"), [(SECOND_SIGINT, 130), ("end_process(87)", 87)])
def test_a_process_that_ends_in_the_middle_shows_the_cursor_again(last: str, expected: int, tmp_path: Path) -> None:
    ours, its = pty.openpty()
    words = [sys.executable, "-c", WITH_A_BAR.format(last=last), str(tmp_path)]
    with subprocess.Popen(words, stdout=its, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(its)
        assert process.wait(60) == expected
    shown = os.read(ours, 65536)
    os.close(ours)
    assert re.findall(rb"\x1b\[\?25[lh]", shown)[-1] == b"\x1b[?25h"


def test_names_between_colons_are_no_emoji(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "loss: nets:train: takes no option; hooks:key: fd00::a:b:12, runs/a:x:b"
    screen = Screen(soft_wrap=True)
    with screen.capture() as found:
        screen.print(text, markup=False)
        screen.print(text)
    assert found.get() == f"{text}\n{text}\n"
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    assert list(console.track([1, 2], 2, "writing a:x:b [bold]c")) == [1, 2]
    assert "writing a:x:b [bold]c" in shown.getvalue()
