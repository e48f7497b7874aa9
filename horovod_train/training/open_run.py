"""Opens what a run consists of (Run), in order, and closes it in reverse order. Does not train; see run.

Opens its data too: records, of which all ranks must see the same, or the user's stream, whose epochs must have the same
steps on all ranks. Otherwise ranks would wait for each other, or train on records that others use too. A Run is handed
over whole to hooks and to the loop; its clocks tell how fast it is and where its time goes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from horovod_train.checkpoint.layout import CHECKPOINTS, Checkpoint
from horovod_train.checkpoint.manager import CheckpointStore, Store
from horovod_train.config.loader import as_dict, by_key
from horovod_train.config.registry import is_users, users_modules
from horovod_train.config.rules import kept_batch, resolve
from horovod_train.config.settings import Config, DataConfig
from horovod_train.data.batch_source import BatchSource
from horovod_train.data.dataset import (
    Records,
    Split,
    beside_training,
    check_counts,
    other_kinds,
    scan_records,
    with_class_names_of,
    with_inputs_of,
)
from horovod_train.data.pipeline import Ranks
from horovod_train.data.source import difference, names_of
from horovod_train.data.stream import StreamPipeline, open_stream, rows_by_rank
from horovod_train.distributed import consistency
from horovod_train.distributed.device import traced_memory_environment
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.horovod_info import check_sums
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.start import forget_timeline, start, suit_cycle, timeline_environment
from horovod_train.distributed.watchdog.heartbeat import HOOK, TRAIN
from horovod_train.distributed.watchdog.watchdog import RunEnd, open_watchdog, stall_environment
from horovod_train.errors import RanksStartApart, UserError
from horovod_train.output import logs, rank_log
from horovod_train.output.lease import Lease, open_lease
from horovod_train.output.run_dir import LostOutput, Output, check_writable, open_output
from horovod_train.shown_text import listed
from horovod_train.training.build import Components, build_components, build_first_model
from horovod_train.training.state import TrainState
from horovod_train.training.steps.step import TrainStep
from horovod_train.training.stopping import StopCoordinator, collected_signals

LOOK_EVERY_S = 0.1
"""Where all cores are busy a look takes 0.5 ms of CPU time, alone 30 µs; at 0.01 steps took 5 % longer."""

MEASURED_PHASES = ("input", "compute", HOOK, "exchange")
"""Those of a step, and users' hooks and Keras callbacks between steps."""
_RANKS_SHOWN = 3
"""Differences that a message names."""

log = logging.getLogger(__name__)


@dataclass
class Stopwatch:
    """Measures training time, without evaluation, saving and calls that compile."""

    seconds: float = 0.0
    steps: int = 0
    records: int = 0
    _lap: float | None = field(default=None, repr=False)
    """When what `seconds` does not contain yet began; None while the watch does not run."""
    blocked: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), repr=False)
    """For how long what has blocked training since the last line, by name."""
    _counted_s: float = 0.0
    """`seconds` when the last call was counted."""
    _longest_call: tuple[float, int] = (0.0, 0)
    """Its seconds and steps."""

    def start(self) -> None:
        self._lap = time.perf_counter()

    def count(self, steps: int, records: int) -> None:
        """Add a finished call."""
        seconds, *_ = self.read()
        self._longest_call = max(self._longest_call, (seconds - self._counted_s, steps))
        self._counted_s = seconds
        self.steps += steps
        self.records += records

    def read(self) -> tuple[float, int, int]:
        """Return seconds, steps and records so far."""
        if self._lap is not None:
            now = time.perf_counter()
            self.seconds, self._lap = self.seconds + now - self._lap, now
        return self.seconds, self.steps, self.records

    def s_per_step(self) -> float:
        """Return the mean seconds per step, of all calls but the longest if there are more; 0 before the first.

        The process may have been suspended in the longest.
        """
        seconds, steps, _ = self.read()
        longest_s, steps_of_longest = self._longest_call
        if steps > steps_of_longest:
            seconds, steps = seconds - longest_s, steps - steps_of_longest
        return seconds / steps if steps else 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.read()
        is_running, self._lap = self._lap is not None, None
        yield
        if is_running:
            self.start()


