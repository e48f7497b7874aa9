"""Which run a command is about; for evaluate, predict and export also which weights, and under which config."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from horovod_train.checkpoint.layout import BEST, CHECKPOINTS
from horovod_train.commands.arguments import add_config, split_overrides
from horovod_train.config.loader import load
from horovod_train.config.settings import Config
from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError
from horovod_train.output import lease
from horovod_train.output.rank_log import FOLDER

LEFT_BY_A_RUN = ("config.yaml", "metrics.jsonl", "summary.json", FOLDER, lease.NAME)


class Choice(NamedTuple):
    config: Config
    checkpoint: str
    """Its folder, or a folder above whose newest checkpoint is used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="RUN_DIR | section.key=value", help="the run; settings that differ from its own"
    )
    add_config(parser, "config files, in place of RUN_DIR")
    parser.add_argument(
        "--checkpoint",
        default="auto",
        metavar="auto|best|PATH",
        help="auto: the newest of the run; default %(default)s",
    )
    parser.add_argument(
        "--weights", choices=("auto", "trained", "ema"), default="auto", help="auto: moving averages if it kept any"
    )


def choose(arguments: argparse.Namespace) -> Choice:
    """Return the config and the checkpoint that the arguments mean. Raises UserError. Opens no checkpoint."""
    files, overrides = split_overrides(arguments.config or [])
    folders, more_overrides = split_overrides(arguments.words)
    if len(folders) > 1 or bool(folders) == bool(files):
        received = " ".join([*(arguments.config or []), *arguments.words]) or "neither"
        raise UserError(f"expected either the directory of a run or --config; received {received}.")
    if folders:
        run_dir = folders[0]
        if not (Path(run_dir) / "config.yaml").is_file():
            raise UserError(f"{run_dir}: is no run's directory: it has no config.yaml. Name another, or use --config.")
        files = [str(Path(run_dir) / "config.yaml")]
    config, _ = load(files, [*overrides, *more_overrides])
    return Choice(config, _checkpoint(arguments.checkpoint, folders[0] if folders else config.output_dir))


def require_run(run_dir: Path) -> None:
    """Raise UserError if the directory has none of the files and folders that runs leave."""
    if not any((run_dir / name).exists() for name in LEFT_BY_A_RUN):
        problem = "a folder without any of these" if run_dir.is_dir() else "no folder"
        raise UserError(f"{run_dir}: expected a run directory, with {', '.join(LEFT_BY_A_RUN)}; found {problem}.")


def _checkpoint(choice: str, run_dir: str | None) -> str:
    if choice not in ("auto", "best"):
        return choice
    if run_dir is None:
        raise UserError(f"--checkpoint {choice}: of which run? Name its directory, or a checkpoint's path.")
    if choice == "auto":
        return run_dir
    best = Path(run_dir) / CHECKPOINTS / BEST
    if launcher.detect().rank == 0 and not best.is_dir():
        raise UserError(f"--checkpoint best: {run_dir} has none; it keeps one if trained with checkpoint.best.")
    return str(best.resolve())
