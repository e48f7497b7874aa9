"""What horovod_train.tensorflow and .keras refuse, and what they have besides gradients: values, rates, files."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import scipy.sparse  # type: ignore[import-untyped]
import tensorflow as tf
from facts import leave, rel_error
from twenty_steps import (
    ROWS,
    Model,
    Optimizer,
    alone,
    batch,
    dense,
    distributed,
    error_of,
    fit,
    in_half,
    loop,
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
from horovod_train.distributed import objects
from horovod_train.errors import RunError
from horovod_train.tensorflow import agreement
from horovod_train.tensorflow.gradients import drop_accumulated_gradients

OUT = Path(sys.argv[1])


def frozen() -> Model:
    model = dense()
    model.trainable = False
    model.compile(distributed(), "mse")
    return model


def compile_what_was_wrapped() -> None:
    """As scripts may that count on DistributedOptimizer to change the optimizer itself."""
    optimizer = sgd()
    hvd.DistributedOptimizer(optimizer)
    dense().compile(optimizer, "mse")


def two_updates_of_float8(**options: Any) -> None:
    """As of the scale of a layer after quantize("float8"), which Keras sets to its gradient."""
    scale, optimizer = keras.Variable(np.ones(1, np.float32)), distributed(**options)
    scale.overwrite_with_gradient = True
    for _ in range(2):
        optimizer.apply([tf.constant([2.0])], [scale])


facts: dict[str, Any] = {}
facts["refused"] = {
    "float8": error_of(two_updates_of_float8),
    "float8_sum": error_of(lambda: two_updates_of_float8(op=hvd.Sum)),
    "float8_passes": error_of(lambda: two_updates_of_float8(backward_passes_per_step=2)),
    "twice": error_of(lambda: hvd.DistributedOptimizer(distributed())),
    "inside_loss_scale": error_of(lambda: keras.optimizers.LossScaleOptimizer(distributed())),
    "inside_multi": error_of(lambda: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(distributed(), {}))),
    "predivided_sum": error_of(lambda: with_tape(op=hvd.Sum, gradient_predivide_factor=2.0)(tf.GradientTape())),
    "unknown_process_set": error_of(lambda: distributed(process_set=hvd.ProcessSet([0]))),
    "predivide": error_of(lambda: distributed(gradient_predivide_factor=0.0)),
    "unbuilt": error_of(lambda: hvd.broadcast_model(keras.Sequential([keras.layers.Dense(1)]))),
    "bf16_value": error_of(lambda: hvd_tf.allreduce(tf.zeros(1), compression=hvd.Compression.bf16)),
    "tape_twice": error_of(lambda: with_tape()(with_tape()(tf.GradientTape()))),
    "half_in_a_loop": error_of(lambda: in_half(lambda: distributed().apply([tf.ones(1)], [keras.Variable([1.0])]))),
    "half_twice": error_of(lambda: in_half(lambda: hvd.DistributedOptimizer(distributed()))),
    "half_not_taken": error_of(lambda: in_half(compile_what_was_wrapped)),
    "gpu": error_of(lambda: distributed(device_dense="/gpu:0")),
    "locking": error_of(lambda: distributed(use_locking=True)),
    "passes": error_of(lambda: distributed(backward_passes_per_step=0)),
    "op": error_of(lambda: distributed(op=hvd_tf.Max)),
    "adasum_of_some": error_of(lambda: distributed(op=hvd.Adasum, process_set=some)),
    "local_scaled": error_of(
        lambda: hvd.PartialDistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(sgd()), local_layers=dense().layers[-1]
        )
    ),
    "local_clipped": error_of(
        lambda: hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(global_clipnorm=1.0), local_layers=dense().layers[-1]
        )
    ),
    "groups": error_of(lambda: distributed(groups=0)),
    "no_optimizer": error_of(lambda: hvd.DistributedOptimizer("sgd")),
    "global_variables": error_of(lambda: hvd.broadcast_global_variables(0)),
    "elastic_unbuilt": error_of(lambda: hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))),
    "elastic_no_variables": error_of(lambda: hvd_tf.elastic.TensorFlowState(epoch=0)),
    "elastic_object": error_of(lambda: hvd_tf.elastic.TensorFlowState([tf.Variable(0)], seen={1})),
    "elastic_no_batch": error_of(lambda: hvd.elastic.UpdateBatchStateCallback(object())),
    "elastic_commits": error_of(lambda: hvd.elastic.CommitStateCallback(object(), 0)),
    "elastic_name": error_of(lambda: hvd_tf.elastic.TensorFlowState([tf.Variable(0)], save=1)),
    "elastic_no_state": error_of(lambda: hvd.elastic.run(print)("state")),
    "legacy": error_of(lambda: hvd.load_model("a.keras", legacy_opts=True)),
    "comm": error_of(lambda: hvd.init(comm=[0])),
    "no_variables": error_of(lambda: hvd.broadcast_variables("weights", root_rank=0)),
}


@contextmanager
def lines_said() -> Iterator[list[str]]:
    """Inside the block, what this package logs; known after it."""
    stream, lines = io.StringIO(), list[str]()
    handler = logging.StreamHandler(stream)
    logging.getLogger("horovod_train").addHandler(handler)
    yield lines
    logging.getLogger("horovod_train").removeHandler(handler)
    lines += stream.getvalue().splitlines()


def train_on(x: np.ndarray, y: np.ndarray) -> None:
    model = dense()
    model.compile(distributed(), "mse")
    for _ in range(12):
        model.train_on_batch(x, y)


# First what nothing is said of, because a line of it comes once.
with lines_said() as facts["said_of_own_rows"]:
    train_on(*batch(0))
    train_on(np.zeros((ROWS, 6), np.float32), np.zeros((ROWS, 1), np.float32))  # no gradient
    train_on(np.full((ROWS, 6), np.nan, np.float32), np.ones((ROWS, 1), np.float32))
with lines_said() as facts["said_of_equal_rows"]:
    train_on(*batch(0, range(2)))
    train_on(*batch(1, range(2)))


def after_two_passes(others_before: int) -> float:
    """A weight, whatever was added up before the ranks changed."""
    weight, optimizer = keras.Variable(np.ones(1, np.float32)), distributed(backward_passes_per_step=2)
    for value in [4.0] * others_before + [1.0] * 2:
        optimizer.apply([tf.constant([value])], [weight])
        if value != 1.0:
            drop_accumulated_gradients()
    return float(weight.numpy()[0])


facts["added_up"] = [after_two_passes(0), after_two_passes(1)]


def after_a_broken_sync() -> list[float]:
    """A variable and a number, of which root gave only the first before a rank was lost, when both are restored."""
    weight = tf.Variable(1.0)
    state: Any = hvd_tf.elastic.TensorFlowState([weight], epoch=1.0)
    weight.assign(2.0)
    state.epoch = 2.0

    def lost(value: Any, name: str, root_rank: int = 0) -> Any:
        if name == "elastic.objects":
            raise RunError("a rank is lost")
        return broadcast(value, name, root_rank)

    broadcast, objects.broadcast = objects.broadcast, lost
    error_of(state.sync)
    objects.broadcast = broadcast
    state.restore()
    return [float(weight.numpy()), state.epoch]


facts["after_a_broken_sync"] = after_a_broken_sync()


def after_a_new_rank_0() -> list[float]:
    """Rank 0 is a process that has just been started; rank 1 has trained."""
    weight = tf.Variable(float(rank))
    state: Any = hvd_tf.elastic.TensorFlowState([weight], epoch=float(rank))
    state._is_common = rank == 1
    state.sync()
    return [float(weight.numpy()), state.epoch, state._root]


facts["after_a_new_rank_0"] = after_a_new_rank_0()

# Weights that differ, without a broadcast: found at the second step, on all ranks, in fit and in a loop.
facts["forgotten"] = [
    error_of(lambda: fit(dense(rank), distributed())),
    error_of(lambda: loop(dense(rank), sgd(), with_tape())),
]


def accumulate_by_hand() -> None:
    """Twelve exchanges before the first update, after which the weights are broadcast."""
    model, optimizer, (x, y) = dense(rank), sgd(), batch(0)
    for _ in range(2):
        added = [tf.zeros_like(variable) for variable in model.trainable_variables]
        for _ in range(12):
            with tf.GradientTape() as tape:
                loss = mse(model, x, y)
            gradients = hvd_tf.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
            added = [a + b for a, b in zip(added, gradients, strict=True)]
        optimizer.apply_gradients(zip(added, model.trainable_variables, strict=True))
        hvd_tf.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)


facts["added_by_hand"] = error_of(accumulate_by_hand)


def train_at_rates_of_their_own() -> None:
    """Weights are equal at the tenth exchange, and then a rank has another rate."""
    model, (x, y) = dense(), batch(0)
    model.compile(distributed(), "mse")
    for number in range(100):
        if number == 20:
            model.optimizer.learning_rate = 0.001 * (1 + rank)
        model.train_on_batch(x, y)


facts["forgotten_later"] = error_of(train_at_rates_of_their_own)
in_fit = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
own_head = dense()
facts["partial_in_fit"] = error_of(
    lambda: fit(own_head, hvd.PartialDistributedOptimizer(sgd(), local_layers=own_head.layers[-1]), in_fit)
)
facts["process_set_in_fit"] = error_of(lambda: fit(dense(), distributed(process_set=some), in_fit))
if some.included():  # the others know nothing of it, and all exchange with each other after it
    loop(dense(), distributed(process_set=some))


class TwoOptimizers(keras.Model):
    """Trains its body with the optimizer of `compile`, and its head, in a train_step of its own, with another."""

    def __init__(self, head_optimizer: Optimizer) -> None:
        super().__init__()
        self.inside, self.head_optimizer = dense(), head_optimizer
        head_optimizer.build(self.inside.layers[-1].trainable_variables)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inside(x, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        body, head = (layer.trainable_variables for layer in self.inside.layers)
        with tf.GradientTape(persistent=True) as tape:
            loss = mse(self, x, y)
        self.optimizer.apply(tape.gradient(loss, body), body)
        self.head_optimizer.apply(tape.gradient(loss, head), head)
        return {"loss": loss}


def slots_at_the_first_batch(model: Model, optimizer: Optimizer, compiled: Optimizer) -> list[float]:
    """The first number of each slot of `optimizer`: this rank's number, until `fit` has broadcast rank 1's."""
    slots = optimizer.variables[2:]
    found: list[float] = []
    for slot in slots:
        slot.assign(np.full(slot.shape, rank))
    look = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: found.extend(float(slot.numpy().flat[0]) for slot in slots)
    )
    fit(model, compiled, [hvd.callbacks.BroadcastGlobalVariablesCallback(1), look])
    return found[: len(slots)]


of_head = distributed()
facts["slots_of_two"] = slots_at_the_first_batch(TwoOptimizers(of_head), of_head, distributed())


def slots_of_local(optimizer: Optimizer) -> list[float]:
    model = dense()
    partial = hvd.PartialDistributedOptimizer(optimizer, local_layers=model.layers[-1])
    partial.build(model.trainable_variables)
    return slots_at_the_first_batch(model, partial, partial)


facts["slots_of_local"] = [slots_of_local(optimizer) for optimizer in (sgd(), keras.optimizers.Adafactor())]

best = hvd.callbacks.BestModelCheckpoint("loss", filepath=str(OUT / "best.keras"))
fit(dense(rank), distributed(), [hvd.callbacks.BroadcastGlobalVariablesCallback(1), best])
facts["best_of_root_1"] = Path(best.filepath).exists()
agreement.guards.files_on_root_only = False
best = hvd.callbacks.BestModelCheckpoint("loss", filepath=str(OUT / f"best-{rank}.keras"))
fit(dense(rank), distributed(), [hvd.callbacks.BroadcastGlobalVariablesCallback(1), best])
facts["writes_best"] = Path(best.filepath).exists()
agreement.guards.files_on_root_only = True


def kept_as_best(*, on_root_only: bool = False) -> list[float]:
    """What Keras' checkpoint took for the best of a figure, root's own figure, and those of the epoch that it saw."""
    kept = keras.callbacks.ModelCheckpoint(str(OUT / f"kept-{rank}.keras"), "val_loss", save_best_only=True)
    own, seen = dense(), list[float]()
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs.get("val_loss", np.nan)))
    own.compile(distributed(), "mse")
    x, y = batch(0)
    evaluated = None if on_root_only and rank else (x, y + rank)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), kept, look]
    own.fit(x, y, epochs=1, verbose=0, validation_data=evaluated, callbacks=callbacks)
    alone = own.evaluate(x, y + rank, verbose=0)
    return [float(np.min(kept.best)) if kept.best is not None else np.inf, float(alone), seen[0]]


facts["kept_as_best"], facts["kept_as_best_on_root"] = kept_as_best(), kept_as_best(on_root_only=True)
unbuilt = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
facts["unbuilt_16_a_call"] = error_of(lambda: fit(unbuilt, distributed(), in_fit, steps_per_execution=16))
facts["unbuilt_weights"] = weights(unbuilt).tobytes().hex()


class WithBranch(keras.Model):
    """Has a layer that is never called, and thus never built; adds to the loss what depends on its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.branch = keras.layers.Dense(1, activity_regularizer="l2"), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(x)


