"""Texts of errors, of this package and of libraries, are shown as one line. A failed program ends immediately."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import urllib.error
from email.message import Message
from pathlib import Path

import pytest
import requests
from conftest import wait_until
from test_architecture import FILES

from horovod_train.errors import ReadFailed, UserError, one_line, unreadable, unreadable_as_told


@pytest.mark.parametrize(
    "error",
    [UserError("a line  that\n  goes on\n"), "a line\tthat goes on", ValueError("\r\n a line that\n\n goes on")],
)
def test_a_text_of_several_lines_becomes_one(error: object) -> None:
    assert one_line(error) == "a line that goes on"


def test_an_error_without_a_text_is_an_empty_line() -> None:
    assert one_line(ValueError()) == ""


def answer(status: int) -> requests.Response:
    made = requests.Response()
    made.status_code = status
    return made


class ClientError(Exception):
    """As that of botocore."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.response = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}


class Timeout(Exception):
    """As that of requests."""


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (ConnectionResetError(104, "reset"), True),
        (OSError(errno.ESTALE, "stale"), True),
        (OSError("cannot identify image file"), False),
        (FileNotFoundError(errno.ENOENT, "gone"), False),
        (ValueError("bad"), False),
        (Timeout("read timed out"), True),
        (requests.exceptions.ConnectionError("no answer"), True),
        (requests.exceptions.ReadTimeout("read timed out"), True),
        (requests.exceptions.HTTPError("503", response=answer(503)), True),
        (requests.exceptions.HTTPError("404", response=answer(404)), False),
        (requests.exceptions.InvalidURL("no host"), False),
        (ClientError(503), True),
        (ClientError(403), False),
        (urllib.error.URLError("no route"), True),
        (urllib.error.HTTPError("http://a", 404, "not found", Message(), None), False),
        (urllib.error.HTTPError("http://a", 503, "busy", Message(), None), True),
        (urllib.error.HTTPError("http://a", 429, "slow down", Message(), None), True),
    ],
)
def test_failures_of_networks_and_servers_may_pass(error: Exception, may_pass: bool) -> None:
    """Whichever library has met them; a request that is wrong does not."""
    assert unreadable(error) is (ReadFailed if may_pass else UserError)


@pytest.mark.parametrize(
    ("text", "may_pass"),
    [
        ("ConnectionError: no answer of http://a", True),
        ("requests.exceptions.ReadTimeout: HTTPSConnectionPool", True),
        ("Timeout: it took too long", True),
        ("BrokenPipeError: [Errno 32] Broken pipe", True),
        ("OSError: [Errno 116] Stale file handle: 'a'", True),
        ("OSError: [Errno 22] Invalid argument", False),
        ("ValueError: ConnectionError", False),
        ("HTTPError: HTTP Error 503: Service Unavailable", True),
        ("HTTPError: 404 Client Error: Not Found for url: http://a/shard-512.tar", False),
        ("ClientResponseError: 429, message='Too Many Requests'", True),
        ("print: no", False),
    ],
)
def test_so_they_may_where_only_their_text_is_known(text: str, may_pass: bool) -> None:
    assert unreadable_as_told(text) is (ReadFailed if may_pass else UserError)


def test_no_other_function_makes_one_line_of_a_text() -> None:
    """`" ".join(text.split())` is one_line(text)."""
    found = []
    for path in FILES:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            words = ast.unparse(call)
            if words.startswith("' '.join(") and words.endswith(".split())"):
                found.append(path.name)
    assert found == ["errors.py"]


NEVER_FREED = """
import atexit, os
from horovod_train import main

class Held:
    def __del__(self):
        print("is freed", flush=True)
        os.read(os.pipe()[0], 1)

def train():
    atexit.register(print, "Horovod's end", flush=True)
    return {exit_code}

held = Held()
main.main = train
main.entry()
"""


def test_a_failed_program_does_not_wait_for_what_python_frees_at_its_end() -> None:
    """A failed run ended a minute late, or with the exit code of an alarm, waiting for an iterator of tf.data."""
    code = NEVER_FREED.replace("{exit_code}", "2")
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert (failed.returncode, failed.stdout) == (2, "Horovod's end\n")
    code = NEVER_FREED.replace("{exit_code}", "0")  # the negative: nothing else ends it
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    assert [done.stdout.readline(), done.stdout.readline()] == ["Horovod's end\n", "is freed\n"]
    done.kill()
    done.wait()
    done.stdout.close()


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's `&` would have switched off
from horovod_train.main import entry
entry()
"""


def open_if_read(pipe: Path, writers: list[int]) -> bool:
    """Open the end to write to if a process reads from the pipe; return whether one does."""
    try:
        writers.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def test_an_interrupted_program_says_so_in_one_line_and_ends_by_the_signal(tmp_path: Path) -> None:
    os.mkfifo(config := tmp_path / "a.yaml")
    command = [sys.executable, "-c", INTERRUPTED, "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        writers: list[int] = []
        wait_until(lambda: open_if_read(config, writers) or program.poll() is not None)
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=60)
    for writer in writers:
        os.close(writer)
    assert (output, errors, program.returncode) == (b"", b"interrupted by SIGINT.\n", -signal.SIGINT)
