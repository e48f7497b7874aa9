"""Multi-layer perceptrons."""

from __future__ import annotations

from typing import Any

import keras


def build(
    inputs: int = 5,
    hidden: int = 10,
    outputs: int = 1,
    stddev: float = 1.0,
    seed: int = 0,
    weight_name: str = "kernel",
) -> keras.Model:
    """Build one hidden layer with ReLU: float32 [batch, inputs] → logits [batch, outputs].

    Weights and biases are drawn from N(0, stddev²), seeded. weight_name: the name of the matrices, in checkpoints
    too: `hidden1/kernel` as in Keras, or `hidden1/weight`.
    """
    Dense = _dense_class(weight_name)
    seeds = iter(range(seed, seed + 4))

    def normal() -> keras.initializers.Initializer:
        return keras.initializers.RandomNormal(stddev=stddev, seed=next(seeds))

    sample = keras.Input((inputs,), name="sample")
    hidden_units = Dense(
        hidden, activation="relu", kernel_initializer=normal(), bias_initializer=normal(), name="hidden1"
    )(sample)
    logits = Dense(outputs, kernel_initializer=normal(), bias_initializer=normal(), dtype="float32", name="out_layer")(
        hidden_units
    )
    return keras.Model(sample, logits, name="mlp")


def build_for_images(
    image_size: int = 28, hidden: int = 500, classes: int = 10, stddev: float = 0.1, bias: float = 0.1
) -> keras.Model:
    """Build one hidden layer with ReLU on small grey images: float32 [batch, size, size, 1] → logits [batch, classes].

    By default 784 → 500 → 10, with layers named layer1 and layer2. Weights are drawn from a normal distribution
    truncated at two deviations; biases start at `bias`.
    """

    def dense(units: int, name: str, **options: str) -> keras.Layer:
        return keras.layers.Dense(
            units,
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=stddev),
            bias_initializer=keras.initializers.Constant(bias),
            name=name,
            **options,
        )

    image = keras.Input((image_size, image_size, 1), name="input")
    x = dense(hidden, "layer1", activation="relu")(keras.layers.Flatten(name="flatten")(image))
    # Float32 at any precision: softmax over half-precision logits loses accuracy.
    return keras.Model(image, dense(classes, "layer2", dtype="float32")(x), name="image_mlp")


def _dense_class(weight_name: str) -> type[keras.layers.Dense]:
    """Return keras.layers.Dense with another name for its matrix; it is saved as a plain keras.layers.Dense."""
    if weight_name == "kernel":
        return keras.layers.Dense

    class Named(keras.layers.Dense):
        def add_weight(self, *args: Any, name: str | None = None, **options: Any) -> Any:
            return super().add_weight(*args, name=weight_name if name == "kernel" else name, **options)

    # An exported model must load where only Keras is installed.
    plain = keras.layers.Dense
    Named.__name__, Named.__qualname__, Named.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    return Named