class Sees(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        facts.setdefault("seen_by_the_first_batch", weights(self.model).tolist())


branched = WithBranch()
branched(batch(0)[0] + rank)
branched.set_weights([np.full_like(weight, rank + 1) for weight in branched.get_weights()])
facts["with_a_branch"] = error_of(lambda: fit(branched, distributed(), [*in_fit, Sees()]))


class Fails(keras.callbacks.Callback):
    """Ends a `fit` before its first batch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        raise RunError("as it was told")


unbuilt = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
facts["failed_fit"] = error_of(lambda: fit(unbuilt, distributed(), [*in_fit, Fails()]))
facts["forgotten"].append(error_of(lambda: loop(dense(rank), sgd(), with_tape())))
facts["plain_in_fit"] = error_of(lambda: fit(dense(), sgd(), in_fit))


def behind_local_variables(through_tape: bool) -> list[float]:
    """Two variables that all ranks have, after gradients rank and 10 rank; each rank has other local ones before."""
    shared, local = ([keras.Variable([0.0]) for _ in range(count)] for count in (2, size - 1 - rank))
    variables, optimizer = [*local, *shared], keras.optimizers.SGD(1.0)
    factors = tf.constant([1.0] * len(local) + [1.0 * rank, 10.0 * rank])
    if not through_tape:
        hvd.DistributedOptimizer(optimizer)
    for variable in [] if through_tape else local:
        optimizer.register_local_var(variable)
    optimizer.build(variables)

    @tf.function
    def step(factors: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(factors * tf.concat(variables, axis=0))
        if through_tape:
            tape = hvd_tf.DistributedGradientTape(tape)
            for variable in local:
                tape.register_local_source(variable.value)
        optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)

    step(factors)
    return [float(variable.numpy()[0]) for variable in shared]


def jacobians(wrap: Callable[[tf.GradientTape], tf.GradientTape]) -> list[Any]:
    """Jacobians of this rank's data: by TensorFlow's parallel loop and by its other one, and by row."""
    weight, x = tf.Variable([[1.0], [2.0]]), tf.constant([[1.0 + rank, 10.0]])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, squares = x @ weight, x * x
    tape = wrap(tape)
    found = [tape.jacobian(y, weight, experimental_use_pfor=in_parallel) for in_parallel in (True, False)]
    return [each.numpy().ravel().tolist() for each in [*found, tape.batch_jacobian(squares, x)]]


facts["jacobians"] = [jacobians(with_tape()), jacobians(lambda tape: tape)]
facts["behind_local"] = [behind_local_variables(through_tape) for through_tape in (True, False)]


def train_after_join(*, broadcasts: bool) -> float:
    """A weight after each rank has made 12 updates more than the one before it, and joined, and all 12 by -1."""
    weight, optimizer = keras.Variable(np.zeros(1, np.float32)), distributed(lambda: keras.optimizers.SGD(1.0))
    for _ in range(12 * rank):
        optimizer.apply([tf.constant([1.0])], [weight])
    last_rank = int(hvd_tf.join())
    if broadcasts:
        hvd.broadcast_variables([weight], root_rank=last_rank)
    for _ in range(12):
        optimizer.apply([tf.constant([1.0])], [weight])
    return float(weight.numpy()[0])


def gradient_of_bfloat16(compression: Any = hvd.Compression.bf16) -> list[float]:
    weight = tf.Variable(tf.ones(1, tf.bfloat16))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * weight)
    (gradient,) = with_tape(compression=compression)(tape).gradient(loss, [weight])
    return [float(value) for value in gradient]


facts["bfloat16_by_fp16"] = gradient_of_bfloat16(hvd.Compression.fp16)
facts["refused"]["bfloat16"] = error_of(gradient_of_bfloat16)
facts["refused"]["barrier_in_a_step"] = error_of(tf.function(hvd_tf.barrier, autograph=False))
in_xla = tf.function(lambda: hvd_tf.allreduce(tf.ones(1)), jit_compile=True, autograph=False)
facts["refused"]["in_xla"] = error_of(in_xla)
facts["refused"]["join_in_a_step"] = error_of(tf.function(hvd_tf.join, autograph=False))
facts["after_join"] = train_after_join(broadcasts=True)
facts["after_join_only"] = error_of(lambda: train_after_join(broadcasts=False))

# Two sets of variables in turns; a variable whose last gradient of a sum is missing.
summing = distributed(lambda: keras.optimizers.SGD(1.0), backward_passes_per_step=2)
pair = [keras.Variable([1.0]), keras.Variable([1.0])]
summing.build(pair)
for _ in range(2):
    for variable, gradient in zip(pair, (10.0, 1.0), strict=True):
        summing.apply([tf.constant([gradient])], [variable])
facts["two_sets"] = [float(variable.numpy()[0]) for variable in pair]
last = keras.Variable([1.0])
summing = distributed(lambda: keras.optimizers.SGD(1.0), backward_passes_per_step=2)
for only in (tf.constant([5.0]), None):
    summing.apply([only], [last])
facts["late_none"] = last.numpy()

averages, logs = hvd.callbacks.MetricAverageCallback(), {"f1": np.array([float(rank), 1.0])}
averages.on_epoch_end(0, logs)
facts["averaged_array"] = logs["f1"]
facts["different"] = error_of(lambda: averages.on_epoch_end(0, {"loss": 1.0, **({"val_loss": 1.0} if rank else {})}))

whole = distributed(backward_passes_per_step=3)
of_three = weights(alone(dense(), sgd(), passes=3))
copies = [type(whole).from_config(whole.get_config()), whole.from_config(whole.get_config())]
facts["of_its_config"] = [rel_error(weights(loop(dense(), copy)), of_three) for copy in copies]
facts["nothing_to_train"] = error_of(
    lambda: frozen().fit(np.zeros((8, 6)), np.zeros((8, 1)), verbose=0, callbacks=in_fit)
)

late = dense(rank)
hvd.broadcast_variables([late, sgd()], root_rank=0)
facts["broadcast"] = weights(loop(late, distributed())).tobytes().hex()


def shard_refuses(data: Any) -> str:
    return error_of(lambda: hvd.shard(np.arange(8), data))


def unlike(variables: Any, root_rank: int = 0) -> str:
    return error_of(lambda: hvd.broadcast_variables(variables, root_rank))


def layers(*units: int) -> list[Any]:
    return keras.Sequential([keras.Input((6,)), *map(keras.layers.Dense, units)]).weights


is_last, moments = rank == size - 1, keras.optimizers.Adam() if rank == size - 1 else keras.optimizers.SGD()
moments.build(dense().trainable_variables)
norm = keras.layers.LayerNormalization()
norm.build((None, 4))
facts["unlike"] = {
    "optimizer": unlike(moments),
    "model": unlike(layers(8, 3, 1) if is_last else layers(8, 1)),
    "state on root only": unlike([] if is_last else moments),
    "dtype": unlike([tf.Variable(0.0, dtype=tf.float64 if is_last else tf.float32)]),
    "order": unlike(norm.weights[::-1] if is_last else norm.weights),
    "root_rank": unlike(norm, int(is_last)),
}
broadcast_in_a_step = tf.function(lambda: hvd.broadcast_variables(moments, root_rank=0))
facts["unlike_in_a_step"] = error_of(broadcast_in_a_step)


def broadcasts_in_a_step(*, in_functions: bool, inplace: bool = False) -> list[float]:
    """The values of two lists of variables after one compiled step; in_functions: each in a function inside it."""
    several = [[tf.Variable(100.0 * rank + number) for number in range(first, first + 30)] for first in (0, 30)]

    def broadcast_of(variables: list[tf.Variable]) -> Callable[[], None]:
        def broadcast() -> None:
            hvd.broadcast_variables(variables, root_rank=0, inplace=inplace)

        return tf.function(broadcast, autograph=False) if in_functions else broadcast

    broadcasts = [broadcast_of(variables) for variables in several]

    def step() -> None:
        for broadcast in broadcasts:
            broadcast()

    tf.function(step, autograph=False)()
    return [float(variable.numpy()) for variables in several for variable in variables]


facts["two_broadcasts"] = [
    broadcasts_in_a_step(in_functions=False),
    broadcasts_in_a_step(in_functions=True),
    broadcasts_in_a_step(in_functions=True, inplace=True),
]

in_place = [dense(rank), tf.Variable(float(rank)), tf.Variable([2.0 * rank])]
hvd.broadcast_variables(in_place, root_rank=size - 1, inplace=True)
facts["in_place"] = [weights(in_place[0]).tobytes().hex(), *(variable.numpy().tolist() for variable in in_place[1:])]

x, y, ones = hvd.shard(np.arange(4 * size + 1), np.arange(4 * size + 1) * 2)
rows = hvd.shard(tf.data.Dataset.from_tensor_slices((np.arange(4 * size + 1), np.arange(4 * size + 1) * 2)))
facts["shard"] = [x.tolist(), y.tolist(), ones.tolist()]
named, ones = hvd.shard({"a": np.arange(4 * size + 1), "b": {"c": tf.range(4 * size + 1) * 2}})
facts["shard_of_dict"] = [named["a"].tolist(), named["b"]["c"].tolist(), ones.tolist()]
facts["shard_refused"] = {
    name: shard_refuses(data)
    for name, data in {
        "None": None,
        "generator": (number for number in range(8)),
        "dataset": tf.data.Dataset.range(8),
        "str": "eight888",
        "number": 8,
        "scalar": np.array(8),
        "ragged": tf.ragged.constant([[1], [2, 3]]),
        "lists": [[1], [2, 3]],
        "scipy": scipy.sparse.eye(8),
        "tf.sparse": tf.sparse.eye(8),
        "dict": {"a": np.zeros(8), "b": None},
        "lengths": {"a": np.zeros(8), "b": np.zeros(7)},
        "empty": {},
    }.items()
}
pairs = tf.data.Dataset.from_tensor_slices((np.arange(8), np.arange(8)))
sampled = tf.data.Dataset.sample_from_datasets([pairs, pairs])
facts["shard_of_shuffled"] = [
    error_of(lambda: hvd.shard(pairs.shuffle(8))),
    error_of(lambda: hvd.shard(pairs.shuffle(8).map(lambda x, y: (y, x)))),
    error_of(lambda: hvd.shard(pairs.shuffle(8, seed=1, reshuffle_each_iteration=False))),
    error_of(lambda: hvd.shard(sampled.apply(tf.data.experimental.assert_cardinality(16)))),
    error_of(lambda: hvd.shard(pairs.map(lambda x, y: (y, x), num_parallel_calls=2, deterministic=False))),
    error_of(lambda: hvd.shard(pairs.map(lambda x, y: (y, x), num_parallel_calls=2))),
]
with lines_said() as of_batches:
    hvd.shard(pairs.batch(2))
with lines_said() as of_records:
    hvd.shard(pairs.batch(2).unbatch().apply(tf.data.experimental.assert_cardinality(8)))
facts["shard_of_batches"] = [of_batches, of_records]


def broadcast_after_shards(*given: Any) -> str:
    """What the next broadcast says of what each call of shard was given."""

    def attempt() -> None:
        for data in given:
            hvd.shard(*data)
        hvd.broadcast_variables([tf.Variable(0.0)], root_rank=0)

    return error_of(attempt)


numbers, own_order = np.arange(4 * size), np.random.default_rng(rank).permutation(4 * size)
broadcast_after_shards()  # with what was given before
facts["shard_in_other_order"] = {
    "arrays": broadcast_after_shards((numbers, numbers), (own_order, own_order * 2)),
    "dataset": broadcast_after_shards([tf.data.Dataset.from_tensor_slices((own_order, own_order))]),
    "numbers of rows": broadcast_after_shards([np.arange(4 * size + rank)]),
    "one order": broadcast_after_shards((own_order, numbers)),
    "one rank alone": broadcast_after_shards(*([(own_order,)] if rank == 0 else [])),
    "fit": error_of(lambda: hvd.shard(own_order) and fit(dense(), distributed(), in_fit)),
    "nothing": broadcast_after_shards(),
}
agreement.guards.check_weights = False
facts["shard_in_other_order"]["unchecked"] = broadcast_after_shards([own_order])
agreement.guards.check_weights = True
facts["shard_of_nothing"] = error_of(hvd.shard)
facts["shard_of_dataset"] = [list(map(float, column)) for column in zip(*rows.as_numpy_iterator(), strict=True)]
facts["values"] = {
    "allreduce": hvd.allreduce(np.array([rank, 1.0])).numpy(),
    "mean_of_integers": [float(hvd.allreduce(rank)), float(hvd_tf.grouped_allreduce([tf.constant(rank)])[0])],
    "mean_of_large_integers": float(hvd_tf.allreduce(tf.constant(70_000 + rank), compression=hvd.Compression.fp16)),
    "sum_of_integers": hvd.allreduce(np.array([rank]), average=False).numpy(),
    "summed": hvd.allreduce(keras.Variable([1.0]), average=False).numpy(),
    "allgather": hvd.allgather([rank]).numpy(),
    "broadcast": hvd.broadcast([float(rank)], root_rank=size - 1).numpy(),
    "reducescatter": hvd.reducescatter(np.arange(float(size)), op=hvd.Sum).numpy(),
    "objects": hvd_tf.allgather_object({"rank": rank}),
    "object": hvd.broadcast_object(("from", rank), root_rank=0),
}


class Rates(keras.callbacks.Callback):
    """The rate with which each batch is trained, and the accumulated update before it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(self.model.optimizer.learning_rate))


