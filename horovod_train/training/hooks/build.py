"""The hooks of a run, in order. To add one: a function in a file of this folder, and a line here."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from horovod_train.data.audit import Audit
from horovod_train.data.batch_source import Batch
from horovod_train.shown_text import listed
from horovod_train.training.hooks import Hook, HookFunction, at, every
from horovod_train.training.hooks.evaluate import build_callback_hooks, end_callbacks, evaluate, is_evaluated
from horovod_train.training.hooks.log import LogTraining
from horovod_train.training.hooks.save import Save, SaveByTime, check_agreement
from horovod_train.training.run_record import Run
from horovod_train.training.state import Copies
from horovod_train.training.steps.histograms import Summaries

log = logging.getLogger(__name__)


def build_hooks(run: Run, audit: Audit, held: Mapping[str, str]) -> list[Hook]:
    """Build the hooks, in the order in which they run at a step where several are due: log, evaluate, users', save.

    held: what layers hold besides weights, for checkpoints.
    """
    config, profiled = run.config, run.config.log.profile_at_steps
    per_call, minutes = config.train.steps_per_call, config.checkpoint.every_minutes
    first_step = int(run.state.step)
    per_epoch = run.parts.train.steps_per_epoch
    # Short epochs have a line each, of all their steps, which also shows the evaluation at their end.
    is_by_epoch = run.parts.eval is not None and config.eval.every_epochs == 1 and per_epoch < config.log.every_steps
    save = Save(run, first_step, audit, Copies(), held)
    log_training = LogTraining(first_step, per_epoch if is_by_epoch else None)

    def epochs(count: int | None) -> int | None:
        return count * per_epoch if count else None

    evaluations = [
        every(config.eval.every_steps, evaluate, is_done=is_evaluated),
        every(epochs(config.eval.every_epochs), evaluate, at_end="done", is_done=is_evaluated),
    ]
    if run.parts.eval is None:
        evaluations = []
    return [
        at(profiled, stop_profile),  # first: the profile holds only the step
        every(per_call, show_progress),
        every(None if is_by_epoch else config.log.every_steps, log_training, at_end="always"),
        every(per_epoch if run.parts.callbacks or is_by_epoch else None, log_training),
        *([every(config.log.histograms_every_steps, _histograms(run))] if config.log.histograms_every_steps else []),
        *build_callback_hooks(run, evaluations),
        *run.parts.users_hooks,  # before saves, so that a checkpoint contains what they change
        *(
            every(hook.every_steps, save.if_best, is_done=is_evaluated)
            for hook in evaluations
            if config.checkpoint.best
        ),
        every(config.train.check_agreement_every_steps, check_agreement),
        every(per_call if minutes is not None else None, SaveByTime(run, minutes or 0.0, save)),
        every(config.checkpoint.every_steps, save),
        every(epochs(config.checkpoint.every_epochs), save),
        every(None, save.at_end, at_end="always"),
        every(None, end_callbacks, at_end="stopped"),  # after the save: the run that resumes has not ended
        # A run that resumes at one of these steps must still unfreeze, or start the profile.
        at(
            [epoch * run.parts.train.steps_per_epoch for epoch in run.parts.freezing.epochs],
            unfreeze,
            is_done=lambda run, step: False,
        ),
        at([step - 1 for step in profiled], start_profile, is_done=lambda run, step: False),
    ]


def show_progress(run: Run, step: int) -> None:
    run.output.show_progress(step)


def _histograms(run: Run) -> HookFunction:
    train, step = run.parts.train, run.parts.train_step

    def first_batch() -> Batch:
        return train.scaled(next(train.batches(epoch=0, epochs=1)))

    summaries = Summaries(step, first_batch, train.size_of(0), run.config.log.activations)

    def show_histograms(run: Run, step: int) -> None:
        with run.outside_training("histograms"):
            run.output.tensorboard.add_histograms(step, summaries.compute())

    return show_histograms


def start_profile(run: Run, step: int) -> None:
    with run.outside_training("profile"):
        run.output.tensorboard.start_profile(step + 1)


def stop_profile(run: Run, step: int) -> None:
    with run.outside_training("profile"):
        run.output.tensorboard.stop_profile(step)


def unfreeze(run: Run, step: int) -> None:
    """Unfreeze what is due at the end of this epoch, and compile the steps again."""
    epoch = int(run.state.epoch)
    run.parts.freezing.apply(epoch)
    run.parts.train_step.retrace()
    if run.parts.eval_step:
        run.parts.eval_step.retrace()
    names = run.parts.freezing.unfrozen_at(epoch)
    log.info(f"after epoch {epoch}: {len(names)} more weights are trained: {listed(names)}")
