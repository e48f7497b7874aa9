"""Twenty steps through each way into horovod_train.tensorflow and .keras, and the same in one process on all rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import keras
import numpy as np
import tensorflow as tf
from facts import leave, rel_error
from twenty_steps import (
    ALL,
    ROWS,
    STEPS,
    Model,
    Optimizer,
    alone,
    batch,
    dense,
    distributed,
    fit,
    in_half,
    loop,
    members,
    mse,
    rank,
    sgd,
    size,
    some,
    weights,
    with_tape,
)

import horovod_train.keras as hvd
import horovod_train.tensorflow as hvd_tf


def embedded() -> Model:
    """With an Embedding, whose gradient is IndexedSlices, with some rows twice."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6,))
    tokens = keras.ops.cast(keras.ops.clip(keras.ops.abs(x) * 4.0, 0.0, 15.0), "int32")
    return keras.Model(x, keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(16, 4)(tokens))))


def constant(value: float, units: int, activation: str | None = None) -> keras.layers.Layer:
    return keras.layers.Dense(units, activation, kernel_initializer=keras.initializers.Constant(value))


class Unbuilt(keras.Model):
    """Counts as built, and has no variables before its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [constant(0.1, 8, "relu"), constant(0.2, 1)]
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.parts[1](self.parts[0](x))


def built() -> Model:
    return keras.Sequential([keras.Input((6,)), constant(0.1, 8, "relu"), constant(0.2, 1)])


def small() -> Optimizer:
    """For gradients that are added up."""
    return keras.optimizers.SGD(0.05 / size, momentum=0.9)


class OwnStep(keras.Model):
    """A model with a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = dense()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inside(x, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = mse(self, x, y)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


def in_groups(model: Model) -> list[list[Any]]:
    return [model.trainable_variables[:2], model.trainable_variables[3:]]


class Halves:
    """A user's own compression: half the gradient on the wire."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, float]:
        return tensor / 2, 2.0

    @staticmethod
    def decompress(tensor: tf.Tensor, factor: float) -> tf.Tensor:
        return tensor * factor


def scaled() -> Optimizer:
    return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=1.0)


WEIGHT = 2.0**-6
"""Of a loss in half precision: with it no gradient overflows, in whatever order its parts are added."""


def sgd_of_weighted() -> Optimizer:
    return keras.optimizers.SGD(0.05 / WEIGHT, momentum=0.9)


def of_compile() -> Model:
    """One process on the rows of all ranks, with the loss scale that `compile` gives an optimizer."""
    model = dense()
    model.compile(sgd_of_weighted(), "mse", loss_weights=[WEIGHT])
    x, y = (np.concatenate(parts) for parts in zip(*(batch(step, ALL) for step in range(STEPS)), strict=True))
    model.fit(x, y, batch_size=ROWS * size, shuffle=False, verbose=0)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return model


def nested() -> Model:
    """Two functions inside a function, each with a tape, as a GAN may have them; the two models are alike."""
    first, second = dense(), dense()
    optimizers = [sgd(), sgd()]

    def gradients_of(model: Model) -> Any:
        @tf.function
        def gradients(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = mse(model, x, y)
            return hvd_tf.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)

        return gradients

    functions = [gradients_of(first), gradients_of(second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        found = [function(x, y) for function in functions]
        for model, optimizer, grads in zip((first, second), optimizers, found, strict=True):
            optimizer.apply(grads, model.trainable_variables)

    for number in range(STEPS):
        step(*map(tf.constant, batch(number)))
    return second


def in_pieces() -> Model:
    """A step whose gradient is that of quarters: by a function that is called twice, in a branch, and in a loop."""
    model, optimizer = dense(), sgd()
    variables = model.trainable_variables
    optimizer.build(variables)

    def gradients_of(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = mse(model, x, y)
        return hvd_tf.DistributedGradientTape(tape).gradient(loss, variables)

    function = tf.function(gradients_of)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, is_whole: tf.Tensor) -> None:
        parts = [function(x[:2], y[:2]), function(x[2:4], y[2:4])]
        parts.append(tf.cond(is_whole, lambda: gradients_of(x[4:6], y[4:6]), lambda: parts[0]))
        looped = [tf.zeros_like(variable) for variable in variables]
        for row in tf.range(6, 8):
            by_row = gradients_of(x[row : row + 1], y[row : row + 1])
            looped = [total + grad / 2 for total, grad in zip(looped, by_row, strict=True)]
        optimizer.apply([tf.add_n(of_one) / 4 for of_one in zip(*parts, looped, strict=True)], variables)

    for number in range(STEPS):
        step(*map(tf.constant, batch(number)), tf.constant(True))
    return model


def with_groups() -> Model:
    model = dense()
    return loop(model, distributed(groups=in_groups(model)))


def eager_tape() -> Model:
    """The tape around a tape that the script does not record with, outside tf.function."""
    model, optimizer = dense(), sgd()
    for number in range(STEPS):
        with hvd_tf.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = mse(model, *batch(number))
        structure = {"all": list(model.trainable_variables)}
        grads = tape.gradient(loss, structure)["all"]
        optimizer.apply(grads, model.trainable_variables)
    return model


def own_loop_with_callbacks(*, compiles: bool) -> Model:
    """A loop that calls the callbacks itself; ranks begin with different weights."""
    model, optimizer = dense(rank), distributed()
    if compiles:
        model.compile(optimizer, "mse")
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    callbacks = keras.callbacks.CallbackList(own, model=model)
    callbacks.on_train_begin()
    for epoch in range(2):
        callbacks.on_epoch_begin(epoch)
        for number in range(epoch * STEPS // 2, (epoch + 1) * STEPS // 2):
            callbacks.on_train_batch_begin(number)
            with tf.GradientTape() as tape:
                loss = mse(model, *batch(number))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            callbacks.on_train_batch_end(number, {"loss": float(loss)})
        callbacks.on_epoch_end(epoch, {"loss": float(loss)})
    callbacks.on_train_end()
    return model


def partial() -> Model:
    """The head is each rank's own: its gradient is this rank's, divided by the number of ranks."""
    model = dense()
    return loop(model, hvd.PartialDistributedOptimizer(sgd(), local_layers=model.get_layer("head")))


Reference = Callable[[], np.ndarray]


def once(train: Callable[[], Model]) -> Reference:
    """The weights of a model that is trained when they are first asked for."""
    return functools.cache(lambda: weights(train()))


plain = once(lambda: alone(dense(), sgd()))
of_embedding = once(lambda: alone(embedded(), sgd()))
of_three = once(lambda: alone(dense(), sgd(), passes=3))
of_own = members if rank in members else [rank]
CASES: dict[str, tuple[Callable[[], Model], Reference]] = {
    "fit": (lambda: fit(dense(), distributed()), plain),
    "fit_with_callback": (
        lambda: fit(dense(rank), distributed(), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], jit_compile=True),
        plain,
    ),
    "own_loop_with_callbacks": (lambda: own_loop_with_callbacks(compiles=True), plain),
    "own_loop_not_compiled": (lambda: own_loop_with_callbacks(compiles=False), plain),
    "half": (
        lambda: in_half(lambda: fit(dense(), distributed(sgd_of_weighted), loss_weights=[WEIGHT])),
        once(lambda: in_half(of_compile)),
    ),
    "own_train_step": (lambda: fit(OwnStep(), distributed()), plain),
    "unbuilt": (
        lambda: fit(Unbuilt(), distributed(), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]),
        once(lambda: alone(built(), sgd())),
    ),
    "loop": (lambda: loop(dense(), distributed()), plain),
    "nested": (nested, plain),
    "in_pieces": (in_pieces, plain),
    "tape": (lambda: loop(dense(), sgd(), with_tape()), plain),
    "tape_in_a_second_trace": (lambda: loop(dense(), sgd(), with_tape(), looks_first=True), plain),
    "passes_3_in_a_second_trace": (
        lambda: loop(dense(), distributed(backward_passes_per_step=3), looks_first=True),
        of_three,
    ),
    "eager_tape": (eager_tape, plain),
    "persistent_tape": (lambda: loop(dense(), sgd(), with_tape(), persistent=True), plain),
    "tape_and_optimizer": (lambda: loop(dense(), distributed(), with_tape()), plain),
    "tape_and_optimizer_summed": (lambda: loop(dense(), distributed(small, op=hvd.Sum), with_tape(op=hvd.Sum)), plain),
    "loss_scale": (lambda: loop(dense(), distributed(scaled)), plain),
    "sum": (lambda: loop(dense(), distributed(small, op=hvd.Sum)), plain),
    "passes_3": (lambda: loop(dense(), distributed(backward_passes_per_step=3)), of_three),
    "passes_3_in_fit": (lambda: fit(dense(), distributed(backward_passes_per_step=3)), of_three),
    "passes_3_averaged": (
        lambda: loop(dense(), distributed(backward_passes_per_step=3, average_aggregated_gradients=True)),
        once(lambda: alone(dense(), sgd(), passes=3, scale=1 / 3)),
    ),
    "passes_3_sparse": (
        lambda: loop(embedded(), distributed(backward_passes_per_step=3)),
        once(lambda: alone(embedded(), sgd(), passes=3)),
    ),
    "sparse": (lambda: loop(embedded(), distributed()), of_embedding),
    "sparse_tape": (lambda: loop(embedded(), sgd(), with_tape()), of_embedding),
    "sparse_as_dense": (lambda: loop(embedded(), distributed(sparse_as_dense=True)), of_embedding),
    "sparse_in_groups": (lambda: loop(embedded(), distributed(num_groups=2)), of_embedding),
    "num_groups": (lambda: loop(dense(), distributed(num_groups=2)), plain),
    "groups": (with_groups, plain),
    "groups_predivided": (lambda: loop(dense(), distributed(groups=3, gradient_predivide_factor=2.0)), plain),
    "predivided": (lambda: loop(dense(), distributed(gradient_predivide_factor=float(size))), plain),
    "own_compression": (lambda: loop(dense(), distributed(compression=Halves)), plain),
    "fp16": (lambda: loop(dense(), distributed(compression=hvd.Compression.fp16)), plain),
    "fp16_tape": (lambda: loop(dense(), sgd(), with_tape(compression=hvd.Compression.fp16)), plain),
    "bf16": (lambda: loop(dense(), distributed(compression=hvd.Compression.bf16)), plain),
    "process_set": (
        lambda: loop(dense(), distributed(process_set=some)),
        once(lambda: alone(dense(), sgd(), of_own)),
    ),
}
MORE = {
    *("own_loop_not_compiled", "unbuilt", "nested", "in_pieces", "tape_in_a_second_trace", "persistent_tape"),
    *("tape_and_optimizer", "tape_and_optimizer_summed", "passes_3", "passes_3_in_a_second_trace", "passes_3_averaged"),
    *("passes_3_sparse", "sparse_tape", "sparse_as_dense", "sparse_in_groups", "num_groups", "groups_predivided"),
    *("predivided", "fp16_tape", "bf16"),
}
"""Those that are one more of a kind, of which drop_in_more.py makes the facts."""


def facts_of(names: Iterable[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {"errors": {}, "sums": {}}
    for name in names:
        ours, reference = CASES[name]
        model = ours()
        facts["errors"][name] = rel_error(weights(model), reference())
        facts["sums"][name] = weights(model).tobytes().hex()[:4000]
    return facts


def facts_of_parts() -> dict[str, str]:
    model = partial()
    head = len(model.get_layer("head").kernel.numpy().ravel()) + 1
    shared, local = np.split(weights(model), [len(weights(model)) - head])
    return {"shared_part": shared.tobytes().hex(), "local_part": local.tobytes().hex()}


def facts_of_stock() -> dict[str, Any]:
    """What stock Horovod makes of the same scripts."""
    facts: dict[str, Any] = {}
    facts["stock_fit"] = rel_error(weights(fit(dense(), stock_keras.DistributedOptimizer(sgd()))), plain())
    try:
        facts["stock_tape"] = rel_error(weights(loop(dense(), sgd(), stock.DistributedGradientTape)), plain())
    except Exception as error:
        facts["stock_tape_raises"] = type(error).__name__
    return facts


if __name__ == "__main__":
    leave(rank, facts_of(name for name in CASES if name not in MORE) | facts_of_parts() | facts_of_stock())
    hvd.shutdown()