def rates(optimizer: Optimizer, schedule: keras.callbacks.Callback) -> tuple[list[float], Model]:
    seen, model = Rates(), dense()
    model.compile(distributed(lambda: optimizer), "mse")
    x, y = batch(0, range(2))
    model.fit(x[:12], y[:12], batch_size=4, epochs=4, shuffle=False, verbose=0, callbacks=[schedule, seen])
    return seen.seen, model


facts["warmup"] = rates(keras.optimizers.Adam(0.8), hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2))[0]
facts["staircase"] = rates(
    sgd(), hvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3)
)[0]

with lines_said() as facts["said_of_powers"]:
    power = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, staircase=False, momentum_correction=False)
    facts["smooth"] = rates(sgd(), power)[0]
    rates(sgd(), power)
    rates(sgd(), hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2, end_epoch=4))
with lines_said() as facts["said_of_constants"]:
    for multiplier, end in ((1, None), (lambda epoch: 0.1, None), (0.1, 3)):
        rates(sgd(), hvd.callbacks.LearningRateScheduleCallback(0.4, multiplier, start_epoch=2, end_epoch=end))


def by_hand(correction: bool) -> np.ndarray:
    """SGD with momentum, where the momentum of a step is multiplied by its rate / the rate before; without Keras'."""
    model, (x, y) = dense(), batch(0, range(2))
    velocity = [np.zeros(variable.shape, np.float32) for variable in model.trainable_variables]
    before = 0.02
    for step in range(12):
        rate, at = 0.02 * (1 + step / 3), step % 3 * 4
        with tf.GradientTape() as tape:
            loss = mse(model, x[at : at + 4], y[at : at + 4])
        for i, (variable, grad) in enumerate(
            zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True)
        ):
            momentum = 0.9 * (rate / before if correction else 1.0)
            velocity[i] = momentum * velocity[i] - rate * grad.numpy()
            variable.assign_add(velocity[i])
        before = rate
    return weights(model)


