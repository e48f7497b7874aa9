"""One run from beginning to end: opens every part in order, hands them to the loop, says how it ended.

Reads top to bottom. Every rank runs every line; what only root may do is behind `output`, `lease` and `store`.
"""

from __future__ import annotations

import platform
import time
from contextlib import closing
from importlib.metadata import version
from typing import Any

import keras
import tensorflow as tf

import horovod_train
from horovod_train import hooks, loop, rank_log
from horovod_train.build import Parts, build_parts
from horovod_train.checkpoint import NoStore, open_store
from horovod_train.checkpoint_files import Best, Checkpoint, Facts, load
from horovod_train.config import Config, resolve
from horovod_train.config_yaml import as_dict, dump
from horovod_train.data.audit import AuditLog, NoAudit, Start
from horovod_train.distributed import agreement, launch
from horovod_train.distributed.group import WorkerGroup, start
from horovod_train.distributed.judge import Limits
from horovod_train.distributed.watch import NoWatch, open_watch, stall_environment
from horovod_train.errors import RunError, UserError
from horovod_train.lease import NoLease, open_lease
from horovod_train.leaving import Leaving
from horovod_train.output import NoOutput, open_output

START_AGAIN = 75
"""Exit code of a run that was asked to stop and has saved: the scheduler may start it again (EX_TEMPFAIL)."""


def run(config: Config) -> int:
    """Trains as `config` says; returns the exit code: 0, or START_AGAIN.

    Collective: called by every rank. Raises UserError before the first step for what the user must mend,
    DivergedError or RanksDisagree on all ranks where training must not go on.
    """
    started = time.time()
    limits = Limits(config.watch.warn_after_s, config.watch.stop_after_s, config.watch.first_step_after_s)
    group = start(
        config.horovod,
        config.device,
        deterministic=config.deterministic,
        environment=stall_environment(limits) if config.watch.enabled else None,
    )
    with group.together():
        config = resolve(config, group.size)
        output = _open_output(config, group)
        lease = open_lease(output.directory, output.say, job=launch.detect().job)
        rank_log.make_folder(output.directory)
    own_log = _open_rank_log(config, group)
    watch = open_watch(group, own_log, limits, say=output.say) if config.watch.enabled else NoWatch(group, own_log)
    leaving = Leaving(group, deadline=_deadline(config, started), run_dir=output.directory, lease=lease)
    with watch, leaving.listening(), closing(lease):
        exit_code = _train(config, group, output, lease, leaving, started)
        group.close()
        watch.close("stopped" if exit_code else "done", exit_code)
    return exit_code


def _train(
    config: Config, group: WorkerGroup, output: NoOutput, lease: NoLease, leaving: Leaving, started: float
) -> int:
    """The run itself, once there is a group to run in, a place to write to and somebody who watches."""
    _introduce(group, output, config)
    agreement.check(group, _facts(config), "at the start")
    with group.together():
        parts = build_parts(config, group)
        store = open_store(output.directory, config.checkpoint.keep, output.say, lease.is_ours)
        statistics = _restore(config, store, parts, output)
    # Once, on a fresh start and on a resume alike: slots and counters exist by now.
    group.broadcast(list(parts.state.variables().values()))
    parts.state.restore_statistics(group, statistics)
    agreement.check(group, parts.state.digests(), "after the broadcast")

    first_step = int(parts.state.step)
    output.rewind(first_step)
    store.rewind(first_step)
    output.write_config(dump(config))
    output.start_progress(first_step, parts.last_step)
    with group.together():
        audit = _open_audit(config, group, parts)
    clock = hooks.Stopwatch()
    log, evaluate, save = _build_actions(config, group, output, store, parts, clock, leaving, audit)
    try:
        ended, asked = loop.train(
            group,
            parts.state,
            parts.train_step,
            parts.train,
            _hooks(config, group, parts, output, log, evaluate, save),
            leaving,
            last_step=parts.last_step,
            steps_per_call=config.train.steps_per_call,
            watch=clock,
            used=audit.append,
        )
    except tf.errors.OpError as error:
        raise parts.train.explain(error) or error from error
    finally:
        audit.close()

    with group.heartbeat.phase("save"):
        failure = store.wait()
    failure = group.broadcast_object(failure)
    if failure:
        raise RunError(f"the last checkpoint could not be saved: {failure}")
    summary = _summary(config, group, parts, clock, started) | {"ended": ended}
    summary |= {"train": log.newest, "eval": evaluate.newest if evaluate else {}}
    with group.together():
        output.write_summary(summary)
    why = "" if ended == loop.DONE else f" ({ended})"
    again = "; saved, start it again to go on" if asked else ""
    output.say(f"Done training for {summary['epochs']} epochs, {summary['steps']} steps{why}{again}")
    output.close()
    return START_AGAIN if asked else 0


