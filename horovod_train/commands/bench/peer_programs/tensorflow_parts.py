"""What the programs in TensorFlow share: data, loss, optimizer."""

from __future__ import annotations

import keras
import tensorflow as tf

from horovod_train.commands.bench.peer_programs import timing


def build_data(task: timing.Task, rank: int, size: int) -> tf.data.Dataset:
    """Return an endless dataset of this rank's batches: uint8 [64, 28, 28, 1], int64 [64]."""
    data = tf.data.Dataset.from_tensor_slices((task.images[rank::size], task.labels[rank::size]))
    data = data.shuffle(10_000, seed=rank, reshuffle_each_iteration=True).repeat()
    return data.batch(timing.BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def scale(images: tf.Tensor) -> tf.Tensor:
    return tf.cast(images, tf.float32) * timing.SCALE + timing.OFFSET


def build_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build_optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(timing.LEARNING_RATE, momentum=timing.MOMENTUM, nesterov=True)
