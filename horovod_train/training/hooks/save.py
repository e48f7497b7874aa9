"""Saves the state, and checks that ranks agree on it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from horovod_train.checkpoint.layout import Best, Facts, path_in
from horovod_train.config.loader import as_dict
from horovod_train.data.audit import Audit
from horovod_train.data.schema import settings_of
from horovod_train.distributed import consistency
from horovod_train.training.hooks import Hook, every
from horovod_train.training.open_run import Run
from horovod_train.training.state import Copies
from horovod_train.training.stopping import PeriodicSync


@contextmanager
def saving(run: Run) -> Iterator[None]:
    """Be in the phase "save", in which the watch sees what is being written: it may take longer than its limits."""
    heartbeat = run.group.heartbeat
    with heartbeat.phase("save"), heartbeat.probing(lambda: (int(run.state.step), None, run.store.describe_write())):
        yield


class Save:
    """Passes a copy of the state to the store, after checking that it is equal on all ranks.

    Made at the step at which the run starts or resumes; nothing is saved there, unless a hook that the last stop
    interrupted is called first. held: what the model computes with besides weights, for Facts.contents.
    """

    def __init__(self, run: Run, audit: Audit, held: Mapping[str, str]) -> None:
        self._audit, self._held, self._copies = audit, held, Copies()
        self._start = place(run, int(run.state.step))
        self._saved: tuple[int, ...] | None = self._start
        config = run.config.checkpoint
        if run.group.is_root and (
            config.every_steps or config.every_epochs or config.every_minutes is not None or config.best
        ):
            self._copies.reserve(run.state.variables())

    def __call__(self, run: Run, step: int) -> None:
        here = place(run, step)
        if here == self._saved:
            return
        started = time.perf_counter()
        with run.clock.stopped(), saving(run):
            settled = run.state.settle(run.group)
            consistency.check(run.group, settled.digests() | run.parts.callbacks.digests(), f"at step {step}")
            run.store.wait()  # it still reads the copies of the save before
            self._audit.flush()  # before ranks meet for the last time: root may save after another rank was killed
            arrays = settled.snapshot(run.group, self._copies) | run.parts.train_step.figures.snapshot(run.group)
            run.output.sync()  # a power cut must not leave a checkpoint that is newer than its metrics
            run.store.save(arrays, _facts(run, self._held))
        self._saved = here
        seconds = time.perf_counter() - started
        run.stopping.note_save(seconds)
        run.clock.blocked["save_blocked_s"] += seconds

    def at_end(self, run: Run, step: int) -> None:
        """Save what callbacks and hooks may have changed at the end, and what could not be saved before."""
        if self._start == place(run, step):
            return  # the run had ended before
        with saving(run):
            has_failed = run.group.broadcast_object(run.store.wait())
        if has_failed or any(hook.at_end != "no" for hook in run.parts.users_hooks):
            self._saved = None
        self(run, step)

    def if_best(self, run: Run, step: int) -> None:
        """Save if the evaluation at this step was the best so far."""
        if int(run.parts.best.step) == step:
            self(run, step)


def save_by_time(run: Run, minutes: float | None, save: Save, steps_per_call: int) -> Hook:
    """Make a hook that saves every `minutes`, or never, after a call at whose end ranks exchange anyway.

    A save makes ranks equal, so that elsewhere the result of the run would depend on the clock: root's, which all ranks
    read about once a second.
    """
    if minutes is None:
        return every(None, save)
    last, pace = time.monotonic(), PeriodicSync(run.group)

    def save_if_due(run: Run, step: int) -> None:
        nonlocal last
        if pace.is_due():
            (is_over,) = pace.meet([float(run.group.is_root and time.monotonic() - last >= 60 * minutes)])
            if is_over:
                last = time.monotonic()
                save(run, step)

    return every(run.state.synchronization.next_sync_step(steps_per_call), save_if_due)


def place(run: Run, step: int) -> tuple[int, ...]:
    """Return what tells a save from the one before: the step, and what has been done at it.

    That is an evaluation, the end of an epoch or of the training, and leaving users' hooks to a resume.
    """
    callbacks = run.parts.callbacks
    ends = callbacks.epoch_ended_at, callbacks.train_ended_at
    return step, int(run.parts.evaluated), *ends, callbacks.hooks_left_at


def check_agreement(run: Run, step: int) -> None:
    """End the run if weights, slots or counters differ between ranks."""
    started = time.perf_counter()
    consistency.check(run.group, run.state.settle(run.group).digests(), f"at step {step}")
    run.clock.blocked["check_agreement_s"] += time.perf_counter() - started


def _facts(run: Run, held: Mapping[str, str]) -> Facts:
    state, parts = run.state, run.parts
    best = Best(parts.best.metric, float(parts.best.value), int(parts.best.step))
    then = run.checkpoint.facts if run.checkpoint else None
    return Facts(
        step=int(state.step),
        epoch=int(state.epoch),
        records=int(state.records),
        ranks=run.group.size,
        config=as_dict(run.config),
        versions=consistency.versions(),
        data=parts.train.fingerprint,
        data_files=parts.train.files,
        class_names=dict(parts.train.class_names),
        features={name: settings_of(feature) for name, feature in parts.train.features.items()},
        callbacks=parts.callbacks.state(),
        built_rates=state.built_rates,
        began_at=path_in(run.config.checkpoint.resume) or (then.began_at if then else ""),
        eval_data=parts.eval.content if parts.eval else (then.eval_data if then else ""),
        contents=held,
        inputs=parts.train.model_inputs.pack(),
        figures=parts.train_step.figures.layout,
        skipped=int(parts.train_step.skipped),
        skipped_in_a_row=int(parts.train_step.skipped_in_a_row),
        evaluates_averages=not state.averages.are_of_optimizer or parts.callbacks.evaluate_averages,
        best=best if run.config.checkpoint.best and best.step >= 0 else None,
    )
