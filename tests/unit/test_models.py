"""Properties of our models that training alone would not show."""

from __future__ import annotations

import keras
import numpy as np

from horovod_train.models import resnet, transformer

TOKENS = np.array([[5, 3, 9, 0, 0, 0], [7, 0, 0, 0, 0, 0]])


def outputs(model: keras.Model, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(model(tokens, training=False))


def test_the_transformer_does_not_look_at_padding() -> None:
    rng = np.random.default_rng(0)
    model = transformer.build(vocabulary=10, max_length=8, width=16, blocks=2)
    full = outputs(model, TOKENS)
    assert np.allclose(outputs(model, TOKENS[:, :3]), full, atol=1e-6)
    embeddings = model.get_layer("token_embedding").embeddings
    changed = embeddings.numpy()
    changed[0] = 7 * rng.normal(size=16)
    embeddings.assign(changed)
    assert np.allclose(outputs(model, TOKENS), full, atol=1e-6)
    changed[7] = 7 * rng.normal(size=16)  # the negative: a token that is there counts, for the sentence that it is in
    embeddings.assign(changed)
    assert np.allclose(outputs(model, TOKENS)[0], full[0], atol=1e-6)
    assert not np.allclose(outputs(model, TOKENS)[1], full[1], atol=1e-2)


def test_the_transformer_looks_at_the_order_of_tokens() -> None:
    model = transformer.build(vocabulary=10, max_length=8, width=16)
    assert not np.allclose(outputs(model, np.array([[1, 2, 3]])), outputs(model, np.array([[3, 2, 1]])), atol=1e-3)


def test_an_empty_sentence_has_finite_outputs() -> None:
    model = transformer.build(vocabulary=10, max_length=8, width=16)
    assert np.isfinite(outputs(model, np.zeros((1, 4), np.int64))).all()


def test_resnet_blocks_start_as_the_identity() -> None:
    model = resnet.build(classes=10, image_size=32)
    lasts = [layer for layer in model.layers if layer.name.endswith("_3_bn")]
    assert len(lasts) == 16
    assert all(not np.any(layer.gamma) for layer in lasts)
    assert model.count_params() == 23_608_202  # 23,587,712 of keras.applications without its top, and 2048 × 10 + 10
