"""Gradients of a batch that is passed in parts are those of the whole batch, in kind too."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.config.settings import Spec
from horovod_train.data.pipeline.batch import Batch
from horovod_train.training.parts.losses import build_loss
from horovod_train.training.parts.metrics import Accumulator
from horovod_train.training.steps.objective import Objective

ROWS = 8


def build_model() -> keras.Model:
    """Tokens → a number, and a layer that takes no part in it."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((3,), dtype="int64")
    embedded = layers.Flatten()(layers.Embedding(7, 2, name="tokens")(tokens))
    spare = layers.Dense(1, name="spare")(embedded)
    return keras.Model(tokens, layers.Dense(1, name="out")(embedded) + 0.0 * keras.ops.stop_gradient(spare))


def gradients(accumulate_steps: int, *, jit_compile: bool = False) -> dict[str, object]:
    model = build_model()
    rng = np.random.default_rng(0)
    batch = Batch(
        inputs=tf.constant(rng.integers(0, 7, size=(ROWS, 3))),
        targets=tf.constant(rng.normal(size=(ROWS, 1)), tf.float32),
        weights=tf.ones(ROWS),
        ids=tf.range(ROWS, dtype=tf.int64),
        count=tf.constant(ROWS, tf.int64),
    )
    loss = build_loss(Spec("mean_squared_error"))
    objective = Objective(
        model,
        keras.optimizers.SGD(),
        loss,
        size=1,
        accumulate_steps=accumulate_steps,
        jit_compile=jit_compile,
    )
    seen = Accumulator(loss, [], also=["penalty"])
    found, _ = tf.function(lambda: objective.gradients(batch, seen), autograph=False)()
    return {variable.path: gradient for variable, gradient in zip(model.trainable_variables, found, strict=True)}


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("accumulate_steps", [2, 4])
def test_gradients_in_parts_are_those_of_the_whole_in_value_and_kind(accumulate_steps: int, jit_compile: bool) -> None:
    whole, parts = gradients(1), gradients(accumulate_steps, jit_compile=jit_compile)
    assert {path: type(gradient) for path, gradient in parts.items()} == {
        path: type(gradient) for path, gradient in whole.items()
    }
    assert parts["spare/kernel"] is None  # an optimizer with weight decay leaves it alone
    assert isinstance(parts["tokens/embeddings"], tf.IndexedSlices)
    assert parts["tokens/embeddings"].values.shape == (ROWS * 3, 2)
    for path, gradient in whole.items():
        if gradient is not None:
            one, other = (tf.convert_to_tensor(each).numpy() for each in (gradient, parts[path]))
            assert np.allclose(one, other, rtol=1e-5, atol=1e-7)
