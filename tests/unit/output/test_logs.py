"""Where log lines go during a run: root's console and the file of each rank. How TensorFlow is loaded."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import run_process

from horovod_train.errors import UserError
from horovod_train.output import logs
from horovod_train.output.rank_log import make_folder, open_rank_log

OURS, USERS, OTHERS = (logging.getLogger(name) for name in ("horovod_train.part", "mine.model", "library"))


@contextmanager
def nothing_set_up() -> Iterator[logging.Logger]:
    """The root logger without pytest's handlers; what a run changes, it puts back."""
    root = logging.getLogger()
    root.handlers, handlers = [], root.handlers
    try:
        yield root
        assert (root.handlers, root.level) == ([], logging.WARNING)
    finally:
        root.handlers = handlers


def log_at_all_levels(logger: logging.Logger) -> None:
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)("%s 100%%", level)


def test_root_shows_ours_and_the_users_from_info_and_others_from_warning() -> None:
    lines: list[str] = []
    with nothing_set_up(), logs.to_console(True, users={"mine.other"}, show=lines.append):
        for logger in (OURS, USERS, OTHERS):
            log_at_all_levels(logger)
    assert lines == [
        "info 100%", "warning: warning 100%", "error: error 100%",
        "mine.model: info 100%", "warning: mine.model: warning 100%", "error: mine.model: error 100%",
        "warning: library: warning 100%", "error: library: error 100%",
    ]  # fmt: skip


def test_other_ranks_show_errors_and_what_may_differ_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with nothing_set_up(), logs.to_console(False):
        for logger in (OURS, OTHERS):
            log_at_all_levels(logger)
        OURS.warning("no room", extra=logs.ANY_RANK)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "error: error 100%\nerror: library: error 100%\nwarning: no room\n")


def test_each_ranks_file_has_all_lines_with_their_tracebacks(tmp_path: Path) -> None:
    make_folder(tmp_path)
    rank_log = open_rank_log(tmp_path, 3, "here", start_text="begins")
    with nothing_set_up(), logs.to_console(False), logs.to_file(rank_log.write):
        OURS.debug("train after step 7", extra=logs.PHASE)
        OTHERS.info("two\nlines")
        try:
            raise ZeroDivisionError("of mine")
        except ZeroDivisionError:
            USERS.exception("failed")
    OURS.warning("after the run")
    lines = [line.split(" ", 1)[1] for line in (tmp_path / "logs" / "rank-3.log").read_text().splitlines()]
    assert lines[:5] == [
        "start begins", "phase train after step 7", "info library: two", "   lines", "error mine.model: failed"
    ]  # fmt: skip
    assert lines[-1].strip() == "ZeroDivisionError: of mine"


def test_a_caller_that_has_set_logging_up_sees_what_it_saw_and_nothing_twice() -> None:
    theirs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: theirs.append(record.getMessage())  # type: ignore[method-assign]
    shown: list[str] = []
    with nothing_set_up() as above:
        above.addHandler(handler)
        for _ in range(2):  # one run after the other
            with logs.to_console(True, users={"mine"}, show=shown.append), logs.to_file(lambda kind, text: None):
                OURS.info("ours")
                USERS.info("below their level")
                OTHERS.warning("others")
        OURS.warning("after the runs")
        assert above.handlers == [handler]
        above.removeHandler(handler)
    assert shown == ["ours", "ours"]
    assert theirs == ["others", "others", "after the runs"]


def test_a_logger_with_a_handler_of_its_own_prints_what_it_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorFlow's does."""
    tensorflow = logging.getLogger("tensorflow")
    monkeypatch.setattr(tensorflow, "handlers", [logging.StreamHandler(sys.stdout)])
    kept: list[str] = []
    with nothing_set_up(), logs.to_console(True), logs.to_file(lambda kind, text: kept.append(text)):
        log_at_all_levels(tensorflow)
    assert capsys.readouterr().out == "warning 100%\nerror 100%\n"
    assert kept == ["tensorflow: warning 100%", "tensorflow: error 100%"]
    assert tensorflow.level == logging.NOTSET


def test_a_line_that_cannot_be_made_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with nothing_set_up(), logs.to_console(True):
        OTHERS.warning("%d", "no number")
        OURS.info("next")
    shown = capsys.readouterr()
    assert shown.out == "next\n"
    assert re.fullmatch(r"warning: \S+test_logs.py:\d+: this line cannot be logged: TypeError: .*\n", shown.err)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_and_a_console_on_a_full_disk_end_nothing(tmp_path: Path, rank: int) -> None:
    script = f"""
import logging, sys
from pathlib import Path
from horovod_train.output import logs
from horovod_train.output.console import let_go
from horovod_train.output.rank_log import make_folder, open_rank_log
make_folder(Path({str(tmp_path)!r}))
Path({str(tmp_path)!r}, "logs", "rank-{rank}.log").symlink_to("/dev/full")
rank_log = open_rank_log({str(tmp_path)!r}, {rank}, "here", start_text="begins")
with logs.to_console({rank} == 0), logs.to_file(rank_log.write):
    for level in (logging.INFO, logging.ERROR):
        logging.getLogger("horovod_train").log(level, "a line")
rank_log.end("done", 0)
let_go()
sys.exit(75)
"""
    with open("/dev/full", "w") as full:
        finished = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=full, env={**os.environ})
    assert finished.returncode == 75


def test_keras_is_loaded_without_libraries_that_can_be_imported_afterwards() -> None:
    script = """
import sys
from horovod_train.output import logs
logs.load_tensorflow()
assert "keras" in sys.modules
print({"sklearn", "matplotlib"} & set(sys.modules))
from sklearn.datasets import load_digits
print(load_digits().data.shape)
"""
    finished = run_process([sys.executable, "-c", script])
    assert finished.stdout.split("\n")[:2] == ["set()", "(1797, 64)"], finished.text
    plain = run_process([sys.executable, "-c", "import keras, sys; print('sklearn' in sys.modules)"])
    assert plain.stdout.strip() == "True", plain.text


def test_another_backend_of_keras_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(UserError, match="KERAS_BACKEND must be tensorflow; received jax"):
        logs.load_tensorflow()
