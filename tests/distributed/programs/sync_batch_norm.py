"""BatchNorm over all ranks against one process on all records: weights and statistics after uneven steps."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave, rel_error
from keras import layers
from stepping import ANY_SIZE, build_step

from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig, TrainConfig
from horovod_train.data.batch_source import Batch, Batches, StepSize
from horovod_train.distributed.start import start
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.errors import UserError

ROWS = 8
FULL = StepSize(rows=ROWS, is_full=True)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
group = start(HorovodConfig(), DeviceConfig())
rank, size = group.rank, group.size
Build = Callable[..., keras.Model]

# Records over all ranks in each step: whole, whole, and a last one that leaves some ranks with less or nothing.
COUNTS = [ROWS * size, ROWS * size, ROWS * (size - 1) + (3, 1)[size - 1] if size < 3 else ROWS + 1]


def records(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(5.0, 2.0, size=(COUNTS[step], 4, 4, 2)).astype(np.float32)
    return x, (np.abs(x.sum(axis=(1, 2, 3))) % 3).astype(np.int64)


def share(step: int) -> Batch:
    """This rank's rows of a step; those past the end are no records and hold numbers that must not matter."""
    x, y = records(step)
    real = max(0, min(ROWS, COUNTS[step] - rank * ROWS))
    mine, pad = slice(rank * ROWS, rank * ROWS + real), ROWS - real
    return Batch(
        inputs=np.concatenate([x[mine], np.full((pad, 4, 4, 2), 99.0, np.float32)]),
        targets=np.concatenate([y[mine], np.zeros(pad, np.int64)]),
        weights=np.array([1.0] * real + [0.0] * pad, np.float32),
        ids=np.array([0] * real + [-1] * pad, np.int64),
        count=np.int64(COUNTS[step]),
    )


def batches(steps: int) -> Batches:
    parts = [share(step) for step in range(steps)]
    stacked = Batch(*(np.stack(values) for values in zip(*parts, strict=True)))
    return Batches(tf.data.Dataset.from_tensor_slices(stacked).batch(1))


def build_model(synchronized: bool = False) -> keras.Model:
    """BatchNorm over images, over features, inside a model inside, and one layer called twice."""
    keras.utils.set_random_seed(3)
    image = keras.Input((4, 4, 2))

    def norm(**options: Any) -> layers.Layer:
        return layers.BatchNormalization(momentum=0.8, synchronized=synchronized, **options)

    x = layers.Conv2D(3, 3, activation="relu")(norm()(image))
    x = norm(axis=1)(x)
    inner = keras.Sequential([keras.Input((12,)), layers.Dense(6), norm(scale=False), layers.ReLU()])
    twice = norm(center=False)
    x = twice(twice(inner(layers.Flatten()(x))) * 2.0 + 1.0)
    return keras.Model(image, layers.Dense(3)(x))


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def train(model: keras.Model, steps: int = 3, accumulate_steps: int = 1) -> keras.Model:
    model.compile(optimizer(), CROSS_ENTROPY)
    config = Config(train=TrainConfig(accumulate_steps=accumulate_steps))
    step, parts = build_step(model, next(batches(1)), group, config), batches(steps)
    step.run(parts, 2, FULL)
    if steps > 2:
        step.run(parts, steps - 2, ANY_SIZE)
    return model


def train_alone(model: keras.Model) -> keras.Model:
    """Plain Keras in one process on the records of all ranks."""
    own = optimizer()
    for step in range(3):
        x, y = records(step)
        with tf.GradientTape() as tape:
            mean = CROSS_ENTROPY(y, model(x, training=True))
        own.apply(tape.gradient(mean, model.trainable_variables), model.trainable_variables)
    return model


