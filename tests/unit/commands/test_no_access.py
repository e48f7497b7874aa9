"""A path that may not be read, or does not answer, is one line for every command, and never taken for a missing one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import PROJECT
from test_report import run_dir

from horovod_train.commands import explain
from horovod_train.commands.cli import LEFT_BY_A_RUN, nearest_existing
from horovod_train.main import main

PLAIN = str(PROJECT / "configs" / "digits_convnet_plain.yaml")
SAID = "Permission denied. Ask its owner for access, or name another."


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = run_dir(tmp_path / "run", config=Path(PLAIN).read_text())
    (made / "lease.json").write_text("{}")
    return made


@pytest.fixture
def closed(tmp_path: Path, run: Path, ordinary_user: None) -> Iterator[Path]:
    """A folder that may not be entered, with a run in it."""
    shutil.copytree(run, (folder := tmp_path / "closed") / "run")
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize(
    "words",
    [
        "explain {closed}/run",
        "watch --once {closed}/run",
        "report {closed}/run",
        "evaluate {closed}/run",
        "predict {closed}/run --data {run} --out x.npz",
        "export {closed}/run --out x.keras",
        "evaluate {run} --checkpoint {closed}/run",
        "check-data --audit {closed}/run",
        "init images {closed}/images",
        "init tfrecords {closed}/train",
        "prepare digits --out {closed}/data/digits",
    ],
)
def test_a_folder_that_may_not_be_entered_is_one_line(
    words: str, closed: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(closed.parent)
    assert main(words.format(closed=closed, run=run).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {closed}")
    assert line.endswith(f": {SAID}")


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("name", ["", "/0.tfrecord", "/*.tfrecord"])
def test_records_that_may_not_be_read_are_not_missing(
    split: str, name: str, closed: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"train": f"{digits}/train", "eval": f"{digits}/eval", split: f"{closed}/run{name}"}
    words = [f"data.{key}={path}" for key, path in paths.items()]
    assert main(["--config", PLAIN, *words, "--output-dir", str(closed.parent / "new")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: data.{split}: {closed}/run")
    assert line.endswith(" cannot be read: Permission denied.")


def test_a_folder_that_may_not_be_entered_is_the_nearest_that_exists(closed: Path) -> None:
    assert nearest_existing(closed / "run" / "checkpoints") == closed


@pytest.mark.parametrize("command", ["explain", "watch", "report"])
@pytest.mark.parametrize(("name", "mode"), [*((name, 0) for name in LEFT_BY_A_RUN), ("logs", 0o400)])
def test_a_file_of_a_run_that_may_not_be_read_is_named(
    command: str, name: str, mode: int, run: Path, ordinary_user: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it the run would be told wrongly: at step 0, killed, without logs."""
    (run / name).chmod(mode)
    assert main([command, str(run)]) == 2
    (run / name).chmod(0o700)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.removeprefix(f"error: {run / name}").removeprefix("/.") == f": {SAID}"


def test_a_log_that_may_not_be_read_is_named_by_watch(
    run: Path, ordinary_user: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (log := run / "logs" / "rank-0.log").chmod(0)
    assert main(["watch", "--once", str(run)]) == 2
    assert capsys.readouterr().err == f"error: {log}: {SAID}\n"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOTCONN])
def test_a_file_system_that_does_not_answer_is_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = OSError(number, os.strerror(number), "runs/a/config.yaml")
    monkeypatch.setattr(Path, "exists", Mock(side_effect=silent))
    assert main(["explain", "runs/a"]) == 1
    said = f"{os.strerror(number)}. Start again when its file system answers."
    assert capsys.readouterr().err == f"error: runs/a/config.yaml: {said}\n"


def by_user(error: OSError) -> Callable[[object], int]:
    """Code that is not the package's, as this file is none of it."""

    def run(_: object) -> int:
        raise error

    return run


REFUSED = PermissionError(errno.EACCES, "Permission denied", "/x")


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (Mock(side_effect=REFUSED), 2),
        (by_user(REFUSED), 1),
        (Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")), 1),  # of no path
        (Mock(side_effect=FileNotFoundError(errno.ENOENT, "No such file or directory", "/x")), 1),
    ],
)
def test_what_may_be_a_mistake_in_code_keeps_its_traceback(
    run: Callable[[object], int], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "run", run)
    assert main(["explain", "runs/a"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)
