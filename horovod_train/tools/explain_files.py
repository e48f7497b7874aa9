"""For `explain`: how far a run came and from where it can go on, read off its files without TensorFlow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from horovod_train.checkpoint_manifest import Damaged, verify
from horovod_train.errors import UserError

_FOLDER = re.compile(r"step-(\d+)")
_STEP = re.compile(r'"step": (\d+)')


@dataclass(frozen=True)
class Checkpoint:
    path: str
    step: int


def last_good_checkpoint(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest that a run can go on from, read byte by byte as a run would, and what is wrong with newer ones."""
    folders = (run_dir / "checkpoints").glob("step-*")
    steps = {int(found[1]): path for path in folders if (found := _FOLDER.fullmatch(path.name))}
    damaged: list[str] = []
    for step, path in sorted(steps.items(), reverse=True):
        try:
            verify(path)
        except (Damaged, UserError) as error:
            damaged.append(f"{path}: {str(error).removeprefix(f'{path}: ')}")
        else:
            return Checkpoint(str(path), step), damaged
    return None, damaged


def last_step_in_metrics(run_dir: Path) -> int | None:
    try:
        found = _STEP.findall((run_dir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return max(map(int, found), default=None)


def resumes_by_itself(run_dir: Path) -> bool:
    """Whether the run, started again with its own config, goes on from its newest checkpoint."""
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        return bool(config["checkpoint"]["resume"] != "never")
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return True


def read_json(path: Path) -> Mapping[str, Any]:
    """Empty where there is no whole JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
