"""When ranks exchange, and what: gradients at every step, gradients one step late, or weights every few steps.

Each strategy is a class with the methods of SyncStrategy, in its own file.
"""

from __future__ import annotations

from collections.abc import Callable

from horovod_train.training.sync.every_step import EveryStep
from horovod_train.training.sync.local import Local
from horovod_train.training.sync.stale import Stale
from horovod_train.training.sync.strategy import SyncParts, SyncStrategy

STRATEGIES: dict[str, Callable[[SyncParts], SyncStrategy]] = {
    "every_step": lambda _: EveryStep(),
    "stale": Stale,
    "local": Local,
}
"""The values of train.synchronization."""


def build_strategy(parts: SyncParts) -> SyncStrategy:
    return STRATEGIES[parts.config.synchronization](parts)
