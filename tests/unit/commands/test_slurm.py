"""The batch scripts: what is asked of SLURM, what is said of it, and mistakes. They are run in tests/cluster."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from horovod_train.commands.cli import Parser
from horovod_train.commands.slurm import TEMPLATE, add_arguments, choose, merge_site_options, render
from horovod_train.main import main

PROJECT = Path(__file__).parents[3]
CONFIG = PROJECT / "configs" / "digits_convnet.yaml"
SHIPPED = PROJECT / "scripts" / "slurm" / "train.sbatch"
HOUR = ("--time", "01:00:00")


@pytest.fixture(autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the site's options would be: there are none, whatever this machine has."""
    folder = tmp_path_factory.mktemp("xdg")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    (folder / "horovod_train").mkdir()
    return folder / "horovod_train" / "slurm.yaml"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    assert main(["slurm", "--config", str(CONFIG), *words]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def renewed() -> str:
    """The shipped script, for any config, with its own first comment."""
    _, *lines = SHIPPED.read_text().splitlines()
    head = [line[2:] for line in itertools.takewhile(lambda line: not line.startswith("#SBATCH"), lines)]
    parser = Parser()
    add_arguments(parser)
    words = ["--config", "", "--tasks-per-node", "4", "--cpus-per-task", "4", "--time", "04:00:00"]
    arguments = parser.parse_args(words)
    merge_site_options(arguments, Path("there is none"))
    job = choose(arguments, "train", per_rank=1)
    return render(job, head=head, arguments=None, folder=None, venv=".venv")


def test_the_shipped_script_is_the_commands_own() -> None:
    """To renew it:

    PYTHONPATH=tests:tests/unit/commands python -c 'import test_slurm as t; t.SHIPPED.write_text(t.renewed())'
    """
    assert SHIPPED.read_text() == renewed()


def test_a_run_that_would_not_resume_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "--config", str(CONFIG), "--time", "01:00:00", "checkpoint.resume=never"]) == 2
    assert "checkpoint.resume: never would refuse each later start of the job. Leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("text", [SHIPPED.read_text(), TEMPLATE.read_text()], ids=["script", "template"])
def test_bash_can_parse_the_script_and_its_template(text: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("left", "age", "expected", "is_requeued"),
    [
        ("75", "now", 75, True),
        ("2", "now", 2, False),
        ("76", "now", 76, False),  # a file STOP would stop it again
        ("75", "1 hour ago", 1, False),  # of an earlier start
        (None, "now", 1, False),
    ],
)
def test_under_horovodrun_the_code_that_rank_0_left_counts(
    tmp_path: Path, left: str | None, age: str, expected: int, is_requeued: bool
) -> None:
    """horovodrun ends with 1 always."""
    end = tmp_path / "a run" / "logs" / "rank-0.end.json"
    leave = f"""echo '{{"ended": "stopped", "exit_code": {left}, "step": 7}}' > '{end}'; touch -d '{age}' '{end}'"""
    end.parent.mkdir(parents=True)
    saved = f"mkdir -p '{tmp_path}/a run/checkpoints/step-1'" if expected != 1 else "true"
    finished = run_job(tmp_path, "horovodrun", f"{saved}; {leave if left else 'true'}; exit 1")
    assert finished.returncode == expected, finished.stderr
    assert finished.stdout.startswith("requeued: ") == is_requeued


@pytest.mark.parametrize(
    ("code", "restarts", "body", "said"),
    [
        (75, 0, "mkdir -p '{run}/checkpoints/step-2'", "requeued: exit code 75"),
        (75, 1, "", "not requeued: exit code 75 without a new checkpoint"),
        (75, 1, "trap 'exit 75' USR1; kill -TERM $PPID; sleep 9 & wait", "requeued: exit code 75: preempted before"),
        # Its time is over before it has saved, also while ranks load TensorFlow, which a signal kills.
        (75, 1, "trap 'exit 75' USR1; kill -USR1 $PPID; sleep 9 & wait", "not requeued: exit code 75 without a new"),
        (138, 1, "kill -USR1 $PPID; sleep 9 & wait", "not requeued: exit code 138 without a new checkpoint"),
        (
            75,
            1,
            "trap \"mkdir -p '{run}/checkpoints/step-2'; exit 75\" USR1; kill -USR1 $PPID; sleep 9 & wait",
            "requeued: exit code 75: stopped on request, and saved",
        ),
        (73, 1, "", "requeued: exit code 73"),  # a rank of the earlier start still has the run directory
        (73, 0, "", ""),
        (76, 1, "mkdir -p '{run}/checkpoints/step-2'", ""),
        (1, 0, "mkdir -p '{run}/checkpoints/step-2'", "requeued: exit code 1"),  # as by a rank that was killed
        (1, 1, "", "not requeued: exit code 1 without a new checkpoint"),
        (87, 1, "mkdir -p '{run}/checkpoints/step-2'", "requeued: exit code 87"),
        (86, 1, "mkdir -p '{run}/checkpoints/step-2'", ""),
    ],
)
def test_a_job_is_requeued_where_another_start_helps(
    tmp_path: Path, code: int, restarts: int, body: str, said: str
) -> None:
    """Not if it has saved nothing and nothing asked it to stop: each start would end so, as by a short max_time."""
    old = tmp_path / "a run" / "checkpoints" / "step-1"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    body = body.format(run=tmp_path / "a run")
    finished = run_job(tmp_path, "mpirun", f"{body}\nexit {code}", restarts=restarts)
    assert finished.returncode == code, finished.stderr
    assert finished.stdout.partition(":")[0] == said.partition(":")[0]
    assert said in finished.stdout


