"""Transformers over tokens."""

from __future__ import annotations

import keras
from keras import layers, ops


def build(
    vocabulary: int = 1000,
    classes: int = 4,
    max_length: int = 64,
    width: int = 64,
    heads: int = 4,
    blocks: int = 2,
    dropout: float = 0.1,
) -> keras.Model:
    """Build an encoder with a classifier: int64 [batch, length ≤ max_length] → logits [batch, classes].

    Token 0 is padding: attention and the mean that is classified ignore it. Blocks of attention and a dense layer of 4
    · width (Vaswani et al. 2017), each normalised before, not after (Xiong et al. 2020). Learned positions. Uses Keras'
    own layers, so that its Keras file loads without code.
    """
    if width % heads:
        raise ValueError(f"width must be divisible by heads; received {width} and {heads}")
    tokens = keras.Input((None,), dtype="int64", name="tokens")
    is_token = ops.not_equal(tokens, 0)
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(vocabulary, width, name="token_embedding")(tokens)
    x = x + layers.Embedding(max_length, width, name="position_embedding")(positions)
    x = layers.Dropout(dropout, name="embedding_dropout")(x)
    attention_mask = ops.expand_dims(is_token, 1)
    for number in range(1, blocks + 1):
        x = _block(x, attention_mask, width, heads, dropout, f"block{number}")
    x = layers.LayerNormalization(name="norm")(x)
    weights = ops.expand_dims(ops.cast(is_token, x.dtype), -1)
    mean = ops.sum(x * weights, axis=1) / ops.maximum(ops.sum(weights, axis=1), 1)
    # Float32 at any precision: softmax over half-precision logits loses accuracy.
    return keras.Model(tokens, layers.Dense(classes, dtype="float32", name="logits")(mean), name="transformer")


def _block(
    x: keras.KerasTensor, attention_mask: keras.KerasTensor, width: int, heads: int, dropout: float, name: str
) -> keras.KerasTensor:
    normed = layers.LayerNormalization(name=f"{name}_norm1")(x)
    attention = layers.MultiHeadAttention(heads, width // heads, dropout=dropout, name=f"{name}_attention")
    x = x + layers.Dropout(dropout, name=f"{name}_dropout1")(attention(normed, normed, attention_mask=attention_mask))
    hidden = layers.LayerNormalization(name=f"{name}_norm2")(x)
    hidden = layers.Dense(4 * width, activation="gelu", name=f"{name}_dense1")(hidden)
    hidden = layers.Dense(width, name=f"{name}_dense2")(hidden)
    return x + layers.Dropout(dropout, name=f"{name}_dropout2")(hidden)
