"""Opens what a run needs, in order, and closes it in reverse order. Does not train; see run."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from horovod_train.checkpoint.manager import open_store
from horovod_train.config.loader import as_dict, dump
from horovod_train.config.registry import is_users, users_modules
from horovod_train.config.rules import resolve
from horovod_train.config.settings import Config
from horovod_train.data.dataset import Records, Split, with_inputs_of
from horovod_train.data.pipeline.batch_source import BatchSource
from horovod_train.distributed import consistency, timeline
from horovod_train.distributed.cycle import suit_cycle
from horovod_train.distributed.device import traced_memory_environment
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.start import start
from horovod_train.distributed.watchdog.heartbeat import HOOK, TRAIN
from horovod_train.distributed.watchdog.run_end import RunEnd
from horovod_train.distributed.watchdog.watchdog import open_watchdog, stall_environment
from horovod_train.errors import RanksStartApart
from horovod_train.output import logs, rank_log
from horovod_train.output.lease import open_lease
from horovod_train.output.run_dir import Output, check_writable, open_output
from horovod_train.training.build import build_components, build_first_model
from horovod_train.training.phase_times import PhaseTimes
from horovod_train.training.resume import batch_of, resolve_as_before
from horovod_train.training.run_record import Run
from horovod_train.training.shared_records import open_on_all_ranks
from horovod_train.training.steps.step import TrainStep
from horovod_train.training.stopping import StopCoordinator, collected_signals
from horovod_train.training.streams import open_streams

log = logging.getLogger(__name__)


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Collective: open a run, from the group of ranks to the compiled steps. The state is not yet restored.

    Raises UserError or RanksStartApart for problems that the user must fix.
    """
    started = time.time()
    with ExitStack() as stack:
        environment = _environment(config)
        if config.horovod.timeline:
            stack.callback(timeline.forget)
        group = start(config.horovod, config.device, deterministic=config.deterministic, environment=environment)
        stack.enter_context(logs.to_console(group.is_root, users=users_modules(as_dict(config))))
        with group.raise_together():
            resolve(config, group.size)  # reports config errors before any file is written
            run_dir = check_writable(_output_dir(config)) if group.is_root else None
            lease = open_lease(run_dir, job=launcher.detect().job)
        stack.callback(lease.close)
        with group.raise_together():
            # After the lease: users' writers and trackers may begin to write when they are made.
            output = open_output(
                _output_dir(config), config.log, is_root=group.is_root, launched=group.launcher != "none"
            )
            rank_log.make_folder(output.directory)
        log_file = _open_rank_log(config, group)
        stack.enter_context(logs.to_file(log_file.write))
        # Around the run's end, which first shows the error and tells the other ranks.
        stack.enter_context(_output_told_of_failure(output))
        signals = stack.enter_context(collected_signals())
        run_end = stack.enter_context(RunEnd(group, log_file, open_watchdog(group, log_file, config.watch)))
        stack.enter_context(closing(lease))  # a run that fails gives it up before the run's end
        consistency.check(group, _facts(config), "at the start", RanksStartApart)
        with group.raise_together():
            saved = config.checkpoint
            store = open_store(output.directory, saved.keep, lease.is_ours, saved.max_failed_saves)
            checkpoint = store.find(config.checkpoint.resume)
        batch_before = group.broadcast_object(batch_of(checkpoint))
        with group.raise_together():
            config = resolve_as_before(config, group.size, batch_before)
        _introduce(group, config)
        data = _open_data(config, group)
        if isinstance(data["train"], Records):  # commands that read other records ask for the inputs of this run
            config = dataclasses.replace(config, data=with_inputs_of(config.data, data["train"].schema))
        model = None
        if is_users(config.model.name):
            model = group.call_in_turns(lambda: build_first_model(config), f"calling {config.model.name}")
        with group.raise_together():
            parts = build_components(config, group, data["train"], data.get("eval"), model)
        if choice := suit_cycle(group, sum(math.prod(w.shape) * 4 for w in parts.state.model.trainable_variables)):
            log.info(choice)
        deadline = _deadline(config, started)
        stopping = StopCoordinator(group, lease, store, signals, deadline=deadline, run_dir=output.directory)
        times = PhaseTimes(lambda: _measured_phase(group, parts.train_step))
        yield Run(config, group, output, store, stopping, run_end, parts, checkpoint, started, times)


