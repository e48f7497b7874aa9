"""For `plan`: the checkpoint that a run would resume from. Reads manifests, no arrays; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_train.checkpoint.layout import CHECKPOINTS, find_start
from horovod_train.checkpoint.manifest import Damaged, read_manifest
from horovod_train.config.settings import Config


@dataclass(frozen=True)
class Start:
    """What the manifest of a checkpoint says. size: bytes of its files. ranks: None if it does not say."""

    folder: Path
    step: int
    ranks: int | None
    size: int
    config: Mapping[str, Any]
    began_at: str

    @property
    def global_batch_size(self) -> int | None:
        size = self.config.get("data", {}).get("global_batch_size")
        return size if isinstance(size, int) else None


def find_resume(config: Config) -> tuple[Start | None, list[str]]:
    """Return the checkpoint that a run of this config would resume from, and sentences about others that it skips.

    Finds it as the run does, but checks only its manifest and the sizes of its files. Raises UserError if the run would
    refuse to start.
    """
    if config.output_dir is None:
        return None, []
    folder = Path(config.output_dir) / CHECKPOINTS
    point = find_start(folder, config.checkpoint.resume, _read)
    notes = [f"the checkpoint of step {step} is damaged: {error}" for step, error in point.damaged.items()]
    return point.checkpoint, [*notes, *filter(None, [point.explanation()])]


def _read(folder: Path) -> Start:
    manifest = read_manifest(folder)
    try:
        size = sum(file["bytes"] for file in manifest["files"].values())
        config, began_at = manifest.get("config") or {}, manifest.get("began_at") or ""
        return Start(folder, int(manifest["step"]), manifest.get("ranks"), size, config, began_at)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"its manifest lacks what plan shows: {error}") from error