@pytest.mark.parametrize(("left_s", "code"), [(200, 75), (3600, 9), (None, 9)])
def test_a_signal_that_comes_as_soon_as_a_short_job_begins_is_left_to_the_clock_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: int | None, code: int
) -> None:
    if left_s:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left_s))
    is_taken = "until grep -q 'ShdPnd:.0*$' /proc/$PPID/status; do :; done"
    body = f"trap 'exit 9' USR1; kill -USR1 $PPID; {is_taken}; [[ {code} == 75 ]] || {{ sleep 9 & wait; }}; exit 75"
    finished = run_job(tmp_path, "mpirun", body)
    assert finished.returncode == code, finished.stderr


@pytest.mark.parametrize(
    ("time", "notice_s"), [("00:01:00", 15), ("00:04:00", 60), ("00:10:00", 60), ("00:20:00", 120), ("4:00:00", 300)]
)
def test_the_signal_leaves_most_of_a_short_time_to_train(
    capsys: pytest.CaptureFixture[str], time: str, notice_s: int
) -> None:
    script, said = printed(capsys, "--time", time)
    assert f"#SBATCH --signal=B:USR1@{notice_s}\n" in script
    assert f"\nNOTICE_S={notice_s}\n" in script
    assert f"asked to save {notice_s} s before, then requeued if it has saved a checkpoint" in said


@pytest.mark.parametrize("name", ["täst", "runs/lr: 1e-3", "123", "x #1", "%a", "@b", "!c", 'it\'s "d"  '])
def test_a_saved_run_is_found_whatever_its_directory_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("LC_ALL", "C")  # as on many hosts of clusters
    end = '{"ended": "stopped", "exit_code": 75, "step": 7}'
    leave = f"mkdir -p checkpoints/step-2 logs; echo '{end}' > logs/rank-0.end.json; exit 1"
    for launch, folder in (("mpirun", tmp_path / "1"), ("horovodrun", tmp_path / "2")):
        where = folder / name
        where.mkdir(parents=True)
        finished = run_job(folder, launch, f"cd {shlex.quote(str(where))}; {leave}", name=name)
        assert finished.stdout.startswith("requeued: exit code "), finished.stderr
        assert finished.returncode == (75 if launch == "horovodrun" else 1)


def test_the_run_directory_follows_what_a_container_greets_with(tmp_path: Path) -> None:
    """Under another's standard input, as a container's without -i."""
    container = tmp_path / "enter"
    container.write_text('#!/bin/bash\necho "output_dir: welcome"\nexec "$@" < /dev/null\n')
    container.chmod(0o755)
    body = f"mkdir -p '{tmp_path}/a run/checkpoints/step-2'; exit 1"
    finished = run_job(tmp_path, "mpirun", body, run=[str(container), "python"])
    assert finished.stdout.startswith("requeued: exit code 1"), finished.stderr