def train_alone_in_parts(model: keras.Model) -> keras.Model:
    """The same with two parts a step, of the rows that ranks take in each; in the last step not all have any."""
    own = optimizer()
    for step in range(3):
        x, y = records(step)
        totals = [0.0] * len(model.trainable_variables)
        for part in range(2):
            firsts = range(0, COUNTS[step], ROWS)
            mine = [(first, min(ROWS, COUNTS[step] - first)) for first in firsts]
            rows = [first + row for first, n in mine for row in range(part * n // 2, (part + 1) * n // 2)]
            with tf.GradientTape() as tape:
                mean = CROSS_ENTROPY(y[rows], model(x[rows], training=True)) * len(rows) / len(x)
            gradients = tape.gradient(mean, model.trainable_variables)
            totals = [total + gradient for total, gradient in zip(totals, gradients, strict=True)]
        own.apply(totals, model.trainable_variables)
    return model


def kinds(model: keras.Model) -> dict[str, np.ndarray]:
    parts = {"weights": model.trainable_weights, "statistics": model.non_trainable_weights}
    return {name: np.concatenate([weight.numpy().ravel() for weight in found]) for name, found in parts.items()}


def errors(model: keras.Model, alone: keras.Model) -> dict[str, float]:
    ours, theirs = kinds(model), kinds(alone)
    return {name: rel_error(ours[name], theirs[name]) for name in ours}


def sha(model: keras.Model) -> str:
    return hashlib.sha256(b"".join(values.tobytes() for values in kinds(model).values())).hexdigest()


alone = train_alone(build_model())
ours = train(synchronise_batch_norm(build_model()))
facts: dict[str, Any] = {"rank": rank, "errors": errors(ours, alone), "sha": sha(ours)}
facts["plain"] = errors(train(build_model()), alone)
facts["keras_synchronized"] = errors(train(build_model(synchronized=True)), alone)
in_parts = train(synchronise_batch_norm(build_model()), accumulate_steps=2)
facts["in_parts"] = errors(in_parts, train_alone_in_parts(build_model()))

# Large values that hardly differ: sums of float32 squares would lose their variance.
x = np.random.default_rng(7).normal(3000.0, 0.5, (ROWS * size, 4)).astype(np.float32)
norm, reference = (keras.Sequential([keras.Input((4,)), layers.BatchNormalization(momentum=0.0)]) for _ in range(2))
synchronise_batch_norm(norm)(x[rank * ROWS : (rank + 1) * ROWS], training=True)
reference(x, training=True)
facts["far_from_zero"] = rel_error(norm.layers[0].moving_variance, np.var(x.astype(np.float64), axis=0))

# A mask over positions, as for sequences of different lengths; here on both sides.
x = np.random.default_rng(8).normal(1.0, 1.0, (ROWS * size, 5, 4)).astype(np.float32)
mask = np.arange(5)[None] < np.random.default_rng(9).integers(1, 6, (ROWS * size, 1))
norm, reference = (layers.BatchNormalization(momentum=0.5) for _ in range(2))
for layer in (norm, reference):
    layer.build((None, 5, 4))
holder = keras.Sequential([norm])
mine = slice(rank * ROWS, (rank + 1) * ROWS)
with_mask = synchronise_batch_norm(holder).layers[0](x[mine], training=True, mask=mask[mine])
facts["masked"] = rel_error(with_mask, reference(x, training=True, mask=mask)[mine])
facts["masked_statistics"] = rel_error(norm.moving_variance, reference.moving_variance)

# In inference nothing is exchanged: here only one rank calls it.
if rank == 0:
    facts["inference"] = rel_error(ours(records(0)[0], training=False), alone(records(0)[0], training=False))


class Own(layers.BatchNormalization):
    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        return inputs


def refusal(layer: layers.Layer) -> str:
    try:
        synchronise_batch_norm(keras.Sequential([keras.Input((4,)), layer]))
    except UserError as error:
        return str(error)
    return "accepted"


renormed = layers.BatchNormalization(name="re")
renormed.renorm = True  # which Keras 3.12, the last for Python 3.10, does not know
facts["refused"] = [refusal(layer) for layer in (layers.Dense(2), renormed, Own(name="own"))]
facts["saved"] = str(Path(sys.argv[1]) / f"model-{rank}.keras")
ours.save(facts["saved"])
facts["prediction"] = ours(records(0)[0][:2], training=False).numpy()
leave(rank, facts)
group.close()