def _measured_phase(group: WorkerGroup, train_step: TrainStep) -> str | None:
    """Return this rank's phase as PhaseTimes counts it. The step's own phase is inside the compiled call."""
    name, outer_phase = group.heartbeat.name, group.heartbeat.outer_phase
    if name == TRAIN:
        return train_step.phase_variable.phase()
    return name if name == HOOK or (name == "exchange" and outer_phase in (TRAIN, HOOK)) else None


def _open_data(config: Config, group: WorkerGroup) -> Mapping[Split, Records | BatchSource]:
    """Collective: open the records of each split, or the stream."""
    if config.data.dataset:
        return open_streams(config, group)
    splits: list[Split] = ["train", "eval"] if config.data.eval else ["train"]
    return open_on_all_ranks(config.data, splits, group)


def _environment(config: Config) -> dict[str, str]:
    """Return environment variables for Horovod and TensorFlow; variables set by the user take precedence."""
    memory = traced_memory_environment() if config.log.profile_at_steps else {}
    is_root, run_dir = launcher.detect().rank == 0, Path(_output_dir(config))
    written = timeline.timeline_environment(run_dir, is_root=is_root) if config.horovod.timeline else {}
    return stall_environment(config.watch) | memory | written


def _output_dir(config: Config) -> str:
    assert config.output_dir is not None
    return config.output_dir


def _open_rank_log(config: Config, group: WorkerGroup) -> rank_log.RankLog:
    """Open the log of this rank. Ranks other than root write no other file, except the audit of data.audit."""
    host, device = group.hosts[group.rank], group.devices[group.rank].name
    first_line = rank_log.introduction(group.rank, group.size, group.launcher, host, f"on {device}")
    return rank_log.open_rank_log(_output_dir(config), group.rank, host, start_text=first_line)


@contextmanager
def _output_told_of_failure(output: Output) -> Iterator[None]:
    """If the block fails, let the trackers and writers of metrics know."""
    try:
        yield
    except BaseException:
        try:
            output.fail()
        except Exception as error:  # a user's writer may raise anything, and is not why the run ends
            log.warning(f"the metrics cannot be closed: {type(error).__name__}: {error}")
        raise


def _deadline(config: Config, started: float) -> float | None:
    """Return when the process must have ended, seconds since 1970: the earlier of config and scheduler, if any."""
    limit = started + config.train.max_time if config.train.max_time is not None else None
    deadlines = [end for end in (limit, launcher.detect().end_time) if end is not None]
    return min(deadlines, default=None)


def _introduce(group: WorkerGroup, config: Config) -> None:
    exchange = f"exchange over {group.exchange}" if group.size > 1 else "no exchange"
    log.info(
        f"{group.size} rank(s) on {len(set(group.hosts))} host(s), launcher {group.launcher}, {exchange}; "
        f"global batch {config.data.global_batch_size}; output in {config.output_dir}"
    )
    # A line for each rank, but not in the file of each rank.
    for rank, device in enumerate(group.devices) if group.is_root else ():
        log.info(f"{group.name(rank)} uses {device.name}; found {device.host_summary}")


def _facts(config: Config) -> dict[str, str]:
    """Return facts that must be equal on all ranks before anything is built."""
    return {
        "config": consistency.digest(dump(config).encode()),
        "code of horovod_train": consistency.code_digest(),
        **{f"version of {name}": value for name, value in consistency.versions().items()},
    }
