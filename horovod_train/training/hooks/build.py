"""The hooks of a run, in order. To add one: a function in a file of this folder, and a line here."""

from __future__ import annotations

from horovod_train.data.audit import Audit
from horovod_train.training.copies import Copies
from horovod_train.training.hooks import Hook, at, call_callbacks, every
from horovod_train.training.hooks.call_callbacks import build_callback_hooks
from horovod_train.training.hooks.evaluate import evaluate, is_evaluated
from horovod_train.training.hooks.log import LogTraining
from horovod_train.training.hooks.save import Save, SaveByTime, check_agreement
from horovod_train.training.hooks.show import ShowHistograms, show_progress, start_profile, stop_profile
from horovod_train.training.hooks.unfreeze import unfreeze
from horovod_train.training.run_record import Run


def build_hooks(run: Run, audit: Audit) -> list[Hook]:
    """Build the hooks, in the order in which they run at a step where several are due: log, evaluate, users', save."""
    config, profiled = run.config, run.config.log.profile_at_steps
    per_call, minutes = config.train.steps_per_call, config.checkpoint.every_minutes
    first_step = int(run.state.step)
    save, log_training = Save(run, first_step, audit, Copies()), LogTraining(first_step)

    def epochs(count: int | None) -> int | None:
        return count * run.parts.train.steps_per_epoch if count else None

    evaluations = [
        every(config.eval.every_steps, evaluate, is_done=is_evaluated),
        every(epochs(config.eval.every_epochs), evaluate, at_end="done", is_done=is_evaluated),
    ]
    if run.parts.eval is None:
        evaluations = []
    return [
        at(profiled, stop_profile),  # first: the profile holds only the step
        every(per_call, show_progress),
        every(config.log.every_steps, log_training, at_end="always"),
        every(epochs(1) if run.parts.callbacks else None, log_training),
        *([every(config.log.histograms_every_steps, ShowHistograms(run))] if config.log.histograms_every_steps else []),
        *evaluations,
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
        every(None, call_callbacks.end, at_end="stopped"),  # after the save: the run that resumes has not ended
        at([epoch * run.parts.train.steps_per_epoch for epoch in run.parts.freezing.epochs], unfreeze),
        # A run that resumes just before a profiled step must still start the profile.
        at([step - 1 for step in profiled], start_profile, is_done=lambda run, step: False),
    ]
