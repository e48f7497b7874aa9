"""For `plan`: bytes of checkpoints and of a rank's memory, from the number of parameters. Builds no model.

Weights, gradients and slots are float32, under mixed precision too. What the layers keep for the backward pass is not
counted, because that needs the model to be built.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from horovod_train.commands.plan_resume import Start
from horovod_train.config.settings import Config, Spec
from horovod_train.data.dataset import Records
from horovod_train.data.sampler import Plan
from horovod_train.errors import UserError

_FLOAT32 = 4
_LOOKS = 16
FUSION_BYTES = 128 << 20
"""Horovod's default buffer for tensors that are exchanged together (operations.cc of 0.28.1)."""

SLOTS = {
    "adadelta": 2, "adafactor": 1, "adagrad": 1, "adam": 2, "adamax": 2, "adamw": 2, "ftrl": 2, "lamb": 2, "lion": 1,
    "lars": 1, "nadam": 2, "rmsprop": 1, "sgd": 0,
}  # fmt: skip
"""Optimizer → values that it keeps for each parameter, without options."""

_OPTIONS = {"adam": ["amsgrad"], "adamw": ["amsgrad"], "rmsprop": ["centered", "momentum"], "sgd": ["momentum"]}
"""Options that add one more value if they are given and not 0."""


@dataclass(frozen=True)
class Size:
    """parameters and checkpoint_bytes: None if unknown. source: where the figures come from, in words."""

    parameters: int | None
    checkpoint_bytes: int | None
    source: str


def parse_count(text: str) -> int:
    """Parse 25600000, 25.6M or 7B. Raises UserError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGB]?)", text.strip(), re.IGNORECASE)
    if not found:
        raise UserError(f"--parameters: expected a number such as 25600000, 25.6M or 7B; received {text!r}.")
    return round(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}[found[2].upper()])


def slots(optimizer: Spec) -> int | None:
    """Return the values that the optimizer keeps for each parameter; None for a user's own."""
    name = optimizer.name.replace("_", "").lower()
    kept = SLOTS.get(name)
    return None if kept is None else kept + sum(bool(optimizer.options.get(more)) for more in _OPTIONS.get(name, []))


def beside_slots(config: Config) -> int:
    """Return the values per parameter in addition to weights and slots: moving average, gradients one step late."""
    return (config.train.ema_decay is not None) + (config.train.synchronization == "stale")


def find_size(config: Config, parameters: str | None, start: Start | None) -> Size:
    """Return the size from `parameters` (an option), else from the checkpoint to resume from, if there is one."""
    kept = slots(config.optimizer)
    per_parameter = _FLOAT32 * (1 + (2 if kept is None else kept) + beside_slots(config))
    if parameters is not None:
        count = parse_count(parameters)
        assumed = "; two slots a parameter assumed" if kept is None else ""
        return Size(count, count * per_parameter, f"from --parameters{assumed}")
    if start is None:
        return Size(None, None, "unknown: give --parameters, for instance 25.6M")
    return Size(start.size // per_parameter, start.size, f"about, from the checkpoint of step {start.step}")


def memory(config: Config, size: Size, record_bytes: dict[str, int]) -> dict[str, int]:
    """Return the bytes of one rank by what uses them. record_bytes: the same for what keeps records."""
    kept = slots(config.optimizer)
    weights = (size.parameters or 0) * _FLOAT32
    fusion_mb = config.horovod.fusion_threshold_mb
    fusion = FUSION_BYTES if fusion_mb is None else int(fusion_mb * 2**20)
    known = {"weights": weights, "gradients": weights, "slots": weights * (2 if kept is None else kept)}
    known["averages and the like"] = weights * beside_slots(config)
    return {**(known if size.parameters else {}), "exchange": fusion, **record_bytes}


def record_bytes(
    config: Config, plan: Plan, records: Records, eval_records: Records | None, ranks: int
) -> dict[str, int]:
    """Return the bytes of records in a rank's memory: those that wait to be drawn, and those that data.cache keeps."""
    kept = 0
    if config.data.cache == "memory":
        # With shuffling, a rank reads every record in time; in the files' order it reads the same ones in every pass.
        kept = _parsed_bytes(records) // (1 if plan.order == "shuffled" else ranks)
        kept += _parsed_bytes(eval_records) // ranks if eval_records else 0
    return {"shuffle": _shuffle_bytes(plan, records, ranks), "cache": kept}


def _shuffle_bytes(plan: Plan, records: Records, ranks: int) -> int:
    """Return the largest size of the blocks that rank 0 keeps for a step, for some steps all over the first epoch."""
    if plan.order != "shuffled":
        return 0
    sequence, sizes = plan.sequence(0), records.source.blocks.bytes
    steps = {plan.steps_per_epoch * part // _LOOKS for part in range(_LOOKS)}
    positions = (plan.positions(0, ranks, step, step + 1)[0] for step in sorted(steps))
    return max(int(sizes[sequence.blocks_near(some)].sum()) for some in positions)


def _parsed_bytes(records: Records) -> int:
    """Return the bytes of all records as data.cache keeps them: numbers as arrays, strings and images as stored.

    For a user's data.parse only the stored bytes are known.
    """
    schema, stored = records.schema, records.source.blocks.total_bytes
    used = [schema.features[name] for name in {*schema.inputs, *schema.targets} if name in schema.features]
    numbers = [feature for feature in used if feature.decode != "image" and feature.stored_dtype != "string"]
    row = sum(np.dtype(feature.stored_dtype).itemsize * math.prod(feature.tensor_shape) for feature in numbers)
    return records.num_records * row + (stored if len(numbers) < len(used) or not used else 0)
