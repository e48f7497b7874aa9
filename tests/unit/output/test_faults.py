"""Whatever call on a file, or whatever send, fails with whatever error: the work continues and its loss is said, or it
ends with one line.

The calls fail at libc's border (tests/faults/shim.c), so TensorFlow's writers are met too. First a run without faults
notes every call; then each call fails in a run of its own. Whole runs and ranks are exhaustive: an hour or two all
together. FAULTS=40 in the environment tries so many of each, drawn at random.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PROJECT, rank_environment, run_process

pytestmark = pytest.mark.long


FAULTS = PROJECT / "tests" / "faults"
LANES = 6
"""Side by side, since ranks mostly wait."""
WATCHED = (
    "done, root last",
    "done, root first",
    "root fails",
    "a rank fails",
    "all fail",
    "a rank stands still",
    "a rank is frozen",
    "root is frozen",
)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, FAULTS / "shim.c", "-ldl"], check=True)
    return library


Report = dict[str, Any]
TryFaults = Callable[..., list[Report]]


@pytest.fixture
def try_faults(shim: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> TryFaults:
    """(names of scenarios, how to choose faults) → a report of each; see zygote. The counts are shown at the end."""

    def try_them(*names: str, **choose: Any) -> list[Report]:
        if "FAULTS" in os.environ:
            choose["at_most"] = min(choose.get("at_most", sys.maxsize), int(os.environ["FAULTS"]))
        task = json.dumps({"scenarios": names, "choose": choose})
        environment = rank_environment() | {"LD_PRELOAD": str(shim), "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, str(FAULTS / "zygote.py"), str(shim), str(tmp_path / "faults"), task]
        finished = run_process(command, timeout_s=6 * 3600, environment=environment)
        assert finished.returncode == 0, finished.text
        reports: list[Report] = json.loads(finished.stdout.splitlines()[-1])
        for report in reports:
            counts = {name: len(report[name]) for name in ("places", "complaints")}
            record_property("faults", report | counts)
            assert report["points"] > 5
            assert report["hit"] > 0
        return reports

    return try_them


def assert_none(reports: list[Report]) -> None:
    complaints = [complaint for report in reports for complaint in report["complaints"]]
    shown = "\n\n".join(f"{one['fault']}: {one['said']}\n{one['text']}" for one in complaints[:3])
    assert not complaints, f"{len(complaints)} complaints, of which the first are\n{shown}"


def test_files_of_a_run_are_whole_or_their_loss_is_said(try_faults: TryFaults) -> None:
    assert_none(try_faults("files", "new files", per_place=None, faults="all", at_most=30))


def test_checkpoints_are_whole_or_not_there(try_faults: TryFaults) -> None:
    assert_none(try_faults("checkpoints", "rewound checkpoints", per_place=None, faults="all", at_most=12))


def test_failures_that_are_ignored_and_half_a_checkpoint_are_found(try_faults: TryFaults) -> None:
    """What the other tests here rest on."""
    (report,) = try_faults("careless (to be found)", per_place=1, faults="turns")
    said = " ".join(line for complaint in report["complaints"] for line in complaint["said"])
    assert "lost without a word: ['metrics']" in said
    assert "step-000000001: manifest.json is missing" in said
    sends = [complaint["said"] for complaint in report["complaints"] if " send " in complaint["fault"]]
    assert sends
    assert all("a traceback" in said for said in sends)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "files",
        "new files",
        "checkpoints",
        "rewound checkpoints",
        "npz",
        "csv",
        "prepare",
        "prepare --force",
        "export",
        "saved model",
    ],
)
def test_every_call_of_a_part_with_every_error(try_faults: TryFaults, name: str) -> None:
    assert_none(try_faults(name, per_place=None, faults="all", lanes=2))


DISK: dict[str, Any] = {
    "per_place": None,
    "faults": "all",
    "about": "run/",
    "kinds": ["open", "write", "sync", "rename"],
    "errors": ["EIO", "ENOSPC"],
}


def test_some_calls_of_a_run_on_a_bad_or_full_disk(try_faults: TryFaults) -> None:
    """The run continues or ends in one line, and what is resumed ends as if nothing had happened."""
    assert_none(try_faults("train", **DISK, at_most=4, lanes=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["train", "resume"])
def test_every_call_of_a_run_on_a_bad_or_full_disk(try_faults: TryFaults, name: str) -> None:
    assert_none(try_faults(name, **DISK, lanes=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["train", "resume", "rewind"])
def test_every_file_of_whole_runs(try_faults: TryFaults, name: str) -> None:
    """The first and the last call of each kind on each file; each alone and from then on."""
    about = "checkpoints" if name == "rewind" else ""
    assert_none(try_faults(name, per_place=2, faults="turns", about=about, lanes=2))


@pytest.mark.exhaustive
def test_every_message_of_the_watchdogs_with_every_error(try_faults: TryFaults) -> None:
    """The first and the last of each kind on each rank."""
    reports = try_faults(*(f"watch: {name}" for name in WATCHED), per_place=2, faults="all", lanes=LANES)
    sources = "".join(path.read_text() for path in (PROJECT / "horovod_train/distributed/watchdog").glob("*.py"))
    kinds = set(re.findall(r'"kind": "(\w+)"', sources))
    sent = {kind for report in reports for place in report["places"] for kind in re.findall(r'"kind": "(\w+)"', place)}
    assert kinds == sent
    assert_none(reports)


@pytest.mark.exhaustive
def test_everything_that_ranks_send_to_find_each_other(try_faults: TryFaults) -> None:
    assert_none(try_faults("start", per_place=None, faults="turns", lanes=LANES))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["done", "a rank fails", "SIGTERM"])
def test_every_message_of_two_ranks(try_faults: TryFaults, name: str) -> None:
    assert_none(try_faults(f"ranks: {name}", per_place=1, faults="one", lanes=2))
