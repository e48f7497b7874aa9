"""Starts ranks for the tests: a program runs once per launcher and number of ranks and leaves facts as JSON.

Rank programs assert nothing; tests assert on what all ranks found. A launch has a hard limit, after which every
process that it started is killed.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

PROJECT = Path(__file__).parent.parent
PROGRAMS = PROJECT / "tests" / "distributed" / "programs"
BIN = Path(sys.executable).parent
CASES_OF_A_UNIT = 2
"""Of each test of a unit, those that `make test` runs."""
HANGS_AFTER_S = 300.0
"""What has not ended by then never will: a limit for what hangs, on a machine that does much else besides."""

# How long an example takes says nothing on a machine that does much else besides.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


@dataclass(frozen=True)
class Finished:
    """A process, or a whole job, that has ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return f"--- exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage meanwhile, nor look later for any in what is collected: it would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark as long, of each test of a unit, all cases but the first two: they are one more of a kind."""
    seen: Counter[str] = Counter()
    for item in items:
        test, is_case, _ = item.nodeid.partition("[")
        is_left_out = item.get_closest_marker("long") or item.get_closest_marker("exhaustive")
        if is_case and test.startswith("tests/unit/") and not is_left_out:
            seen[test] += 1
            if seen[test] > CASES_OF_A_UNIT:
                item.add_marker(pytest.mark.long)


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
    """What a user's shell has after `activate`, with limits after which nothing hangs any longer."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return kept | {
        "PATH": f"{BIN}:{kept.get('PATH', '')}",
        "PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests'}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
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


WARNINGS_FAIL = pytest.mark.filterwarnings("error", "default::ResourceWarning")
"""Fails a test that warns; but not for a file that an earlier one left open, which Python may collect at any time."""


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
    command: Sequence[str],
    *,
    timeout_s: float = HANGS_AFTER_S,
    cwd: Path = PROJECT,
    environment: Mapping[str, str] | None = None,
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
        kill_all(process)
        stdout, stderr = process.communicate()
        pytest.fail(f"{' '.join(command)}: not done after {timeout_s} s\n{stdout[-3000:]}\n{stderr[-3000:]}")
    return Finished(process.returncode, stdout, stderr)


@contextmanager
def started(
    command: Sequence[str], *, cwd: Path = PROJECT, environment: Mapping[str, str] | None = None, **streams: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process to look at while it runs. At its limit, and at the end of the block, it and its children are killed."""
    process = subprocess.Popen(
        list(command), cwd=cwd, env=dict(environment or rank_environment()), text=True, **streams
    )
    limit = threading.Timer(HANGS_AFTER_S, kill_all, [process])
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        kill_all(process)
        process.wait()


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Kill a process, and what it has started."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def wait_until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + HANGS_AFTER_S
    while not condition():
        assert time.monotonic() < limit, f"not so within {HANGS_AFTER_S} s"
        time.sleep(0.002)


