"""Watches the ranks of a script: names ranks that are waited for or have gone, and the rank that failed first.

Begins at the first broadcast of variables, because a script must be able to set up devices between `init` and its first
operation. Ends with the process.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.device import Device
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.start import StartedProcess, form_group
from horovod_train.distributed.watchdog.heartbeat import IN_CALL, files_being_read
from horovod_train.distributed.watchdog.run_end import RunEnd
from horovod_train.distributed.watchdog.state import end_process
from horovod_train.distributed.watchdog.watchdog import open_watchdog
from horovod_train.errors import AlreadySaid, RunError
from horovod_train.output.console import to_stderr
from horovod_train.output.rank_log import RankLog
from horovod_train.tensorflow.agreement import cause_of, exchange_count

STEPS_BEFORE_STOP = 2
"""The step limit applies after this many exchanges: before that a step may still be compiling."""

LIMITS = WatchConfig(warn_after_s=60, stop_after_s=1800, first_step_after_s=1800)
"""A script may do anything between two steps, such as a long evaluation on root alone, so the limit is a long one."""


class _Watch:
    """The watch of this process; begins at most once."""

    def __init__(self, started: StartedProcess, device: Device, limits: WatchConfig) -> None:
        self._started, self._device, self._limits = started, device, limits
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
        with self._started.rendezvous:
            self.group = group = form_group(self._started, self._device)
        group.heartbeat.phase("train")
        group.heartbeat.set_probe(lambda: _probe(group))
        log = RankLog()
        self.run_end = RunEnd(group, log, open_watchdog(group, log, self._limits))
        atexit.register(self.run_end.close)

    def _report(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Show the exception that ends the script, unless another rank's has ended it; note the exit code.

        Before the watchdog runs, each rank shows its exception.
        """
        error = cause_of(error)
        if not isinstance(error, Exception):
            self._previous_excepthook(kind, error, traceback)
        elif self.run_end is not None:
            try:
                self.run_end.__exit__(type(error), error, traceback)
            except AlreadySaid as outcome:
                self._exit_code = outcome.exit_code
        elif isinstance(error, RunError):
            to_stderr(f"error: {error}")
            self._exit_code = error.exit_code
        else:
            self._previous_excepthook(kind, error, traceback)

    def _exit(self) -> None:
        if self._exit_code is not None:
            end_process(self._exit_code)


def _probe(group: WorkerGroup) -> tuple[int, str | None, str]:
    step = exchange_count()
    if step > STEPS_BEFORE_STOP:
        group.heartbeat.record_first_step()
    return step, None, files_being_read()


_watch: _Watch | None = None
_unwatched_process: StartedProcess | None = None
"""Referenced here to keep its rendezvous open: ranks that start late still need it."""


def prepare(started: StartedProcess, device: Device, limits: WatchConfig | None) -> None:
    """Prepare a watch for `begin`. limits: None for no watch. device: what this rank computes on, for messages."""
    global _watch, _unwatched_process
    if limits is not None and limits.enabled:
        _watch = _Watch(started, device, limits)
    else:
        _unwatched_process = started


def begin() -> None:
    """Collective, the first time: begin to watch, if `prepare` was called."""
    if _watch is not None:
        _watch.begin()


def end() -> None:
    """End the watch, if there is one, because this rank will not exchange any more."""
    if _watch is not None and _watch.run_end is not None:
        _watch.run_end.close()


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
