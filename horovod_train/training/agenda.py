"""Builds the actions of a run and the hooks that say at which steps they are due. Runs none of them."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_train.checkpoint.manager import Store
from horovod_train.checkpoint.tensors import Best, Facts
from horovod_train.config.loader import as_dict
from horovod_train.config.settings import Config
from horovod_train.data.audit import Audit
from horovod_train.data.pipeline import Batch
from horovod_train.distributed.group import WorkerGroup
from horovod_train.output.run_dir import Output
from horovod_train.training.actions import CheckAgreement, Evaluate, EveryMinutes, LogTraining, Save
from horovod_train.training.build import Components
from horovod_train.training.histograms import Summaries
from horovod_train.training.hooks import Action, Hook, Stopwatch, at, every
from horovod_train.training.stopping import PeriodicSync, StopCoordinator


@dataclass(frozen=True)
class Show:
    """What TensorBoard shows besides scalars; the time it takes does not count as training time."""

    histograms: Action
    start_profile: Action
    stop_profile: Action


@dataclass(frozen=True)
class Actions:
    """The actions of a run between steps; `evaluate` is None without evaluation data."""

    log: LogTraining
    evaluate: Evaluate | None
    save: Save
    show: Show


def build_actions(
    config: Config,
    group: WorkerGroup,
    output: Output,
    store: Store,
    components: Components,
    clock: Stopwatch,
    stopping: StopCoordinator,
    audit: Audit,
    versions: dict[str, str],
) -> Actions:
    state = components.state

    def facts() -> Facts:
        best = Best(components.best.metric, float(components.best.value), int(components.best.step))
        return Facts(
            step=int(state.step),
            epoch=int(state.epoch),
            records=int(state.records),
            ranks=group.size,
            config=as_dict(config),
            versions=versions,
            data=components.train.fingerprint,
            data_files=components.train.files,
            best=best if config.checkpoint.best and best.step >= 0 else None,
        )

    log = LogTraining(group, output, state, components.train, components.train_step, clock)
    stopping.last_write_s = lambda: store.write_s
    save = Save(group, store, state, clock, stopping, log, audit, facts)
    show = _build_show(config, group, output, components, clock, stopping.pace)
    if components.eval is None:
        return Actions(log, None, save, show)
    evaluate = Evaluate(
        group,
        output,
        state,
        components.eval,
        components.eval_step,
        clock,
        stopping,
        config.train.steps_per_call,
        components.evaluated,
        watchers=[components.best.update, components.early_stopping.update],
    )
    return Actions(log, evaluate, save, show)


def _build_show(
    config: Config, group: WorkerGroup, output: Output, components: Components, clock: Stopwatch, pace: PeriodicSync
) -> Show:
    def first_batch() -> Batch:
        batch: Batch = next(iter(components.train.batches(epoch=0, epochs=1)))
        return batch

    summaries = Summaries(group, components.train_step, first_batch, config.log.activations)

    def histograms(step: int) -> None:
        with clock.stopped(), pace.other_calls(), group.heartbeat.phase("histograms"):
            output.tensorboard.add_histograms(step, summaries.compute())

    def start_profile(step: int) -> None:
        with clock.stopped(), pace.other_calls():
            output.tensorboard.start_profile(step + 1)

    def stop_profile(step: int) -> None:
        with clock.stopped(), pace.other_calls(), group.heartbeat.phase("profile"):
            output.tensorboard.stop_profile(step)

    return Show(histograms, start_profile, stop_profile)


def build_hooks(
    config: Config,
    group: WorkerGroup,
    components: Components,
    output: Output,
    actions: Actions,
) -> list[Hook]:
    """Build the hooks, in the order in which they run at a step where several are due: evaluate, then save."""
    log, evaluate, save = actions.log, actions.evaluate, actions.save
    per_call = config.train.steps_per_call

    def epochs(count: int | None) -> int | None:
        return count * components.train.steps_per_epoch if count else None

    def save_best(step: int) -> str | None:
        return save(step) if int(components.best.step) == step else None

    profiled = config.log.profile_at_steps
    due = [at(profiled, actions.show.stop_profile)]  # first: the profile holds only the step
    due += [every(per_call, output.show_progress), every(config.log.every_steps, log, at_end="always")]
    due += [every(config.log.histograms_every_steps, actions.show.histograms)]
    if evaluate:
        due += [
            every(config.eval.every_steps, evaluate, is_done=evaluate.is_done),
            every(epochs(config.eval.every_epochs), evaluate, at_end="done", is_done=evaluate.is_done),
        ]
    if evaluate and config.checkpoint.best:
        due += [every(config.eval.every_steps, save_best), every(epochs(config.eval.every_epochs), save_best)]
    due += [every(config.train.check_agreement_every_steps, CheckAgreement(group, components.state, log))]
    if config.checkpoint.every_minutes is not None:
        due += [every(per_call, EveryMinutes(group, config.checkpoint.every_minutes, save))]
    due += [every(config.checkpoint.every_steps, save)]
    due += [every(epochs(config.checkpoint.every_epochs), save, at_end="always")]
    # A run that resumes just before a profiled step must still start the profile.
    due += [at([step - 1 for step in profiled], actions.show.start_profile, is_done=lambda step: False)]
    return due
