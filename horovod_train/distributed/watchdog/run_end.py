"""How a run ends on this rank: shows the exception once over all ranks, records the end, chooses the exit code."""

from __future__ import annotations

import re
import time
from types import TracebackType
from typing import Any

import tensorflow as tf

from horovod_train.config.registry import failure_of, raised_at
from horovod_train.distributed.group import WorkerGroup, is_connection_loss
from horovod_train.distributed.watchdog.state import Cause
from horovod_train.distributed.watchdog.watchdog import Watchdog
from horovod_train.errors import AlreadySaid, FailedElsewhere, RunError, Stalled, UserError, one_line
from horovod_train.output.console import to_stderr, traceback_to_stderr
from horovod_train.output.rank_log import RankLog

_CONTEXT_LINE = re.compile(r'Graph execution error|Detected at node|File "|Traceback \(|\d+ root error|\[\[\{\{node')
"""Lines of TensorFlow's messages that do not say what went wrong."""

_NOT_IN_XLA = re.compile(r"on XLA_\w+: (\w+) \(No registered ")

_READ_WITHIN_S = 0.2
"""How long launchers may take to pass on what a rank has printed; they read the ranks' outputs in any order."""


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
        if isinstance(error, Exception):
            with self._watchdog.reporting_failure():
                exit_code = self._report(error)
            raise AlreadySaid(str(error), exit_code) from error
        if error is None:
            self.close()
        else:
            self._log.write_traceback(error, "stopped")
            self.close("stopped", 1, error=type(error).__name__)

    def _report(self, error: Exception) -> int:
        """Report the exception that ends the run on this rank, unless another rank has; return the exit code."""
        if isinstance(error, FailedElsewhere):
            self._record_end("followed", error.exit_code, error=str(error))
            return error.exit_code
        if is_connection_loss(error):
            self._log.write_traceback(error, "lost")
            return self._follow(self._watchdog.find_cause())
        self._log.write_traceback(error)
        text, exit_code, line = self._sum_up(error)
        self._record_end("failed", exit_code, error=text)
        if self._watchdog.claim_to_speak(exit_code):
            _show(error, line)  # before other ranks report it, so that the user reads it first
            time.sleep(_READ_WITHIN_S)
            hint = f"; see {self._log.name}" if self._log.name else ""
            self._watchdog.announce_cause(Cause(self._group.rank, f"failed: {text.rstrip('.')}{hint}", exit_code))
            return exit_code
        cause = self._watchdog.find_cause()
        if cause is None or text.rstrip(".") not in cause.what:
            self._follow(cause)
        return exit_code

    def _sum_up(self, error: Exception) -> tuple[str, int, str]:
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
        exit_code = 1 if group.heartbeat.has_stepped else UserError.exit_code
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
        ended = "stalled" if exit_code == Stalled.exit_code else "followed"
        self._record_end(ended, exit_code, error=line, cause=rank)
        return exit_code

    def _record_end(self, ended: str, exit_code: int, **facts: Any) -> None:
        # The main thread's phase, because it has left the compiled call.
        heartbeat = self._group.heartbeat
        self._log.end(
            ended, exit_code, **{"step": heartbeat.last().step, "phase": heartbeat.name, "error": None, **facts}
        )


def _summarize(error: Exception) -> str:
    """Return the exception in one line.

    TensorFlow's messages begin with where the operation was made; the reason follows.
    """
    if isinstance(error, RunError):
        return one_line(error)
    if operation := _NOT_IN_XLA.search(str(error)):
        return f"jit_compile: true, but XLA cannot compile the operation {operation[1]}; set jit_compile: false"
    lines = (one_line(line) for line in str(error).splitlines())
    reason = next((line for line in lines if line and not _CONTEXT_LINE.match(line)), "")
    return f"{type(error).__name__}: {reason[:300]}" if reason else type(error).__name__


def _show(error: Exception, line: str) -> None:
    if line:
        to_stderr(line)
    else:
        traceback_to_stderr(error)
