"""Speed and result of a config under each `train.synchronization`, taking turns.

python benchmarks/synchronization.py --np 2 --config configs/digits_convnet_plain.yaml

Runs the whole trainer, started as `launch` starts it; each round runs every strategy once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from horovod_train.commands.cli import build_table, open_screen
from horovod_train.distributed.launch.local import best_way, run_ranks

STRATEGIES = {
    "every_step": ["train.synchronization=every_step", "train.average_every_steps=null"],
    "local, every 10 steps": ["train.synchronization=local", "train.average_every_steps=10"],
    "stale": ["train.synchronization=stale", "train.average_every_steps=null"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; default %(default)s")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="longest that one may take; default %(default)s")
    parser.add_argument("--config", nargs="+", required=True, metavar="YAML", help="files, then section.key=value")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in STRATEGIES}
    for _ in range(arguments.rounds):
        for name, overrides in STRATEGIES.items():
            found[name].append(_train([*arguments.config, *overrides], arguments.np, arguments.limit_s))
            print(f"{name}: {_figures([found[name][-1]])}", file=sys.stderr, flush=True)
    base = _speed(found["every_step"])
    rows = [
        (name, f"{_speed(runs):,.0f}", f"{_speed(runs) / base:.2f}", _figures(runs)) for name, runs in found.items()
    ]
    titles = ("", "records/s", "of every_step", "at the end")
    open_screen().print(build_table(titles, rows, left=("", "at the end")))


def _train(words: list[str], ranks: int, limit_s: float) -> dict[str, Any]:
    """Return the summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        command = [sys.executable, "-m", "horovod_train.main", "--config", *words, "log.tensorboard=false"]
        finished = run_ranks(best_way()[0], ranks, [*command, "--output-dir", str(run_dir)], {}, limit_s)
        if finished.returncode:
            sys.exit(f"{' '.join(words)}: exit code {finished.returncode}: {finished.stderr[-2000:]}")
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


if __name__ == "__main__":
    main()
