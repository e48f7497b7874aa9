"""As a user would write it: model.fit with Horovod's optimizer and callbacks. users_script.py OUT TROUBLE."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_train.keras as hvd
import horovod_train.tensorflow as hvd_tf
from horovod_train.config.settings import WatchConfig

OUT, TROUBLE = Path(sys.argv[1]), sys.argv[2]
STOP_S = 6.0  # longer than TensorFlow traces on a busy machine
LIMITS = WatchConfig(warn_after_s=60, stop_after_s=STOP_S, first_step_after_s=60)
LONG_S = STOP_S + 1
of_limits = ("hangs", "hangs-in-its-loop", "takes-its-time", "broadcasts-alone")
watch_ranks = LIMITS if TROUBLE in of_limits else TROUBLE != "unwatched"
hvd.init(watch_ranks=watch_ranks)
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
if TROUBLE == "builds-on-root":  # as to load weights
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    if hvd.rank() == 0:
        model.build((None, 6))
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
model.compile(optimizer, "mse")


class Tell(keras.callbacks.Callback):
    """Leaves this process's id once it trains."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            (OUT / f"pid-{hvd.rank()}.part").write_text(str(os.getpid()))
            (OUT / f"pid-{hvd.rank()}.part").rename(OUT / f"pid-{hvd.rank()}")


class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 1 and batch == 2:
            raise ValueError("no luck on rank 1")


