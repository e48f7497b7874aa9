"""The only folder that imports horovod or mpi4py. What users of plain `model.fit` need is named here.

Names load on first use, so that `distributed.launch` stays free of TensorFlow.
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
