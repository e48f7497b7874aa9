"""For `explain`: how far a run came and from where it can resume, from its files, without TensorFlow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from horovod_train.checkpoint.layout import CHECKPOINTS, newest_whole, step_name
from horovod_train.checkpoint.manifest import Damaged, reason, verify
from horovod_train.errors import UserError

_STEP = re.compile(r'"step": (\d+)')


@dataclass(frozen=True)
class Checkpoint:
    path: str
    step: int


def last_good_checkpoint(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that a run can resume from, and what is wrong with newer ones.

    Reads them byte by byte, as a run would. Raises UserError if the folder cannot be read.
    """
    folder = run_dir / CHECKPOINTS
    try:
        newest, damaged = newest_whole(folder, _read)
    except OSError as error:
        raise UserError(f"{run_dir}: cannot read its checkpoints: {reason(error)}.") from error
    return newest, [f"{folder / step_name(step)}: {error}" for step, error in damaged.items()]


def _read(folder: Path) -> Checkpoint:
    try:
        return Checkpoint(str(folder), int(verify(folder)["step"]))
    except UserError as error:  # Only a later version can read it.
        raise Damaged(str(error).removeprefix(f"{folder}: ")) from error
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its manifest has no step: {error}") from error


def last_step_in_metrics(run_dir: Path) -> int | None:
    try:
        steps = _STEP.findall((run_dir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return max(map(int, steps), default=None)


def resumes_by_itself(run_dir: Path) -> bool:
    """Return whether the run, started again with its own config, resumes from its newest checkpoint."""
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        return bool(config["checkpoint"]["resume"] != "never")
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return True


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object; empty if there is no complete one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
