"""Convolutional networks for small grey images."""

from __future__ import annotations

import keras
from keras import layers


def build(classes: int = 10, image_size: int = 28, dropout: float = 0.0) -> keras.Model:
    """Build two convolutions and three dense layers: float32 [batch, size, size, 1] → logits [batch, classes].

    5×5 kernels, 2×2 max-pooling, 1024 hidden units, weights from truncated normal distributions; 3.3 million weights.
    dropout: rate after the hidden units.
    """

    def weights(stddev: float, bias: float) -> dict[str, keras.initializers.Initializer]:
        return {
            "kernel_initializer": keras.initializers.TruncatedNormal(stddev=stddev),
            "bias_initializer": keras.initializers.Constant(bias),
        }

    image = keras.Input((image_size, image_size, 1), name="image")
    x = layers.Conv2D(32, 5, padding="same", activation="relu", **weights(0.05, 0.0), name="conv1")(image)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = layers.Conv2D(64, 5, padding="same", activation="relu", **weights(0.05, 0.1), name="conv2")(x)
    x = layers.MaxPooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(1024, activation="relu", **weights(0.04, 0.1), name="dense1")(x)
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    x = layers.Dense(classes, activation="relu", **weights(0.04, 0.1), name="dense2")(x)
    # Float32 at any precision: softmax over half-precision logits loses accuracy.
    initial = keras.initializers.TruncatedNormal(stddev=1 / 192)
    logits = layers.Dense(classes, kernel_initializer=initial, dtype="float32", name="logits")(x)
    return keras.Model(image, logits, name="convnet")
