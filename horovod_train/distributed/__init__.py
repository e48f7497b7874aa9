"""The only package that imports horovod or mpi4py. It exports what users of plain `model.fit` need.

Names load on first use, so that importing `distributed.launch` does not import TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DistributedOptimizer": "optimizer",
    "BroadcastVariables": "keras_callbacks",
    "AverageMetrics": "keras_callbacks",
    "WorkerGroup": "group",
    "start": "group",
    "synchronise_batch_norm": "sync_batch_norm",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
