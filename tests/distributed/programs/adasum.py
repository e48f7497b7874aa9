"""What op: adasum makes of gradients that have nothing, everything and something in common, and of training."""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave, rel_error
from stepping import ANY_SIZE, build_step

from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig
from horovod_train.data.batch_source import Batch, Batches
from horovod_train.distributed.optimizer import GradientExchange
from horovod_train.distributed.start import start
from horovod_train.tensorflow import Adasum, DistributedOptimizer

group = start(HorovodConfig(op="adasum"), DeviceConfig())
rank, size = group.rank, group.size
exchange = GradientExchange("adasum", "none")


def by_the_paper(gradients: list[np.ndarray]) -> np.ndarray:
    """Maleki et al. 2021: (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b of two; of more, of neighbours and so on."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    a, b = by_the_paper(gradients[:half]), by_the_paper(gradients[half:])
    return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b


orthogonal = [np.repeat(np.eye(size)[r] * (r + 1), 5) for r in range(size)]
equal = [np.arange(1.0, 8.0)] * size
drawn = [np.random.default_rng(r).normal(size=101) + 0.5 for r in range(size)]


def combined(gradients: list[np.ndarray], name: str) -> np.ndarray:
    return exchange(tf.constant(gradients[rank], tf.float32), name).numpy()


raise_together = combined(drawn, "drawn")
rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([rank, rank]), tf.constant([size, 3]))
facts = {
    "exchange": group.exchange,
    "errors": {
        "orthogonal": rel_error(combined(orthogonal, "orthogonal"), np.sum(orthogonal, axis=0)),
        "equal": rel_error(combined(equal, "equal"), equal[0]),
        "drawn": rel_error(raise_together, by_the_paper(drawn)),
        "sparse": rel_error(exchange(rows, "sparse"), np.full((size, 3), 2.0)),
    },
    "from_mean": rel_error(raise_together, np.mean(drawn, axis=0)),
    "from_sum": rel_error(raise_together, np.sum(drawn, axis=0)),
}

keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5), op=Adasum)
optimizer.build(model.trainable_variables)
x = np.random.default_rng(rank).normal(size=(32, 6)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)


@tf.function(autograph=False)
def step() -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


facts["losses"] = [group.average([step().numpy()])[0].item() for _ in range(20)]
facts["weights"] = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.weights)).hexdigest()

# A last step with one record, which rank 0 has: its gradient is the update.
start_of = [weight.numpy() for weight in model.trainable_variables]
loss = keras.losses.MeanSquaredError()
one = np.full((1, 6), 0.5, np.float32), np.full((1, 1), 2.0, np.float32)
with tf.GradientTape() as tape:
    value = loss(one[1], model(one[0]))
gradients = tape.gradient(value, model.trainable_variables)
uneven = keras.models.clone_model(model)
uneven.set_weights(model.get_weights())
uneven.compile(keras.optimizers.SGD(0.5), loss)
batch = Batch(
    tf.constant(np.repeat(one[0], 2, axis=0)),
    tf.constant(np.repeat(one[1], 2, axis=0)),
    tf.ones(2),
    tf.constant([0 if rank == 0 else -1, -1], tf.int64),
    tf.constant(1, tf.int64),
)
trained = build_step(uneven, batch, group, Config(horovod=HorovodConfig(op="adasum")))
trained.run(Batches(tf.data.Dataset.from_tensors(batch).batch(1)), 1, ANY_SIZE)
moved = [(old - new.numpy()) / 0.5 for old, new in zip(start_of, uneven.trainable_variables, strict=True)]
facts["one_record"] = max(rel_error(*pair) for pair in zip(moved, gradients, strict=True))
leave(rank, facts)
group.close()
