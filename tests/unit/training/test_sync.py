"""Strategies for exchanging: each value of the setting has one, and what cannot wait for a step as it is."""

from __future__ import annotations

import typing

import keras
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.config.settings import TrainConfig
from horovod_train.errors import UserError
from horovod_train.training.sync import STRATEGIES
from horovod_train.training.sync.stale import Stale
from horovod_train.training.sync.strategy import SyncParts


def test_gradients_of_embeddings_do_not_become_tables_unasked() -> None:
    tokens = keras.Input((3,), dtype="int32")
    model = keras.Model(tokens, layers.Dense(1)(layers.Flatten()(layers.Embedding(5, 2, name="words")(tokens))))
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model(tf.zeros((2, 3), tf.int32)))
    gradients = tape.gradient(total, model.trainable_variables)
    assert isinstance(gradients[0], tf.IndexedSlices)
    parts = SyncParts(TrainConfig(), None, model, keras.optimizers.SGD(), sparse_as_dense=False)  # type: ignore[arg-type]
    stale = Stale(parts)
    with pytest.raises(
        UserError, match=r"horovod.sparse_as_dense: must be true with .* the gradient of words/embeddings"
    ):
        stale.exchange(gradients, tf.constant(0))


def test_every_value_of_the_setting_has_a_strategy() -> None:
    values = typing.get_args(typing.get_type_hints(TrainConfig)["synchronization"])
    assert sorted(values) == sorted(STRATEGIES)
