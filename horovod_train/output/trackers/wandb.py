"""The tracker `wandb`: a run of Weights & Biases, online or offline as WANDB_MODE says."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_train.config.registry import import_extra
from horovod_train.output.trackers.sender import Ended, Row

_SETTINGS = {
    "console": "off",  # otherwise it replaces sys.stdout; logs/ has the lines
    # By default the process ends when all is uploaded, however long that takes. What is not stays in the directory.
    "init_timeout": 30.0,
    "finish_timeout": 25.0,
    "finish_timeout_raises": True,
}


class WandbTracker:
    """The config is the run's config; values are `split/name` over `step`. All options are passed to wandb.init.

    Its own defaults, and the user's WANDB_… variables, hold for what is not given.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._wandb: Any = import_extra("wandb", "wandb", "log.trackers")
        options = {"project": project, "entity": entity, "name": name, "group": group, "tags": list(tags)}
        self._options = {key: value for key, value in options.items() if value}
        self._run: Any = None

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        self._run = self._wandb.init(
            id=run_id or secrets.token_hex(4),
            resume="allow",
            dir=str(directory),
            config=dict(config),
            settings=self._wandb.Settings(**_SETTINGS),
            **self._options,
        )
        # Rows of training and of evaluation may have the same step, which wandb's own counter does not allow.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, row: Row) -> None:
        values = {f"{row.split}/{name}": value for name, value in row.values.items()}
        self._run.log({"step": row.step, "epoch": row.epoch, **values})

    def finish(self, ended: Ended, files: Sequence[Path]) -> None:
        # Not by Run.save: W&B also writes a config.yaml there.
        artifact = self._wandb.Artifact(f"run-{self._run.id}", type="run")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)
        if ended == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ended == "done" else 1)
