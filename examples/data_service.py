"""Input made by other processes: TensorFlow's data service feeds all ranks.

horovodrun --gloo -np 2 python examples/data_service.py

Here rank 0 runs the dispatcher and every rank one worker. On a cluster workers run on hosts without GPUs; then only the
address below changes. The service's ports accept anyone who can reach them.
"""

from __future__ import annotations

import socket

import digits
import keras
import tensorflow as tf

import horovod_train.keras as hvd

BATCH, EPOCHS = 32, 12
service = tf.data.experimental.service

hvd.init()
rank, size = hvd.rank(), hvd.size()
dispatcher = service.DispatchServer() if rank == 0 else None
port = dispatcher.target.rpartition(":")[2] if dispatcher else None
address = hvd.broadcast_object(f"{socket.gethostname()}:{port}")
worker = service.WorkerServer(service.WorkerConfig(address))

(x, y), held_out = digits.load()


def shift(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Stands for what costs time: decoding, cropping."""
    return tf.image.random_crop(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), image.shape), label


data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(len(x)).map(shift).batch(BATCH, drop_remainder=True)
# One job for all ranks: each batch goes to one of them. Without end, so that all take the same number of steps.
data = data.apply(service.distribute(service.ShardingPolicy.OFF, f"grpc://{address}", job_name="digits"))

model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3, activation="relu")])
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(10))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * size)), loss, metrics=["accuracy"])
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
steps = len(x) // BATCH // size
verbose = 2 if rank == 0 else 0
model.fit(data, steps_per_epoch=steps, epochs=EPOCHS, shuffle=False, verbose=verbose, callbacks=callbacks)
if rank == 0:
    print(f"held-out accuracy {model.evaluate(*held_out, verbose=0, return_dict=True)['accuracy']:.3f}", flush=True)
hvd.barrier()  # the dispatcher ends with rank 0
