"""`bench synchronization`: speed and result of a config under each way to exchange, taking turns.

python -m horovod_train.main bench synchronization --np 2 --config configs/s6_convnet.yaml

Runs the whole trainer, started as scripts/run_local.sh starts it; each round runs every way once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from horovod_train.commands.tables import open_screen
from horovod_train.distributed.launch.local import best_way, run_ranks
from horovod_train.errors import RunError, UserError

WAYS = {
    "every_step": ["train.synchronization=every_step", "train.average_every_steps=null"],
    "local, every 10 steps": ["train.synchronization=local", "train.average_every_steps=10"],
    "stale": ["train.synchronization=stale", "train.average_every_steps=null"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; default %(default)s")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="longest that one may take; default %(default)s")
    parser.add_argument("--config", nargs="+", required=True, metavar="YAML", help="files, then section.key=value")


def run(arguments: argparse.Namespace) -> int:
    if min(arguments.np, arguments.rounds) < 1:
        raise UserError("bench synchronization: --np and --rounds must be at least 1.")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for _ in range(arguments.rounds):
        for name, overrides in WAYS.items():
            found[name].append(_train([*arguments.config, *overrides], arguments.np, arguments.limit_s))
            print(f"{name}: {_figures([found[name][-1]])}", file=sys.stderr, flush=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    base = _speed(found["every_step"])
    for title in ("", "records/s", "of every_step", "at the end"):
        table.add_column(title, justify="left" if title in ("", "at the end") else "right", no_wrap=True)
    for name, summaries in found.items():
        speed = _speed(summaries)
        table.add_row(name, f"{speed:,.0f}", f"{speed / base:.2f}", _figures(summaries))
    open_screen().print(table)
    return 0


def _train(words: list[str], ranks: int, limit_s: float) -> dict[str, Any]:
    """Return the summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        command = [sys.executable, "-m", "horovod_train.main", "--config", *words, "log.tensorboard=false"]
        try:
            finished = run_ranks(best_way()[0], ranks, [*command, "--output-dir", str(run_dir)], {}, limit_s)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"bench synchronization: {' '.join(words)}: not done after {limit_s:.0f} s.") from error
        if finished.returncode:
            raise RunError(f"bench synchronization: exit code {finished.returncode}: {finished.stderr[-2000:]}")
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def _speed(summaries: list[dict[str, Any]]) -> float:
    return statistics.median(summary["examples_per_s"] for summary in summaries)


def _figures(summaries: list[dict[str, Any]]) -> str:
    """Return the evaluation at the end; for several runs, from the least to the greatest."""
    parts = []
    for name in summaries[0]["eval"]:
        values = [summary["eval"][name] for summary in summaries]
        least, most = f"{min(values):.4g}", f"{max(values):.4g}"
        parts.append(f"{name} {least}" if least == most else f"{name} {least}–{most}")
    return ", ".join(parts)
