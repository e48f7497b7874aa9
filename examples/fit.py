"""model.fit on several ranks.

horovodrun --gloo -np 2 python examples/fit.py
"""

from __future__ import annotations

import digits
import keras

import horovod_train.keras as hvd

hvd.init()
(x, y), held_out = digits.load()
x, y, weights = hvd.shard(x, y)  # each record on one rank, equally many on each

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * hvd.size()))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, weighted_metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.002 * hvd.size(), warmup_epochs=2),
]
model.fit(
    x,
    y,
    batch_size=32,
    sample_weight=weights,
    epochs=8,
    validation_data=held_out,
    verbose=2 if hvd.rank() == 0 else 0,
    callbacks=callbacks,
)
if hvd.rank() == 0:
    print(f"held-out accuracy {model.evaluate(*held_out, verbose=0)[1]:.3f}", flush=True)
