"""For `bench scaling`: one measured run of the trainer, from its own files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from horovod_train.config.loader import dump
from horovod_train.config.rules import resolve
from horovod_train.config.settings import CheckpointConfig, Config, EarlyStoppingConfig, EvalConfig
from horovod_train.distributed.launch.local import Way, launch_command, start_program, wait_for_all
from horovod_train.distributed.launch.tuning import sees_gpu
from horovod_train.errors import RunError
from horovod_train.output.rank_log_reader import read_stories

SHARES = ("input", "compute", "exchange")
_LINES = 10
"""Lines of metrics in a run; the first fifth of them is not counted."""
_TIMEOUT_S = 3600.0


class Measured(NamedTuple):
    """examples_per_s: over all ranks. shares: of all ranks' time in steps; {} for a short run.

    first_step_s: from the launch on.
    """

    examples_per_s: float
    shares: dict[str, float]
    first_step_s: float

    def line(self) -> str:
        return f"{self.examples_per_s:,.0f} examples/s, first step after {self.first_step_s:.1f} s"


def measured_config(config: Config, steps: int) -> Config:
    """Return the config of a run that does nothing but train for so many steps."""
    train = dataclasses.replace(config.train, max_steps=steps, epochs=None, max_time=None)
    if config.train.epochs is not None:
        train = dataclasses.replace(train, epochs=10**6)  # epochs of schedules stay epochs
    return dataclasses.replace(
        config,
        train=train,
        data=dataclasses.replace(config.data, eval=()),
        eval=EvalConfig(),
        early_stopping=EarlyStoppingConfig(),
        checkpoint=CheckpointConfig(every_epochs=None, resume="never"),
        log=dataclasses.replace(config.log, every_steps=max(1, steps // _LINES), tensorboard=False, progress="plain"),
    )


def measure(config: Config, ranks: int, way: Way | None) -> Measured:
    """Run it once. way None: as so many runs of one rank at the same time, each with the batch and cores of one rank.

    Raises RunError with the run's message if a run fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        if way is not None:
            launcher = [] if ranks == 1 else launch_command(way, ranks)
            return _measure_all([_start(config, Path(folder, "run"), launcher)])[0]
        one_rank_config = _config_of_one_rank(config, ranks)
        runs = [_start(one_rank_config, Path(folder, f"run-{n}"), [], _only_gpu(n)) for n in range(ranks)]
        measured = _measure_all(runs)
    return Measured(
        sum(each.examples_per_s for each in measured),
        {phase: statistics.fmean(each.shares[phase] for each in measured) for phase in measured[0].shares},
        max(each.first_step_s for each in measured),
    )


class _Run(NamedTuple):
    process: subprocess.Popen[str]
    run_dir: Path
    began: float


def _config_of_one_rank(config: Config, ranks: int) -> Config:
    """Return the config of one of so many runs, which has the batch and the threads of one of so many ranks."""
    batch = resolve(config, ranks).data.global_batch_size
    assert batch is not None
    data = dataclasses.replace(config.data, global_batch_size=-(-batch // ranks), batch_size_per_rank=None)
    threads = config.device.intra_op_threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    return dataclasses.replace(config, data=data, device=dataclasses.replace(config.device, intra_op_threads=threads))


def _only_gpu(number: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(number)} if sees_gpu() else {}


def _start(
    config: Config, run_dir: Path, launcher: Sequence[str], environment: Mapping[str, str] | None = None
) -> _Run:
    run_dir.mkdir()
    file = run_dir.with_suffix(".yaml")
    with file.open("x", encoding="utf-8") as opened:
        opened.write(dump(config))
    train = [sys.executable, "-m", "horovod_train.main", "--config", str(file), "--output-dir", str(run_dir)]
    return _Run(start_program([*launcher, *train], environment), run_dir, time.time())


def _measure_all(runs: Sequence[_Run]) -> list[Measured]:
    """Wait for runs, which have started at the same time."""
    if problem := wait_for_all([run.process for run in runs], _TIMEOUT_S):
        errors = re.findall(r"error: .*", problem)
        raise RunError(f"bench: a run failed: {errors[0] if errors else problem}")
    return [_read(run) for run in runs]


def _read(run: _Run) -> Measured:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").open(encoding="utf-8")]
    counted = [row for row in rows if row["split"] == "train" and "examples_per_s" in row][_LINES // 5 :]
    if not counted:
        raise RunError("bench: a run was too short to measure. Give more --steps.")
    with_shares = [row for row in counted if "input_share" in row]
    shares = {phase: statistics.fmean(row[f"{phase}_share"] for row in with_shares) for phase in SHARES if with_shares}
    compiled = next(
        datetime.fromisoformat(entry.time).timestamp()
        for entry in read_stories(run.run_dir)[0].find("phase")
        if entry.text.startswith("train")
    )
    rate = statistics.harmonic_mean([row["examples_per_s"] for row in counted])
    return Measured(rate, shares, compiled - run.began)
