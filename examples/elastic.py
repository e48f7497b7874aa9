"""A training loop that goes on when hosts are lost, and takes in hosts that come. Each record is used once an epoch.

horovodrun --gloo -np 1 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/elastic.py

hosts.sh prints the hosts that there are, one a line, with the number of ranks each can run: node1:4
"""

from __future__ import annotations

import digits
import keras
import numpy as np
import tensorflow as tf

import horovod_train.tensorflow as hvd

GLOBAL_BATCH, EPOCHS, COMMIT_EVERY = 64, 12, 5

hvd.init()
(x, y), held_out = digits.load()
model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(64, "relu")])
model.add(keras.layers.Dense(10))
optimizer = keras.optimizers.Adam(0.004)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


@tf.function(reduce_retracing=True)
def step(x: tf.Tensor, y: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
    """x, y: this rank's records of the step, which may be none. records: how many all ranks have together."""
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True)) / records
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowKerasState) -> None:
    """Begins at the last commit, which may be inside an epoch and of another number of ranks."""
    while state.epoch < EPOCHS:
        order = np.random.default_rng(state.epoch).permutation(len(x))  # the same on all ranks
        while state.done < len(order):
            rows = order[state.done : state.done + GLOBAL_BATCH]
            mine = rows[hvd.rank() :: hvd.size()]
            loss = step(tf.constant(x[mine]), tf.constant(y[mine]), tf.constant(float(len(rows))))
            state.done += len(rows)
            if state.done // GLOBAL_BATCH % COMMIT_EVERY == 0:
                state.commit()  # what is done since is repeated if a host is lost
        mean = hvd.allreduce(loss, op=hvd.Sum, name="loss")
        state.epoch, state.done = state.epoch + 1, 0
        state.commit()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {float(mean):.4f} on {hvd.size()} ranks", flush=True)


train(hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, done=0))
if hvd.rank() == 0:
    right = tf.equal(tf.argmax(model(held_out[0]), axis=1), held_out[1])
    print(f"held-out accuracy {float(tf.reduce_mean(tf.cast(right, tf.float32))):.3f}", flush=True)
