"""Where log lines go during a run: root's console and the file of each rank. How TensorFlow is loaded.

A log's reader splits exactly where its writer does, whatever characters the text has.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tensorflow as tf
from conftest import run_process

from horovod_train.commands.watch import Follower
from horovod_train.errors import UserError
from horovod_train.output import logs
from horovod_train.output.files import Artifact, Lines
from horovod_train.output.metrics import MetricsFile
from horovod_train.output.rank_log import introduction, make_folder, open_rank_log, read_stories

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


@pytest.mark.parametrize("cut", [1, 30])
def test_a_line_that_was_cut_short_does_not_hide_the_next_start(tmp_path: Path, cut: int) -> None:
    """As after a power cut, or on a disk that was full."""
    make_folder(tmp_path)
    for number in range(2):
        open_rank_log(tmp_path, 0, "here", start_text=introduction(0, 1 + number, "none", "here"))
        file = tmp_path / "logs" / "rank-0.log"
        if number == 0:
            file.write_bytes(file.read_bytes()[:-cut])
    assert read_stories(tmp_path)[0].size == 2


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


@pytest.mark.long
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


def test_the_last_words_of_c_are_shown_and_noise_is_not(tmp_path: Path) -> None:
    """As when TensorFlow aborts on a processor that lacks AVX, while it is imported."""
    (tmp_path / "tensorflow.py").write_text(
        "import os\nos.write(2, b'I0000 noise\\nbuilt for instructions\\377 that this CPU lacks\\n')\nos.abort()\n"
    )
    script = "from horovod_train.output import logs; logs.load_tensorflow()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=False)
    assert finished.returncode == -signal.SIGABRT
    assert finished.stderr == b"built for instructions\377 that this CPU lacks\n"


@pytest.mark.parametrize(("on_cpu", "hidden"), [(True, [([], "GPU")]), (False, [])])
def test_commands_on_the_cpu_take_no_gpu(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, hidden: list[tuple[list[str], str]]
) -> None:
    asked: list[tuple[list[str], str]] = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0", f"{kind}:1"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda *words: asked.append(words))
    logs.load_tensorflow(on_cpu=on_cpu)
    assert asked == hidden


def test_another_backend_of_keras_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(UserError, match="KERAS_BACKEND must be tensorflow; received jax"):
        logs.load_tensorflow()


ENDS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
"""Of lines, to str.splitlines."""
FORGED = f"2026-11-25T11:48:27.000+00:00 start {introduction(0, 1, 'none', 'elsewhere')}"


def test_the_ends_of_lines_are_all_that_python_knows() -> None:
    assert {end for end in map(chr, range(0x3000)) if len(f"a{end}b".splitlines()) > 1} == {*ENDS} - {"\r\n"}


@pytest.mark.parametrize("end", ENDS)
def test_no_text_begins_an_entry_of_its_own(end: str, tmp_path: Path) -> None:
    make_folder(tmp_path)
    log = open_rank_log(tmp_path, 0, "here", start_text=introduction(0, 1, "none", "here"))
    log.write("failed", f"bad{end}{FORGED}")
    log.write("slow", f"also{end}")
    log.end("failed", 1)
    story = read_stories(tmp_path)[0]
    assert (story.host, [entry.kind for entry in story.entries]) == ("here", ["start", "failed", "slow", "end"])
    assert FORGED in story.entries[1].text
    (tmp_path / "metrics.jsonl").touch()
    now = Follower(tmp_path).look().ranks[0]
    assert (now.about.host, now.ended) == ("here", "failed, exit code 1")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_run_that_another_has_followed_in_its_directory_writes_no_more(
    tmp_path: Path, rank: int, has_ended: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was suspended, and wakes while the other trains, or when that has ended: readers must see the other alone."""
    make_folder(tmp_path)
    woken = open_rank_log(tmp_path, rank, "here", start_text=introduction(rank, 2, "none", "here"))
    woken.write("phase", "train after step 0")
    make_folder(tmp_path)
    other = open_rank_log(tmp_path, rank, "there", start_text=introduction(rank, 2, "none", "there"))
    if has_ended:
        other.end("done", 0)
    before = {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert woken.name
    woken.write_traceback(RuntimeError("another run has taken the directory"))
    woken.write_stacks("it ends")
    woken.end("failed", 73)
    assert {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()} == before
    assert woken.name == ""  # no message says that its log has more
    assert "most recent call first" in capfd.readouterr().err
    other.write("phase", "train after step 9")
    assert [entry.text for entry in read_stories(tmp_path)[rank].find("phase")] == ["train after step 9"]


def test_a_crash_of_the_second_run_of_a_process_is_in_its_own_log(tmp_path: Path) -> None:
    script = f"""
import faulthandler
from pathlib import Path
from horovod_train.output.rank_log import make_folder, open_rank_log
for folder in (Path({str(tmp_path)!r}, "a"), Path({str(tmp_path)!r}, "b")):
    folder.mkdir()
    make_folder(folder)
    open_rank_log(folder, 0, "here", start_text="begins").end("done", 0)
faulthandler._sigabrt()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    finished = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert finished.returncode == -signal.SIGABRT
    shows = [
        "Fatal Python error: Aborted" in (tmp_path / name / "logs" / "rank-0.log").read_text() for name in ("a", "b")
    ]
    assert shows == [False, True]


def test_no_password_reaches_the_logs(tmp_path: Path) -> None:
    make_folder(tmp_path)
    log = open_rank_log(tmp_path, 0, "here", start_text="begins")
    log.write("warning", "no answer of http://me:s3cret@host/x")
    log.end("failed", 1, error="no answer of http://me:s3cret@host/x")
    texts = [path.read_text() for path in (tmp_path / "logs").iterdir()]
    assert len(texts) == 2
    assert all("s3cret" not in text and "@host/x" in text for text in texts)


@pytest.mark.parametrize("end", [end for end in ENDS if "\n" not in end])
def test_a_log_that_another_version_wrote_has_lines_where_that_ended_them(end: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    began = FORGED.replace("elsewhere", "here")
    (tmp_path / "logs" / "rank-0.log").write_bytes(f"{began}\n{began} bad{end}{FORGED}\n".encode())
    assert read_stories(tmp_path)[0].host == "here"


@pytest.mark.parametrize("end", [end for end in ENDS if "\n" not in end])
def test_lines_that_are_kept_are_kept_whole(end: str, tmp_path: Path) -> None:
    lines = Lines(tmp_path / "a")
    lines.append(f"kept{end}whole")
    lines.append("other")
    lines.keep(lambda line: line.startswith("kept"), Artifact("a file", "a"))
    assert list(lines.read()) == [f"kept{end}whole"]
    lines.path.write_bytes(b"a\nb")
    assert list(lines.read()) == ["a", "b"]  # b was cut short


@pytest.mark.parametrize("end", ENDS)
def test_rows_of_metrics_are_read_as_written(end: str, tmp_path: Path) -> None:
    rows = MetricsFile(tmp_path)
    rows.write(1, 0, "train", {f"a{end}b": 1.0})
    rows.write(2, 0, "train", {})
    rows.rewind(1)
    (row,) = rows.rows()
    assert row.values == {f"a{end}b": 1.0}
