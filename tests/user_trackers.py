"""Trackers as a user would keep them in a package of their own, named `user_trackers:Class`."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from horovod_train.output.trackers.sender import Ended, Row
from horovod_train.training.hooks import at


class Noted:
    """Appends each call to calls.jsonl in the run directory."""

    def __init__(self, word: str = "") -> None:
        self._word, self._path = word, Path()

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        self._path = directory / "calls.jsonl"
        self._note("start", run_id=run_id, step=step, seed=config["seed"], word=self._word)
        return run_id or "the first"

    def log(self, row: Row) -> None:
        self._note("log", step=row.step, split=row.split, values=dict(row.values))

    def finish(self, ended: Ended, files: Sequence[Path]) -> None:
        self._note("finish", ended=ended, files=[file.name for file in files])

    def _note(self, call: str, **what: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"call": call, "thread": threading.current_thread().name, **what}) + "\n")


class Unreachable(Noted):
    """What is tracked is nowhere."""

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        raise ConnectionError("nobody at tracker.example:5000")


class WithoutFinish:
    """Lacks a method."""

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        return ""

    def log(self, row: Row) -> None: ...


def _kill_group(run: Any, step: int) -> None:
    """Ends the processes that GROUP_TO_KILL names, from root."""
    if run.group.rank == 0:
        os.killpg(int(os.environ["GROUP_TO_KILL"]), signal.SIGKILL)


def _kill_wandb_core(run: Any, step: int) -> None:
    """Ends the process that sends what root logs to W&B."""
    if run.group.rank == 0:
        (core,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "wandb-core"]
        core.kill()


kill_group = at([6], _kill_group)
kill_wandb_core = at([6], _kill_wandb_core)