class PhaseTimes:
    """Measures how long this rank is in each phase of training, by looking at it from a thread.

    phase: returns the present one of MEASURED_PHASES, or None in others, such as an evaluation.
    """

    def __init__(self, phase: Callable[[], str | None]) -> None:
        self._phase, self._ended, self._lock = phase, threading.Event(), threading.Lock()
        self._seconds = np.zeros(len(MEASURED_PHASES))
        self._thread = threading.Thread(target=self._look, name="phase times", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)  # a look may hang with a stuck process, which then ends without it

    def take(self) -> np.ndarray:
        """Return the seconds in each of MEASURED_PHASES since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, np.zeros(len(MEASURED_PHASES))
        return taken

    def _look(self) -> None:
        before, last = time.perf_counter(), None
        while not self._ended.wait(LOOK_EVERY_S):
            phase, now = self._phase(), time.perf_counter()
            # The whole time since the last look: a process that was stopped has looked neither before nor after.
            if phase is not None and last is not None:
                with self._lock:
                    self._seconds[MEASURED_PHASES.index(phase)] += now - before
            before, last = now, phase


@dataclass(frozen=True)
class Run:
    """One training run on this rank. `output` and `store` do nothing on ranks other than root.

    Users' hooks may rely on config, group, output and state; the rest may change.
    """

    config: Config
    """With the global batch size and data.inputs filled in."""
    group: WorkerGroup
    opened_output: Output
    """What `output` is until the lease is lost."""
    store: Store
    stopping: StopCoordinator
    run_end: RunEnd
    parts: Components
    checkpoint: Checkpoint | None
    """On root, the checkpoint to resume from, if there is one."""
    started: float
    """On time.monotonic's clock."""
    phase_times: PhaseTimes
    clock: Stopwatch = field(default_factory=Stopwatch)

    @property
    def output(self) -> Output:
        """What the run writes beside checkpoints: nothing, as on other ranks, once another run has the directory."""
        return LostOutput(self.opened_output) if self.stopping.lease.lost else self.opened_output

    @property
    def state(self) -> TrainState:
        """The model, its optimizer, and the place of the run in the data."""
        return self.parts.state

    @contextmanager
    def outside_training(self, phase: str, detail: str = "", method: str = "") -> Iterator[None]:
        """Leave the block's time out of the training time and of the time between votes.

        phase, detail: what the watchdog reports if the block takes too long. method: of the callback that it calls.
        """
        began = time.monotonic()
        with self.clock.stopped(), self.stopping.pace.other_calls(phase), self.group.heartbeat.phase(phase, detail):
            yield
        if phase == HOOK:
            self.stopping.note_hook((detail, method), time.monotonic() - began)


