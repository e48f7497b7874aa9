"""The graph of a broadcast, without Horovod's operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

from horovod_train.tensorflow import broadcasting


def test_devices_are_broadcast_in_place_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation holds a thread until all ranks run it."""
    operations: list[Any] = []

    def broadcast(handles: Any, **_: Any) -> Any:
        operations.append(tf.raw_ops.NoOp())
        return operations[-1]

    monkeypatch.setattr(hvd.global_process_set, "size", lambda: 2)
    monkeypatch.setattr(broadcasting, "MPI_LIB", SimpleNamespace(horovod_broadcast_inplace_resource=broadcast))
    variables: list[Any] = [SimpleNamespace(device=f"GPU:{number % 3}", handle=None) for number in range(6)]
    broadcasting._broadcast(variables, 0, hvd.global_process_set, inplace=True)
    assert len(operations) == 3
    assert [operation.control_inputs for operation in operations[1:]] == [operations[:1], operations[1:2]]
