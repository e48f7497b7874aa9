"""What saves and agreement checks of a big state cost: seconds for which training stands still, and memory.

python benchmarks/saves.py --np 2 --mb 500

Trains dense layers with momentum, whose weights and slots are a state of --mb, by the trainer itself; saves it every
--every steps, and in another run after each step, so that one is due while another is still being written. Seconds
are those that the run records. Memory, as a multiple of the state: the state, and by how much the largest resident
memory of the process (VmHWM) exceeds that of a run without saves; 1 is a process that makes no copy.

python benchmarks/saves.py --np 2 --convnet

The same for the small convnet of models/convnet.py: images of 28×28, 64 a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from horovod_train.commands.cli import build_table, open_screen
from horovod_train.distributed.launch.local import best_way, run_ranks

NOTES = "BENCHMARK_SAVES_NOTES"
"""Environment variable: the folder for what ranks note."""
INPUTS, LAYERS = 16, 8
SHAPES = {"dense": (INPUTS,), "convnet": (28, 28, 1)}
"""Of a record, by model."""
COMPILED = 2
"""Steps after which times and memory are those of training."""
LEAST_STEPS = 6
LEAST_MB = 100
"""Of a smaller state, the memory of a process moves by more than a copy has."""
LIMIT_S = 1800.0


def records(rank: int, size: int, epoch: int, seed: int, training: bool, model: str) -> Any:
    """For data.dataset: made records without an end; none to evaluate."""
    import tensorflow as tf

    if not training:
        return None
    return tf.data.Dataset.from_tensors((tf.fill(SHAPES[model], 0.1), tf.constant(1, tf.int64))).repeat()


def dense(units: int) -> Any:
    """For model.name."""
    import keras

    layers = [keras.layers.Dense(units, activation="relu") for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((INPUTS,)), *layers, keras.layers.Dense(2)])


def note(run: Any, step: int) -> None:
    """For hooks, after each step: write the largest memory since the last call."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = 1024 * int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0])
    variables = run.state.variables().values()
    size = sum(variable.dtype.size * variable.shape.num_elements() for variable in variables)
    with Path(os.environ[NOTES], f"rank-{run.group.rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "peak_bytes": peak, "state_bytes": size}) + "\n")
    # 5: the largest resident memory begins anew (proc_pid_clear_refs of Linux)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Run(NamedTuple):
    """metrics: lines of the run; notes: of each rank."""

    metrics: list[dict[str, Any]]
    notes: list[list[dict[str, Any]]]


def train(ranks: int, megabytes: float | None, every: int | None, steps: int) -> Run:
    """Train so many steps. megabytes: None for the convnet. every: steps between saves, if any."""
    weights = 1e6 * (megabytes or 0) / 8  # each with a slot, in float32
    units = round((weights / (LAYERS - 1)) ** 0.5)
    here, kind = Path(__file__).stem, "dense" if megabytes else "convnet"
    model: dict[str, Any] = {"name": f"{here}:dense", "options": {"units": units}} if megabytes else {"name": "convnet"}
    dataset = {"name": f"{here}:records", "options": {"model": kind}}
    batch = 2 if megabytes else 64
    with tempfile.TemporaryDirectory(prefix="bench-saves-") as folder:
        config = {
            "data": {"dataset": dataset, "batch_size_per_rank": batch, "steps_per_epoch": steps},
            "model": model,
            "loss": {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}},
            "optimizer": {"name": "sgd", "options": {"momentum": 0.9}},
            "lr_schedule": {"base_lr": 1e-6},
            "train": {"max_steps": steps, "check_agreement_every_steps": 3},
            "checkpoint": {"every_steps": every, "every_epochs": None, "keep": 1},
            "hooks": [f"{here}:note"],
            "log": {"every_steps": 1, "tensorboard": False},
        }
        Path(folder, "config.yaml").write_text(json.dumps(config))  # YAML includes JSON
        run_dir = Path(folder, "run")
        words = [sys.executable, "-m", "horovod_train.main", "--config", str(Path(folder, "config.yaml"))]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {NOTES: folder, "PYTHONPATH": path}
        way = best_way()[0]
        finished = run_ranks(way, ranks, [*words, "--output-dir", str(run_dir)], environment, LIMIT_S)
        if finished.returncode:
            sys.exit(f"exit code {finished.returncode}: {finished.stderr[-3000:]}")
        notes = [_lines(Path(folder, f"rank-{rank}.jsonl")) for rank in range(ranks)]
        return Run(_lines(run_dir / "metrics.jsonl"), notes)


def figures(run: Run, every: int, before: list[int]) -> dict[str, float]:
    """before: largest memory of each rank without saves, in bytes."""
    size = run.notes[0][0]["state_bytes"]
    most = peaks(run)
    copies = [max(0.0, peak - base) / size for peak, base in zip(most, before, strict=True)]
    trained = [row for row in run.metrics if row["split"] == "train"]
    step_s = statistics.median(row["s_per_step"] for row in trained if "s_per_step" in row)
    saved = [row["save_blocked_s"] for row in trained if "save_blocked_s" in row]
    checked = [row["check_agreement_s"] for row in trained if "check_agreement_s" in row]
    return {
        "state_mb": size / 1e6,
        "every": every,
        "step_s": step_s,
        "save_s": statistics.median(saved),
        "save_most_s": max(saved),
        "check_s": statistics.median(checked),
        "root": 1 + copies[0],
        "others": 1 + max(copies[1:], default=0.0),
    }


def peaks(run: Run) -> list[int]:
    """Return the largest memory of each rank after the first steps, in bytes."""
    return [max(row["peak_bytes"] for row in rows if row["step"] > COMPILED) for rows in run.notes]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks; default %(default)s")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--mb", type=float, default=500.0, help="size of the state in MB; default %(default)s")
    size.add_argument("--convnet", action="store_true", help="the convnet, whose state has 26 MB, instead")
    parser.add_argument("--every", type=int, default=20, help="steps between saves; default %(default)s")
    parser.add_argument("--saves", type=int, default=3, help="saves in each run; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each run")
    arguments = parser.parse_args()
    if min(arguments.np, arguments.saves) < 1 or arguments.every < LEAST_STEPS or not arguments.mb > 0:
        parser.error(f"--np and --saves must be at least 1, --every {LEAST_STEPS}, --mb above 0")
    found = list(_measure_all(arguments))
    if arguments.json:
        print(*map(json.dumps, found), sep="\n")
        return
    titles = ("state", "saved every", "a step", "a save stops", "at most", "a check", "root", "others")
    open_screen().print(build_table(titles, map(_row, found), left=()))


def _measure_all(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    size = None if arguments.convnet else arguments.mb
    before = peaks(train(arguments.np, size, None, LEAST_STEPS))
    for every, saves in ((arguments.every, arguments.saves), (1, LEAST_STEPS)):
        # One more step, because the memory of a save is noted after the next one.
        yield figures(train(arguments.np, size, every, every * saves + 1), every, before)


def _row(found: dict[str, float]) -> tuple[str, ...]:
    seconds = (f"{found[name]:.3f} s" for name in ("step_s", "save_s", "save_most_s", "check_s"))
    shows_memory = found["state_mb"] >= LEAST_MB
    times = (f"{found[name]:.2f} ×" if shows_memory else "—" for name in ("root", "others"))
    return f"{found['state_mb']:,.0f} MB", f"{found['every']:.0f} steps", *seconds, *times


if __name__ == "__main__":
    main()
