"""The batch scripts: what is asked of SLURM, what is said of it, and mistakes. They are run in tests/cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_train.commands.slurm import shipped
from horovod_train.main import main

PROJECT = Path(__file__).parent.parent.parent
CONFIG = PROJECT / "configs" / "digits_convnet.yaml"
SHIPPED = [(0, 1), (0, 2), (4, 1), (4, 2)]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main(["slurm", "--config", str(CONFIG), *words]) == 0
    said = capsys.readouterr()
    return said.out, said.err


@pytest.mark.parametrize(("gpus", "nodes"), SHIPPED)
def test_shipped_scripts_are_the_commands_own(gpus: int, nodes: int) -> None:
    """To make them anew after a change: write shipped(…) to its file."""
    name = f"{'gpu' if gpus else 'cpu'}_node{'s' if nodes > 1 else ''}.sbatch"
    assert (PROJECT / "scripts" / "slurm" / name).read_text() == shipped(gpus, nodes)
    checked = subprocess.run(["bash", "-n"], input=shipped(gpus, nodes), text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("left", "age", "expected", "is_requeued"),
    [
        ("75", "now", 75, True),
        ("2", "now", 2, False),
        ("75", "1 hour ago", 1, False),  # of an earlier start
        (None, "now", 1, False),
    ],
)
def test_under_horovodrun_the_code_that_rank_0_left_counts(
    tmp_path: Path, left: str | None, age: str, expected: int, is_requeued: bool
) -> None:
    """horovodrun ends with 1 always. The job is being preempted, and its hosts answer."""
    end = tmp_path / "a run" / "logs" / "rank-0.end.json"
    leave = f"""echo '{{"ended": "stopped", "exit_code": {left}, "step": 7}}' > '{end}'; touch -d '{age}' '{end}'"""
    end.parent.mkdir(parents=True)
    commands = {
        "horovodrun": f"{leave if left else 'true'}; exit 1",
        "srun": "echo here",
        "scontrol": f"echo JobState=RUNNING PreemptTime=2026; echo $1 >> {tmp_path}/asked",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f"PATH={tmp_path}:{Path(sys.executable).parent}:$PATH\n")
    script = shipped(0, 2).replace("\nLAUNCH=srun\n", "\nLAUNCH=horovodrun\n")
    given = {"SLURM_SUBMIT_DIR": str(PROJECT), "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1"}
    finished = subprocess.run(
        ["bash", "-s", "--", "--config", str(CONFIG), "--output-dir", str(end.parent.parent)],
        input=script,
        env={**os.environ, **given, "VENV": str(tmp_path), "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == expected, finished.stderr
    assert ("put in the queue again" in finished.stdout) == is_requeued
    assert "requeue" in (tmp_path / "asked").read_text() if is_requeued else True


@pytest.mark.parametrize(("task", "output_dir"), [(None, "runs/50%a @VENV@"), ("7", "runs/507 @VENV@")])
def test_words_and_paths_reach_the_ranks_as_they_are(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    task: str | None,
    output_dir: str,
) -> None:
    """%a is the task's number in an array, and nothing else outside of one."""
    venv = tmp_path / "it's } $(touch made) `touch made` env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text(f"PATH={tmp_path}:$PATH\n")
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(venv))
    monkeypatch.chdir(tmp_path)
    script, _ = printed(capsys, "--time", "01:00:00", "--output-dir", "runs/50%a @VENV@")
    given = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1"}
    given |= {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_JOB_ID": "1"} if task else {}
    finished = subprocess.run(
        ["bash", "-s"], input=script, env={**os.environ, **given}, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-2:] == ["--output-dir", output_dir]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--partition", "short\necho here"),
        ("--account", "mine --exclusive"),
        ("--account", ""),
        ("--container", "apptainer exec\na.sif"),
    ],
)
def test_what_would_become_another_line_of_the_script_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert main(["slurm", "--config", str(CONFIG), "--time", "01:00:00", option, value]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"argument {option}: expected a " in said.err


def test_one_rank_for_each_gpu_and_the_choices_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    script, said = printed(capsys, "--nodes", "4", "--gpus-per-node", "8", "--time", "04:00:00")
    for line in ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=04:00:00", "--signal=B:USR1@300"):
        assert f"#SBATCH {line}\n" in script
    assert f"set -- --config {CONFIG} --output-dir runs/digits_convnet\n" in script
    assert "LAUNCH=srun\n" in script
    assert "ranks: 4 host(s) × 8 = 32, each with a GPU" in said
    assert "batch: 64 records over all ranks, 2 on each" in said


def test_a_rank_on_several_gpus_gets_them_and_their_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    script, said = printed(capsys, "--gpus-per-node", "8", "--time", "04:00:00", "device.per_rank=2")
    for line in ("--ntasks-per-node=4", "--gpus-per-node=8", "--cpus-per-task=16"):
        assert f"#SBATCH {line}\n" in script
    assert "ranks: 1 host(s) × 4 = 4, each with 2 GPUs" in said
    on_cpus, _ = printed(capsys, "--tasks-per-node", "3", "--time", "04:00:00", "device.per_rank=2")
    assert "#SBATCH --ntasks-per-node=3\n" in on_cpus


def test_without_gpus_none_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--tasks-per-node",
        "4",
        "--time",
        "00:20:00",
        "--partition",
        "short",
        "--container",
        "apptainer exec a.sif",
    ]
    script, _ = printed(capsys, *words, "train.epochs=3", "--launch", "mpirun")
    assert "gpus" not in script
    assert "#SBATCH --partition=short\n" in script
    assert "#SBATCH --signal=B:USR1@120\n" in script
    assert "RUN='apptainer exec a.sif python'\n" in script
    assert "LAUNCH=mpirun\n" in script
    assert " train.epochs=3 " in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--time", "4h"], "--time must be [D-]HH:MM:SS; received '4h'."),
        (["--time", "01:00:00", "--nodes", "100"], "data.global_batch_size must be at least the number of ranks (100)"),
        (
            ["--time", "01:00:00", "--gpus-per-node", "2", "--tasks-per-node", "4"],
            "--tasks-per-node must be --gpus-per",
        ),
        (
            ["--time", "01:00:00", "--gpus-per-node", "4", "--tasks-per-node", "2"],
            "--tasks-per-node must be --gpus-per",
        ),
        (
            ["--time", "01:00:00", "--gpus-per-node", "3", "device.per_rank=2"],
            "--gpus-per-node must be a multiple of device.per_rank (2); received 3.",
        ),
        (
            ["--time", "01:00:00", "--gpus-per-node", "4", "--tasks-per-node", "4", "device.per_rank=2"],
            "--tasks-per-node must be --gpus-per-node / device.per_rank (4 / 2 = 2), since each rank takes 2 GPU(s); "
            "received 4.",
        ),
        (["--time", "01:00:00", "trian.epochs=3"], "command line: trian: unknown key"),
    ],
)
def test_mistakes_are_named_before_a_job_waits_for_hours(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert main(["slurm", "--config", str(CONFIG), *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {expected}")
    assert said.out == ""


def test_a_login_node_needs_no_tensorflow() -> None:
    script = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = sys.modules['horovod'] = None\n"
        "from horovod_train.main import main\n"
        f"sys.exit(main(['slurm', '--config', {str(CONFIG)!r}, '--time', '01:00:00']))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("#!/bin/bash\n")
