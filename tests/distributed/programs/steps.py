"""Weights after a few uneven steps through TrainStep, against one process that sees all records at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave, rel_error

from horovod_train.config import DeviceConfig, HorovodConfig, Spec
from horovod_train.data.pipeline import Batch
from horovod_train.distributed.group import start
from horovod_train.distributed.optimizer import DistributedOptimizer
from horovod_train.metrics import Accumulator, build_metrics
from horovod_train.objective import Objective, build_loss
from horovod_train.state import TrainState
from horovod_train.step import EvalStep, TrainStep

ROWS = 8
group = start(HorovodConfig(), DeviceConfig())
rank, size = group.rank, group.size

# Records over all ranks in each step: whole, whole, and a last one that leaves some ranks with less or nothing.
COUNTS = [ROWS * size, ROWS * size, ROWS * (size - 1) + 3 if size < 3 else ROWS + 1]


def records(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(COUNTS[step], 6)).astype(np.float32)
    return x, (np.abs(x.sum(axis=1)) % 3).astype(np.int64)


def share(step: int) -> Batch:
    """This rank's rows of a step; those past the end weigh nothing and hold numbers that must not matter."""
    x, y = records(step)
    real = max(0, min(ROWS, COUNTS[step] - rank * ROWS))
    mine = slice(rank * ROWS, rank * ROWS + real)
    pad = ROWS - real
    return Batch(
        inputs=tf.constant(np.concatenate([x[mine], np.full((pad, 6), 9.0, np.float32)])),
        targets=tf.constant(np.concatenate([y[mine], np.zeros(pad, np.int64)])),
        weights=tf.constant([1.0] * real + [0.0] * pad),
        ids=tf.constant([0] * real + [-1] * pad, tf.int64),
        count=tf.constant(COUNTS[step], tf.int64),
    )


def batches() -> Iterator[Batch]:
    first = share(0)
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, first)
    return iter(tf.data.Dataset.from_generator(lambda: (share(step) for step in range(3)), output_signature=spec))


def build_model(dropout: float = 0.0, l2: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(3)
    regularizer = keras.regularizers.L2(l2) if l2 else None
    head = [keras.Input((6,)), keras.layers.Dense(8, activation="relu", kernel_regularizer=regularizer)]
    return keras.Sequential([*head, *([MaskKeeper(dropout)] if dropout else []), keras.layers.Dense(3)])


class MaskKeeper(keras.layers.Layer):
    """Dropout that notes which units it let through in its last call."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(rate)

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(shape=(ROWS, shape[-1]), trainable=False, initializer="zeros", name="mask")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        ones = self.dropout(keras.ops.ones_like(x), training=training)
        if training:
            self.mask.assign(ones)
        return x * ones


LOSS = Spec("sparse_categorical_crossentropy", {"from_logits": True})
METRICS = [Spec("sparse_categorical_accuracy", {"name": "accuracy"})]


def train(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, *, accumulate_steps: int = 1, first_step: int = 0
) -> tuple[TrainState, Accumulator]:
    state = TrainState(model, DistributedOptimizer(optimizer))
    state.step.assign(first_step)
    seen = Accumulator(["loss", "penalty"], build_metrics(METRICS))
    objective = Objective(model, state.optimizer, build_loss(LOSS), size=size, accumulate_steps=accumulate_steps)
    step = TrainStep(state, objective, seen, rank=rank, seed=5, count_over_ranks=lambda batch: batch.count)
    step.run(batches(), 2)
    step.run(stream_from(2), 1)
    return state, seen


def stream_from(step: int) -> Iterator[Batch]:
    found = batches()
    for _ in range(step):
        next(found)
    return found


def train_alone(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> list[float]:
    """Plain Keras in one process on the records of all ranks; returns the loss sums of the steps."""
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sums = []
    for step in range(3):
        x, y = records(step)
        with tf.GradientTape() as tape:
            mean = cross_entropy(y, model(x, training=True))
            objective = mean + (tf.add_n(model.losses) if model.losses else 0.0)
        optimizer.apply(tape.gradient(objective, model.trainable_variables), model.trainable_variables)
        sums.append(float(mean) * len(x))
    return sums


def weights(model: keras.Model) -> np.ndarray:
    return np.concatenate([variable.numpy().ravel() for variable in model.trainable_variables])


BUILDERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "clipped": lambda: keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1),
}
facts: dict[str, Any] = {"rank": rank, "errors": {}}
for name, build in BUILDERS.items():
    state, seen = train(build(), build_model())
    alone = build_model()
    sums = train_alone(build(), alone)
    facts["errors"][name] = rel_error(weights(state.model), weights(alone))
    if name == "sgd":
        facts["loss"] = [seen.result(group)["loss"], sum(sums) / sum(COUNTS)]
        facts["steps"] = int(state.step)

state, _ = train(keras.optimizers.SGD(0.5), build_model(), accumulate_steps=4)
alone = build_model()
train_alone(keras.optimizers.SGD(0.5), alone)
facts["errors"]["accumulated"] = rel_error(weights(state.model), weights(alone))

state, _ = train(keras.optimizers.SGD(0.5), build_model(l2=0.1))
alone = build_model(l2=0.1)
train_alone(keras.optimizers.SGD(0.5), alone)
facts["errors"]["l2"] = rel_error(weights(state.model), weights(alone))

# Negative: the mean of each rank's own mean is not the mean over records once the shares are uneven.
naive = build_model()
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.5))
for step in range(3):
    batch = share(step)
    with tf.GradientTape() as tape:
        values = build_loss(LOSS)(batch.targets, naive(batch.inputs)) * batch.weights
        mean = tf.reduce_sum(values) / tf.maximum(tf.reduce_sum(batch.weights), 1.0)
    optimizer.apply(tape.gradient(mean, naive.trainable_variables), naive.trainable_variables)
plain = build_model()
train_alone(keras.optimizers.SGD(0.5), plain)
facts["errors"]["mean_of_means"] = rel_error(weights(naive), weights(plain))

# Every record once in evaluation, whatever lies in the padding.
model = build_model()
found = Accumulator(["loss"], build_metrics([*METRICS, Spec("AUC", {"from_logits": True, "multi_label": True})][:1]))
EvalStep(model, build_loss(LOSS), found).run(batches(), 3)
x, y = (np.concatenate(parts) for parts in zip(*(records(step) for step in range(3)), strict=True))
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
facts["evaluation"] = [found.result(group), model.evaluate(x, y, verbose=0, return_dict=True, batch_size=len(x))]

state, _ = train(keras.optimizers.SGD(0.1), build_model(dropout=0.5))
facts["mask"] = state.model.layers[1].mask.numpy()
again, _ = train(keras.optimizers.SGD(0.1), build_model(dropout=0.5))
facts["mask_again"] = again.model.layers[1].mask.numpy()
later, _ = train(keras.optimizers.SGD(0.1), build_model(dropout=0.5), first_step=1)
facts["mask_later"] = later.model.layers[1].mask.numpy()

# Ranks that gathered different statistics hold their mean afterwards, and can have their own back.
own = state.average_statistics(group)
facts["averaged_mask"] = state.model.layers[1].mask.numpy()
state.set_statistics(own)
facts["own_mask"] = state.model.layers[1].mask.numpy()

leave(rank, facts)
group.close()