def _open_rank_log(config: Config, group: WorkerGroup) -> rank_log.NoRankLog:
    """This rank's own log; the only file that a rank other than root writes."""
    host, device = group.hosts[group.rank], group.devices[group.rank].name
    said = rank_log.introduction(group.rank, group.size, group.launcher, host, f"on {device}")
    assert config.output_dir is not None
    log = rank_log.open_rank_log(config.output_dir, group.rank, host, said=said)
    group.heartbeat.tell = log.write
    return log


def _open_output(config: Config, group: WorkerGroup) -> NoOutput:
    assert config.output_dir is not None
    return open_output(
        config.output_dir,
        is_root=group.is_root,
        tensorboard=config.log.tensorboard,
        progress=config.log.progress,
        launched=group.launcher != "none",
    )


def _deadline(config: Config, started: float) -> float | None:
    """When the process must be gone: by the config or by the scheduler, whichever is sooner."""
    own = started + config.train.max_time if config.train.max_time is not None else None
    given = [end for end in (own, launch.detect().end_time) if end is not None]
    return min(given, default=None)


def _introduce(group: WorkerGroup, output: NoOutput, config: Config) -> None:
    output.say(
        f"{group.size} rank(s) on {len(set(group.hosts))} host(s), launcher {group.launcher}, exchange over "
        f"{group.exchange}; global batch {config.data.global_batch_size}; output in {config.output_dir}"
    )
    for rank, device in enumerate(group.devices):
        output.say(f"{group.name(rank)} uses {device.name}; found {device.found}")


def _facts(config: Config) -> dict[str, str]:
    """What must be equal on all ranks before they build anything."""
    return {
        "config": agreement.digest(dump(config).encode()),
        "code of horovod_train": agreement.code_digest(),
        **{f"version of {name}": value for name, value in _versions().items()},
    }


def _versions() -> dict[str, str]:
    return {
        "horovod_train": horovod_train.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "horovod": version("horovod"),
    }


def _restore(config: Config, store: NoStore, parts: Parts, output: NoOutput) -> dict[str, Any]:
    """Gives root's state the values of the checkpoint to start from; returns the statistics of each rank in it."""
    found = store.find(config.checkpoint.resume)
    if found is None:
        output.say("starting from initial weights")
        return {}
    arrays = load(parts.state.variables(), found)
    _check_position(parts, found)
    if found.facts.config["checkpoint"]["best"] != as_dict(config.checkpoint.best):
        parts.best.forget()  # the best of another metric
    output.say(f"resumed from {found.folder} at step {int(parts.state.step)}")
    return {name: array for name, array in arrays.items() if name.startswith("ranks/")}


def _check_position(parts: Parts, found: Checkpoint) -> None:
    """A saved place inside an epoch means something only where the same order of records leads there."""
    if found.facts.records and found.facts.data != parts.train.fingerprint:
        was = found.facts.config
        raise UserError(
            f"{found.folder}: stands after record {found.facts.records} of an epoch whose order is no longer the same. "
            f"Go on with the training files of then, seed {was['seed']}, data.global_batch_size "
            f"{was['data']['global_batch_size']} and the same data.shuffle… settings; or from the end of an epoch."
        )


