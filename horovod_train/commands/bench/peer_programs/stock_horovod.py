"""Stock Horovod in a hand-written loop: under Keras 3 its optimizer and tape do not work, its collectives do.

As its best users would write it: compiled, several steps a call, each gradient exchanged as soon as it is there; with
--grouped all in one exchange, which is faster for a tiny model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras

from horovod_train.commands.bench.peer_programs import tensorflow_parts as parts
from horovod_train.commands.bench.peer_programs import timing


def main() -> None:
    task = timing.read_task()
    hvd.init()
    parts.set_threads(task)
    keras.utils.set_random_seed(1)
    model, optimizer = parts.build_model(task), parts.build_optimizer(task)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([each.value for each in [*model.weights, *optimizer.variables]], root_rank=0)
    data = parts.build_data(task, hvd.rank(), hvd.size())
    call = parts.compile_loop(task, model, optimizer, data, _grouped if task.grouped else _each)
    speed = timing.measure(call, task.system, task.steps, hvd.size())
    timing.write(task.out, hvd.rank(), speed, model.get_weights())
    hvd.shutdown()


def _each(gradients: Sequence[Any]) -> list[Any]:
    return [hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients]


def _grouped(gradients: Sequence[Any]) -> list[Any]:
    averages: list[Any] = hvd.grouped_allreduce(gradients, op=hvd.Average)
    return averages


if __name__ == "__main__":
    main()
