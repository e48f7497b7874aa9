"""Scripts whose layers hold more than weights, adapted on root alone, or on each rank's own records."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave, rel_error

import horovod_train.keras as hvd
from horovod_train.errors import UserError

hvd.init()
rank, size = hvd.rank(), hvd.size()
BATCH = 12
generator = np.random.default_rng(0)
x = generator.normal(5.0, 3.0, (4 * BATCH, 3)).astype(np.float32)
y = x.sum(axis=1, keepdims=True).astype(np.float32)
facts: dict[str, Any] = {}


def own(rows: np.ndarray) -> np.ndarray:
    """This rank's part of each global batch."""
    return rows.reshape(-1, size, BATCH // size, rows.shape[1])[:, rank].reshape(-1, rows.shape[1])


def built() -> tuple[keras.Model, keras.layers.Normalization]:
    keras.utils.set_random_seed(1)
    norm, inputs = keras.layers.Normalization(), keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(1)(norm(inputs))), norm


def trained(is_distributed: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Two fits, before each of which root adapts; the weights, and outputs for the first records."""
    model, norm = built()
    optimizer = keras.optimizers.SGD(0.05)
    model.compile(hvd.DistributedOptimizer(optimizer) if is_distributed else optimizer, "mse")
    rows, targets = (own(x), own(y)) if is_distributed else (x, y)
    for factor in (1.0, 2.0):
        if not is_distributed or rank == 0:
            norm.adapt(factor * x)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if is_distributed else []
        if not is_distributed:
            model.make_train_function(force=True)  # Keras itself keeps what was traced before
        batch = BATCH // size if is_distributed else BATCH
        model.fit(rows, targets, batch_size=batch, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights(), model.predict(x[:4], verbose=0)


alone, outputs_alone = trained(is_distributed=False)
together, outputs = trained(is_distributed=True)
facts["weights"] = max(map(rel_error, together, alone))
facts["outputs"] = rel_error(outputs, outputs_alone)

model, norm = built()
if rank == 0:
    norm.adapt(x)
hvd.broadcast_model(model)
outputs = model.predict(x[:4], verbose=0)
facts["broadcast"] = rel_error(outputs, hvd.broadcast_object(outputs, 0))

words = np.array(["red", "blue", "green"] * 8)
text = keras.Input((), dtype="string")
lookup = keras.layers.StringLookup(vocabulary=sorted({*words.tolist()}, reverse=bool(rank)))
model = keras.Model(text, keras.layers.Dense(1)(keras.layers.Embedding(5, 2)(lookup(text))))
words_in_batches = tf.data.Dataset.from_tensor_slices((words, np.zeros((24, 1)))).batch(6)
number = keras.Input((3,))
scaled = keras.Model(number, keras.layers.Dense(1)(keras.layers.Rescaling(1.0 / (1 + rank))(number)))
numbers_in_batches = tf.data.Dataset.from_tensor_slices((x[:24], y[:24])).batch(6)
refused = (("refused", model, words_in_batches), ("refused options", scaled, numbers_in_batches))
for name, model, data in refused:
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    try:
        model.fit(data, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    except UserError as error:
        facts[name] = str(error)

# What may differ by rank: an initializer, since root sends the weights, and what a wrapper knows of the batch.
initial = keras.initializers.Constant(1.0 if rank == 0 else 0.0)
inputs = x[:24].reshape(8, 3, 3)[: 8 - 4 * rank]
model = keras.Sequential([keras.layers.TimeDistributed(keras.layers.Dense(1, kernel_initializer=initial))])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(inputs, inputs[..., :1], batch_size=4 - rank, epochs=2, verbose=0, callbacks=callbacks)
weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
facts["differ"] = rel_error(weights, hvd.broadcast_object(weights, 0))

leave(rank, facts)
