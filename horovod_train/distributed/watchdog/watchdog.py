"""The main thread's side of the watchdog: start it, and end the run on this rank.

The watchdog names the rank that the others wait for, ends a stalled run, and reports which rank is lost. It runs
outside Horovod, in a thread on each rank (see watch_thread). It therefore works while every main thread is inside a
compiled call or an exchange, and while a rank is frozen. It does not end a run that makes progress, however slow.
"""

from __future__ import annotations

import itertools
import math
import re
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import tensorflow as tf

from horovod_train.config.registry import failure_of, raised_at
from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.group import WorkerGroup, is_connection_loss, is_of_nccl
from horovod_train.distributed.launch.network import choose_host, exchange_interfaces
from horovod_train.distributed.watchdog.transport import Address, Server, connect
from horovod_train.distributed.watchdog.watch_thread import (
    ANSWER_WITHIN_S,
    GLOO_TIMEOUT,
    LEAVE_WITHIN_S,
    Cause,
    Coordinator,
    Watch,
    WatchThread,
    Worker,
    in_background,
    open_host_claim,
)
from horovod_train.errors import AlreadySaid, FailedElsewhere, RunError, Stalled, UserError, one_line
from horovod_train.output.console import to_stderr, traceback_to_stderr
from horovod_train.output.rank_log import RankLog

_CONNECT_WITHIN_S = 10.0
_FINISHED_AFTER_S = 1.0
"""Other causes arrive earlier than this after Horovod has shut down."""
_READ_WITHIN_S = 0.2
"""How long launchers may take to pass on what a rank has printed; they read the ranks' outputs in any order."""

_CONTEXT_LINE = re.compile(r'Graph execution error|Detected at node|File "|Traceback \(|\d+ root error|\[\[\{\{node')
"""Lines of TensorFlow's messages that do not say what went wrong."""
_NOT_IN_XLA = re.compile(r"on XLA_\w+: (\w+) \(No registered ")


class Watchdog:
    """What the main thread asks of the watchdog. This one does not watch: a rank shows its own failures alone."""

    def claim_to_speak(self, exit_code: int) -> bool:
        """Return whether this rank shows its failure. If several ranks fail, one of them does."""
        return True

    def announce_cause(self, cause: Cause) -> None:
        """Tell all ranks why the run ends."""

    def find_cause(self, exit_code: int = 1) -> Cause | None:
        """Return why Horovod has shut down; None if that is still unknown after LEAVE_WITHIN_S.

        exit_code: what this process ends with if the watchdog has to end it meanwhile.
        """
        return None

    def print_once_per_host(self, line: str) -> None:
        """Print a line, unless a rank of this host has already printed why the run ends."""
        to_stderr(line)

    def reporting_failure(self) -> AbstractContextManager[None]:
        """Return a context in which this rank reports its failure. The process then ends within a limited time."""
        return nullcontext()

    def close(self) -> None:
        """Tell the other ranks that this one has finished."""


