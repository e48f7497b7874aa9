"""Trainings in TensorFlow that peers.py compares with, as their best users would write them.

All are hand-written loops, compiled, several steps a call: under Keras 3 neither the optimizer and the tape of stock
Horovod work nor `fit` under MultiWorkerMirroredStrategy, but Horovod's collectives and the strategy itself do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from rank_programs import timing

from horovod_train.models import convnet, mlp


class Parts(NamedTuple):
    """What is trained, with the slots of the optimizer."""

    model: keras.Model
    loss: keras.losses.Loss
    optimizer: keras.optimizers.Optimizer


def main() -> None:
    task = timing.read_task(WAYS)
    WAYS[task.way](task)


def train_alone(task: timing.Task) -> None:
    """Train on one rank, without any exchange."""
    set_threads(task)
    parts = build_parts(task)
    call = compile_loop(task, parts, build_data(task, 0, 1), lambda gradients: gradients)
    timing.write(task.out, 0, timing.measure(call, task.system, task.steps, 1), parts.model.get_weights())


def train_with_horovod(task: timing.Task) -> None:
    """Train with stock Horovod: each gradient exchanged as soon as it is there, or all in one exchange.

    One exchange is faster for a tiny model.
    """
    import horovod.tensorflow as hvd

    def average_each(gradients: Sequence[Any]) -> list[Any]:
        return [hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients]

    def average_grouped(gradients: Sequence[Any]) -> list[Any]:
        averages: list[Any] = hvd.grouped_allreduce(gradients, op=hvd.Average)
        return averages

    hvd.init()
    set_threads(task)
    parts = build_parts(task)
    variables = [*parts.model.weights, *parts.optimizer.variables]
    hvd.broadcast_variables([each.value for each in variables], root_rank=0)
    average = average_grouped if task.way == "horovod_grouped" else average_each
    call = compile_loop(task, parts, build_data(task, hvd.rank(), hvd.size()), average)
    speed = timing.measure(call, task.system, task.steps, hvd.size())
    timing.write(task.out, hvd.rank(), speed, parts.model.get_weights())
    hvd.shutdown()


def train_multi_worker(task: timing.Task) -> None:
    """Train under MultiWorkerMirroredStrategy. TF_CONFIG says which rank this is; Keras adds up the gradients."""
    set_threads(task)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    with strategy.scope():
        model, loss_of, optimizer = build_parts(task)
    data = strategy.distribute_datasets_from_function(lambda context: build_data(task, rank, size))

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(scale(inputs), training=True)) / size
        gradients = tape.gradient(loss, [weight.value for weight in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def train(batches: Any) -> None:
        for _ in tf.range(task.system.steps_per_call):
            strategy.run(step, args=next(batches))

    batches, compiled = iter(data), tf.function(train)
    speed = timing.measure(lambda: compiled(batches), task.system, task.steps, size)
    timing.write(task.out, rank, speed, model.get_weights())


WAYS = {
    "one_process": train_alone,
    "horovod": train_with_horovod,
    "horovod_grouped": train_with_horovod,
    "multi_worker": train_multi_worker,
}


def set_threads(task: timing.Task) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(task.threads)
    tf.config.threading.set_inter_op_parallelism_threads(task.threads)


def build_parts(task: timing.Task) -> Parts:
    """Build the same on each rank."""
    keras.utils.set_random_seed(1)
    _, _, rate, momentum = task.system
    model = {"convnet": convnet, "mlp": mlp}[task.name].build()
    optimizer = keras.optimizers.SGD(rate, momentum=momentum, nesterov=bool(momentum))
    optimizer.build(model.trainable_variables)
    if task.name == "mlp":
        return Parts(model, keras.losses.BinaryCrossentropy(from_logits=True), optimizer)
    return Parts(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer)


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


def compile_loop(
    task: timing.Task, parts: Parts, data: tf.data.Dataset, average: Callable[[Sequence[Any]], Sequence[Any]]
) -> Callable[[], object]:
    """Return the training of a rank, steps_per_call steps a call. average: gradients of this rank → of all ranks.

    It keeps the mean of the loss, as every training that shows one does.
    """
    (model, loss_of, optimizer), mean_loss = parts, keras.metrics.Mean()
    weights = model.trainable_variables

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


if __name__ == "__main__":
    main()
