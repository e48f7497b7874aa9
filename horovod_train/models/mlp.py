"""Multi-layer perceptrons."""

from __future__ import annotations

import keras


def build(inputs: int = 5, hidden: int = 10, outputs: int = 1, stddev: float = 1.0, seed: int = 0) -> keras.Model:
    """One hidden layer with ReLU: float32 [batch, inputs] → logits [batch, outputs].

    System S1: weights and biases drawn from N(0, stddev²), seeded.
    """
    draws = iter(range(seed, seed + 4))

    def normal() -> keras.initializers.Initializer:
        return keras.initializers.RandomNormal(stddev=stddev, seed=next(draws))

    sample = keras.Input((inputs,), name="sample")
    hidden_units = keras.layers.Dense(
        hidden, activation="relu", kernel_initializer=normal(), bias_initializer=normal(), name="hidden1"
    )(sample)
    logits = keras.layers.Dense(
        outputs, kernel_initializer=normal(), bias_initializer=normal(), dtype="float32", name="out_layer"
    )(hidden_units)
    return keras.Model(sample, logits, name="mlp")