def run_job(
    folder: Path, launch: str, body: str, *, restarts: int = 1, name: str = "a run", run: Sequence[str] = ("python",)
) -> subprocess.CompletedProcess[str]:
    """The shipped script, whose launcher is a program of the shell. The job is being preempted; its hosts answer."""
    commands = {
        launch: body,
        "srun": "[[ ${!#} == true ]] || echo here",
        "scontrol": f"echo JobState=RUNNING PreemptTime=2026; echo $1 >> {folder}/asked",
    }
    for command, text in commands.items():
        (folder / command).write_text(f"#!/bin/bash\n{text}\n")
        (folder / command).chmod(0o755)
    (folder / "bin").mkdir()
    (folder / "bin" / "activate").write_text(f"PATH={folder}:{Path(sys.executable).parent}:$PATH\n")
    script = SHIPPED.read_text().replace("\nLAUNCH=srun\n", f"\nLAUNCH={launch}\n")
    script = script.replace("\nRUN=(python)\n", f"\nRUN=({shlex.join(run)})\n")
    given = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1"}
    given["SLURM_RESTART_COUNT"] = str(restarts)
    finished = subprocess.run(
        ["bash", "-s", "--", "--config", str(CONFIG), "--output-dir", name],
        input=script,
        env={**os.environ, **given, "VENV": str(folder), "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    asked = (folder / "asked").read_text() if (folder / "asked").exists() else ""
    assert ("requeue" in asked) == finished.stdout.startswith("requeued: ")
    return finished


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


def test_a_python_of_conda_or_of_a_module_is_found_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefix" / "bin").mkdir(parents=True)
    for name in ("python", "srun"):
        (tmp_path / "prefix" / "bin" / name).write_text('#!/bin/bash\nprintf "%s\\n" "$0"\n')
        (tmp_path / "prefix" / "bin" / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path / "prefix"))
    script, _ = printed(capsys, "--time", "01:00:00", "--output-dir", "runs/a")
    given = {**os.environ, "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1"}
    finished = subprocess.run(["bash", "-s"], input=script, env=given, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == str(tmp_path / "prefix" / "bin" / "srun")


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["--config", "a.yaml", "seed=%a"], True),
        (["--config", "a.yaml", "seed=%a", "--output-dir", "runs/a"], True),
        (["--config", "%a.yaml", "--output-dir=runs/a"], True),
        (["--config", "a.yaml", "--output-dir", "runs/a b=%a"], False),
        (["--config", "a.yaml", "--output-dir=runs/%a"], False),
        (["--config", "a.yaml", "output_dir=runs/%a"], False),
        (["--config", "all.yaml", "%a.yaml"], False),
        (["--config", "digits_%a"], False),
    ],
)
def test_the_script_refuses_tasks_of_an_array_that_would_be_one_run(
    tmp_path: Path, words: list[str], is_refused: bool
) -> None:
    """sbatch --array=1-5 may be given to any script."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f"PATH={tmp_path}:$PATH\n")
    (tmp_path / "srun").write_text("#!/bin/bash\necho trains\n")
    (tmp_path / "srun").chmod(0o755)
    given = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_ID": "1"}
    given |= {"VENV": str(tmp_path), "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "1"}
    finished = subprocess.run(
        ["bash", "-s", "--", *words],
        input=SHIPPED.read_text(),
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == ((2, "") if is_refused else (0, "trains\n")), finished.stderr
    assert ("needs a run directory of its own: --output-dir runs/NAME-%a\n" in finished.stderr) == is_refused


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--partition", "short\necho here"),
        ("--account", "mine --exclusive"),
        ("--account", ""),
        ("--container", "apptainer exec\na.sif"),
        ("--modules", "cuda/12; touch made"),
        ("--gres", "gpu:4 --exclusive"),
        ("--mem", "64 G"),
        ("--sbatch", "--qos=x\n#SBATCH --exclusive"),
        ("--sbatch", "--qos x"),
        ("--sbatch", "qos=x"),
    ],
)
def test_what_would_become_another_line_of_the_script_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert main(["slurm", "--config", str(CONFIG), "--time", "01:00:00", option, value]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"argument {option}: expected " in said.err


def test_one_rank_for_each_gpu_and_the_choices_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    script, said = printed(capsys, "--nodes", "4", "--gpus-per-node", "8", "--time", "04:00:00")
    for line in ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=04:00:00", "--signal=B:USR1@300"):
        assert f"#SBATCH {line}\n" in script
    assert f"set -- --config {CONFIG} --output-dir runs/digits_convnet\n" in script
    assert "LAUNCH=srun\n" in script
    assert "ranks: 4 host(s) × 8 = 32, each with a GPU" in said
    assert "batch: 64 records over all ranks, 2 on each" in said


def test_where_sbatch_writes_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "what ranks print: slurm-digits_convnet-JOB.out, in the folder where sbatch is called\n"
    assert expected in printed(capsys, *HOUR)[1]
    words = ["--sbatch=--output=/logs/%x.%j", "--sbatch=--job-name=mine"]
    assert "what ranks print: /logs/mine.JOB\n" in printed(capsys, *HOUR, *words)[1]


def test_a_rank_on_several_gpus_gets_them_and_their_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    script, said = printed(capsys, "--gpus-per-node", "8", "--time", "04:00:00", "device.per_rank=2")
    for line in ("--ntasks-per-node=4", "--gpus-per-node=8", "--cpus-per-task=16"):
        assert f"#SBATCH {line}\n" in script
    assert "ranks: 1 host(s) × 4 = 4, each with 2 GPUs" in said
    on_cpus, _ = printed(capsys, "--tasks-per-node", "3", "--time", "04:00:00", "device.per_rank=2")
    assert "#SBATCH --ntasks-per-node=3\n" in on_cpus


def test_without_gpus_none_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks-per-node", "4", "--time", "00:20:00", "--partition", "short"]
    words += ["--container", "apptainer exec a.sif"]
    script, _ = printed(capsys, *words, "train.epochs=3", "--launch", "mpirun")
    assert "#SBATCH --gpus" not in script
    assert "#SBATCH --partition=short\n" in script
    assert "#SBATCH --signal=B:USR1@120\n" in script
    assert "\nRUN=(apptainer exec a.sif python)\n" in script
    assert "LAUNCH=mpirun\n" in script
    assert " train.epochs=3 " in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--time", "4h"], "slurm: argument --time: expected [D-]HH:MM:SS; received '4h'."),
        ([], "slurm: --time [D-]HH:MM:SS is required"),
        ([*HOUR, "epochs"], "argument 'epochs': expected section.key=value, or --config before the name of a config."),
        ([*HOUR, "--launch", "ssh"], "slurm: argument --launch: expected one of srun, srun-pmix, "),
        ([*HOUR, "--image", "nowhere"], "slurm: argument --image: expected a container's image, FILE.sif; received"),
        ([*HOUR, "seed=%a"], "%a is the number of a task of a job array; give --array, such as --array 1-5."),
        ([*HOUR, "--array", "all"], "slurm: argument --array: expected numbers of tasks such as 1-5"),
        ([*HOUR, "--array", "1-5", "seed=x%a"], "command line: seed: expected an int; received 'x1'"),
        (
            [*HOUR, "--array", "1-5", "seed=%a", "--output-dir", "runs/a"],
            "--array 1-5: all tasks would be one run, in runs/a; each task needs its own: --output-dir runs/NAME-%a.",
        ),
        ([*HOUR, "--sbatch", "--array=1-5"], "slurm: argument --sbatch: give --array=1-5 to this command itself"),
        ([*HOUR, "--image", str(CONFIG), "--container", "podman run a"], "--image and --container: both name"),
        ([*HOUR, "--gpus-per-node", "2", "--gres", "gpu:2"], "--gpus-per-node 2 and --gres gpu:2: both ask for GPUs"),
        ([*HOUR, "--sbatch", "--nodes=3"], "slurm: argument --sbatch: give --nodes=3 to this command itself"),
        (
            [*HOUR, "--sbatch", "--gpus-per-task=1", "--image", "train.sif"],
            "slurm: argument --sbatch: in place of --gpus-per-task=1, give --gpus-per-node or --gres to this command.",
        ),
        ([*HOUR, "--sbatch", "--gpus=4"], "slurm: argument --sbatch: in place of --gpus=4, give --gpus-per-node or"),
        ([*HOUR, "--sbatch=--gpus-per-socket=2"], "slurm: argument --sbatch: in place of --gpus-per-socket=2, give"),
        ([*HOUR, "--sbatch=--tasks-per-node=2"], "slurm: argument --sbatch: must not set --tasks-per-node"),
        ([*HOUR, "--sbatch", "--export=ALL"], "slurm: argument --sbatch: must not set --export, because"),
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
            "--gpus-per-node: GPUs of a host must be a multiple of device.per_rank (2); received 3.",
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


def options_of(script: str) -> list[str]:
    """What sbatch would take from a script's #SBATCH lines, which it splits as a shell does."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line)]


