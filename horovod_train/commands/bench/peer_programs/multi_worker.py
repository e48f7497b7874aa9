"""tf.distribute.MultiWorkerMirroredStrategy in a hand-written loop: `fit` of Keras 3 does not take the strategy.

TF_CONFIG says which rank this is. Compiled, several steps a call; the Keras optimizer adds up the gradients.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from horovod_train.commands.bench.peer_programs import tensorflow_parts as parts
from horovod_train.commands.bench.peer_programs import timing


def main() -> None:
    task = timing.read_task()
    parts.set_threads(task)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, loss_of, optimizer = parts.build_model(task), parts.build_loss(task), parts.build_optimizer(task)
        optimizer.build(model.trainable_variables)
    data = strategy.distribute_datasets_from_function(lambda context: parts.build_data(task, rank, size))

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(parts.scale(inputs), training=True)) / size
        gradients = tape.gradient(loss, [weight.value for weight in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def train(batches: Any) -> None:
        for _ in tf.range(task.system.steps_per_call):
            strategy.run(step, args=next(batches))

    batches, compiled = iter(data), tf.function(train)
    speed = timing.measure(lambda: compiled(batches), task.system, task.steps, size)
    timing.write(task.out, rank, speed, model.get_weights())


if __name__ == "__main__":
    main()
