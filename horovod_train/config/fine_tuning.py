"""Rules of the settings for fine-tuning that the types do not say. Looks only at the config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from horovod_train.config.settings import Config, ModelSpec


def unfrozen_by_epoch(model: ModelSpec) -> list[tuple[int, tuple[str, ...]]]:
    """Return `model.unfreeze` in the order of its epochs: (complete epochs, patterns)."""
    return sorted((int(epoch), _patterns(entry)) for epoch, entry in model.unfreeze.items())


def fine_tuning_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong: (key, problem)."""
    model, epochs = config.model, config.train.epochs
    if model.init_from and config.checkpoint.resume not in ("auto", "never"):
        yield "model.init_from", "has no effect with checkpoint.resume: PATH, which gives the model all its weights."
    for epoch, entry in model.unfreeze.items():
        if not _is_count(epoch):
            yield "model.unfreeze", f"expected complete epochs, 1 or more; received {epoch!r}."
        elif epochs is not None and int(epoch) >= epochs:
            yield f"model.unfreeze.{epoch}", f"has no effect: the run ends after train.epochs, {epochs}."
        if not _patterns(entry) or not all(isinstance(pattern, str) for pattern in _patterns(entry)):
            yield f"model.unfreeze.{epoch}", f"expected patterns of weights; received {entry!r}."
    for pattern, rank in model.lora.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            yield f"model.lora.{pattern}", f"expected a rank of 1 or more; received {rank!r}."
    if model.lora and config.device.cut_before:
        yield "model.lora", "does not go with device.cut_before, which makes layers again from their configs."
    yield from _wrong_multipliers(config.optimizer.lr_multipliers)


def _wrong_multipliers(multipliers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for pattern, factor in multipliers.items():
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not math.isfinite(factor) or factor <= 0:
            yield (
                f"optimizer.lr_multipliers.{pattern}",
                f"expected a factor above 0; received {factor!r}. Weights that are not to change: model.freeze.",
            )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _patterns(entry: Any) -> tuple[Any, ...]:
    return tuple(entry) if isinstance(entry, list | tuple) else (entry,)
