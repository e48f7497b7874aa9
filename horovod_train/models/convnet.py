"""Convolutional networks for small grey images."""

from __future__ import annotations

import keras
from keras import layers


def build(classes: int = 10, image_size: int = 28, dropout: float = 0.0) -> keras.Model:
    """Build two convolutions and three dense layers: float32 [batch, size, size, 1] → logits [batch, classes].

    5×5 kernels, 2×2 max-pooling, 1024 hidden units, weights from truncated normal distributions; 3.3 million weights.
    dropout: rate after the hidden units.
    """

    def truncated(stddev: float) -> keras.initializers.Initializer:
        return keras.initializers.TruncatedNormal(stddev=stddev)

    def convolution(filters: int, bias: float, name: str) -> keras.Layer:
        return layers.Conv2D(
            filters,
            5,
            padding="same",
            activation="relu",
            kernel_initializer=truncated(0.05),
            bias_initializer=keras.initializers.Constant(bias),
            name=name,
        )

    def dense(units: int, name: str) -> keras.Layer:
        return layers.Dense(
            units,
            activation="relu",
            kernel_initializer=truncated(0.04),
            bias_initializer=keras.initializers.Constant(0.1),
            name=name,
        )

    image = keras.Input((image_size, image_size, 1), name="image")
    x = convolution(32, bias=0.0, name="conv1")(image)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = convolution(64, bias=0.1, name="conv2")(x)
    x = layers.MaxPooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = dense(1024, name="dense1")(x)
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    x = dense(classes, name="dense2")(x)
    # Float32 at any precision: softmax over half-precision logits loses accuracy.
    logits = layers.Dense(classes, kernel_initializer=truncated(1 / 192), dtype="float32", name="logits")(x)
    return keras.Model(image, logits, name="convnet")
