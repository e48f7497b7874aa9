"""Runs that end before their end: together, saying why, and ready to go on where they were."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
from conftest import (
    HANGS_AFTER_S,
    PROJECT,
    kill_all,
    launcher_command,
    metrics_of,
    rank_environment,
    summary_of,
    train,
    warm_python,
)

from horovod_train.checkpoint.layout import open_checkpoint
from horovod_train.checkpoint.tensors import read_arrays
from horovod_train.data.audit import audit

CONFIG = """
data: {{train: {data}/train, eval: {data}/eval, global_batch_size: 96}}
model: user_models:long_run
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
metrics: [{{name: sparse_categorical_accuracy, options: {{name: accuracy}}}}]
optimizer: adam
lr_schedule: {{base_lr: 0.01, decay: {{name: cosine}}}}
train: {{epochs: 20, steps_per_call: 5, ema_decay: 0.99}}
log: {{every_steps: 15, tensorboard: false}}
eval: {{every_epochs: null}}
checkpoint: {{every_steps: 20, every_epochs: null}}
"""
STEPS_PER_EPOCH = 15


@pytest.fixture(scope="session")
def config(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "leaving.yaml"
    path.write_text(CONFIG.format(data=digits))
    return path


class Job:
    """A run under a launcher that is looked at, and disturbed, while it goes on."""

    def __init__(self, launcher: str, np: int, words: list[str], log: Path) -> None:
        command = [*launcher_command(launcher, np), *warm_python(), "-m", "horovod_train.main", *words]
        self.log, self._file, self._np = log, log.open("w"), np
        JOBS.append(self)
        self._logs = Path(words[words.index("--output-dir") + 1]) / "logs"
        environment = rank_environment() | {"PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, stdout=self._file, stderr=self._file
        )

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, by rank, once the run has introduced them."""
        self.wait_until(self.has_said("rank(s) on"), "a start")
        logs = [(self._logs / f"rank-{rank}.log").read_text() for rank in range(self._np)]
        return [psutil.Process(int(re.findall(r", process (\d+) on ", log)[-1])) for log in logs]

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = HANGS_AFTER_S) -> None:
        limit = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > limit:
                self.end()
                pytest.fail(f"{what} did not happen:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.01)

    def has_said(self, words: str) -> Callable[[], bool]:
        return lambda: words in self.log.read_text()

    def wait(self, timeout_s: float = HANGS_AFTER_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"still there after {timeout_s} s:\n{self.log.read_text()[-3000:]}")
        finally:
            self._file.close()

    def end(self) -> None:
        kill_all(self.process)
        self.process.wait()


JOBS: list[Job] = []


@pytest.fixture(autouse=True)
def end_of_jobs() -> Iterator[None]:
    """Where a test fails, a job may still go on."""
    yield
    while JOBS:
        JOBS.pop().end()


def undisturbed(config: Path, run_dir: Path, np: int, *words: str, steps: int) -> str:
    launcher = "mpirun" if np > 1 else "none"
    finished = train(["--config", config, "--output-dir", run_dir, *words], launcher=launcher, np=np)
    assert finished.returncode == 0, finished.text
    assert summary_of(run_dir)["steps"] == steps
    return str(summary_of(run_dir)["weights_sha256"])


@pytest.mark.long
@pytest.mark.parametrize(
    "names", [("save",), pytest.param(("first compile", "step", "evaluation", "save"), marks=pytest.mark.exhaustive)]
)
def test_sigterm_to_one_rank_at_any_moment_saves_and_the_run_goes_on_bit_for_bit(
    config: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """One run, stopped at these moments, and each time started again."""
    run_dir, rng = tmp_path / "stopped", random.Random(len(names))
    marker = tmp_path / "evaluating"
    seconds = 0.1 if "evaluation" in names else 0
    slow = f"model={{name: user_models:long_run, options: {{marker: {marker}, seconds: {seconds}}}}}"
    common = [slow, "deterministic=true", "train.epochs=8", "eval.every_steps=60", "checkpoint.every_steps=10"]
    common += ["hooks=[user_hooks:hold_saves_from_60]"]
    expected = undisturbed(config, tmp_path / "whole", 2, *common, steps=120)

    root_log = run_dir / "logs" / "rank-0.log"

    def step() -> int:
        rows = metrics_of(run_dir, "train") if (run_dir / "metrics.jsonl").exists() else []
        return int(rows[-1]["step"]) if rows else 0

    moments: dict[str, Callable[[Job], Callable[[], bool]]] = {
        # After the first vote: ranks that leave there have done nothing that could be saved.
        "first compile": lambda job: lambda: root_log.exists() and " phase compile" in root_log.read_text(),
        "step": lambda job: lambda: step() > 20,
        "evaluation": lambda job: marker.exists,
        "save": lambda job: (run_dir / "is-held").exists,
    }
    for name in names:
        log, moment = tmp_path / f"{name}.log", moments[name]
        marker.unlink(missing_ok=True)
        if name == "save":
            run_dir.mkdir(exist_ok=True)
            (run_dir / "hold").touch()
        job = Job("mpirun", 2, ["--config", str(config), "--output-dir", str(run_dir), *common], log)
        job.wait_until(moment(job), name)
        rng.choice(job.ranks()).send_signal(signal.SIGTERM)
        (run_dir / "hold").unlink(missing_ok=True)
        assert job.wait() == 75, log.read_text()
        assert "(SIGTERM); saved; to resume, start it again" in log.read_text()
        assert summary_of(run_dir)["ended"] == "SIGTERM"
    finished = train(["--config", config, "--output-dir", run_dir, *common], launcher="mpirun", np=2)
    assert finished.returncode == 0, finished.text
    assert summary_of(run_dir)["weights_sha256"] == expected
    assert [row["step"] for row in metrics_of(run_dir, "eval")] == [60, 120]
    rows, whole = (metrics_of(path, "train") for path in (run_dir, tmp_path / "whole"))
    assert len({row["step"] for row in rows}) == len(rows)
    assert all(math.isfinite(row["loss"]) for row in rows)
    # Figures of the steps since the line before, whatever stopped between; a stop adds a line of its own.
    losses, undisturbed_losses = ({row["step"]: row["loss"] for row in each} for each in (rows, whole))
    assert undisturbed_losses.items() <= losses.items()


def steps_said(text: str) -> tuple[int | None, int]:
    """The step that a start of a run began at, None before it has said so, and that of its newest metrics, or 0."""
    began = re.search(r"starting from|resumed from \S+ at step (\d+)", text)
    shown = re.findall(r"train step (\d+) ", text)
    return int(began[1] or 0) if began else None, int((shown or [0])[-1])


def is_in_save(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".step-*.partial"))


def is_held_in_save(root: psutil.Process, run_dir: Path) -> bool:
    """A save takes milliseconds, so root is frozen as soon as one is seen; and goes on if that was too late."""
    if is_in_save(run_dir):
        root.suspend()
        if is_in_save(run_dir):
            return True
        root.resume()
    return False


def kill_one(job: Job, np: int, run_dir: Path, moment: str, goal: int, rng: random.Random) -> bool:
    """Kills a rank on the way up, in a step or in a save, not before step `goal`; whether a save was under way."""
    ranks = job.ranks()
    if moment == "start":
        time.sleep(rng.uniform(0, 1))  # reading, building, compiling: the first step comes later
    else:
        job.wait_until(lambda: steps_said(job.log.read_text())[1] >= goal, f"step {goal}")
    if moment == "step":
        time.sleep(rng.uniform(0, 0.05))  # not only where a line has just been written
    if moment == "save":
        job.wait_until(lambda: is_held_in_save(ranks[0], run_dir), "a save")
    ranks[rng.randrange(np)].kill()
    in_save = is_in_save(run_dir)
    job.wait()
    _, left = psutil.wait_procs(ranks, timeout=HANGS_AFTER_S)
    assert not left, "ranks are left"
    return in_save


@pytest.mark.parametrize("np", [pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments_a_run_ends_as_if_it_had_not_been(config: Path, tmp_path: Path, np: int) -> None:
    """`make test-faults ROUNDS=25` does it more often."""
    rounds, rng = int(os.environ.get("ROUNDS", "1")), random.Random(f"{os.environ.get('FAULT_SEED', '1')} at {np}")
    epochs = rounds + 3  # one to a kill, between one that leaves checkpoints and two that a late kill does not outlast
    words = [f"train.epochs={epochs}", "log.every_steps=3", "checkpoint.every_steps=4", "data.audit=true"]
    words += ["deterministic=true"] if np > 2 else []
    expected = undisturbed(config, tmp_path / "whole", np, *words, steps=epochs * STEPS_PER_EPOCH)
    moments = ["save"] * (rounds // 5) + ["start"] * (rounds // 6)
    moments += ["step"] * (rounds - len(moments))
    rng.shuffle(moments)

    run_dir, log, reached = tmp_path / "killed", tmp_path / "log", 0
    landed: Counter[str] = Counter()
    seen: list[str] = []
    for epoch, moment in enumerate(moments, 1):
        goal = epoch * STEPS_PER_EPOCH + rng.randrange(STEPS_PER_EPOCH)
        job = Job("mpirun", np, ["--config", str(config), "--output-dir", str(run_dir), *words], log)
        in_save = kill_one(job, np, run_dir, moment, goal, rng)
        said = log.read_text()
        assert job.process.returncode not in (0, 75), said
        assert "damaged" not in said
        began, shown = steps_said(said)
        seen.append(f"epoch {epoch}, {moment}: began at {began}, killed after {shown}{', in a save' * in_save}")
        # Of two saves, four steps apart, only the newer can be under way.
        assert began is None or began >= reached - 8, "\n".join(seen)
        reached = shown or reached
        landed["in training"] += shown > 0
        landed["in a save"] += shown > 0 and in_save
    told = "\n".join([f"of {rounds}: {dict(landed)}", *seen])
    print(told)
    assert landed["in training"] >= (rounds + 1) // 2, told
    assert landed["in a save"] >= rounds // 6, told
    assert rounds - landed["in training"] >= rounds // 12, told

    finished = train(["--config", config, "--output-dir", run_dir, *words], launcher="mpirun", np=np)
    assert finished.returncode == 0, finished.text
    began, _ = steps_said(finished.stdout)
    assert began is not None, told
    assert began >= reached - 8, told
    assert summary_of(run_dir)["weights_sha256"] == expected, told
    read = [(each.epoch, each.is_whole, each.missing, each.twice) for each in audit(str(run_dir))]
    assert read == [(epoch, True, [], []) for epoch in range(epochs)], told
    rows, rows_expected = (metrics_of(path, "train") for path in (run_dir, tmp_path / "whole"))
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in rows_expected]


def test_nan_on_one_rank_stops_all_at_the_same_step(config: Path, tmp_path: Path) -> None:
    model = "model={name: user_models:troubled, options: {step: 7, on_rank: 1, what: nan}}"
    words = ["--config", config, "--output-dir", tmp_path / "run", model, "train.epochs=2"]
    finished = train(words, launcher="mpirun", np=2)
    assert finished.returncode == 1
    assert finished.stderr.count("Model diverged with loss = NaN at step 7: loss or gradients are not finite on") == 1
    assert " not finite on rank 1 (" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_weight_changed_on_one_rank_is_named(config: Path, tmp_path: Path) -> None:
    model = "model={name: user_models:troubled, options: {step: 7, on_rank: 1, what: tamper}}"
    words = ["--config", config, "--output-dir", tmp_path / "run", model, "train.epochs=2"]
    finished = train([*words, "train.check_agreement_every_steps=5"], launcher="mpirun", np=2)
    assert finished.returncode == 86
    assert "ranks disagree at step 10 on model/at/gain: rank 1 (" in finished.stderr


@pytest.mark.long
def test_without_the_check_a_changed_weight_goes_unnoticed(config: Path, tmp_path: Path) -> None:
    """The negative of the above: nothing else would have found it."""
    model = "model={name: user_models:troubled, options: {step: 7, on_rank: 1, what: tamper}}"
    words = [
        "--config",
        config,
        "--output-dir",
        tmp_path / "run",
        model,
        "train.epochs=1",
        "checkpoint.every_steps=null",
    ]
    words = [*words, "train.check_agreement_every_steps=null", "train.max_steps=10", "log.every_steps=5"]
    finished = train(words, launcher="mpirun", np=2)
    assert finished.returncode == 86  # by the save at the end, which always looks
    assert [row["step"] for row in metrics_of(tmp_path / "run", "train")] == [5, 10]


def until_its_time_is_over(words: Sequence[object], folder: Path) -> tuple[Path, dict[str, Any]]:
    """Runs with max_time, twice as much each time until a start leaves time for a step. → run directory, summary."""
    for max_time_s in (4 * 2**doubled for doubled in range(7)):
        run_dir = folder / f"{max_time_s} s"
        timed = train(
            [*words, f"train.max_time={max_time_s}", "--output-dir", run_dir], timeout_s=max_time_s + HANGS_AFTER_S
        )
        assert timed.returncode == 75, timed.text
        if summary_of(run_dir)["steps"]:
            return run_dir, summary_of(run_dir)
    pytest.fail(f"no step in {max_time_s} s:\n{timed.text}")


def test_the_stop_file_and_max_time_end_a_run_to_be_started_again(config: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "STOP").touch()
    stopped = train(["--config", config, "--output-dir", tmp_path / "a", "hooks=[user_hooks:terminated_at_exit]"])
    assert stopped.returncode == 76, stopped.text  # though a second signal comes while the process ends
    assert f"(STOP file); to resume, remove {tmp_path / 'a' / 'STOP'} and start it again" in stopped.stdout
    assert summary_of(tmp_path / "a")["ended"] == "STOP file"
    assert metrics_of(tmp_path / "a", "train") == []  # nothing was done that could be told
    often = "checkpoint={every_steps: null, every_epochs: null, every_minutes: 0.02, keep: 1000}"
    words = ["--config", config, "train.epochs=100000", often]
    run_dir, summary = until_its_time_is_over(words, tmp_path)
    assert summary["ended"] == "walltime"
    # It leaves as soon as no more is left than what it keeps, and that is twice what it has measured of itself.
    kept = summary["at_walltime"]
    assert kept["left_s"] <= kept["kept_s"]
    assert (
        kept["kept_s"]
        >= 2 * (kept["save_s"] + kept["write_s"] + kept["time_to_safe_step_s"] + kept["between_votes_s"]) - 0.01
    )
    saved = len(list((run_dir / "checkpoints").glob("step-*")))
    assert 1 <= saved <= 2 + summary["seconds"] / 1.2  # every 1.2 s, and at the end
    if saved > 1:
        assert min(kept["save_s"], kept["write_s"]) > 0
    assert metrics_of(run_dir, "train")[-1]["step"] == summary["steps"]


@pytest.mark.parametrize("exit_code", [0, pytest.param(76, marks=pytest.mark.long)])
def test_threads_that_never_end_are_named_and_end_with_the_program(
    config: Path, tmp_path: Path, exit_code: int
) -> None:
    """And processes; those that end in time are waited for, and an executor that has nothing to do is no trouble."""
    run, notes = tmp_path / "run", tmp_path / "notes"
    run.mkdir()
    notes.mkdir()
    if exit_code:
        (run / "STOP").touch()
    leaves = f"callbacks=[{{name: user_callbacks:LeavesThreads, options: {{notes: {notes}}}}}]"
    words = ["--config", config, "--output-dir", run, "train.max_steps=5", leaves]
    finished = train(words, launcher="mpirun", np=2, fresh=True)
    assert finished.returncode == exit_code, finished.text
    left = re.findall(r"rank (\d) \(.*\): all was done 3 s ago, but (.+) of your code still runs", finished.stderr)
    (both, uploader) = sorted(left)
    assert (both[0], sorted(both[1].split(", "))) == ("0", ["process 'cache'", "process 'converter'"]), finished.text
    assert uploader == ("1", "thread 'uploader'")
    assert "Exception ignored" not in finished.stderr
    assert {file.name for file in notes.iterdir()} == {"0", "1"}
    assert all(f"exit code {exit_code}" in file.read_text() for file in (run / "logs").glob("rank-?.log"))


@pytest.mark.long
def test_a_last_evaluation_that_is_interrupted_is_made_up_for_and_a_second_sigint_ends_a_stuck_call(
    config: Path, tmp_path: Path
) -> None:
    """What is saved there are the trained weights, though the evaluation was of their averages."""
    marker = tmp_path / "evaluating"
    slow = f"model={{name: user_models:long_run, options: {{marker: {marker}, seconds: SECONDS}}}}"
    short = ["train.max_steps=5", "train.steps_per_call=1", "eval.batch_size_per_rank=24"]
    averaged = [
        "train.ema_decay=null",
        "optimizer={name: adam, options: {use_ema: true}}",
        "callbacks=[SwapEMAWeights]",
    ]
    best = ["checkpoint.best={metric: loss}", "eval.every_steps=5"]
    words = ["--config", str(config), "--output-dir", str(tmp_path / "run"), *short, *averaged, *best]
    job = Job("none", 1, [*words, slow.replace("SECONDS", "0.2")], tmp_path / "log")
    job.wait_until(marker.exists, "the evaluation")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.log.read_text()
    assert summary_of(tmp_path / "run")["eval"] == {}
    saved = read_arrays(open_checkpoint(str(tmp_path / "run"), "--checkpoint"))
    averages = {name.removeprefix("ema/"): array for name, array in saved.items() if name.startswith("ema/")}
    assert averages
    assert all(np.abs(saved[f"model/{path}"] - average).max() > 1e-3 for path, average in averages.items())
    marker.unlink()
    stuck = Job("none", 1, [*words, slow.replace("SECONDS", "60")], tmp_path / "log")
    stuck.wait_until(marker.exists, "the evaluation")
    stuck.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        stuck.process.wait(1)
    stuck.process.send_signal(signal.SIGINT)
    assert stuck.wait() == 130  # not 75, which it would be once the evaluation has come to its end
    assert not (tmp_path / "run" / "checkpoints" / "best").exists()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:  # as if killed after the evaluation, before a save
        file.write('{"step": 5, "epoch": 0, "split": "eval", "seconds": 1.0, "loss": 9.0}\n')
    finished = train([*words, slow.replace("SECONDS", "0")])
    assert finished.returncode == 0, finished.text
    assert summary_of(tmp_path / "run")["eval"]
    assert len(metrics_of(tmp_path / "run", "eval")) == 1
    link = tmp_path / "run" / "checkpoints" / "best"  # the checkpoint of a run that stopped before it was evaluated
    assert os.readlink(link) == "step-000000005"
    found = open_checkpoint(str(link), "--checkpoint").facts.best
    assert found is not None
    assert found.step == 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_rank_whose_clock_is_wrong_is_named_and_does_not_end_the_run(
    config: Path, tmp_path: Path, hours: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('SLURM_PROCID') == '1':\n"
        f"    right = time.time; time.time = lambda: right() + {hours * 3600}\n"
    )
    environment = rank_environment() | {"SLURM_JOB_END_TIME": str(int(time.time()) + 1800), "SLURM_JOB_ID": "7"}
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    words = ["--config", config, "train.max_steps=30", "--output-dir", tmp_path / "run"]
    finished = train(words, launcher="srun", np=3, environment=environment)
    assert finished.returncode == 0, finished.text
    order = "ahead of" if hours > 0 else "behind"
    assert re.search(rf"warning: the clock of rank 1 \(\S+\) is 3[56]\d\d s {order} the others", finished.text)
    assert summary_of(tmp_path / "run")["seconds"] < 3000


@pytest.mark.long
def test_an_end_by_callbacks_is_saved_and_stays_the_end(config: Path, tmp_path: Path) -> None:
    """What on_train_end changes is in the checkpoint, once; and a run that a callback has ended does not train on."""
    run, stops = tmp_path / "run", "{name: user_callbacks:StopsAfter, options: {epoch: 0}}"
    words = ["--config", config, "--output-dir", run, "checkpoint.every_epochs=1", "train.ema_decay=null"]
    summaries = []
    for _ in range(2):
        finished = train([*words, f"callbacks=[user_callbacks:Halves, {stops}]"])
        assert finished.returncode == 0, finished.text
        summaries.append(summary_of(run))
    first, again = summaries
    assert (first["steps"], first["ended"]) == (STEPS_PER_EPOCH, "a callback has set model.stop_training")
    for name in ("steps", "ended", "weights_sha256"):
        assert again[name] == first[name]
    exported = train(["export", run, "--out", tmp_path / "model.keras"])
    assert exported.returncode == 0, exported.text
    total = hashlib.sha256()
    for weight in keras.saving.load_model(tmp_path / "model.keras", compile=False).get_weights():
        total.update(weight.tobytes())
    assert total.hexdigest() == first["weights_sha256"]
    words += ["callbacks=[user_callbacks:Halves]", "train.max_steps=17", "hooks=[user_hooks:stop_at_17]"]
    saved = []
    for exit_code in (75, 0):  # stopped at its last step; then only the end is left to do
        finished = train([*words, "data.eval=[]"])
        assert (summary_of(run)["steps"], finished.returncode) == (17, exit_code), finished.text
        arrays = read_arrays(open_checkpoint(str(run), "--checkpoint"))
        saved.append({name: array for name, array in arrays.items() if re.fullmatch("model/.*kernel", name)})
    stopped, ended = saved
    assert stopped
    for name, kernel in stopped.items():
        np.testing.assert_array_equal(ended[name], kernel / 2)


@pytest.mark.long
def test_what_hooks_change_at_the_end_is_changed_once(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--config", config, "--output-dir", run, "train.max_steps=6", "hooks=[user_hooks:halves_at_end]"]
    ends = []
    for _ in range(2):
        finished = train(words)
        assert finished.returncode == 0, finished.text
        arrays = read_arrays(open_checkpoint(str(run), "--checkpoint"))
        kernels = {name: array.tolist() for name, array in arrays.items() if re.fullmatch("model/.*kernel", name)}
        ends.append((summary_of(run)["weights_sha256"], kernels))
    assert ends[0] == ends[1]


@pytest.mark.exhaustive
def test_a_rate_that_a_callback_sets_survives_resumes_and_a_new_one_in_the_config_wins(
    config: Path, tmp_path: Path
) -> None:
    words = [
        "--config",
        config,
        "lr_schedule={base_lr: 0.08, decay: constant}",
        "callbacks=[user_callbacks:HalvesTheRate]",
    ]
    words += ["log.every_steps=5", "checkpoint.every_steps=5", "data.eval=[]"]

    def rates(run: Path, *ends: int, more: Sequence[str] = ()) -> list[float]:
        for end in ends:
            finished = train([*words, f"train.max_steps={end}", *more, "--output-dir", run])
            assert finished.returncode == 0, finished.text
        return [row["learning_rate"] for row in metrics_of(run, "train")]

    whole = rates(tmp_path / "whole", 35)
    assert whole == pytest.approx([0.08] * 3 + [0.04] * 3 + [0.02])
    assert rates(tmp_path / "resumed", 15, 20, 35) == whole
    assert rates(tmp_path / "resumed", 40, more=["lr_schedule.base_lr=0.5"])[-1] == pytest.approx(0.5)


@pytest.mark.long
def test_early_stopping_by_patience_and_by_target(config: Path, tmp_path: Path) -> None:
    words = ["--config", config, "eval.every_epochs=1", "lr_schedule.base_lr=0.0", "early_stopping.patience=2"]
    finished = train([*words, "--output-dir", tmp_path / "patience"])
    assert finished.returncode == 0, finished.text
    summary = summary_of(tmp_path / "patience")
    assert summary["epochs"] == 3
    assert summary["ended"].startswith("early stopping: loss has not been better than")
    again = train([*words, "--output-dir", tmp_path / "patience"])
    assert again.returncode == 0, again.text
    same = summary_of(tmp_path / "patience")
    for name in ("epochs", "ended", "train", "eval", "weights_sha256"):
        assert same[name] == summary[name]
    assert summary["eval"]["loss"] > 0
    words = ["--config", config, "eval.every_epochs=1", "early_stopping={metric: accuracy, mode: max, target: 0.5}"]
    best = "checkpoint.best={metric: accuracy, mode: max}"
    finished = train([*words, best, "--output-dir", tmp_path / "target"])
    assert finished.returncode == 0, finished.text
    summary = summary_of(tmp_path / "target")
    assert summary["ended"].startswith("target reached: accuracy ")
    assert summary["epochs"] < 20
    assert summary["eval"]["accuracy"] >= 0.5


@pytest.mark.long
def test_steps_of_the_last_line_count_in_the_next_one_of_a_run_that_goes_on(config: Path, tmp_path: Path) -> None:
    lines = {}
    for name, stops in (("whole", [9]), ("prolonged", [5, 9])):
        for steps in stops:
            words = ["log.every_steps=4", "train.steps_per_call=1", f"train.max_steps={steps}", "--output-dir"]
            finished = train(["--config", config, "lr_schedule.decay.name=constant", *words, tmp_path / name])
            assert finished.returncode == 0, finished.text
        lines[name] = {row["step"]: row["loss"] for row in metrics_of(tmp_path / name, "train")}
    assert {*lines["prolonged"]} - {*lines["whole"]} == {5}
    assert all(lines["prolonged"][step] == loss for step, loss in lines["whole"].items())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose checkpoints lie on a disk of 20 MB."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield tmp_path / "run"
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
def test_a_disk_that_fills_up_does_not_end_training_and_spares_the_last_good_checkpoint(
    config: Path, small_disk: Path
) -> None:
    """Checkpoints of 9.5 MB: not all that are to be kept fit."""
    model = "model={name: user_models:small, options: {hidden: 1500}}"
    words = ["--config", config, "--output-dir", small_disk, model, "optimizer={name: sgd, options: {momentum: 0.9}}"]
    finished = train([*words, "checkpoint={every_steps: 10, max_failed_saves: null}", "train.max_steps=50"])
    assert finished.returncode == 1
    assert "the last checkpoint could not be saved" in finished.stderr
    assert "No space left on device" in finished.stdout
    assert [row["step"] for row in metrics_of(small_disk, "train")] == [15, 30, 45, 50]
    assert "damaged" not in finished.stdout
    again = train([*words, "train.max_steps=10", "data.eval=[]"])  # nothing new to save
    assert "resumed from" in again.stdout
    assert again.returncode == 0, again.text


@pytest.mark.long
def test_a_run_that_cannot_save_ends_on_the_rank_that_writes_and_is_explained_so(config: Path, tmp_path: Path) -> None:
    words = ["--config", config, "--output-dir", tmp_path / "run", "train.epochs=1000", "train.steps_per_call=5"]
    saving = ["hooks=[user_hooks:block_checkpoints]", "checkpoint.every_steps=5", "checkpoint.max_failed_saves=2"]
    finished = train([*words, *saving], launcher="mpirun", np=2)
    assert finished.returncode == 1, finished.text
    (line,) = [line for line in finished.stderr.splitlines() if "error: " in line]
    assert re.search(r"rank 0 \(.*\): \d+ saves in a row have failed \(checkpoint\.max_failed_saves\): the check", line)
    assert "File exists" in line
    assert "Traceback" not in finished.stderr
    explained = json.loads(train(["explain", tmp_path / "run", "--json"]).stdout)
    assert (explained["state"], explained["rank"], explained["followed"]) == ("failed", 0, [1])


@pytest.mark.long
def test_a_frozen_rank_of_a_run_is_named_and_the_job_ends(config: Path, tmp_path: Path) -> None:
    words = ["--config", str(config), "--output-dir", str(tmp_path / "run"), "train.epochs=100000", "log.every_steps=5"]
    limits = ["watch.warn_after_s=5", "watch.stop_after_s=10"]
    job = Job("mpirun", 3, [*words, *limits], tmp_path / "log")
    job.wait_until(job.has_said("train step 20 "), "20 steps")
    ranks = job.ranks()
    ranks[2].suspend()
    assert job.wait() == 87, job.log.read_text()
    said = job.log.read_text()
    assert "rank 2 (" in said
    assert "has sent no heartbeat for" in said
    assert "2 ranks wait for it" in said
    _, left = psutil.wait_procs(ranks, timeout=HANGS_AFTER_S)
    assert not left
    explained = train(["explain", tmp_path / "run"])
    assert explained.returncode == 1
    assert "rank 2" in explained.stdout


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("horovodrun", marks=pytest.mark.exhaustive)])
def test_a_rank_that_fails_says_why_and_the_others_point_at_it(config: Path, tmp_path: Path, launcher: str) -> None:
    model = "model={name: user_models:troubled, options: {step: 7, on_rank: 1, what: raise}}"
    words = ["--config", config, "--output-dir", tmp_path / "run", model]
    finished = train(words, launcher=launcher, np=2)
    assert finished.returncode == 1
    assert "the reactor is on fire" in finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if "error: " in line]
    assert re.search(r"error: rank 1 \(.*\): .* is on fire \(at .*/user_models\.py:\d+\); the traceback is", line)
    assert "reason = fit(" not in finished.stderr
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert "the reactor is on fire" in log
    assert "reason = fit(" in log
    explained = train(["explain", tmp_path / "run"])
    assert explained.returncode == 1
    assert "rank 1" in explained.stdout
    assert "the reactor is on fire" in explained.stdout
