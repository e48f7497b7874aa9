"""Starts ranks for the tests: a program runs once per launcher and number of ranks and leaves facts as JSON.

Rank programs assert nothing; tests assert on what all ranks found. A launch has a hard limit, after which every
process that it started is killed.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

PROJECT = Path(__file__).parent.parent
PROGRAMS = PROJECT / "tests" / "distributed" / "programs"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Finished:
    """A process, or a whole job, that has ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return f"--- exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what was tried under faults; see unit/test_faults.py."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    counts = [
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "faults"
    ]
    if not counts:
        return
    columns = ("scenario", "points", "places", "points_tried", "faults", "hit", "complaints")
    total = {name: sum(count[name] for count in counts) for name in columns[1:]}
    terminalreporter.write_sep("-", "faults")
    for row in [dict(zip(columns, columns, strict=True)), *counts, {"scenario": "all"} | total]:
        terminalreporter.write_line(" | ".join(str(row[name]) for name in columns))


_LAUNCHERS = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM")


def rank_environment() -> dict[str, str]:
    """What a user's shell has after `activate`, with limits short enough that nothing hangs in a test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return kept | {
        "PATH": f"{BIN}:{kept.get('PATH', '')}",
        "PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests'}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "40",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def without_tensorflow(folder: Path) -> dict[str, str]:
    """An environment in which a process ends as soon as it imports TensorFlow."""
    package = folder / "no_tensorflow" / "tensorflow"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise SystemExit('TensorFlow was loaded')")
    environment = rank_environment()
    return environment | {"PYTHONPATH": f"{package.parent}:{environment['PYTHONPATH']}"}


def launcher_command(launcher: str, np: int) -> list[str]:
    """The words before `python …` that start `np` ranks on this host."""
    as_srun = [sys.executable, str(PROJECT / "tests" / "as_srun.py"), str(np)]
    return {
        "none": [],
        "horovodrun": ["horovodrun", "--gloo", "-np", str(np)],
        "horovodrun-default": ["horovodrun", "-np", str(np)],
        "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(np)],
        "srun": [*as_srun, "--"],
        "srun-bound": [*as_srun, "bound", "--"],
    }[launcher]


def run_process(
    command: Sequence[str], *, timeout_s: float = 120, cwd: Path = PROJECT, environment: Mapping[str, str] | None = None
) -> Finished:
    """Runs a command to its end, or to its limit: then it fails the test, and nothing that it started survives."""
    process = subprocess.Popen(
        list(command),
        cwd=cwd,
        env=dict(environment or rank_environment()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for started in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            started.kill()
        stdout, stderr = process.communicate()
        pytest.fail(f"{' '.join(command)}: not done after {timeout_s} s\n{stdout[-3000:]}\n{stderr[-3000:]}")
    return Finished(process.returncode, stdout, stderr)


def train(
    arguments: Sequence[str | Path], *, launcher: str = "none", np: int = 1, timeout_s: float = 120, **options: Any
) -> Finished:
    """`python -m horovod_train.main …` under a launcher."""
    command = [*launcher_command(launcher, np), sys.executable, "-m", "horovod_train.main", *map(str, arguments)]
    return run_process(command, timeout_s=timeout_s, **options)


class WarmProcess:
    """`train` with one process, as a fork of one that has loaded TensorFlow: see warm.py.

    For what a command does. How one starts, and what it does before TensorFlow is loaded, takes `train`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._calls = folder, 0
        self._errors = (folder / "warm.stderr").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(PROJECT / "tests" / "warm.py")],
            cwd=PROJECT,
            env=rank_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __call__(self, arguments: Sequence[str | Path], timeout_s: float = 120) -> Finished:
        self._calls += 1
        stdout, stderr = (self._folder / f"{self._calls}.{name}" for name in ("stdout", "stderr"))
        request = {"words": list(map(str, arguments)), "stdout": str(stdout), "stderr": str(stderr)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        is_done, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        answer = self._process.stdout.readline() if is_done else ""
        if not answer:
            said = "".join(path.read_text()[-3000:] for path in (stdout, stderr) if path.exists())
            errors = (self._folder / "warm.stderr").read_text()[-3000:]
            pytest.fail(f"{arguments}: not done after {timeout_s} s\n{said}\n{errors}")
        return Finished(int(answer), stdout.read_text(), stderr.read_text())

    def end(self) -> None:
        for started in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
            started.kill()
        self._process.wait()
        self._errors.close()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    started = WarmProcess(tmp_path_factory.mktemp("warm"))
    yield started
    started.end()


def metrics_of(run_dir: Path, split: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


def split_records(data: bytes) -> Iterator[bytes]:
    """The records of a TFRecord file, framing and all."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length + 4
        yield data[at:end]
        at = end


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())  # type: ignore[no-any-return]


RankFacts = Callable[[str, str, int], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def rank_facts(tmp_path_factory: pytest.TempPathFactory) -> RankFacts:
    """(program, launcher, np) → the facts that each rank left, by rank. Each combination is launched once a session."""

    @functools.cache
    def launch_once(program: str, launcher: str, np: int) -> list[dict[str, Any]] | str:
        try:
            return launch(program, launcher, np)
        except pytest.fail.Exception as error:
            return str(error)  # a launch that hangs is not to hang again for the next test

    def launch(program: str, launcher: str, np: int) -> list[dict[str, Any]]:
        out = tmp_path_factory.mktemp(f"{program}-{launcher}-{np}")
        script = str(PROGRAMS / f"{program}.py")
        finished = run_process([*launcher_command(launcher, np), sys.executable, script, str(out)], timeout_s=240)
        files = [out / f"rank-{rank}.json" for rank in range(np)]
        if finished.returncode or not all(file.exists() for file in files):
            pytest.fail(f"{program} under {launcher} at np={np}:\n{finished.text}")
        return [json.loads(file.read_text()) for file in files]

    def facts(program: str, launcher: str, np: int) -> list[dict[str, Any]]:
        found = launch_once(program, launcher, np)
        if isinstance(found, str):
            pytest.fail(found)
        return found

    return facts


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in handwritten digits as records: `train/` and `eval/` beside dataset.json."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    finished = train(["prepare", "digits", "--out", folder])
    assert finished.returncode == 0, finished.text
    return folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Three virtual hosts of two CPUs under a real SLURM; see tests/cluster."""
    from virtual_cluster import running, why_not

    if reason := why_not():
        pytest.skip(reason)
    with running(hosts=3, cpus=2) as started:
        yield started


@pytest.fixture(scope="session")
def cluster_tables() -> Iterator[list[object]]:
    """What the tests of the cluster have seen, for people: build/cluster.md."""
    tables: list[object] = []
    yield tables
    (PROJECT / "build").mkdir(exist_ok=True)
    (PROJECT / "build" / "cluster.md").write_text("\n".join(map(str, tables)))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB; the test fills it."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
