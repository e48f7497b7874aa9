"""Transfer learning: a network of keras.applications, frozen, with a new head.

horovodrun --gloo -np 2 python examples/transfer.py
"""

from __future__ import annotations

import digits
import keras

import horovod_train.keras as hvd


def pretrained() -> keras.Model:
    """VGG16 with ImageNet's weights; with random ones where they cannot be fetched."""
    shape = {"input_shape": (32, 32, 3), "include_top": False, "pooling": "avg"}
    try:
        return keras.applications.VGG16(weights="imagenet", **shape)
    except Exception as error:
        print(f"random initial weights, because ImageNet's cannot be fetched: {error}", flush=True)
        return keras.applications.VGG16(weights=None, **shape)


hvd.init()
keras.utils.set_random_seed(1)
(x, y), held_out = digits.load()
x, y, weights = hvd.shard(x, y)

body = pretrained()
body.trainable = False
inputs = keras.Input((8, 8, 1))
colours = keras.layers.Concatenate()([keras.layers.UpSampling2D(4)(inputs)] * 3)
features = body(keras.layers.Rescaling(2.0, -1.0)(colours), training=False)
model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.BatchNormalization(momentum=0.9)(features)))
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.003 * hvd.size()))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, weighted_metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(x, y, 64, 6, verbose=2 if hvd.rank() == 0 else 0, sample_weight=weights, callbacks=callbacks)
if hvd.rank() == 0:
    print(f"held-out accuracy {model.evaluate(*held_out, verbose=0)[1]:.3f}", flush=True)
