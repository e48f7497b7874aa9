"""Elastic training, in a loop of its own or by fit, until the file `enough` is there: elastic_rank.py OUT loop|fit.

Each rank keeps OUT/at-HOST up to date: process id, number of ranks, steps that count. At the end it writes its facts to
OUT/end-HOST.json. The file OUT/fails-HOST lets the next rank on a host fail before it meets the others; the files
OUT/dies-in-commit-HOST and OUT/dies-in-sync-HOST let a rank be killed in the middle of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_train.keras
import horovod_train.tensorflow as hvd
from horovod_train.distributed import objects

OUT, MODE = Path(sys.argv[1]), sys.argv[2]
ROWS, GLOBAL_BATCH, COMMIT_EVERY = 100, 12, 3
STEPS = -(-ROWS // GLOBAL_BATCH)

host = os.environ["HOROVOD_HOSTNAME"]
if (OUT / f"fails-{host}").exists():
    (OUT / f"fails-{host}").rename(OUT / f"has-failed-{host}")
    sys.exit("cannot start here")
hvd.init()
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 4)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
keras.utils.set_random_seed(1 + hvd.rank())  # without sync, ranks would train different models
# Larger than 1 MiB, so that ranks must agree on how exchanges are cut.
model = keras.Sequential(
    [keras.Input((4,)), *(keras.layers.Dense(600, "tanh") for _ in range(2)), keras.layers.Dense(1)]
)
optimizer: Any = keras.optimizers.Adam(0.01)


def tell(steps: int) -> None:
    """What the test waits for."""
    told = OUT / f"at-{host}.new"
    told.write_text(f"{os.getpid()} {hvd.size()} {steps}")
    told.replace(OUT / f"at-{host}")


def die_if_asked(place: str) -> None:
    if (OUT / f"dies-in-{place}-{host}").exists():
        (OUT / f"dies-in-{place}-{host}").rename(OUT / f"has-died-{host}")
        os.kill(os.getpid(), signal.SIGKILL)


def may_die(state: Any) -> None:
    """Let a rank be killed when it has saved and not yet met the others, or when they have variables and no objects."""
    save, broadcast = state.save, objects.broadcast

    def save_and_die() -> None:
        save()
        die_if_asked("commit")

    def die_and_broadcast(value: bytes, name: str, root_rank: int = 0) -> bytes:
        die_if_asked("sync" if name == "elastic.objects" else "no place")
        return broadcast(value, name, root_rank)

    state.save, objects.broadcast = save_and_die, die_and_broadcast


def is_enough() -> bool:
    return bool(hvd.broadcast_object((OUT / "enough").exists()))


def write_facts(state: Any, **facts: Any) -> None:
    weights = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    facts |= {"size": hvd.size(), "epoch": state.epoch, "iterations": int(optimizer.iterations), "weights": weights}
    facts["sizes"] = state.sizes
    (OUT / f"end-{host}.json").write_text(json.dumps(facts))


def loop() -> None:
    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor, rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / rows
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while not state.is_done:
            order = np.random.default_rng(state.epoch).permutation(ROWS)
            while state.done < ROWS:
                rows = order[state.done : state.done + GLOBAL_BATCH]
                mine = rows[hvd.rank() :: hvd.size()]
                step(tf.constant(x[mine]), tf.constant(y[mine]), tf.constant(float(len(rows))))
                state.done += len(rows)
                state.used[rows] += 1  # in place, so a commit must copy it
                state.sizes.append(hvd.size())
                tell(len(state.sizes))
                if len(state.sizes) % COMMIT_EVERY == 0:
                    state.commit()
            state.epoch, state.done = state.epoch + 1, 0
            state.is_done = is_enough()
            state.commit()

    state = hvd.elastic.TensorFlowKerasState(
        model, optimizer, epoch=0, done=0, is_done=False, used=np.zeros(ROWS, int), sizes=[]
    )
    may_die(state)
    train(state)
    write_facts(state, used=sorted(set(state.used.tolist())))


def fit() -> None:
    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            state.sizes.append(hvd.size())
            tell(len(state.sizes))

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            self.model.stop_training = is_enough()

    def data() -> tf.data.Dataset:
        mine = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
        return mine.repeat().batch(GLOBAL_BATCH // 3)

    @horovod_train.keras.elastic.run
    def train(state: Any) -> None:
        callbacks = [
            Tell(),  # before the commit, which is to hold what it keeps
            horovod_train.keras.elastic.CommitStateCallback(state, COMMIT_EVERY),
            horovod_train.keras.elastic.UpdateBatchStateCallback(state),
            horovod_train.keras.elastic.UpdateEpochStateCallback(state),
            horovod_train.keras.callbacks.BroadcastGlobalVariablesCallback(0),
        ]
        model.fit(data(), steps_per_epoch=STEPS, epochs=10**6, callbacks=callbacks, verbose=0)

    model.compile(hvd.DistributedOptimizer(optimizer), "mse", jit_compile=False)
    state = horovod_train.keras.elastic.KerasState(model, epoch=0, batch=0, sizes=[])
    train(state)
    write_facts(state, batch=state.batch)


{"loop": loop, "fit": fit}[MODE]()
