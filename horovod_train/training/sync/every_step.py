"""Gradients are combined before they are applied: ranks have the same weights after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_train.training.sync.strategy import CombineList, Exchanged


class EveryStep:
    """See SyncStrategy for the methods."""

    delay = 0

    def __init__(self) -> None:
        self.variables: dict[str, tf.Variable] = {}
        self.must_be_finite: list[tf.Variable] = []

    def exchange(
        self, combine: CombineList, local_gradients: Sequence[Any], variables: Sequence[Any] | None, step: tf.Tensor
    ) -> Exchanged:
        return Exchanged(combine(local_gradients), local_gradients)

    def end_step(self, failed: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return failed  # comes from combined gradients, so ranks agree

    def settle(self, step: int) -> bool:
        return False

    def next_sync_step(self, step: int) -> int:
        return step

    def drift(self) -> None:
        return None