def train(
    arguments: Sequence[object],
    *,
    launcher: str = "none",
    np: int = 1,
    fresh: bool | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Finished:
    """`python -m horovod_train.main …` under a launcher. arguments: each as str() gives it.

    fresh: whether each rank is a new process, not a fork of one that has loaded TensorFlow (see warm.py). By default
    where it has an environment of its own; a test of how ranks start, or of what they do before they load TensorFlow,
    asks for it.
    """
    is_fresh = environment is not None if fresh is None else fresh
    python = [sys.executable] if is_fresh else warm_python()
    command = [*launcher_command(launcher, np), *python, "-m", "horovod_train.main", *map(str, arguments)]
    return run_process(command, environment=environment, **options)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as `pip wheel` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools builds in place, and packs what an earlier build has left there
    shutil.copytree(PROJECT / "horovod_train", source / "horovod_train", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    built = run_process([sys.executable, "-m", "pip", *words])
    assert built.returncode == 0, built.text
    (made,) = folder.glob("*.whl")
    return made


@functools.cache
def warm_python() -> list[str]:
    """The words to put for `python` to run a program in a fork of warm.py, which is started here and kept."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return [sys.executable]  # CUDA takes no fork
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, (folder / "log").open("w") as log:
        listening.bind(str(folder / "socket"))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, str(PROJECT / "tests" / "warm.py"), str(listening.fileno())],
            cwd=PROJECT,
            env=rank_environment(),
            stdin=subprocess.PIPE,  # which it ends with
            stdout=log,
            stderr=log,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    _warm_servers.append(server)
    return [sys.executable, "-IS", str(PROJECT / "tests" / "warm_start.py"), str(folder / "socket")]


_warm_servers: list[subprocess.Popen[bytes]] = []


@pytest.fixture(scope="session", autouse=True)
def end_of_warm_servers() -> Iterator[None]:
    yield
    for server in _warm_servers:
        server.communicate()


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
    return json.loads((run_dir / "summary.json").read_text())


RankFacts = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def rank_facts(tmp_path_factory: pytest.TempPathFactory) -> RankFacts:
    """(program, launcher, np, *words) → the facts that each rank left, by rank, launched once a session.

    Words follow the folder on the program's command line; for_s: after which the launch counts as hanging.
    """

    @functools.cache
    def launch_once(program: str, launcher: str, np: int, words: tuple[str, ...], for_s: float) -> Any:
        try:
            return launch(program, launcher, np, words, for_s)
        except pytest.fail.Exception as error:
            return str(error)  # a launch that hangs is not to hang again for the next test

    def launch(program: str, launcher: str, np: int, words: tuple[str, ...], for_s: float) -> list[dict[str, Any]]:
        out = tmp_path_factory.mktemp(f"{program}-{launcher}-{np}")
        script = str(PROGRAMS / f"{program}.py")
        finished = run_process(
            [*launcher_command(launcher, np), *warm_python(), script, str(out), *words], timeout_s=for_s
        )
        files = [out / f"rank-{rank}.json" for rank in range(np)]
        if finished.returncode or not all(file.exists() for file in files):
            pytest.fail(f"{program} under {launcher} at np={np}:\n{finished.text}")
        return [json.loads(file.read_text()) for file in files]

    def facts(
        program: str, launcher: str, np: int, *words: str, for_s: float = 2 * HANGS_AFTER_S
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] | str = launch_once(program, launcher, np, words, for_s)
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
def said() -> Iterator[list[str]]:
    """What root's console has shown so far, in lines."""
    from horovod_train.output import logs

    lines: list[str] = []
    with logs.to_console(is_root=True, show=lines.append):
        yield lines


@pytest.fixture
def fresh_driver() -> Iterator[None]:
    """The driver is asked anew, and again after the test."""
    from horovod_train.distributed.launch import local

    local._ask_driver.cache_clear()
    yield
    local._ask_driver.cache_clear()


@pytest.fixture
def driver_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_driver: None) -> None:
    """An nvidia-smi that lists four GPUs, GPU-a to GPU-d, of which the last has a slice, MIG-d0."""
    gpus = "\n".join(f"{number}, GPU-{letter}" for number, letter in enumerate("abcd"))
    slices = "GPU 3: NVIDIA A100-SXM4-40GB (UUID: GPU-d)\n  MIG 7g.40gb     Device  0: (UUID: MIG-d0)"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncase $1 in -L) echo '{slices}' ;; *) echo '{gpus}' ;; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB; the test fills it."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Modes of files and folders hold for this thread, also where root runs the tests. os.access does not know it."""
    libc = ctypes.CDLL(None, use_errno=True)
    this_thread = (ctypes.c_uint32 * 2)(0x20080522, 0)
    capabilities = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; of each two words
    assert libc.capget(this_thread, capabilities) == 0
    before = capabilities[0]
    capabilities[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(this_thread, capabilities) == 0
    yield
    capabilities[0] = before
    assert libc.capset(this_thread, capabilities) == 0


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Some for each of the threads that read."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 120, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
