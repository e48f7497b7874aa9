"""Run one training from start to end: open every part in order, hand the parts to the loop, report the result.

Read it top to bottom. Every rank runs every line; `output`, `lease` and `store` do nothing on ranks other than root.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from typing import Any

import keras
import tensorflow as tf

import horovod_train
from horovod_train.checkpoint.manager import Store, open_store
from horovod_train.config.loader import as_dict, dump
from horovod_train.config.registry import loaded_files, users_modules
from horovod_train.config.settings import Config, resolve
from horovod_train.data.dataset import Split
from horovod_train.distributed import consistency
from horovod_train.distributed.device import traced_memory_environment
from horovod_train.distributed.group import WorkerGroup, start
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.watchdog.run_end import RunEnd
from horovod_train.distributed.watchdog.watchdog import open_watchdog, stall_environment
from horovod_train.errors import DivergedError, RanksDisagree, RanksStartApart, RunError
from horovod_train.models.model_parallel import stage_lines
from horovod_train.output import logs, rank_log
from horovod_train.output.lease import Lease, open_lease
from horovod_train.output.run_dir import Output, open_output
from horovod_train.training import loop
from horovod_train.training.agenda import build_actions, build_hooks
from horovod_train.training.build import Components, build_components
from horovod_train.training.graph import draw_step
from horovod_train.training.hooks import Stopwatch
from horovod_train.training.resume import batch_of, open_audit, resolve_as_before, restore
from horovod_train.training.shared_records import open_on_all_ranks
from horovod_train.training.stopping import STOP_FILE_REASON, StopCoordinator

START_AGAIN = 75
"""Exit code of a run that was asked to stop and has saved: the scheduler may restart it (EX_TEMPFAIL)."""

log = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Train as `config` says; return the exit code: 0 or START_AGAIN.

    Collective: called by every rank. Raises UserError or RanksStartApart before the first step for problems that the
    user must fix. Raises DivergedError or RanksDisagree on all ranks where training must not continue.
    """
    started = time.time()
    group = start(
        config.horovod,
        config.device,
        deterministic=config.deterministic,
        environment=_environment(config),
    )
    with logs.to_console(group.is_root, users=users_modules(as_dict(config))):
        with group.raise_together():
            resolve(config, group.size)  # reports config errors before any file is written
            output = _open_output(config, group)
            lease = open_lease(output.directory, job=launcher.detect().job)
            rank_log.make_folder(output.directory)
        own_log = _open_rank_log(config, group)
        with logs.to_file(own_log.write):
            run_end = RunEnd(group, own_log, open_watchdog(group, own_log, config.watch))
            deadline = _deadline(config, started)
            stopping = StopCoordinator(group, deadline=deadline, run_dir=output.directory, lease=lease)
            with run_end, stopping.listening(), closing(lease):
                exit_code = _train(config, group, output, lease, stopping, started)
                group.close()
                run_end.close("stopped" if exit_code else "done", exit_code)
    return exit_code


def _train(
    config: Config, group: WorkerGroup, output: Output, lease: Lease, stopping: StopCoordinator, started: float
) -> int:
    """Train and write the summary, once the group, the output and the watchdog are open."""
    consistency.check(group, _facts(config), "at the start", RanksStartApart)
    with group.raise_together():
        store = open_store(output.directory, config.checkpoint.keep, lease.is_ours)
        found = store.find(config.checkpoint.resume)
    batch_before = group.broadcast_object(batch_of(found))
    with group.raise_together():
        config = resolve_as_before(config, group.size, batch_before)
    _introduce(group, config)
    splits: list[Split] = ["train", "eval"] if config.data.eval else ["train"]
    records = open_on_all_ranks(config.data, splits, group)
    with group.raise_together():
        components = build_components(config, group, records["train"], records.get("eval"))
        statistics = restore(config, found, components)
    consistency.check(group, _users_code(config), "at the start", RanksStartApart)
    for line in stage_lines(components.state.model) if config.device.per_rank > 1 else ():
        log.info(line)
    for line in components.warnings:
        log.warning(line)
    # On a fresh start and on a resume alike: slots and counters exist by now.
    group.broadcast(list(components.state.variables().values()))
    components.state.restore_statistics(group, statistics)
    consistency.check(group, components.state.settle(group).digests(), "after the broadcast")

    first_step = int(components.state.step)
    if first_step == 0:
        log.info("starting from initial weights")
    with group.raise_together():
        output.rewind(first_step)
        store.rewind(first_step)
        output.write_config(dump(config))
        audit = open_audit(config, group, components)
    _draw_graph(config, group, components, output)
    output.start_progress(first_step, components.last_step)
    clock = Stopwatch()
    actions = build_actions(config, group, output, store, components, clock, stopping, audit, _versions())
    with (
        _last_save_finished(group, store, 0.9 * config.watch.stop_after_s),
        closing(audit),
        components.train.explaining(),
    ):
        ended, asked = loop.train(
            group,
            components.state,
            components.train_step,
            components.train,
            build_hooks(config, group, components, output, actions),
            stopping,
            last_step=components.last_step,
            steps_per_call=config.train.steps_per_call,
            watch=clock,
            used=audit.append,
            ended=components.early_stopping.ended(),
        )

    with group.heartbeat.phase("save"):
        failure = store.wait()
    failure = group.broadcast_object(failure)
    if failure:
        raise RunError(f"the last checkpoint could not be saved: {failure}")
    summary = _summary(config, group, components, clock, started) | {"ended": ended}
    summary |= {"at_walltime": stopping.at_walltime} if stopping.at_walltime else {}
    summary |= {split: output.last_metrics(split) for split in ("train", "eval")}
    with group.raise_together():
        output.write_summary(summary)
    why = "" if ended == loop.DONE else f" ({ended})"
    again = f"; saved, start it again{_and_go_on(config, ended)} to go on" if asked else ""
    log.info(f"Done training for {summary['epochs']} epochs, {summary['steps']} steps{why}{again}")
    output.close()
    return START_AGAIN if asked else 0


