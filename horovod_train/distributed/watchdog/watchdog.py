"""Watch the ranks of a run: name the rank that the others wait for, end a stalled run, report which rank has gone.

Runs outside Horovod, in a thread on each rank (see role). It therefore works while every main thread is inside a
compiled call or an exchange, and while a rank is frozen. Does not end a run that makes progress, however slow.
"""

from __future__ import annotations

import math
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from horovod_train.distributed.group import WorkerGroup, is_connection_loss
from horovod_train.distributed.watchdog.coordinator import Coordinator
from horovod_train.distributed.watchdog.listener import Address
from horovod_train.distributed.watchdog.role import ANSWER_WITHIN_S, LEAVE_WITHIN_S, Cause, Role, in_background
from horovod_train.distributed.watchdog.stall_detector import StallLimits
from horovod_train.distributed.watchdog.transport import Server, choose_host, connect, exchange_interface
from horovod_train.distributed.watchdog.worker import Worker
from horovod_train.errors import AlreadySaid, FailedElsewhere, RunError, Stalled
from horovod_train.output.console import to_stderr, unfailing
from horovod_train.output.rank_log import NullRankLog

_CONNECT_WITHIN_S = 10.0
_AROUND_THE_MESSAGE = re.compile(
    r'Graph execution error|Detected at node|File "|Traceback \(|\d+ root error|\[\[\{\{node'
)


class NullWatchdog:
    """Does not watch. As a context manager it shows the exception that ends the run, as every watchdog does."""

    def __init__(self, group: WorkerGroup, log: NullRankLog) -> None:
        self.group, self.log = group, log
        self._is_closed = False

    def report_failure(self, text: str, show: Callable[[], None], exit_code: int = 1) -> None:
        """Show what failed on this rank, unless another rank failed before it, and tell the others.

        text: one line. If all ranks fail alike, one rank shows it.
        """
        show()

    def explain_loss(self, timeout_s: float = LEAVE_WITHIN_S) -> Cause | None:
        """Return why Horovod has shut down, if it is known or becomes known in this time."""
        return None

    def close(self, ended: str = "done", exit_code: int = 0, **facts: Any) -> None:
        """Record that the run is over for this rank, as it should be. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._note_end(ended, exit_code, **facts)

    def __enter__(self) -> NullWatchdog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Show an exception, then raise AlreadySaid instead of it."""
        if isinstance(error, Exception):
            raise AlreadySaid(str(error), self._settle(error)) from error
        if error is None:
            self.close()
        else:
            self.log.write_traceback(error, "stopped")
            self.close("stopped", 1, error=type(error).__name__)

    def _settle(self, error: Exception) -> int:
        """Report the exception that ends the run on this rank; return the exit code."""
        if isinstance(error, FailedElsewhere):
            self._note_end("followed", error.exit_code, error=str(error))
            return error.exit_code
        if is_connection_loss(error):
            self.log.write_traceback(error, "lost")
            return self._follow(self.explain_loss())
        text, exit_code = _in_one_line(error), error.exit_code if isinstance(error, RunError) else 1
        self.log.write_traceback(error)
        self._note_end("failed", exit_code, error=text)
        self.report_failure(text, lambda: _show(error), exit_code)
        return exit_code

    def _follow(self, cause: Cause | None) -> int:
        """Say in one line which rank's end ends this rank; return the exit code."""
        if cause is None:
            see = f"; see {self.log.name}" if self.log.name else ""
            line, exit_code, rank = f"stopped: another rank has gone; its message says why{see}", 1, None
        else:
            line, exit_code, rank = f"stopped: {self.group.name(cause.rank)} {cause.what}", cause.exit_code, cause.rank
        self._say_once(line)
        ended = "stalled" if exit_code == Stalled.exit_code else "followed"
        self._note_end(ended, exit_code, error=line, cause=rank)
        return exit_code

    def _say_once(self, line: str) -> None:
        to_stderr(line)

    def _note_end(self, ended: str, exit_code: int, **facts: Any) -> None:
        # The main thread's own phase, because it is not inside the compiled call any more.
        heartbeat = self.group.heartbeat
        self.log.end(
            ended, exit_code, **{"step": heartbeat.last().step, "phase": heartbeat.name, "error": None, **facts}
        )


