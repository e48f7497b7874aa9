"""A multi-layer perceptron on small grey images."""

from __future__ import annotations

import keras
from keras import layers


def build(
    image_size: int = 28, hidden: int = 500, classes: int = 10, stddev: float = 0.1, bias: float = 0.1
) -> keras.Model:
    """Build one hidden layer with ReLU: float32 [batch, size, size, 1] → logits [batch, classes].

    By default 784 → 500 → 10, with layers named layer1 and layer2. Weights are drawn from a normal distribution
    truncated at two deviations; biases start at `bias`.
    """

    def dense(units: int, name: str, **options: str) -> keras.Layer:
        return layers.Dense(
            units,
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=stddev),
            bias_initializer=keras.initializers.Constant(bias),
            name=name,
            **options,
        )

    image = keras.Input((image_size, image_size, 1), name="input")
    x = dense(hidden, "layer1", activation="relu")(layers.Flatten(name="flatten")(image))
    # Float32 at any precision: softmax over half-precision logits loses accuracy.
    return keras.Model(image, dense(classes, "layer2", dtype="float32")(x), name="image_mlp")
