"""TensorFlow in one process, in a hand-written loop: compiled, several steps a call, without any exchange."""

from __future__ import annotations

import keras

from horovod_train.commands.bench.peer_programs import tensorflow_parts as parts
from horovod_train.commands.bench.peer_programs import timing


def main() -> None:
    task = timing.read_task()
    parts.set_threads(task)
    keras.utils.set_random_seed(1)
    model, optimizer = parts.build_model(task), parts.build_optimizer(task)
    optimizer.build(model.trainable_variables)
    call = parts.compile_loop(task, model, optimizer, parts.build_data(task, 0, 1), lambda gradients: gradients)
    timing.write(task.out, 0, timing.measure(call, task.system, task.steps, 1), model.get_weights())


if __name__ == "__main__":
    main()
