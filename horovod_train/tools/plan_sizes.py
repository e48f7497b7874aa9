"""For `plan`: bytes of checkpoints and of a rank's memory, from the number of parameters. Builds no model.

Weights, gradients and slots are float32, under mixed precision too. What the layers keep for the backward pass is not
counted: only building the model would tell.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_train.config import Config, Spec
from horovod_train.errors import UserError

_FLOAT32 = 4
FUSION_BYTES = 128 << 20
"""Horovod's buffer for tensors that are exchanged at once, where nothing is set (operations.cc of 0.28.1)."""

SLOTS = {
    "adadelta": 2, "adafactor": 1, "adagrad": 1, "adam": 2, "adamax": 2, "adamw": 2, "ftrl": 2, "lamb": 2, "lion": 1,
    "lars": 1, "nadam": 2, "rmsprop": 1, "sgd": 0,
}  # fmt: skip
"""Optimizer → values that it keeps for each parameter, without options."""

_OPTIONS = {"adam": ["amsgrad"], "adamw": ["amsgrad"], "rmsprop": ["centered", "momentum"], "sgd": ["momentum"]}
"""Options that add one more where they are given and not 0."""


@dataclass(frozen=True)
class Size:
    """parameters and checkpoint_bytes: None where nobody knows. source: where the figures come from, in words."""

    parameters: int | None
    checkpoint_bytes: int | None
    source: str


def parse_count(text: str) -> int:
    """25600000, 25.6M or 7B. Raises UserError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGB]?)", text.strip(), re.IGNORECASE)
    if not found:
        raise UserError(f"--parameters: expected a number such as 25600000, 25.6M or 7B; received {text!r}.")
    return round(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}[found[2].upper()])


def slots(optimizer: Spec) -> int | None:
    """Values that the optimizer keeps for each parameter; None for a user's own."""
    name = optimizer.name.replace("_", "").lower()
    kept = SLOTS.get(name)
    return None if kept is None else kept + sum(bool(optimizer.options.get(more)) for more in _OPTIONS.get(name, []))


def beside_slots(config: Config) -> int:
    """Values that a run keeps for each parameter besides weights and slots: moving average, gradients one step late."""
    return (config.train.ema_decay is not None) + (config.train.synchronization == "stale")


def find_size(config: Config, parameters: str | None) -> Size:
    """From `parameters` (an option), else from the newest checkpoint of the run, if it has one."""
    kept = slots(config.optimizer)
    per_parameter = _FLOAT32 * (1 + (2 if kept is None else kept) + beside_slots(config))
    if parameters is not None:
        count = parse_count(parameters)
        assumed = "; two slots a parameter assumed" if kept is None else ""
        return Size(count, count * per_parameter, f"from --parameters{assumed}")
    newest = newest_manifest(Path(config.output_dir)) if config.output_dir else None
    if newest is None:
        return Size(None, None, "unknown: give --parameters, for instance 25.6M")
    step, manifest = newest
    size = sum(file["bytes"] for file in manifest["files"].values())
    return Size(size // per_parameter, size, f"about, from the checkpoint of step {step}")


def newest_manifest(run_dir: Path) -> tuple[int, dict[str, Any]] | None:
    """Step and manifest of the newest checkpoint that has a readable one."""
    for place in sorted((run_dir / "checkpoints").glob("step-*/manifest.json"), reverse=True):
        try:
            manifest = json.loads(place.read_text(encoding="utf-8"))
            return int(manifest["step"]), manifest
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def memory(config: Config, size: Size, shuffle_bytes: int) -> dict[str, int]:
    """Bytes of one rank by what holds them. shuffle_bytes: of records that wait to be drawn."""
    kept = slots(config.optimizer)
    weights = (size.parameters or 0) * _FLOAT32
    fusion_mb = config.horovod.fusion_threshold_mb
    fusion = FUSION_BYTES if fusion_mb is None else int(fusion_mb * 2**20)
    known = {"weights": weights, "gradients": weights, "slots": weights * (2 if kept is None else kept)}
    known["averages and the like"] = weights * beside_slots(config)
    return {**(known if size.parameters else {}), "exchange": fusion, "shuffle": shuffle_bytes}
