"""Start and stop Horovod in a script: init starts it and pins the process to its device, shutdown stops it.

In between a watchdog names ranks that the others wait for, ranks that have disappeared, and the rank that failed first.
It starts with the first broadcast of variables, because a script must be able to set up devices between `init` and its
first operation, and ends with the process. Also process sets, barrier and join.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.device import chosen_before, in_use
from horovod_train.distributed.group import WorkerGroup, is_connection_loss, run_as_graph
from horovod_train.distributed.horovod_info import check_sums
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.start import StartedProcess, form_group, start_process
from horovod_train.distributed.watchdog.heartbeat import IN_CALL, files_being_read
from horovod_train.distributed.watchdog.watch_thread import end_process
from horovod_train.distributed.watchdog.watchdog import RunEnd, as_seconds, open_watchdog, stall_environment
from horovod_train.errors import AlreadySaid, RunError, UserError, without_autograph
from horovod_train.output.console import to_stderr
from horovod_train.output.rank_log import RankLog
from horovod_train.tensorflow import agreement

STEPS_BEFORE_STOP = 2
"""The step limit applies after this many exchanges: before that a step may still be compiling."""

LIMITS = WatchConfig(warn_after_s=60, stop_after_s=1800, first_step_after_s=1800)
"""A script may do anything between two steps, such as a long evaluation on root alone, so the limit is a long one."""

log = logging.getLogger(__name__)

_watch: _Watch | None = None
_started: StartedProcess | None = None
"""Referenced here to keep its rendezvous open: ranks that start late still need it."""
_process_sets: list[hvd.ProcessSet] = []
"""Those that Horovod was given since it has started."""


def init(
    comm: Any = None,
    process_sets: Sequence[hvd.ProcessSet] | str | None = None,
    *,
    pin_device: bool = True,
    watch_ranks: bool | WatchConfig = True,
    check_weights: bool = True,
    files_on_root_only: bool = True,
    end_epochs_together: bool = True,
) -> None:
    """Collective: start Horovod in this process. A second call does nothing.

    comm: must be None; give the ranks of a part of the job as `process_sets`.
    process_sets: sets of ranks that will exchange among themselves; "dynamic" allows add_process_set later. All ranks
        still call `fit` with the broadcast callback, and broadcast_variables without a process set.
    pin_device: make the GPU with this process's local rank the only one it uses, and share the host's cores among its
        ranks, unless the script has chosen GPUs or threads. What the script sets, before or afterwards, wins.
    watch_ranks: from the first broadcast of variables on, name ranks that are waited for or have gone, end the others;
        a WatchConfig sets the limits. Its default stops a script that makes no step for half an hour. Elastic ranks are
        not watched. Before that broadcast Horovod names exchanges in which ranks wait for longer than warn_after_s.
    check_weights: see that all ranks hold the same weights at the tenth exchange of gradients, at the hundredth and at
        every thousandth, once there has been an update, and, by the broadcast callback, after each epoch.
    files_on_root_only: with the broadcast callback, run Keras' callbacks that write files, and the progress bar, on
        root only, or on the first rank that has one.
    end_epochs_together: with the broadcast callback, end an epoch of `fit` on all ranks when the rank with the fewest
        batches has had them, and say so; otherwise ranks that have different numbers of batches are an error.

    Raises UserError if the processes would not find each other, or have too few GPUs.
    """
    global _started, _watch
    if comm is not None:
        raise UserError(
            "hvd.init: comm is not served. Give process_sets=[hvd.ProcessSet([0, 1])] for a part of the ranks."
        )
    if hvd.is_initialized():
        return
    is_elastic = launcher.detect().is_elastic
    if is_elastic and (process_sets or isinstance(watch_ranks, WatchConfig)):
        raise UserError(
            "hvd.init: process_sets and limits of the watch are for ranks that stay; horovodrun --min-np started an "
            "elastic script. Leave them out."
        )
    limits = watch_ranks if isinstance(watch_ranks, WatchConfig) else LIMITS
    guards = agreement.guards
    guards.check_weights, guards.files_on_root_only = check_weights, files_on_root_only
    guards.end_epochs_together = end_epochs_together
    environment = _stall_environment(limits) if watch_ranks and not is_elastic else None
    _started = start_process(environment=environment, process_sets=process_sets)
    _process_sets[:] = () if isinstance(process_sets, str) else process_sets or ()
    if pin_device:
        _pin(_started)
    if watch_ranks and limits.enabled:
        _watch = _Watch(_started, limits)


def shutdown() -> None:
    """Shut Horovod down in this process. It cannot exchange with the others any more, whose watch expects that."""
    if _watch is not None and _watch.run_end is not None:
        _watch.run_end.close()
    hvd.shutdown()
    if _started is not None:
        _started.close()
    agreement.forget_process_sets()  # the next start may give their ids to others
    for process_set in _process_sets:
        process_set.process_set_id = None
    _process_sets.clear()


def add_process_set(process_set: hvd.ProcessSet | Sequence[int]) -> hvd.ProcessSet:
    """Collective: add a set of ranks that exchange among themselves; needs init(process_sets="dynamic").

    Raises UserError in an elastic script, whose ranks may change.
    """
    if launcher.detect().is_elastic:
        raise UserError("hvd.add_process_set: horovodrun --min-np started an elastic script, which has no such sets.")
    _process_sets.append(hvd.add_process_set(process_set))
    return _process_sets[-1]


def remove_process_set(process_set: hvd.ProcessSet) -> bool:
    """Collective: remove a set of ranks; return whether there was one. Needs init(process_sets="dynamic")."""
    process_set_id = process_set.process_set_id
    is_removed = bool(hvd.remove_process_set(process_set))
    if is_removed and process_set_id is not None:
        agreement.forget_process_set(process_set_id)
    return is_removed


def barrier(process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
    """Collective: return when every rank of the process set has called it. Raises UserError inside a tf.function."""
    if not tf.executing_eagerly():
        raise UserError(
            "hvd.barrier: TensorFlow would leave it out, because nothing uses its result. Call it outside tf.function."
        )
    with exchanging("hvd.barrier"):
        hvd.allreduce(tf.zeros(1), op=hvd.Sum, name="barrier", process_set=process_set)


def join() -> tf.Tensor:
    """Take part, with zeros, in the allreduces of ranks that have more data; return the last rank to join, an int32 [].

    A rank that waits here does not train: broadcast the weights and the optimizer of the rank that this returns. Ranks
    compare their weights at the tenth exchange after it. Raises UserError inside a tf.function.
    """
    if not tf.executing_eagerly():
        raise UserError("hvd.join: TensorFlow would compute it once and keep the result. Call it outside tf.function.")
    with exchanging("hvd.join"):
        # In a new graph each time: Horovod's operation counts as a constant, so that a second call would not wait.
        last_rank = run_as_graph(hvd.join)
    agreement.reset_counts()
    return last_rank


def begin_watch() -> None:
    """Collective, the first time: begin to watch, if `init` was told to."""
    if _watch is not None:
        _watch.begin()


def note_progress() -> None:
    """Let the watch, if there is one, see that this rank makes progress outside of steps. Cheap."""
    if _watch is not None and _watch.group is not None:
        _watch.group.heartbeat.phase("train")


def exchanging(call: str) -> AbstractContextManager[None]:
    """Return a context in which the watch, if there is one, sees that this rank waits for the others.

    call: which exchange, for messages: "hvd.barrier", "the start of model.fit". Only for exchanges that Python calls;
    those of gradients are inside compiled steps, which the watch counts.
    """
    group = None if _watch is None else _watch.group
    return nullcontext() if group is None else group.heartbeat.phase("exchange", f"{IN_CALL}{call}")


def _stall_environment(limits: WatchConfig) -> dict[str, str]:
    """Return Horovod's settings, with which it names exchanges that ranks wait in: before the watch begins, only it."""
    environment = stall_environment(limits)
    if environment:
        environment["HOROVOD_STALL_CHECK_TIME_SECONDS"] = as_seconds(limits.warn_after_s)
    return environment


