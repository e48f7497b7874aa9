"""Residual networks, from keras.applications."""

from __future__ import annotations

import keras


def build(classes: int = 1000, image_size: int = 224, zero_init_residual: bool = True) -> keras.Model:
    """Build ResNet-50 (He et al. 2015) with initial weights: float32 [batch, size, size, 3] → logits [batch, classes].

    zero_init_residual: the last scale of each residual branch starts at 0, so that blocks start as the identity (Goyal
    et al. 2017, section 5.1). Nothing is downloaded. image_size: at least 32. 25.6 million weights.
    """
    body = keras.applications.ResNet50(
        include_top=False, weights=None, input_shape=(image_size, image_size, 3), pooling="avg"
    )
    if zero_init_residual:
        for layer in body.layers:
            if layer.name.endswith("_3_bn"):
                layer.gamma.assign(keras.ops.zeros_like(layer.gamma))
    # Float32 at any precision: softmax over half-precision logits loses accuracy.
    logits = keras.layers.Dense(
        classes, kernel_initializer=keras.initializers.RandomNormal(stddev=0.01), dtype="float32", name="logits"
    )(body.output)
    return keras.Model(body.input, logits, name="resnet50")