corrected = hvd.callbacks.LearningRateScheduleCallback(0.02, lambda epoch: 1 + epoch, staircase=False)
facts["corrected"] = weights(rates(keras.optimizers.SGD(0.02, momentum=0.9), corrected)[1])
facts["corrected_by_hand"], facts["uncorrected_by_hand"] = by_hand(True), by_hand(False)

# A list of callbacks that is given to `fit` twice; the losses of the last rank are not finite.
callback_list = keras.callbacks.CallbackList(
    [hvd.callbacks.BroadcastGlobalVariablesCallback(0), keras.callbacks.TerminateOnNaN()], add_history=True
)
given = list(callback_list.callbacks)
facts["list_given_again"] = []
for is_interrupted in (False, True, False):
    model = dense()
    model.compile(distributed(), "mse")
    callback_list.set_model(model)
    x, y = batch(0, range(2))
    if is_interrupted:
        model.train_step = None  # which raises
        with suppress(TypeError):
            model.fit(x[:8], y[:8], batch_size=4, verbose=0, callbacks=callback_list)
        continue
    model.fit(x[:8], y[:8] * (np.nan if rank == size - 1 else 1), batch_size=4, verbose=0, callbacks=callback_list)
    facts["list_given_again"].append([bool(model.stop_training), callback_list.callbacks == given])

# A model with its optimizer goes through a file, and trains on.
path = str(OUT / f"model-{rank}.keras")
saved = fit(dense(), distributed())
saved.save(path)
loaded = hvd.load_model(path)
facts["loaded_slots"] = rel_error(loaded.optimizer.variables[2].numpy(), saved.optimizer.variables[2].numpy())
x, y = batch(99)
for model in (saved, loaded):
    model.fit(x, y, batch_size=ROWS, verbose=0)
facts["trained_on"] = [weights(saved).tobytes().hex(), weights(loaded).tobytes().hex()]
leave(rank, facts)
hvd.shutdown()
