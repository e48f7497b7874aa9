"""What goes with data.dataset, a stream of the user's. Settings about stored records do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from horovod_train.config.settings import DataConfig

_GO_WITH = {"dataset", "steps_per_epoch", "global_batch_size", "batch_size_per_rank", "prefetch_batches"}


def stream_problems(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the settings of a stream, and those that have no effect with one: (key, problem)."""
    if data.dataset is None:
        return
    if ":" not in data.dataset.name:
        yield "data.dataset", f"expected package.module:function; received {data.dataset.name!r}."
    for field in dataclasses.fields(data):
        if field.name in _GO_WITH:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if getattr(data, field.name) != default:
            problem = "has no effect beside data.dataset, whose function gives the records. Leave it out."
            yield f"data.{field.name}", problem