def test_further_options_of_sbatch_reach_it_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    comment = """--comment=it's $(date) "a" \\ #b"""
    words = ["--sbatch", "--qos=x", "--sbatch=--exclusive", "--sbatch", comment, "--mem", "64G", "--gres", "gpu:a100:4"]
    script, said = printed(capsys, *HOUR, *words, "device.per_rank=2")
    assert {"--qos=x", "--exclusive", comment, "--mem=64G", "--gres=gpu:a100:4"} < set(options_of(script))
    assert "--ntasks-per-node=2" in options_of(script)
    assert "#SBATCH --gpus-per-node" not in script
    assert "each with 2 GPUs" in said


def test_tasks_of_an_array_are_checked_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    script, said = printed(capsys, *HOUR, "--array", "1-5", "seed=%a", "--output-dir", "runs/sweep-%a")
    assert {"--array=1-5", "--job-name=sweep", "--output=slurm-%x-%A_%a.out"} < set(options_of(script))
    assert " seed=%a --output-dir runs/sweep-%a\n" in script
    assert "output: runs/sweep-%a" in said


def test_tasks_of_an_array_have_the_run_directories_of_their_config(capsys: pytest.CaptureFixture[str]) -> None:
    script, said = printed(capsys, *HOUR, "--array", "1-5", "output_dir=runs/sweep-%a")
    assert "--output-dir runs/sweep-%a\n" in script
    assert "sweep-1" not in script + said


