"""Stock Horovod in a loop of one's own: under Keras 3 its optimizer and tape do not work, its collectives do.

As its best users would write it: compiled, several steps a call, each gradient exchanged as soon as it is there.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_train.commands.bench.peer_programs import timing
from horovod_train.commands.bench.peer_programs.tensorflow_parts import build_data, build_loss, build_optimizer, scale
from horovod_train.models import convnet


def main() -> None:
    task = timing.read_task()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(task.threads)
    tf.config.threading.set_inter_op_parallelism_threads(task.threads)
    keras.utils.set_random_seed(1)
    model, loss_of, optimizer = convnet.build(), build_loss(), build_optimizer()
    weights = model.trainable_variables
    optimizer.build(weights)
    hvd.broadcast_variables([each.value for each in [*model.weights, *optimizer.variables]], root_rank=0)
    data = build_data(task, hvd.rank(), hvd.size())

    def train(batches: Any) -> None:
        for _ in tf.range(timing.STEPS_PER_CALL):
            images, labels = next(batches)
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(scale(images), training=True))
            gradients = tape.gradient(loss, [weight.value for weight in weights])
            optimizer.apply([hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients], weights)

    batches, compiled = iter(data), tf.function(train)
    speed = timing.measure(lambda: compiled(batches), task.steps, hvd.size())
    timing.write(task.out, hvd.rank(), speed, model.get_weights())
    hvd.shutdown()


if __name__ == "__main__":
    main()
