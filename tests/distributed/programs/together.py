"""Which exchanges gradients take, and whether those that travel together have the bits of those that travel alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import tensorflow as tf
from uneven import rank

from horovod_train.distributed.optimizer import SMALL_BYTES, GradientExchange

EXCHANGES = {
    "plain": GradientExchange(),
    "sum": GradientExchange(op="sum"),
    "fp16": GradientExchange(compression="fp16"),
    "bf16": GradientExchange(compression="bf16"),
    "deterministic": GradientExchange(deterministic=True),
    "predivide": GradientExchange(predivide=3.0),
}


def gradients(*shapes: tuple[int, ...], dtype: str = "float32") -> list[Any]:
    rng = np.random.default_rng(rank)
    return [tf.constant(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def number_of(exchange: GradientExchange, grads: list[Any]) -> dict[str, int]:
    """How often each operation of Horovod's is in a compiled step."""
    together = lambda: [grad for grad in exchange.combine_each(grads, "counted") if grad is not None]  # noqa: E731
    compiled = tf.function(together, autograph=False)
    operations = compiled.get_concrete_function().graph.get_operations()
    return dict(Counter(each.type for each in operations if each.type.startswith("Horovod")))


def facts() -> dict[str, Any]:
    small = gradients((3, 4), (4,), (), (2, 1, 3))
    sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 2]), tf.constant([5, 3]))
    large = gradients((SMALL_BYTES // 8,), (SMALL_BYTES // 8 + 1,))
    same = {}
    for name, exchange in EXCHANGES.items():
        together = exchange.combine_each(small, f"{name}.together")
        alone = [exchange(grad, f"{name}.alone.{index}") for index, grad in enumerate(small)]
        same[name] = [a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(together, alone, strict=True)]
    return {
        "together": {
            "same": same,
            "small": number_of(EXCHANGES["plain"], small),
            "small, deterministic": number_of(EXCHANGES["deterministic"], small),
            "large": number_of(EXCHANGES["plain"], large),
            "of two dtypes": number_of(EXCHANGES["plain"], small + gradients((3,), (2,), dtype="float64")),
            "some sparse, some none": number_of(EXCHANGES["plain"], [None, *small, sparse]),
        }
    }