class Leave(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == int(TROUBLE[-1]) and batch == 2:
            sys.exit(0)


class BroadcastAlone(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2 and hvd.rank() == 0:
            hvd.barrier()
        elif epoch == 2:
            hvd.broadcast_variables(self.model.weights, root_rank=0)


class KillOnce(keras.callbacks.Callback):
    """Kills rank 0 in the third epoch, the first time."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        is_first = not (OUT / "killed").exists()
        if hvd.rank() == 0 and is_first and batch == 5 and self.epoch == 2:
            (OUT / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch


class Hang(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if hvd.rank() == 1 and epoch == 2:
            threading.Event().wait()


class Dawdle(keras.callbacks.Callback):
    """Makes an evaluation longer than the watch lets ranks be idle."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch < 4:
            time.sleep(LONG_S / 4)


def batches_of(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Batches without TensorFlow's autotuning: `fit` would wait for its thread, at times for seconds, when it ends."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4).with_options(options)


def penalise_inputs() -> None:
    """Differentiate by weights and by inputs, which are other ones on each rank, as adversarial training does."""
    weights = model.trainable_variables

    @tf.function
    def gradients(inputs: tf.Tensor) -> Any:
        with hvd_tf.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            tape.watch(inputs)
            loss = tf.reduce_mean(model(inputs) ** 2)
        return tape.gradient(loss, [inputs]), tape.gradient(loss, weights)

    for _ in range(12):
        gradients(tf.constant(x[:4]))


def hang_in_a_loop() -> None:
    """Train as Horovod's tensorflow2_mnist does, which broadcasts in its compiled step, until rank 1 hangs."""
    adam = keras.optimizers.Adam(0.01)

    @tf.function
    def step(rows: tf.Tensor, is_first: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(rows) ** 2)
        tape = hvd_tf.DistributedGradientTape(tape)
        weights = model.trainable_variables
        adam.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        if is_first:
            hvd_tf.broadcast_variables(model.variables, root_rank=0)
            hvd_tf.broadcast_variables(adam.variables, root_rank=0)

    for number in range(13):
        step(tf.constant(x[:4]), number == 0)
        if number == 11 and hvd.rank() == 1:
            threading.Event().wait()


class Differ(keras.callbacks.Callback):
    """Adds a metric that gets better on rank 1 and worse on rank 0."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["differs"] = -epoch if hvd.rank() else epoch


rows = 257 if TROUBLE.startswith("uneven") else 256
x = np.random.default_rng(0).normal(size=(rows, 6)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)


def stop_after(batch: int, logs: Any = None) -> None:
    """Stop all ranks in their third batch."""
    model.stop_training = batch == 2


x, y = (values[hvd.rank() :: hvd.size()] for values in (x, y))
callbacks: list[Any] = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
if TROUBLE == "forgets":
    callbacks = []
elif TROUBLE == "raises":
    callbacks.append(Fail())
elif TROUBLE.startswith("leaves"):
    callbacks.append(Leave())
elif TROUBLE == "broadcasts-alone":
    callbacks.insert(0, BroadcastAlone())
elif TROUBLE in ("backs-up", "backs-up-on-root"):
    if TROUBLE == "backs-up" or hvd.rank() == 0:
        callbacks.append(keras.callbacks.BackupAndRestore(OUT / "backup"))
    callbacks.append(KillOnce())
elif TROUBLE == "backs-up-too-early":
    callbacks.insert(0, keras.callbacks.BackupAndRestore(OUT / "backup"))
elif TROUBLE == "nan":
    callbacks += [keras.callbacks.TerminateOnNaN()] if hvd.rank() == 0 else []
    y[9] = np.nan if hvd.rank() == 1 else y[9]
elif TROUBLE == "hangs":
    callbacks.append(Hang())
elif TROUBLE == "writes":
    path = str(OUT / f"of-{hvd.rank()}")
    callbacks += [keras.callbacks.ModelCheckpoint(f"{path}.keras"), keras.callbacks.CSVLogger(f"{path}.csv")]
    model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)  # what is said of a second `fit` too is said once
elif TROUBLE == "decides":
    callbacks = [Differ(), callbacks[0], keras.callbacks.EarlyStopping("differs", patience=0, mode="min")]
elif TROUBLE == "decides-alone":
    callbacks += [keras.callbacks.EarlyStopping("loss", patience=99)] if hvd.rank() == 0 else []
elif TROUBLE == "stops":
    callbacks = [callbacks[0], keras.callbacks.LambdaCallback(on_train_batch_end=stop_after)]
elif TROUBLE == "uneven":
    callbacks.append(hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=3))
elif TROUBLE == "decides-too-early":
    callbacks.insert(0, keras.callbacks.EarlyStopping("loss"))
elif TROUBLE == "takes-its-time":
    callbacks.append(Dawdle())
elif TROUBLE == "trains-on":
    callbacks.append(Tell())
if TROUBLE == "hangs-in-its-loop":
    hang_in_a_loop()
epochs = 100_000 if TROUBLE == "trains-on" else 4
own: Any = {"x": x, "y": y, "batch_size": 4, "shuffle": TROUBLE not in ("backs-up", "backs-up-on-root", "nan")}
if TROUBLE == "takes-its-time":
    own = {"x": batches_of(x, y), "validation_data": batches_of(x[:24], y[:24]), "validation_freq": 4}
if TROUBLE == "stops" and hvd.rank() == 0:
    own["validation_data"] = (x, y)
history = model.fit(epochs=epochs, verbose=0, callbacks=callbacks, **own)
print(f"rank {hvd.rank()}: {len(history.epoch)} epochs", flush=True)
print(f"{int(optimizer.iterations)} steps", flush=True)
if TROUBLE.startswith("backs-up"):
    weights = model.get_weights()
    keras.utils.set_random_seed(hvd.rank())
    whole = keras.models.clone_model(model)
    whole.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    whole.fit(epochs=epochs, verbose=0, callbacks=callbacks[:2], **own)
    same = all(np.array_equal(*pair) for pair in zip(weights, whole.get_weights(), strict=True))
    print("as without the kill" if same else "otherwise than without the kill", flush=True)
if TROUBLE == "takes-its-time":
    penalise_inputs()
    if hvd.rank() == 0:  # the others have finished
        time.sleep(LONG_S)
elif TROUBLE == "unwatched":
    hvd.shutdown()
