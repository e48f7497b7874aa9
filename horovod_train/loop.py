"""Steps and hooks, from where the state is to the last step. Builds nothing and meets only inside its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from horovod_train.data.pipeline import Batch, Pipeline
from horovod_train.hooks import Hook, Stopwatch
from horovod_train.state import TrainState
from horovod_train.step import TrainStep


def train(
    state: TrainState,
    train_step: TrainStep,
    pipeline: Pipeline,
    hooks: Sequence[Hook],
    *,
    last_step: int,
    steps_per_call: int,
    watch: Stopwatch,
) -> None:
    """Trains until `last_step`; a call never runs past a step at which a hook is due."""
    step, first = int(state.step), position(state, pipeline)
    epochs = -(-(first + last_step - step) // pipeline.steps_per_epoch)
    batches: Iterator[Batch] = iter(pipeline.batches(int(state.epoch), first, epochs))
    while step < last_step:
        next_stop = min([last_step, step + steps_per_call, *(hook.next_step(step) for hook in hooks)])
        steps = int(next_stop) - step
        train_step.run(batches, steps)
        records = advance(state, pipeline, steps)
        step += steps
        watch.count(steps, records)
        for hook in hooks:
            if hook.is_due(step, last_step):
                hook.action(step)


def position(state: TrainState, pipeline: Pipeline) -> int:
    """The step of its epoch that the state stands before."""
    return -(-int(state.records) // pipeline.global_batch_size)


def advance(state: TrainState, pipeline: Pipeline, steps: int) -> int:
    """Moves the state's place in the data on by `steps`; returns the records that all ranks used in them."""
    epoch, at, used = int(state.epoch), position(state, pipeline), 0
    for _ in range(steps):
        used += pipeline.count(at)
        at += 1
        if at == pipeline.steps_per_epoch:
            epoch, at = epoch + 1, 0
    state.move_to(epoch, min(at * pipeline.global_batch_size, pipeline.num_records))
    return used
