"""XLA cannot compile the exchange between ranks, and `compile` may ask for XLA by default."""

from __future__ import annotations

import logging

import horovod.tensorflow as hvd
import keras

log = logging.getLogger(__name__)


def switch_off_xla(model: keras.Model, root_rank: int = 0) -> None:
    """Let `fit` train without XLA; for a callback's on_train_begin. root_rank reports it."""
    if model.jit_compile:
        model.jit_compile = False
        model.make_train_function(force=True)
        if hvd.rank() == root_rank:
            log.warning("jit_compile: XLA cannot compile the exchange between ranks; model.fit trains without XLA.")
