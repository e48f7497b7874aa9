"""Computes loss and metrics over the whole evaluation set: each record once, at any number of ranks.

Calls a method of all Keras callbacks of a run. Does not know when; see call_callbacks and evaluate.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from horovod_train.data.pipeline.batch_source import BatchSource
from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.training.hooks.users import raised_as
from horovod_train.training.run_record import Run
from horovod_train.training.steps.step import EvalStep
from horovod_train.training.stopping import StopReason


def evaluate(run: Run, step: int) -> StopReason | None:
    """Evaluate once per step, and pass the values to early stopping and to the search for the best.

    A stop request interrupts it; a run that resumes evaluates first.
    """
    if is_evaluated(run, step):
        return None
    parts, state = run.parts, run.state
    assert parts.eval is not None
    assert parts.eval_step is not None
    with run.outside_training("evaluate"):
        state.settle(run.group)  # before callbacks exchange the weights for their averages
    tell(run, step, "on_test_begin")
    with run.outside_training("evaluate"):
        with nullcontext() if state.averages.are_of_optimizer else state.averages.in_place():
            interrupted = _evaluate_all(run, parts.eval, parts.eval_step)
        values = run.group.broadcast_object(parts.eval_step.metrics.result(run.group))  # bit-equal, whatever the hosts
    if interrupted:
        state.averages.put_back()  # callbacks are not told that it ends
        return interrupted
    parts.evaluated.assign(step)
    run.output.append_metrics("eval", step, int(state.epoch), values)
    tell(run, step, "on_test_end", values)
    parts.best.update(step, values)
    return parts.early_stopping.update(step, values)


def is_evaluated(run: Run, step: int) -> bool:
    return int(run.parts.evaluated) == step


def _evaluate_all(run: Run, pipeline: BatchSource, step: EvalStep) -> StopReason | None:
    step.counter.step = int(run.state.step)
    for batches, steps, size in pipeline.one_epoch(run.config.train.steps_per_call):
        # By default errors are explained from the training data, and progress is that of training.
        with run.group.heartbeat.probing(step.counter), pipeline.explaining():
            step.run(batches, steps, size)
        if reason := run.stopping.vote_periodically():
            return reason
    return None


def tell(run: Run, step: int, method: str, *arguments: Any) -> None:
    """Call METHOD(*arguments) of each callback, on this rank. Raises RunError if one fails."""
    for named in run.parts.callbacks.named:
        with run.outside_training(HOOK, f"calling {named.name}"):
            # Each gets a copy, because callbacks add to it.
            copies = [dict(value) if isinstance(value, Mapping) else value for value in arguments]
            failed = f"callbacks: {named.name} failed in {method} after step {step}"
            with raised_as(failed, has_stepped=run.group.heartbeat.has_stepped):
                getattr(named.callback, method)(*copies)