@contextmanager
def _last_save_finished(group: WorkerGroup, store: Store, timeout_s: float) -> Iterator[None]:
    """If the block fails, wait until root has finished the checkpoint it is writing, then re-raise.

    timeout_s: must be less than the time after which the watchdog reports a stall.
    """
    try:
        yield
    except Exception as error:
        if store.step_under_way is not None:
            group.heartbeat.phase("save")  # phase stays on: the watchdog allows for the rest of the exit too
        store.finish(timeout_s)
        if isinstance(error, DivergedError | RanksDisagree):
            group.barrier()  # raised on all ranks; a launcher kills all ranks when the first one exits
        raise


def _and_go_on(config: Config, ended: str) -> str:
    """Return what the user must change in the command or folder so that the next start resumes."""
    never = " with --resume auto" if config.checkpoint.resume == "never" else ""
    return f"{never} without that file" if ended == STOP_FILE_REASON else never


def _draw_graph(config: Config, group: WorkerGroup, components: Components, output: Output) -> None:
    if config.log.graph:
        spec, names = components.train.element_spec, config.log.graph_names
        with group.heartbeat.phase("compile"):
            output.tensorboard.add_graph(lambda: draw_step(components.train_step, spec, rank=group.rank, names=names))


def _open_rank_log(config: Config, group: WorkerGroup) -> rank_log.RankLog:
    """Open the log of this rank. Ranks other than root write no other file, except the audit of data.audit."""
    host, device = group.hosts[group.rank], group.devices[group.rank].name
    said = rank_log.introduction(group.rank, group.size, group.launcher, host, f"on {device}")
    assert config.output_dir is not None
    return rank_log.open_rank_log(config.output_dir, group.rank, host, said=said)


def _environment(config: Config) -> dict[str, str]:
    """Return environment variables for Horovod and TensorFlow; variables set by the user take precedence."""
    return stall_environment(config.watch) | (traced_memory_environment() if config.log.profile_at_steps else {})


def _open_output(config: Config, group: WorkerGroup) -> Output:
    assert config.output_dir is not None
    return open_output(config.output_dir, config.log, is_root=group.is_root, launched=group.launcher != "none")


def _deadline(config: Config, started: float) -> float | None:
    """Return when the process must have ended, seconds since 1970: the earlier of config and scheduler, if any."""
    own = started + config.train.max_time if config.train.max_time is not None else None
    given = [end for end in (own, launcher.detect().end_time) if end is not None]
    return min(given, default=None)


def _introduce(group: WorkerGroup, config: Config) -> None:
    log.info(
        f"{group.size} rank(s) on {len(set(group.hosts))} host(s), launcher {group.launcher}, exchange over "
        f"{group.exchange}; global batch {config.data.global_batch_size}; output in {config.output_dir}"
    )
    # A line for each rank, but not in the file of each rank.
    for rank, device in enumerate(group.devices) if group.is_root else ():
        log.info(f"{group.name(rank)} uses {device.name}; found {device.found}")


def _facts(config: Config) -> dict[str, str]:
    """Return facts that must be equal on all ranks before anything is built."""
    return {
        "config": consistency.digest(dump(config).encode()),
        "code of horovod_train": consistency.code_digest(),
        **{f"version of {name}": value for name, value in _versions().items()},
    }


def _users_code(config: Config) -> dict[str, str]:
    """Return digests of the user's own modules, which must be equal too; call after importing them."""
    files = loaded_files(as_dict(config))
    return {f"code of {name}": consistency.digest(path.read_bytes()) for name, path in files.items()}


def _versions() -> dict[str, str]:
    return {
        "horovod_train": horovod_train.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "horovod": version("horovod"),
    }


def _summary(
    config: Config, group: WorkerGroup, components: Components, clock: Stopwatch, started: float
) -> dict[str, Any]:
    seconds, _, records = clock.read()
    state = components.state
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