@contextmanager
def open_run(config: Config) -> Iterator[Run]:
    """Collective: open a run, from the group of ranks to the compiled steps. The state is not yet restored.

    Raises UserError, InUse or RanksStartApart for problems that the user must fix.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        environment = _environment(config)
        if config.horovod.timeline:
            stack.callback(forget_timeline)
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
                _output_dir(config),
                config.log,
                is_root=group.is_root,
                launched=group.launcher != "none",
                is_ours=lease.is_ours,
            )
            rank_log.make_folder(output.directory)
        host, device = group.hosts[group.rank], group.devices[group.rank].name
        start_time = group.broadcast_object(rank_log.now())
        first_line = rank_log.introduction(
            group.rank, group.size, group.launcher, host, f"on {device}", start=start_time
        )
        # The only file of ranks other than root, except the audit of data.audit.
        log_file = rank_log.open_rank_log(_output_dir(config), group.rank, host, start_text=first_line)
        stack.enter_context(logs.to_file(log_file.write))
        # Around the run's end, which first shows the error and tells the other ranks.
        stack.enter_context(_output_told_of_failure(output, lease))
        signals = stack.enter_context(collected_signals())
        run_end = stack.enter_context(RunEnd(group, log_file, open_watchdog(group, log_file, config.watch)))
        stack.enter_context(closing(lease))  # a run that fails gives it up before the run's end
        check_sums(group)
        consistency.check(group, _facts(config), "at the start", RanksStartApart)
        with group.raise_together():
            saved = config.checkpoint
            store = Store()
            if output.directory:
                folder = output.directory / CHECKPOINTS
                store = CheckpointStore(folder, saved.keep, lease.is_ours, saved.max_failed_saves)
            checkpoint = store.find(config.checkpoint.resume)
        group.heartbeat.is_saving = lambda: store.step_under_way is not None
        batch_before = checkpoint.facts.setting("data.global_batch_size") if checkpoint else None
        batch_before = group.broadcast_object(batch_before)
        with group.raise_together():
            asked, config = config, resolve(config, group.size, batch_before)
        if line := kept_batch(asked, config, group.size):
            log.info(line)
        _introduce(group, config)
        data, config = _open_data(config, group)
        model = None
        if is_users(config.model.name):
            model = group.call_in_turns(lambda: build_first_model(config), f"calling {config.model.name}")
        with group.raise_together():
            parts = build_components(config, group, data["train"], data.get("eval"), model)
        if choice := suit_cycle(group, sum(math.prod(w.shape) * 4 for w in parts.state.model.trainable_variables)):
            log.info(choice)
        deadline = _deadline(config, started, group)
        stopping = StopCoordinator(group, lease, store, signals, deadline=deadline, run_dir=output.directory)
        times = PhaseTimes(lambda: _measured_phase(group, parts.train_step))
        yield Run(config, group, output, store, stopping, run_end, parts, checkpoint, started, times)


def _measured_phase(group: WorkerGroup, train_step: TrainStep) -> str | None:
    """Return this rank's phase as PhaseTimes counts it. The step's own phase is inside the compiled call."""
    name, outer_phase = group.heartbeat.name, group.heartbeat.outer_phase
    if name == TRAIN:
        return train_step.phase_variable.phase()
    return name if name == HOOK or (name == "exchange" and outer_phase in (TRAIN, HOOK)) else None


def _open_data(config: Config, group: WorkerGroup) -> tuple[Mapping[Split, Records | BatchSource], Config]:
    """Collective: open the records of each split, or the stream; return also the config with what the records tell.

    Commands that read other records ask for the inputs of this run.
    """
    if config.data.dataset:
        return open_streams(config, group), config
    splits: list[Split] = ["train", "eval"] if config.data.eval else ["train"]
    records = open_on_all_ranks(config.data, splits, group)
    found = with_inputs_of(config.data, records["train"])
    return records, dataclasses.replace(config, data=with_class_names_of(found, records["train"]))


def _environment(config: Config) -> dict[str, str]:
    """Return environment variables for Horovod and TensorFlow; variables set by the user take precedence."""
    memory = traced_memory_environment() if config.log.profile_at_steps else {}
    is_root, run_dir = launcher.detect().rank == 0, Path(_output_dir(config))
    written = timeline_environment(run_dir, is_root=is_root) if config.horovod.timeline else {}
    return stall_environment(config.watch) | memory | written


def _output_dir(config: Config) -> str:
    assert config.output_dir is not None
    return config.output_dir


@contextmanager
def _output_told_of_failure(output: Output, lease: Lease) -> Iterator[None]:
    """If the block fails, let the trackers and writers of metrics know, unless another run continues them."""
    try:
        yield
    except BaseException:
        try:
            if lease.lost:
                output.stop_progress()
            else:
                output.fail()
        except Exception as error:  # a user's writer may raise anything, and is not why the run ends
            log.warning(f"the metrics cannot be closed: {type(error).__name__}: {error}")
        raise


def _deadline(config: Config, started: float, group: WorkerGroup) -> float | None:
    """Collective: return when the process must have ended: the earlier of config and scheduler, if any.

    started, and what is returned: on time.monotonic's clock, which no correction sets. The scheduler's end is compared
    once with the middle one of the ranks' clocks, because a host whose clock is wrong would end the run, or let it run
    too long. Warns of such a host.
    """
    clocks = group.gather(time.time())
    now = statistics.median_high(clocks)  # of two that differ the one by which the run ends earlier
    for rank, clock in enumerate(clocks):
        if abs(clock - now) > rank_log.MOST_CLOCKS_DIFFER_S and group.is_root:
            difference = f"{abs(clock - now):.0f} s {'ahead of' if clock > now else 'behind'}"
            log.warning(
                f"the clock of {group.name(rank)} is {difference} the others: times in its log are wrong by that."
            )
    deadlines = [] if config.train.max_time is None else [started + config.train.max_time]
    end_time = launcher.detect().end_time
    if end_time is not None:
        if end_time > now:
            deadlines.append(time.monotonic() + end_time - now)
        elif group.is_root:
            log.warning(
                f"{launcher.END_TIME} lies {now - end_time:.0f} s in the past, so the run does not end by it: it is "
                "left over of another job, or the job's time was extended. Unset it, or say by train.max_time when to "
                "end."
            )
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
        **{f"setting {name}": str(value) for name, value in by_key(as_dict(config))},
        "code of horovod_train": consistency.code_digest(),
        **{f"version of {name}": value for name, value in consistency.versions().items()},
    }


def open_on_all_ranks(
    config: DataConfig, splits: Sequence[Split], group: WorkerGroup, *, needs_labels: bool = True
) -> dict[Split, Records]:
    """Collective: return the records of each split, the same on every rank. needs_labels: as of open_records.

    Root scans files without a fresh index while the others wait; then one rank of each host that still finds none does.
    This works even where files cannot be locked.

    Raises UserError for any problem with the data, RanksStartApart where ranks see different records.
    """
    scan = functools.partial(_scan, config, splits, needs_labels=needs_labels)
    opened = group.call_in_turns(scan, "looking at the records", phase="index")
    for records in opened.values():
        _check_equal(group, records)
    with group.raise_together():
        for split, records in opened.items():
            check_counts(records, config.paths(split))
    for note in dict.fromkeys(note for records in opened.values() for note in records.notes):
        log.warning(note)
    for records in opened.values():
        problems = records.problems
        for problem in problems[:_RANKS_SHOWN]:
            log.warning(f"{problem} What comes after is left out, as data.on_bad_record says.")
        if len(problems) > _RANKS_SHOWN:
            more = len(problems) - _RANKS_SHOWN
            log.warning(f"{records.setting}: {more} more files are damaged; check-data names them")
    return opened


def _scan(config: DataConfig, splits: Sequence[Split], *, needs_labels: bool) -> dict[Split, Records]:
    """Return the records of each split; the inputs are those of the first one."""
    opened: dict[Split, Records] = {}
    for split in splits:
        opened[split] = scan_records(config, split, needs_labels=needs_labels)
        config = with_inputs_of(config, opened[split])
    (_, first), *further = opened.items()
    for split, records in further:
        opened[split] = beside_training(records, first, config)
        for line in other_kinds(records, first.schema.features, first.setting):
            log.warning(line)
    if "train" in opened:
        buckets = opened["train"].find_buckets(config)  # reads all records, unless that was done before
        if buckets:
            opened["train"] = dataclasses.replace(opened["train"], lengths=buckets.digest)
    return opened


def _check_equal(group: WorkerGroup, records: Records) -> None:
    """Collective: raise RanksStartApart, naming a file and the ranks on which it differs or is missing."""
    try:
        consistency.check(group, records.facts, "at the start", RanksStartApart)
    except RanksStartApart as error:
        # All ranks are here, so they can communicate again. File lists make long messages, sent only in this case.
        local_files = names_of(records.source.parts)
        sent = group.broadcast_object([list(entry) for entry in local_files])
        root_files = [(str(name), str(digest)) for name, digest in sent]
        local_difference = difference(local_files, root_files, group.name(0)) if local_files != root_files else ""
        different = [f"{group.name(rank)} {text}" for rank, text in enumerate(group.gather(local_difference)) if text]
        if not different:
            raise
        more = f"; {len(different) - _RANKS_SHOWN} more ranks differ" if len(different) > _RANKS_SHOWN else ""
        raise RanksStartApart(
            f"{records.setting}: ranks see different records: {'; '.join(different[:_RANKS_SHOWN])}{more}; "
            f"{group.size - len(different)} of {group.size} ranks see the same as rank 0. Give every rank the same "
            "files."
        ) from error


def open_streams(config: Config, group: WorkerGroup) -> dict[Split, StreamPipeline]:
    """Collective: return each split's batches of the stream that data.dataset names, with the same steps on all ranks.

    `config` is resolved. Raises UserError for a stream that cannot be used, RanksStartApart where records differ in
    kind between ranks.
    """
    _describe(config)
    train = _open(config, group, is_training=True)
    assert train is not None, "None is refused"
    opened: dict[Split, StreamPipeline] = {"train": train}
    is_evaluated = config.eval.every_epochs or config.eval.every_steps
    if is_evaluated and (eval_ := _open(config, group, is_training=False)):
        opened["eval"] = eval_
    elif config.checkpoint.best or config.early_stopping.patience or config.early_stopping.target is not None:
        raise UserError("data.dataset: checkpoint.best and early_stopping need an evaluation, and there is none.")
    return opened


def _open(config: Config, group: WorkerGroup, *, is_training: bool) -> StreamPipeline | None:
    """Collective: open one split; None if the function gives no records to evaluate."""
    ranks = Ranks(group.rank, group.size, group.local_size, group.devices[group.rank].logical[0])
    open_split = functools.partial(open_stream, config.data, ranks, seed=config.seed, training=is_training)
    stream = group.call_in_turns(open_split, "opening data.dataset")
    elements = str(stream.elements) if stream else "None"
    consistency.check(group, {"records of data.dataset": elements}, "at the start", RanksStartApart)
    if stream is None:
        return None
    if stream.has_batches:
        log.warning(
            f"data.dataset: {stream.spec.name} gives batches, and each counts as one record. Leave batch() out, unless "
            "a record is a sequence: data.global_batch_size says how many records a step has."
        )
    steps_per_epoch = config.data.steps_per_epoch if is_training else None
    lengths = None
    if steps_per_epoch is None:
        spared = "; with data.steps_per_epoch they need not be counted" if is_training else ""
        count = f"counting the {'training' if is_training else 'evaluation'} records of {stream.spec.name}{spared}"
        with group.heartbeat.phase("index", count), logs.said_if_slow(count), group.raise_together():
            length = stream.count()
        lengths = group.gather(length)
        if not any(lengths):
            raise UserError(f"data.dataset: with training={is_training} no rank has a record.")
        by_rank = listed((f"{length:,}" for length in lengths), 8, "ranks")
        log.info(f"data.dataset: {'training' if is_training else 'evaluation'} records by rank: {by_rank}")
    data = config.data
    assert data.global_batch_size is not None
    batch = data.global_batch_size
    if not is_training and config.eval.batch_size_per_rank:
        batch = config.eval.batch_size_per_rank * group.size
    counts = zip(lengths or (), rows_by_rank(batch, group.size), strict=False)
    steps = steps_per_epoch or max(-(-length // rows) for length, rows in counts)
    return StreamPipeline(stream, batch, steps, lengths, prefetch_batches=data.prefetch_batches)


def _describe(config: Config) -> None:
    """Log what a stream keeps of a run's promises, and what it does not."""
    assert config.data.dataset is not None
    name, steps = config.data.dataset.name, config.data.steps_per_epoch
    log.info(
        f"{name} is a stream: ranks end each epoch together, and a run resumes inside an epoch on as many ranks, "
        "by reading up to where it stopped. The stream decides whether each record comes once, and in the same order."
    )
    if steps:
        log.info(f"an epoch of {name} has {steps} steps: longer streams are cut, shorter ones are filled by weight 0")