def _pin(started: StartedProcess) -> None:
    """Pin this process to its device, unless the script has chosen one or has started TensorFlow already."""
    if len(tf.config.get_visible_devices("GPU")) < len(tf.config.list_physical_devices("GPU")):
        return
    try:
        started.pin(chosen_before())
    except RuntimeError as error:  # TensorFlow has started, and keeps what it has
        reason = str(error).rstrip(".")
        log.warning(f"hvd.init could not pin this process to a device: {reason}. Call it before the first operation.")
    except UserError:
        started.rendezvous.close()
        raise


class _Watch:
    """The watch of this process; begins at most once."""

    def __init__(self, started: StartedProcess, limits: WatchConfig) -> None:
        self._started, self._limits = started, limits
        self.group: WorkerGroup | None = None
        self.run_end: RunEnd | None = None
        self._exit_code: int | None = None
        self._previous_excepthook = sys.excepthook
        sys.excepthook = self._report
        # Registered first, so that it runs last. Python itself would exit with 1 after any exception.
        atexit.register(self._exit)

    def begin(self) -> None:
        """Collective, the first time: start the watchdog; do nothing in an elastic script or on one rank."""
        started_by = self._started.started_by
        if self.run_end is not None or started_by.is_elastic or started_by.size == 1:
            return
        try:
            with self._started.rendezvous:
                self.group = group = form_group(self._started, in_use(hvd.local_rank()))
        except Exception as error:
            if not is_connection_loss(error):
                raise
            raise RunError(
                "another rank ended before its first broadcast; its message, if any, is above or in its log. All ranks "
                "must call model.fit, or hvd.broadcast_variables, also those outside a process set."
            ) from error
        group.heartbeat.phase("train")
        group.heartbeat.set_probe(lambda: _probe(group))
        log = RankLog()
        self.run_end = RunEnd(group, log, open_watchdog(group, log, self._limits))
        atexit.register(self.run_end.close)
        check_sums(group)

    def _report(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Show the exception that ends the script, unless another rank's has ended it; note the exit code.

        Before the watchdog runs, each rank shows its exception.
        """
        error = agreement.cause_of(error)
        if not isinstance(error, Exception):
            self._previous_excepthook(kind, error, traceback)
        elif self.run_end is not None:
            try:
                self.run_end.__exit__(type(error), error, traceback)
            except AlreadySaid as outcome:
                self._exit_code = outcome.exit_code
        elif isinstance(error, RunError):
            to_stderr(f"error: {without_autograph(str(error))}")
            self._exit_code = error.exit_code
        else:
            self._previous_excepthook(kind, error, traceback)

    def _exit(self) -> None:
        if self._exit_code is not None:
            end_process(self._exit_code)


def _probe(group: WorkerGroup) -> tuple[int, str | None, str]:
    step = agreement.exchange_count()
    if step > STEPS_BEFORE_STOP:
        group.heartbeat.has_stepped = True
    return step, None, files_being_read()
