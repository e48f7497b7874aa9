"""Updates by sparse gradients, in which tokens repeat in a record, between records and ranks, against dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from facts import rel_error
from uneven import build_sparse_model, train, train_alone, weights

from horovod_train.config.settings import TrainConfig

BUILDERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "clipped": lambda: keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1),
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse": ("momentum", {}),
    "sparse_as_dense": ("momentum", {"sparse_as_dense": True}),
    "sparse_accumulated": ("clipped", {"config": TrainConfig(accumulate_steps=4)}),
    "sparse_clipped": ("clipped", {}),
    "sparse_adam": ("adam", {}),
}


def error_of(name: str) -> float:
    optimizer_name, options = WAYS[name]
    alone = build_sparse_model()
    train_alone(BUILDERS[optimizer_name](), alone)
    step = train(BUILDERS[optimizer_name](), build_sparse_model(), **options)
    return rel_error(weights(step.state.model), weights(alone))