class RankWatchdog(Watchdog):
    """The main thread's access to the watchdog's thread."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def claim_to_speak(self, exit_code: int) -> bool:
        watch = self._watch
        with watch.changed:
            watch.start_exit_timer(exit_code)
            if watch.cause is None:
                watch.claim()
            watch.changed.wait_for(lambda: watch.speaker is not None or watch.cause is not None, ANSWER_WITHIN_S)
            return watch.cause is None and watch.speaker in (None, watch.group.rank)

    def announce_cause(self, cause: Cause) -> None:
        with self._watch.changed:
            self._watch.announce_cause(cause)

    def find_cause(self, exit_code: int = 1) -> Cause | None:
        watch, deadline = self._watch, time.monotonic() + LEAVE_WITHIN_S
        with watch.changed:
            watch.start_exit_timer(exit_code)
            while watch.cause is None and time.monotonic() < deadline:
                watch.changed.wait(watch.intervals.turn_s)
                if watch.cause is None:  # this rank may have to say why itself, which takes time too
                    watch.exits_since = time.monotonic()
                watch.report_silent(time.monotonic())
                if time.monotonic() > deadline - LEAVE_WITHIN_S + _FINISHED_AFTER_S:
                    watch.report_finished()
                    watch.report_suspended(time.monotonic())
            return watch.cause

    def print_once_per_host(self, line: str) -> None:
        with self._watch.changed:
            self._watch.print_once_per_host(line)

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        watch = self._watch
        if watch.group.launcher != "none":
            _end_process_in_time(watch.log)
        # Report the step of this moment, or that of the last heartbeat if a device is stuck.
        in_background(watch.group.heartbeat.read_probe, 0.5)
        yield
        with watch.changed:  # The thread keeps this lock while it ends a stalled run, until it ends the process.
            # This rank has reported its failure, so it must not count as disappeared.
            watch.has_failed = True
            watch.say_bye()

    def close(self) -> None:
        with self._watch.changed:
            self._watch.close()


def open_watchdog(group: WorkerGroup, log: RankLog, limits: WatchConfig) -> Watchdog:
    """Collective: start watching the ranks, unless `limits.enabled` is false.

    A rank that cannot reach root reports this and continues unwatched.
    """
    if not limits.enabled:
        return Watchdog()
    server = _open_server(group) if group.is_root else None
    root = server.address if server else None
    fields = group.broadcast_object((root.host, root.port, root.token) if root else None)
    if fields is None:
        return Watchdog()
    address = Address(*fields)
    host_claim = open_host_claim(group)
    watch: Watch
    if server is not None:
        log.write("watch", f"listens at {address.host}:{address.port}")
        watch = Coordinator(group, log, limits, server, host_claim)
    else:
        try:
            connection = connect(address, group.rank, _CONNECT_WITHIN_S)
        except OSError as error:
            where = f"root at {address.host}:{address.port}"
            to_stderr(f"warning: {group.name(group.rank)} is not watched: cannot reach {where}: {error}")
            return Watchdog()
        watch = Worker(group, log, limits, connection, host_claim)
    WatchThread(watch).start()
    return RankWatchdog(watch)


def stall_environment(limits: WatchConfig) -> dict[str, str]:
    """Return settings with which the watchdog reports before Horovod does; Horovod ends what the watchdog cannot.

    HOROVOD_GLOO_TIMEOUT_SECONDS is how long gloo tolerates a frozen rank, and also how long it waits for ranks to
    start, before anything watches them. So it is not made longer for the sake of runs that are suspended as a whole.
    """
    if not limits.enabled:
        return {}
    longest_s = math.ceil(max(limits.stop_after_s, limits.first_step_after_s))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(longest_s),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(longest_s + 60),
        GLOO_TIMEOUT: str(math.ceil(limits.stop_after_s) + 30),
    }


def _open_server(group: WorkerGroup) -> Server | None:
    try:
        return Server(choose_host(group.hosts, exchange_interfaces()), group.size)
    except OSError as error:
        to_stderr(f"warning: the ranks are not watched: root cannot listen: {error}")
        return None


def _end_process_in_time(log: RankLog) -> None:
    """End the process later even if the watchdog's thread cannot.

    Python's own exit, in which no Python thread runs, may hang in TensorFlow, Horovod or, last of all, MPI.
    """
    log.end_process_after(2 * LEAVE_WITHIN_S - 1)
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.alarm(math.ceil(2 * LEAVE_WITHIN_S))


class RunEnd:
    """As a context manager around the run: shows the exception that ends it, then raises AlreadySaid instead."""

    def __init__(self, group: WorkerGroup, log: RankLog, watchdog: Watchdog) -> None:
        self._group, self._log, self._watchdog = group, log, watchdog
        self._is_closed = False

    def close(self, ended: str = "done", exit_code: int = 0, **facts: Any) -> None:
        """Record that the run has ended on this rank without a failure, and tell the other ranks.

        A second call only tells them again: a rank that ends without telling them counts as disappeared.
        """
        self._watchdog.close()
        if not self._is_closed:
            self._is_closed = True
            self._record_end(ended, exit_code, **facts)

    def __enter__(self) -> RunEnd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, SystemExit):
            error = failure_of(error)
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            with self._watchdog.reporting_failure():
                exit_code = self._report(error)
            raise AlreadySaid(str(error), exit_code) from error
        if error is None:
            self.close()
        else:
            self._log.write_traceback(error, "stopped")
            self.close("stopped", 1, error=type(error).__name__)

    def _report(self, error: BaseException) -> int:
        """Report the exception that ends the run on this rank, unless another rank has; return the exit code."""
        if isinstance(error, FailedElsewhere):
            # The rank that knows has said it by then: mpirun kills all when the first one ends.
            self._watchdog.find_cause(error.exit_code)
            self._record_end("followed", error.exit_code, error=str(error))
            return error.exit_code
        may_be_own = is_of_nccl(error)
        if is_connection_loss(error):
            self._log.write_traceback(error, "lost")
            cause = self._watchdog.find_cause()
            if cause is not None or not may_be_own:
                return self._follow(cause)
            # No rank has gone, so the error is this rank's own.
        else:
            self._log.write_traceback(error)
        text, exit_code, line = self._sum_up(error)
        self._record_end("failed", exit_code, error=text)
        if self._watchdog.claim_to_speak(exit_code):
            if line:
                to_stderr(line)
            else:
                traceback_to_stderr(error)
                if may_be_own:
                    to_stderr(f"error: {text}")
            # So that the user reads this first, before other ranks say that this one has failed.
            time.sleep(_READ_WITHIN_S)
            hint = f"; see {self._log.name}" if self._log.name else ""
            self._watchdog.announce_cause(Cause(self._group.rank, f"failed: {text.rstrip('.')}{hint}", exit_code))
            return exit_code
        # Ranks that have looked for a cause already must end in time; the rank that speaks has the same error.
        cause = None if may_be_own else self._watchdog.find_cause()
        if cause is None or text.rstrip(".") not in cause.what:
            self._follow(cause)
        return exit_code

    def _sum_up(self, error: BaseException) -> tuple[str, int, str]:
        """Return what an exception says, its exit code, and the line to show; "": show its traceback.

        An error of the user's code, or of an operation on the user's data, is a line if a log has its traceback. Before
        the first step it is a mistake found before training. Any other exception is a fault of this package.
        """
        text = _summarize(error)
        if isinstance(error, RunError):
            return text, error.exit_code, f"error: {error}"
        place = raised_at(error)
        if not self._log.name or not (place or isinstance(error, tf.errors.OpError)):
            return text, 1, ""
        group = self._group
        exit_code = 1 if group.heartbeat.has_stepped or is_of_nccl(error) else UserError.exit_code
        who = f"{group.name(group.rank)}: " if group.size > 1 else ""
        return text + place, exit_code, f"error: {who}{text}{place}; the traceback is in {self._log.name}"

    def _follow(self, cause: Cause | None) -> int:
        """Print in one line which rank's end also ends this rank; return the exit code."""
        if cause is None:
            hint = f"; see {self._log.name}" if self._log.name else ""
            line, exit_code, rank = f"stopped: another rank has gone; its message says why{hint}", 1, None
        else:
            line, exit_code, rank = f"stopped: {self._group.name(cause.rank)} {cause.what}", cause.exit_code, cause.rank
        self._watchdog.print_once_per_host(line)
        ended, error = "followed", line
        if exit_code == Stalled.exit_code:
            ended = "stalled"
        elif cause is not None and rank == self._group.rank:
            ended, error = "failed", cause.what
        self._record_end(ended, exit_code, error=error, cause=rank)
        return exit_code

    def _record_end(self, ended: str, exit_code: int, **facts: Any) -> None:
        # The main thread's phase, because it has left the compiled call.
        heartbeat = self._group.heartbeat
        self._log.end(
            ended, exit_code, **{"step": heartbeat.last().step, "phase": heartbeat.name, "error": None, **facts}
        )


def _summarize(error: BaseException) -> str:
    """Return the exception in one line.

    TensorFlow's messages begin with where the operation was made; the reason follows.
    """
    if isinstance(error, RunError):
        return one_line(error)
    if operation := _NOT_IN_XLA.search(str(error)):
        return f"jit_compile: true, but XLA cannot compile the operation {operation[1]}; set jit_compile: false"
    lines = (one_line(line) for line in str(error).splitlines())
    begun = itertools.dropwhile(lambda line: not line or _CONTEXT_LINE.match(line), lines)
    reason = one_line(" ".join(itertools.takewhile(lambda line: not _CONTEXT_LINE.match(line), begun)))
    hint = "; NCCL_DEBUG=WARN says more" if is_of_nccl(error) and "NCCL_DEBUG" not in reason else ""
    return f"{type(error).__name__}: {reason[:300]}{hint}" if reason else type(error).__name__