def test_an_image_may_exist_on_the_cluster_only(capsys: pytest.CaptureFixture[str]) -> None:
    script, said = printed(capsys, *HOUR, "--image", "/shared/train.sif")
    assert "\nRUN=(apptainer exec /shared/train.sif python)\n" in script
    assert "image: /shared/train.sif is not on this host; it must be on those of the job\n" in said


def test_an_image_is_run_by_apptainer_with_the_gpus_and_modules_are_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    image = tmp_path / "my image.sif"
    image.touch()
    words = ["--image", str(image), "--gpus-per-node", "2", "--modules", "cuda/12", "--modules", "nccl/2"]
    script, _ = printed(capsys, *HOUR, *words)
    assert f"\nRUN=(apptainer exec --nv '{image}' python)\n" in script
    assert "\nmodule load cuda/12 nccl/2 || exit 2\n" in script
    assert "module" not in printed(capsys, *HOUR)[0]


SITE = """
partition: short
time: 12:00:00            # YAML would take it for a number
sbatch: [--qos=long, --constraint=ib]
modules: cuda/12
gres: gpu:a100:4
"""


def test_the_sites_options_are_defaults_and_the_script_says_which(
    capsys: pytest.CaptureFixture[str], site: Path
) -> None:
    site.write_text(SITE)
    script, said = printed(capsys)
    assert {"--partition=short", "--time=12:00:00", "--qos=long", "--constraint=ib", "--gres=gpu:a100:4"} < set(
        options_of(script)
    )
    for text in (script, said):
        assert f"rom {site}: partition=short, time=12:00:00, modules=cuda/12, gres=gpu:a100:4, sbatch=" in text


def test_the_command_line_wins_over_the_site(capsys: pytest.CaptureFixture[str], site: Path) -> None:
    site.write_text(SITE)
    words = ["--partition", "long", "--sbatch", "--qos=short", "--gpus-per-node", "2", "--modules", "rocm/6"]
    script, said = printed(capsys, *HOUR, *words)
    found = options_of(script)
    assert {"--partition=long", "--time=01:00:00", "--qos=short", "--constraint=ib", "--gpus-per-node=2"} < set(found)
    assert not {"--partition=short", "--qos=long", "--gres=gpu:a100:4"} & set(found)
    assert "module load rocm/6 " in script
    assert f"from {site}: sbatch=--constraint=ib\n" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("time: 01:00:00\npartion: a", ":2: partion: unknown option; did you mean partition"),
        ("nodes: many", ":1: nodes: expected a whole number of at least 1; received 'many'."),
        ("nodes: [1, 2]", ":1: nodes: expected one value."),
        ("nodes: 1\nnodes: 2", ":2: nodes is given twice; it was set at"),
        ("cpus-per-task: 1\ncpus_per_task: 2", ":2: cpus_per_task is given twice."),
        ("[nodes]", ":1: expected `option: value` lines; received ['nodes']."),
        ("sbatch: --export=ALL", ":1: sbatch: must not set --export, because the script depends on its own."),
        ("sbatch: [--qos=a, --gpus=4]", ":1: sbatch: in place of --gpus=4, give --gpus-per-node or --gres to this"),
        ("nodes: {", ": not valid YAML"),
    ],
)
def test_mistakes_in_the_sites_file_name_it_and_the_line(
    capsys: pytest.CaptureFixture[str], site: Path, text: str, expected: str
) -> None:
    site.write_text(text)
    assert main(["slurm", "--config", str(CONFIG), *HOUR]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {site}")
    assert expected in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_a_login_node_needs_no_tensorflow() -> None:
    script = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = sys.modules['horovod'] = None\n"
        "from horovod_train.main import main\n"
        f"sys.exit(main(['slurm', '--config', {str(CONFIG)!r}, '--time', '01:00:00']))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("#!/bin/bash\n")
