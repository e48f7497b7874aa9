"""Whatever call on a file fails, with whatever error: the work goes on and its loss is said, or ends with one line.

The calls fail at libc's border (tests/faults/shim.c), so TensorFlow's writers are met too. First a run without faults
notes every call; then each call fails in a run of its own. Whole runs and ranks are the long ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import PROJECT, rank_environment, run_process

FAULTS = PROJECT / "tests" / "faults"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, FAULTS / "shim.c", "-ldl"], check=True)
    return library


def try_faults(shim: Path, tmp_path: Path, names: list[str], **choose: Any) -> list[dict[str, Any]]:
    task = json.dumps({"scenarios": names, "choose": choose})
    environment = rank_environment() | {"LD_PRELOAD": str(shim), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(FAULTS / "zygote.py"), str(shim), str(tmp_path / "faults"), task]
    finished = run_process(command, timeout_s=6 * 3600, environment=environment)
    assert finished.returncode == 0, finished.text
    reports = json.loads(finished.stdout.splitlines()[-1])
    for report in reports:
        print({name: value for name, value in report.items() if name != "complaints"})
        assert report["points"] > 5
        assert report["hit"] > 0
    return reports  # type: ignore[no-any-return]


def assert_none(reports: list[dict[str, Any]]) -> None:
    complaints = [complaint for report in reports for complaint in report["complaints"]]
    shown = "\n\n".join(f"{one['fault']}: {one['said']}\n{one['text']}" for one in complaints[:3])
    assert not complaints, f"{len(complaints)} complaints, of which the first are\n{shown}"


def test_files_of_a_run_are_whole_or_their_loss_is_said(shim: Path, tmp_path: Path) -> None:
    assert_none(try_faults(shim, tmp_path, ["files", "new files"], per_place=None, faults=50))


def test_checkpoints_are_whole_or_not_there(shim: Path, tmp_path: Path) -> None:
    assert_none(try_faults(shim, tmp_path, ["checkpoints"], per_place=None, faults=20))


def test_failures_that_are_ignored_and_half_a_checkpoint_are_found(shim: Path, tmp_path: Path) -> None:
    """What the other tests here rest on."""
    (report,) = try_faults(shim, tmp_path, ["careless"], per_place=1, faults="turns")
    said = " ".join(line for complaint in report["complaints"] for line in complaint["said"])
    assert "lost without a word: ['metrics']" in said
    assert "step-000000001: manifest.json is missing" in said


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["files", "new files", "checkpoints", "npz", "csv", "prepare", "prepare --force", "export", "saved model"]
)
def test_every_call_of_a_part_with_every_error(shim: Path, tmp_path: Path, name: str) -> None:
    assert_none(try_faults(shim, tmp_path, [name], per_place=None, faults="all"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["train", "resume", "ranks"])
def test_every_file_of_whole_runs(shim: Path, tmp_path: Path, name: str) -> None:
    """The first and the last call of each kind on each file; each alone and from then on."""
    assert_none(try_faults(shim, tmp_path, [name], per_place=2, faults="turns"))
