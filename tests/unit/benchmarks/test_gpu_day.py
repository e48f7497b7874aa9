"""benchmarks/gpu_day.sh runs each step of the first day with a GPU, whatever the others do; here without a GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import gpu_day
import numpy as np
import psutil
import pytest
from conftest import PROJECT, Finished, rank_environment, run_process
from rank_programs.gpu_steps import TOLERANCE, largest_difference, network

from horovod_train.host import sees_gpu

pytestmark = pytest.mark.long


SCRIPT = str(PROJECT / "benchmarks" / "gpu_day.sh")
FAULTS = """
import os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, "benchmarks")
import gpu_day
from rank_programs.gpu_steps import NotOk

def works(day):
    return {"so_far": (day.log.parent / "results.json").read_text()} if day.log.name == "last.log" else {}

def raises(day):
    print("some words")
    raise ValueError("a fault")

def differs(day):
    raise NotOk("failed: expected 1", {"number": 2})

def dies(day):
    os.abort()

def hangs(day):
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)

functions = {"first": works, "raises": raises, "differs": differs, "dies": dies, "hangs": hangs, "last": works}
steps = [gpu_day.Step(name, 3.0, function) for name, function in functions.items()]
gpu_day.run_day(steps, Path(sys.argv[1]), cpu=True, minutes=5.0)
late = [gpu_day.Step("too_late", 3.0, works), steps[1]]
gpu_day.run_day(late, Path(sys.argv[1]), cpu=True, minutes=0.01, misfit="the driver is old.")
"""


def results_in(out: Path) -> dict[str, Any]:
    steps: dict[str, Any] = json.loads((out / "results.json").read_text())["steps"]
    return steps


def test_a_step_that_fails_or_hangs_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    finished = run_process([sys.executable, "-c", FAULTS, str(tmp_path)])
    assert finished.returncode == 0, finished.text
    found = results_in(tmp_path)
    assert {name: step["status"] for name, step in found.items()} == {
        "first": "ok",
        "raises": "failed: ValueError: a fault",
        "differs": "failed: expected 1",
        "dies": "failed: its process ended with -6",
        "hangs": "failed: not done after 3 s",
        "last": "ok",
        "too_late": "not run: no time is left",
    }
    assert found["raises"]["last_lines"][0] == "some words"  # it has not run again, and its result stays
    assert json.loads((tmp_path / "results.json").read_text())["misfit"] == "the driver is old."
    assert found["differs"]["found"] == {"number": 2}
    assert list(json.loads(found["last"]["found"]["so_far"])["steps"]) == list(found)[:5]
    started = int(found["hangs"]["last_lines"][0])
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE


def test_weights_and_slots_are_compared_and_nothing_else() -> None:
    first = {"model/a": np.zeros(3, np.float32), "optimizer/b": np.ones(2, np.float32), "progress/c": np.array(np.nan)}
    assert largest_difference(first, dict(first)) == 0.0
    assert largest_difference(first, {**first, "optimizer/b": np.array([1.0, 0.5])}) == 0.5 > TOLERANCE
    assert largest_difference(first, {**first, "model/a": np.array([0.0, np.nan, 0.0])}) == np.inf


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tiny", "scaled", "taken"), [(False, False, "uint8"), (True, True, "float32")])
def test_images_are_taken_as_bytes_or_as_floats(tiny: bool, scaled: bool, taken: str) -> None:
    model = network(32, tiny=tiny, scaled=scaled)
    assert model.inputs[0].dtype == taken
    logits = model(np.full((2, 32, 32, 3), 200, taken), training=False)
    assert (tuple(logits.shape), logits.dtype.name) == ((2, 1000), "float32")


def shell(*words: object, **settings: str) -> Finished:
    environment = rank_environment() | settings
    return run_process(["bash", *map(str, words)], environment=environment, timeout_s=7200.0)


def test_pieces_are_joined_and_a_damaged_or_missing_one_is_named(tmp_path: Path) -> None:
    folder, packed = tmp_path / "folder", tmp_path / "packed"
    folder.mkdir()
    contents = {"a.whl": os.urandom(2_500_000), "b.whl": b"short"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    finished = shell(SCRIPT, "pack", packed, folder, PIECE_MIB="1")
    assert finished.returncode == 0, finished.text
    pieces = sorted(packed.glob("piece-*"))
    assert len(pieces) == 3
    assert all(piece.stat().st_size <= 2**20 for piece in pieces)
    carried = packed / "benchmarks" / "gpu_day.sh"
    assert shell(carried, "unpack", packed).returncode == 0
    assert {path.name: path.read_bytes() for path in (packed / "wheels").iterdir()} == contents
    with pieces[1].open("r+b") as file:
        file.write(b"damage")
    pieces[2].unlink()
    finished = shell(carried, "install", packed)
    assert finished.returncode == 2
    assert finished.stderr == (
        f"error: gpu_day: {packed}: damaged or missing: piece-001 piece-002. Carry again what is named.\n"
    )
    assert not (packed / "venv").exists()


CARRIED = """
import ctypes, hashlib, lzma, ssl, venv, zipfile, sys
print(sys.prefix, *{line.split()[-1] for line in open("/proc/self/maps") if "libpython" in line})
"""


def test_the_python_of_pack_runs_on_a_machine_that_has_none(tmp_path: Path) -> None:
    finished = shell(SCRIPT, "carry_interpreter", sys.executable, tmp_path / "python")
    assert finished.returncode == 0, finished.text
    (carried,) = (tmp_path / "python" / "bin").iterdir()
    command = ["env", "-i", f"LD_LIBRARY_PATH={tmp_path / 'python' / 'lib'}", str(carried), "-c", CARRIED]
    prefix, *libraries = run_process(command, timeout_s=60.0).stdout.split()
    assert prefix == str(tmp_path / "python")
    assert all(library.startswith(f"{prefix}/") for library in libraries)


def test_the_oldest_libraries_of_cuda_that_tensorflow_takes_are_packed(tmp_path: Path) -> None:
    needs = ["numpy>=1.26.0", 'nvidia-cudnn-cu12<10.0,>=9.3.0.75; extra == "and-cuda"']
    with ZipFile(tmp_path / "tensorflow.whl", "w") as wheel:
        lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
        wheel.writestr("tensorflow-2.21.0.dist-info/METADATA", f"Name: tensorflow\n{lines}")
    finished = shell(SCRIPT, "oldest_cuda", sys.executable, tmp_path / "tensorflow.whl")
    assert finished.stdout == "nvidia-cudnn-cu12==9.3.0.75\n", finished.text


@pytest.mark.skipif(sees_gpu(), reason="a GPU is here")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    finished = shell(SCRIPT, "--out", tmp_path / "out")
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: gpu_day: this machine has no NVIDIA GPU")
    assert finished.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("numbers", "said", "words"),
    [
        ([90], "580.65.06, 9.0\n580.65.06, 9.0\n", ""),
        ([90], "580.65.06, 12.0\n", ""),
        ([80, 90], "595.1, 8.6\n", ""),
        ([90], "570.124.06, 9.0\n", "the driver is of branch 570; Horovod as packed needs 580 or later."),
        ([90], "580.65.06, 8.0\n", "the GPU is of compute capability 8.0, and Horovod was compiled for 90. Pack again"),
        ([86, 120], "580.65.06, 9.0\n", "with HOROVOD_BUILD_CUDA_CC_LIST=90."),
        ([86, 90], "580.65.06, 8.0\n", "with HOROVOD_BUILD_CUDA_CC_LIST=80."),
        (
            [90],
            "580.65.06, 7.0\n",
            "Horovod was compiled for 90. It takes a CUDA 12 toolkit: CUDA 13, of which pack is, ",
        ),
        ([90], "No devices were found\n", ""),
        ([90], "", ""),
    ],
)
def test_what_was_packed_for_other_gpus_or_drivers_is_said_first(numbers: list[int], said: str, words: str) -> None:
    problem = gpu_day.misfit({"driver": 580, "compute_capabilities": numbers}, said)
    assert (words in problem, bool(problem)) == (True, bool(words))


def test_what_needs_no_horovod_runs_first_where_horovod_may_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 570.124.06, 9.0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "built_for.json").write_text('{"driver": 580, "compute_capabilities": [90], "compiled_with": []}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_day, "BUILT_FOR", tmp_path / "built_for.json")
    monkeypatch.setattr(gpu_day, "sees_gpu", lambda: True)
    monkeypatch.setattr("sys.argv", ["gpu_day.py", "--out", str(tmp_path / "out")])
    began: list[str] = []

    def run_day(steps: Sequence[gpu_day.Step], out: Path, **options: Any) -> dict[str, Any]:
        began.extend(step.name for step in steps)
        results = gpu_day.read_results(out, options["cpu"])
        assert results["built_for"]["driver"] == 580
        assert {"tensorflow", "keras"} <= set(results["versions"])
        return results | {"steps": {step.name: {"status": "ok"} for step in steps}}

    monkeypatch.setattr(gpu_day, "run_day", run_day)
    with pytest.raises(SystemExit, match="0"):
        gpu_day.main()
    assert began[:5] == ["resnet_fit", "resnet_loop", "resnet_fit_xla", "resnet_loop_xla", "nccl"]
    assert len(began) == len(gpu_day.STEPS)
    said = capsys.readouterr().err
    assert said.startswith("warning: gpu_day: the driver is of branch 570; Horovod as packed needs 580 or later. ")


def test_results_with_and_without_a_gpu_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text('{"cpu": true, "steps": {"doctor": {"status": "ok"}}}')
    assert gpu_day.names_left(tmp_path, cpu=True) == [step.name for step in gpu_day.STEPS if step.name != "doctor"]
    with pytest.raises(SystemExit, match="2"):
        gpu_day.names_left(tmp_path, cpu=False)
    assert "is of a day with --cpu; give another --out." in capsys.readouterr().err


def test_a_step_that_takes_too_long_fails_the_day(tmp_path: Path) -> None:
    finished = shell(SCRIPT, "--cpu", "--out", tmp_path, "--only", "doctor", "--patience", "0.01")
    assert finished.returncode == 1, finished.text
    assert results_in(tmp_path)["doctor"]["status"] == "failed: not done after 1 s"


@pytest.mark.exhaustive
def test_all_steps_run_on_cpus(tmp_path: Path) -> None:
    finished = shell(SCRIPT, "--cpu", "--out", tmp_path, "--minutes", "110", "--patience", "20")
    assert finished.returncode == 0, finished.text
    found = results_in(tmp_path)
    need_gpu = {"nccl", "pin"}
    assert {name: step["status"] for name, step in found.items()} == {
        step.name: "skipped: needs a GPU" if step.name in need_gpu else "ok" for step in gpu_day.STEPS
    }
    assert found["digits"]["found"]["largest_difference"] <= TOLERANCE
    assert found["resume"]["found"]["saved"]
    assert len(set(found["resume"]["found"]["weights_sha256"])) == 1
    assert found["two_ranks"]["found"]["outcome"] == "working"
    speeds = [step["found"]["images_per_s"] for name, step in found.items() if name.startswith("resnet")]
    assert speeds
    assert min(speeds) > 0
    assert [len(found[name]["found"]["runs"]) for name in ("save_100mb", "save_2gb")] == [2, 2]
    assert found["profile"]["found"]["ops"]