class Watchdog(NullWatchdog):
    """The main thread's access to the watchdog's thread (`guard`, a Role)."""

    def __init__(self, guard: Role) -> None:
        super().__init__(guard.group, guard.log)
        self._guard = guard

    def report_failure(self, text: str, show: Callable[[], None], exit_code: int = 1) -> None:
        guard = self._guard
        with guard.changed:
            guard.start_exit_timer(exit_code)
            if guard.cause is None:
                guard.claim()
            guard.changed.wait_for(lambda: guard.speaker is not None or guard.cause is not None, ANSWER_WITHIN_S)
            is_speaker = guard.cause is None and guard.speaker in (None, self.group.rank)
        if is_speaker:
            # Before the others are told, because the user is to read it first.
            show()
            see = f"; see {self.log.name}" if self.log.name else ""
            with guard.changed:
                guard.tell(Cause(self.group.rank, f"failed: {text.rstrip('.')}{see}", exit_code))
            return
        cause = self.explain_loss()
        if cause is None or text.rstrip(".") not in cause.what:
            self._follow(cause)

    def explain_loss(self, timeout_s: float = LEAVE_WITHIN_S) -> Cause | None:
        guard, until = self._guard, time.monotonic() + timeout_s
        with guard.changed:
            guard.start_exit_timer(1)
            while guard.cause is None and time.monotonic() < until:
                guard.changed.wait(guard.limits.turn_s)
                guard.report_silent(time.monotonic())
            return guard.cause

    def close(self, ended: str = "done", exit_code: int = 0, **facts: Any) -> None:
        with self._guard.changed:
            if self._guard.cause is None:
                self._guard.send({"kind": "bye"})
            self._guard.is_closed = True
        super().close(ended, exit_code, **facts)

    def _settle(self, error: Exception) -> int:
        if self.group.launcher != "none":
            _end_process_in_time(self.log)
        # The step of this moment, not of the last heartbeat; that of the last heartbeat if a device is stuck.
        in_background(self.group.heartbeat.look).join(0.5)
        exit_code = super()._settle(error)
        with self._guard.changed:  # The guard keeps this lock while it ends a stalled run, until it ends the process.
            # This rank has reported its failure, so it must not count as disappeared.
            self._guard.send({"kind": "bye"})
            return exit_code

    def _say_once(self, line: str) -> None:
        with self._guard.changed:
            self._guard.say_once(line)


def open_watchdog(
    group: WorkerGroup, log: NullRankLog, limits: StallLimits, *, say: Callable[[str], None] = to_stderr
) -> NullWatchdog:
    """Collective: start watching the ranks.

    say: shows a line to the user, on root. A rank that cannot reach root reports this and continues unwatched.
    """
    server = _open_server(group) if group.is_root else None
    own = server.address if server else None
    told = group.broadcast_object((own.host, own.port, own.token) if own else None)
    if told is None:
        return NullWatchdog(group, log)
    address = Address(*told)
    guard: Role
    if server is not None:
        log.write("watch", f"listens at {address.host}:{address.port}")
        guard = Coordinator(group, log, limits, server, say)
    else:
        try:
            guard = Worker(group, log, limits, connect(address, group.rank, _CONNECT_WITHIN_S))
        except OSError as error:
            where = f"root at {address.host}:{address.port}"
            to_stderr(f"warning: {group.name(group.rank)} is not watched: cannot reach {where}: {error}")
            return NullWatchdog(group, log)
    guard.start()
    return Watchdog(guard)


def stall_environment(limits: StallLimits) -> dict[str, str]:
    """Return settings with which the watchdog reports before Horovod does; Horovod ends what the watchdog cannot.

    HOROVOD_GLOO_TIMEOUT_SECONDS is how long gloo tolerates a frozen rank, and also how long it waits for ranks to
    start.
    """
    longest_s = math.ceil(max(limits.stop_after_s, limits.first_step_after_s))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(longest_s),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(longest_s + 60),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(limits.stop_after_s) + 30),
    }


def _open_server(group: WorkerGroup) -> Server | None:
    try:
        return Server(choose_host(group.hosts, exchange_interface()), group.size)
    except OSError as error:
        to_stderr(f"warning: nobody watches over the ranks: root cannot listen: {error}")
        return None


def _end_process_in_time(log: NullRankLog) -> None:
    """End the process later even if the guard's thread cannot.

    Python's own exit, in which no Python thread runs, may hang in TensorFlow, Horovod or, last of all, MPI.
    """
    log.end_process_after(2 * LEAVE_WITHIN_S - 1)
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.alarm(math.ceil(2 * LEAVE_WITHIN_S))


def _in_one_line(error: Exception) -> str:
    """Return the exception as the end of a sentence.

    TensorFlow's messages begin with where an operation was made; what went wrong follows.
    """
    if isinstance(error, RunError):
        return " ".join(str(error).split())
    lines = (line.strip() for line in str(error).splitlines())
    said = next((line for line in lines if line and not _AROUND_THE_MESSAGE.match(line)), "")
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


def _show(error: Exception) -> None:
    if isinstance(error, RunError):
        to_stderr(f"error: {error}")
    else:
        stderr = unfailing(sys.stderr)
        traceback.print_exception(error, file=stderr)
        stderr.flush()