def _open_audit(config: Config, group: WorkerGroup, parts: Parts) -> NoAudit:
    if not config.data.audit:
        return NoAudit()
    assert config.output_dir is not None
    return AuditLog(
        config.output_dir,
        Start(
            epoch=int(parts.state.epoch),
            step=loop.position(parts.state, parts.train),
            rank=group.rank,
            size=group.size,
            num_records=parts.train.num_records,
            global_batch_size=parts.train.global_batch_size,
            steps_per_epoch=parts.train.steps_per_epoch,
        ),
    )


def _build_actions(
    config: Config,
    group: WorkerGroup,
    output: NoOutput,
    store: NoStore,
    parts: Parts,
    clock: hooks.Stopwatch,
    leaving: Leaving,
    audit: NoAudit,
) -> tuple[hooks.LogTraining, hooks.Evaluate | None, hooks.Save]:
    state = parts.state

    def facts() -> Facts:
        best = Best(parts.best.metric, float(parts.best.value), int(parts.best.step))
        return Facts(
            step=int(state.step),
            epoch=int(state.epoch),
            records=int(state.records),
            ranks=group.size,
            config=as_dict(config),
            versions=_versions(),
            data=parts.train.fingerprint,
            best=best if config.checkpoint.best and best.step >= 0 else None,
        )

    log = hooks.LogTraining(group, output, state, parts.train, parts.train_step, clock)
    save = hooks.Save(group, store, state, clock, leaving, log, audit, facts)
    if parts.eval is None:
        return log, None, save
    per_call = config.train.steps_per_call
    evaluate = hooks.Evaluate(
        group, output, state, parts.eval, parts.eval_step, clock, leaving, per_call, parts.evaluated
    )
    evaluate.watchers = [parts.best.update, parts.early_stopping.update]
    return log, evaluate, save


def _hooks(
    config: Config,
    group: WorkerGroup,
    parts: Parts,
    output: NoOutput,
    log: hooks.LogTraining,
    evaluate: hooks.Evaluate | None,
    save: hooks.Save,
) -> list[hooks.Hook]:
    """In the order in which they run at a step where several are due: what is saved has been evaluated."""
    every, per_call = hooks.every, config.train.steps_per_call

    def epochs(count: int | None) -> int | None:
        return count * parts.train.steps_per_epoch if count else None

    def save_best(step: int) -> str | None:
        return save(step) if int(parts.best.step) == step else None

    due = [every(per_call, output.show_progress), every(config.log.every_steps, log, at_end="always")]
    if evaluate:
        due += [
            every(config.eval.every_steps, evaluate, is_done=evaluate.is_done),
            every(epochs(config.eval.every_epochs), evaluate, at_end="done", is_done=evaluate.is_done),
        ]
    if evaluate and config.checkpoint.best:
        due += [every(config.eval.every_steps, save_best), every(epochs(config.eval.every_epochs), save_best)]
    due += [every(config.train.check_agreement_every_steps, hooks.CheckAgreement(group, parts.state))]
    if config.checkpoint.every_minutes is not None:
        # Root's clock decides, and is asked often enough for minutes.
        due += [every(10 * per_call, hooks.EveryMinutes(group, config.checkpoint.every_minutes, save))]
    due += [every(config.checkpoint.every_steps, save)]
    due += [every(epochs(config.checkpoint.every_epochs), save, at_end="always")]
    return due


def _summary(
    config: Config, group: WorkerGroup, parts: Parts, clock: hooks.Stopwatch, started: float
) -> dict[str, Any]:
    seconds, _, records = clock.read()
    state = parts.state
    state.average_statistics(group)
    return {
        "steps": int(state.step),
        "epochs": int(state.epoch),
        "ranks": group.size,
        "seconds": round(time.time() - started, 3),
        "examples_per_s": round(records / seconds, 1) if seconds else None,
        "weights_sha256": state.weights_sha256(),
        "versions": _versions(),
        "config": as_dict(config),
    }
