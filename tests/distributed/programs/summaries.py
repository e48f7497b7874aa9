"""What histograms are made of, on N ranks: gradients against one process, and what computing them leaves behind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave, rel_error
from stepping import build_step

from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig, TrainConfig
from horovod_train.data.batch_source import Batch, Batches, StepSize
from horovod_train.distributed.group import as_tf_variable
from horovod_train.distributed.start import start
from horovod_train.errors import UserError
from horovod_train.training.steps.histograms import Summaries, find_layers
from horovod_train.training.steps.step import TrainStep

ROWS, RATE = 8, 0.5
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
group = start(HorovodConfig(), DeviceConfig())
rank, size = group.rank, group.size
COUNT = ROWS * size - 3  # the last rank has fewer records

rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS * size, 6)).astype(np.float32)
Y = (np.abs(X.sum(axis=1)) % 3).astype(np.int64)
SIZE = StepSize(rows=min(ROWS, max(0, COUNT - rank * ROWS)), is_full=False)
REAL = (np.arange(ROWS * size) < COUNT).astype(np.float32)


def share() -> Batch:
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    # What lies in the padding must not show.
    x = np.where(REAL[mine, None] > 0, X[mine], 99.0).astype(np.float32)
    ids = tf.constant(np.where(REAL[mine] > 0, 0, -1), tf.int64)
    return Batch(tf.constant(x), tf.constant(Y[mine]), tf.constant(REAL[mine]), ids, tf.constant(COUNT, tf.int64))


def plain() -> keras.Model:
    keras.utils.set_random_seed(3)
    regularizer = keras.regularizers.L2(0.1)
    hidden = keras.layers.Dense(8, activation="relu", kernel_regularizer=regularizer, name="hidden")
    return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(3, name="logits")], name="plain")


def restless() -> keras.Model:
    """With everything that a forward pass in training changes."""
    keras.utils.set_random_seed(3)
    x = sample = keras.Input((6,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(8, name="hidden")(x))
    return keras.Model(sample, keras.layers.Dense(3, name="logits")(keras.layers.Dropout(0.5, seed=1)(x)))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = keras.layers.Embedding(5, 4, name="tokens")
        self.twice = keras.layers.Dense(4, name="twice")
        self.logits = keras.layers.Dense(3, name="logits")

    def call(self, x: Any) -> Any:
        rows = keras.ops.cast(keras.ops.abs(x) < 1, "int32")
        return self.logits(self.twice(self.twice(keras.ops.mean(self.tokens(rows), axis=1))))


def subclassed() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = Subclassed()
    model(X[:1])
    return model


def build(
    model: Callable[[], keras.Model],
    *,
    optimizer: keras.optimizers.Optimizer | None = None,
    accumulate_steps: int = 1,
    activations: dict[str, str] | None = None,
) -> tuple[TrainStep, Summaries]:
    built = model()
    built.compile(optimizer or keras.optimizers.SGD(RATE), CROSS_ENTROPY, metrics=["accuracy"], auto_scale_loss=False)
    l2 = 0.01 if model is plain else 0.0  # with it no gradient is sparse
    step = build_step(built, share(), group, Config(train=TrainConfig(l2=l2, accumulate_steps=accumulate_steps)))
    return step, Summaries(step, share, SIZE, activations or {})


def alone(model: keras.Model, rows: np.ndarray) -> list[np.ndarray]:
    """Gradients of plain Keras in one process on the records of all ranks."""
    with tf.GradientTape() as tape:
        objective = CROSS_ENTROPY(Y[rows], model(X[rows], training=True)) + tf.add_n(model.losses or [0.0])
        matrices = [weight for weight in model.trainable_variables if len(weight.shape) > 1]
        objective += 0.005 * tf.add_n([tf.reduce_sum(tf.square(weight)) for weight in matrices])
    return [tf.convert_to_tensor(g).numpy() for g in tape.gradient(objective, model.trainable_variables)]


def gradients(values: dict[str, Any]) -> list[np.ndarray]:
    return [value.numpy() for name, value in values.items() if name.startswith("gradients/")]


def all_bytes(step: TrainStep) -> str:
    kept = [
        *step.state.variables().values(),
        *step.state.model.variables,
        *step.figures.variables,
        step.state.failure.last_loss,
        step.skipped,
    ]
    return hashlib.sha256(b"".join(as_tf_variable(variable).numpy().tobytes() for variable in kept)).hexdigest()


def largest_error(got: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(rel_error(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


records = np.flatnonzero(REAL)
facts: dict[str, Any] = {"rank": rank, "errors": {}}
step, summaries = build(plain, activations={"y_hidden": "hidden", "also": "hidden"})
values = summaries.compute()
facts["names"] = list(values)
facts["errors"]["alone"] = largest_error(gradients(values), alone(plain(), records))
facts["own_is_not_enough"] = largest_error(gradients(values), alone(plain(), records[: ROWS // 2]))
hidden = plain().layers[0](X[rank * ROWS : (rank + 1) * ROWS][REAL[rank * ROWS : (rank + 1) * ROWS] > 0])
facts["errors"]["outputs"] = rel_error(values["y_hidden"], hidden)
facts["both_names"] = bool(np.array_equal(values["also"], values["y_hidden"]))

# The update that training would make of these records.
before = [variable.numpy() for variable in step.state.model.trainable_variables]
step.run(Batches(tf.data.Dataset.from_tensors(share()).batch(1)), 1, SIZE)
moved = [(b - a.numpy()) / RATE for b, a in zip(before, step.state.model.trainable_variables, strict=True)]
facts["errors"]["update"] = largest_error(gradients(values), moved)
facts["call_is_the_layers_own"] = "call" not in vars(step.state.model.layers[0])

_, summaries = build(plain, accumulate_steps=2)
of_a_pass = records[records % ROWS < ROWS // 2]
facts["errors"]["accumulated"] = largest_error(gradients(summaries.compute()), alone(plain(), of_a_pass))

scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=2.0**12)
_, summaries = build(plain, optimizer=scaled)
facts["errors"]["loss_scale"] = largest_error(gradients(summaries.compute()), alone(plain(), records))

_, summaries = build(subclassed, activations={"twice": "twice"})
values = summaries.compute()
facts["subclassed"] = [name for name in values if name.startswith(("twice", "gradients"))]
facts["sparse_rows"] = [values["gradients/subclassed/tokens/embeddings"].shape[0], len(np.unique(np.abs(X) < 1))]

step, summaries = build(restless)
step.run(Batches(tf.data.Dataset.from_tensors(share()).batch(1)), 1, SIZE)
state_before = all_bytes(step)
facts["finite"] = all(bool(np.isfinite(gradient).all()) for gradient in gradients(summaries.compute()))
summaries.compute()
facts["left_as_it_was"] = all_bytes(step) == state_before
step.state.model(share().inputs, training=True)  # negative: what the summaries do, without their care
facts["forward_leaves_it"] = all_bytes(step) == state_before

try:
    find_layers(plain(), {"y_hidden": "hiden"})
except UserError as error:
    facts["unknown_layer"] = str(error)

leave(rank, facts)
group.close()
