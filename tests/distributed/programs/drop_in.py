"""Twenty steps through each way into horovod_train.tensorflow and .keras, and the same in one process on all rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import keras
import numpy as np
import tensorflow as tf
from facts import leave, rel_error

import horovod_train.keras as hvd
import horovod_train.tensorflow as hvd_tf
from horovod_train.distributed.launch import launcher
from horovod_train.errors import RunError

OUT = Path(sys.argv[1])
STEPS, ROWS = 20, 8
members = [1] if launcher.detect().size == 2 else [0, 1]  # Horovod takes no set that is all ranks
some = hvd.ProcessSet(members)
hvd.init(process_sets=[some])
rank, size = hvd.rank(), hvd.size()
if rank == 0:  # Keras numbers what it makes, so nothing here has the same name on all ranks
    made_before = [keras.optimizers.SGD(), keras.Sequential([keras.layers.Dense(1)])]
ALL = tuple(range(size))
Model = keras.Model
Optimizer = keras.optimizers.Optimizer


def batch(step: int, ranks: Sequence[int] = (rank,)) -> tuple[np.ndarray, np.ndarray]:
    rngs = [np.random.default_rng([step, of]) for of in ranks]
    x = np.concatenate([rng.normal(size=(ROWS, 6)) for rng in rngs]).astype(np.float32)
    return x, np.tanh(x.sum(axis=1, keepdims=True))


def dense(seed: int = 0) -> Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1, name="head")])


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


def sgd() -> Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def small() -> Optimizer:
    """For gradients that are added up."""
    return keras.optimizers.SGD(0.05 / size, momentum=0.9)


def mse(model: Model, x: Any, y: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


def weights(model: Model) -> np.ndarray:
    return np.concatenate([np.ravel(variable.numpy()) for variable in model.trainable_variables])


Wrap = Callable[[tf.GradientTape], tf.GradientTape]


def loop(model: Model, optimizer: Optimizer, wrap: Wrap = lambda tape: tape, persistent: bool = False) -> Model:
    """A custom loop, compiled."""
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape(persistent=persistent) as tape:
            loss = mse(model, x, y)
        tape = wrap(tape)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for number in range(STEPS):
        step(*map(tf.constant, batch(number)))
    return model


def alone(model: Model, optimizer: Optimizer, ranks: Sequence[int] = ALL, passes: int = 1, scale: float = 1.0) -> Model:
    """One process on the rows of all ranks; the update is of the sum of the gradients of `passes` batches, times scale.

    Without a graph and without Horovod.
    """
    variables = model.trainable_variables
    optimizer.build(variables)
    sums = [np.zeros(variable.shape, np.float32) for variable in variables]
    for number in range(STEPS):
        with tf.GradientTape() as tape:
            loss = mse(model, *batch(number, ranks))
        for total, grad in zip(sums, tape.gradient(loss, variables), strict=True):
            total += scale * tf.convert_to_tensor(grad).numpy()
        if (number + 1) % passes == 0:
            optimizer.apply([tf.constant(total) for total in sums], variables)
            for total in sums:
                total[...] = 0
    return model


def fit(model: Model, optimizer: Optimizer, callbacks: Sequence[Any] = (), **compiled: Any) -> Model:
    model.compile(optimizer, "mse", **compiled)
    x, y = (np.concatenate(parts) for parts in zip(*(batch(step) for step in range(STEPS)), strict=True))
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


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


def distributed(build: Callable[[], Optimizer] = sgd, **options: Any) -> Optimizer:
    return hvd.DistributedOptimizer(build(), **options)


def with_tape(**options: Any) -> Wrap:
    return lambda tape: hvd_tf.DistributedGradientTape(tape, **options)


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


def frozen() -> Model:
    model = dense()
    model.trainable = False
    model.compile(distributed(), "mse")
    return model


def scaled() -> Optimizer:
    return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=1.0)


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


def partial() -> Model:
    """The head is each rank's own: its gradient is this rank's, divided by the number of ranks."""
    model = dense()
    return loop(model, hvd.PartialDistributedOptimizer(sgd(), local_layers=model.get_layer("head")))


plain = alone(dense(), sgd())
of_embedding = alone(embedded(), sgd())
of_three = alone(dense(), sgd(), passes=3)
mean_of_three = alone(dense(), sgd(), passes=3, scale=1 / 3)
of_own = members if rank in members else [rank]
CASES: dict[str, tuple[Callable[[], Model], Model]] = {
    "fit": (lambda: fit(dense(), distributed()), plain),
    "fit_with_callback": (
        lambda: fit(dense(rank), distributed(), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], jit_compile=True),
        plain,
    ),
    "own_train_step": (lambda: fit(OwnStep(), distributed()), plain),
    "unbuilt": (
        lambda: fit(Unbuilt(), distributed(), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]),
        alone(built(), sgd()),
    ),
    "loop": (lambda: loop(dense(), distributed()), plain),
    "nested": (nested, plain),
    "tape": (lambda: loop(dense(), sgd(), with_tape()), plain),
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
        mean_of_three,
    ),
    "passes_3_sparse": (
        lambda: loop(embedded(), distributed(backward_passes_per_step=3)),
        alone(embedded(), sgd(), passes=3),
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
    "process_set": (lambda: loop(dense(), distributed(process_set=some)), alone(dense(), sgd(), of_own)),
}
facts: dict[str, Any] = {"errors": {}, "sums": {}}
for name, (ours, reference) in CASES.items():
    model = ours()
    facts["errors"][name] = rel_error(weights(model), weights(reference))
    facts["sums"][name] = weights(model).tobytes().hex()[:4000]

model = partial()
head = len(model.get_layer("head").kernel.numpy().ravel()) + 1
facts["shared_part"], facts["local_part"] = (
    part.tobytes().hex() for part in np.split(weights(model), [len(weights(model)) - head])
)

# What stock Horovod makes of the same scripts.
facts["stock_fit"] = rel_error(weights(fit(dense(), stock_keras.DistributedOptimizer(sgd()))), weights(plain))
try:
    facts["stock_tape"] = rel_error(weights(loop(dense(), sgd(), stock.DistributedGradientTape)), weights(plain))
except Exception as error:
    facts["stock_tape_raises"] = type(error).__name__


def error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (RunError, AttributeError, tf.errors.OpError) as error:
        return str(error)
    return "accepted"


facts["refused"] = {
    "twice": error_of(lambda: hvd.DistributedOptimizer(distributed())),
    "inside_loss_scale": error_of(lambda: keras.optimizers.LossScaleOptimizer(distributed())),
    "unknown_process_set": error_of(lambda: distributed(process_set=hvd.ProcessSet([0]))),
    "predivide": error_of(lambda: distributed(gradient_predivide_factor=0.0)),
    "unbuilt": error_of(lambda: hvd.broadcast_model(keras.Sequential([keras.layers.Dense(1)]))),
    "bf16_value": error_of(lambda: hvd_tf.allreduce(tf.zeros(1), compression=hvd.Compression.bf16)),
    "tape_twice": error_of(lambda: with_tape()(with_tape()(tf.GradientTape()))),
    "gpu": error_of(lambda: distributed(device_dense="/gpu:0")),
    "locking": error_of(lambda: distributed(use_locking=True)),
    "passes": error_of(lambda: distributed(backward_passes_per_step=0)),
    "op": error_of(lambda: distributed(op=hvd_tf.Max)),
    "groups": error_of(lambda: distributed(groups=0)),
    "no_optimizer": error_of(lambda: hvd.DistributedOptimizer("sgd")),  # type: ignore[arg-type]
    "global_variables": error_of(lambda: hvd.broadcast_global_variables(0)),
    "elastic": error_of(lambda: hvd.elastic),
    "legacy": error_of(lambda: hvd.load_model("a.keras", legacy_opts=True)),
    "comm": error_of(lambda: hvd.init(comm=[0])),
    "no_variables": error_of(lambda: hvd.broadcast_variables("weights", root_rank=0)),
}

# Weights that differ, without a broadcast: found at the second step, on all ranks, in fit and in a loop.
facts["forgotten"] = [
    error_of(lambda: fit(dense(rank), distributed())),
    error_of(lambda: loop(dense(rank), sgd(), with_tape())),
]
in_fit = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
own_head = dense()
facts["partial_in_fit"] = error_of(
    lambda: fit(own_head, hvd.PartialDistributedOptimizer(sgd(), local_layers=own_head.layers[-1]), in_fit)
)
facts["process_set_in_fit"] = error_of(lambda: fit(dense(), distributed(process_set=some), in_fit))
facts["plain_in_fit"] = error_of(lambda: fit(dense(), sgd(), in_fit))

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
for gradient in (tf.constant([5.0]), None):
    summing.apply([gradient], [last])
facts["late_none"] = last.numpy()

averages, logs = hvd.callbacks.MetricAverageCallback(), {"f1": np.array([float(rank), 1.0])}
averages.on_epoch_end(0, logs)
facts["averaged_array"] = logs["f1"]
facts["different"] = error_of(lambda: averages.on_epoch_end(0, {"loss": 1.0, **({"val_loss": 1.0} if rank else {})}))

whole = distributed(backward_passes_per_step=3)
facts["of_its_config"] = [
    rel_error(weights(loop(dense(), type(whole).from_config(whole.get_config()))), weights(of_three)),
    rel_error(weights(loop(dense(), whole.from_config(whole.get_config()))), weights(of_three)),
]
facts["nothing_to_train"] = error_of(
    lambda: frozen().fit(np.zeros((8, 6)), np.zeros((8, 1)), verbose=0, callbacks=in_fit)
)

late = dense(rank)
hvd.broadcast_variables([late, sgd()], root_rank=0)
facts["broadcast"] = weights(loop(late, distributed())).tobytes().hex()

x, y, ones = hvd.shard(np.arange(4 * size + 1), np.arange(4 * size + 1) * 2)
rows = hvd.shard(tf.data.Dataset.from_tensor_slices((np.arange(4 * size + 1), np.arange(4 * size + 1) * 2)))
facts["shard"] = [x.tolist(), y.tolist(), ones.tolist()]
facts["shard_of_dataset"] = [list(map(float, column)) for column in zip(*rows.as_numpy_iterator(), strict=True)]
facts["values"] = {
    "allreduce": hvd.allreduce(np.array([rank, 1.0])).numpy(),
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
facts["smooth"] = rates(
    sgd(), hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, staircase=False, momentum_correction=False)
)[0]


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
