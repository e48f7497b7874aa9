"""What the programs in TensorFlow share: data, model, loss, optimizer, and the loop of those that compile their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from horovod_train.commands.bench.peer_programs import timing
from horovod_train.models import convnet, mlp


def set_threads(task: timing.Task) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(task.threads)
    tf.config.threading.set_inter_op_parallelism_threads(task.threads)


def build_data(task: timing.Task, rank: int, size: int) -> tf.data.Dataset:
    """Return an endless dataset of this rank's batches: inputs, targets.

    Rows are drawn by batches from the arrays: quicker than a dataset of single records, shuffled and batched.
    """
    inputs, targets = tf.constant(task.inputs[rank::size]), tf.constant(task.targets[rank::size])
    batch = task.system.batch
    used = len(inputs) // batch * batch

    def epoch(number: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(tf.range(len(inputs)), seed=[rank, number])
        return tf.data.Dataset.from_tensor_slices(tf.reshape(order[:used], (-1, batch)))

    rows = tf.data.Dataset.counter().flat_map(epoch)
    return rows.map(lambda chosen: (tf.gather(inputs, chosen), tf.gather(targets, chosen))).prefetch(tf.data.AUTOTUNE)


def scale(inputs: tf.Tensor) -> tf.Tensor:
    """Return pixels as floats; other inputs are floats already."""
    return tf.cast(inputs, tf.float32) * timing.SCALE + timing.OFFSET if inputs.dtype == tf.uint8 else inputs


def build_model(task: timing.Task) -> keras.Model:
    return {"convnet": convnet, "mlp": mlp}[task.name].build()


def build_loss(task: timing.Task) -> keras.losses.Loss:
    if task.name == "mlp":
        return keras.losses.BinaryCrossentropy(from_logits=True)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build_optimizer(task: timing.Task) -> keras.optimizers.Optimizer:
    _, _, rate, momentum = task.system
    return keras.optimizers.SGD(rate, momentum=momentum, nesterov=bool(momentum))


def compile_loop(
    task: timing.Task,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    data: tf.data.Dataset,
    average: Callable[[Sequence[Any]], Sequence[Any]],
) -> Callable[[], object]:
    """Return the training of a rank, steps_per_call steps a call. average: gradients of this rank → of all ranks.

    It keeps the mean of the loss, as every training that shows one does.
    """
    loss_of, weights, mean_loss = build_loss(task), model.trainable_variables, keras.metrics.Mean()

    def train(batches: Any) -> None:
        for _ in tf.range(task.system.steps_per_call):
            inputs, targets = next(batches)
            with tf.GradientTape() as tape:
                loss = loss_of(targets, model(scale(inputs), training=True))
            gradients = tape.gradient(loss, [weight.value for weight in weights])
            optimizer.apply(average(gradients), weights)
            mean_loss.update_state(loss, sample_weight=task.system.batch)

    batches, compiled = iter(data), tf.function(train)
    return lambda: compiled(batches)
