"""The main thread's side of the watchdog: start it, end the run on this rank, and choose which rank of a host says why.

The watchdog names the rank that the others wait for, ends a stalled run, and reports which rank is lost. It runs
outside Horovod, in a thread on each rank (see watch_thread). It therefore works while every main thread is inside a
compiled call or an exchange, and while a rank is frozen. It does not end a run that makes progress, however slow.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import re
import secrets
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import tensorflow as tf

from horovod_train.config.registry import failure_of, raised_at
from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.group import WorkerGroup, is_connection_loss, is_of_nccl
from horovod_train.distributed.launch.network import choose_host, exchange_interfaces
from horovod_train.distributed.watchdog.transport import Address, Server, connect
from horovod_train.distributed.watchdog.watch_thread import (
    GLOO_TIMEOUT,
    Cause,
    Coordinator,
    Watch,
    Watchdog,
    WatchThread,
    Worker,
)
from horovod_train.errors import (
    AlreadySaid,
    FailedElsewhere,
    RunError,
    Stalled,
    UserError,
    kind_of,
    one_line,
    without_autograph,
)
from horovod_train.output.console import to_stderr, traceback_to_stderr
from horovod_train.output.files import Artifact, remove
from horovod_train.output.rank_log import RankLog

_CONNECT_WITHIN_S = 10.0
_READ_WITHIN_S = 0.2
"""How long launchers may take to pass on what a rank has printed; they read the ranks' outputs in any order."""

_FILE = Artifact("a file that the ranks of a host share", r"horovod_train-[0-9a-f]{16}-\d+")
_MEMORY = Path("/dev/shm")

_CONTEXT_LINE = re.compile(r'Graph execution error|Detected at node|File "|Traceback \(|\d+ root error|\[\[\{\{node')
"""Lines of TensorFlow's messages that do not say what went wrong."""
_NOT_IN_XLA = re.compile(r"on XLA_\w+: (\w+) \(No registered ")


def open_watchdog(group: WorkerGroup, log: RankLog, limits: WatchConfig) -> Watchdog:
    """Collective: start watching the ranks, unless `limits.enabled` is false.

    A rank that cannot reach root reports this and continues unwatched.
    """
    if not limits.enabled:
        return Watchdog()
    server = _open_server(group) if group.is_root else None
    fields = group.broadcast_object(server.address._asdict() if server else None)
    if fields is None:
        return Watchdog()
    address = Address(**fields)
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
    return watch


def stall_environment(limits: WatchConfig) -> dict[str, str]:
    """Return settings with which the watchdog reports before Horovod does; Horovod ends what the watchdog cannot.

    HOROVOD_GLOO_TIMEOUT_SECONDS is how long gloo tolerates a frozen rank, and also how long it waits for ranks to
    start, before anything watches them. So it is not made longer for the sake of runs that are suspended as a whole.
    """
    if not limits.enabled:
        return {}
    longest_s = max(limits.stop_after_s, limits.first_step_after_s)
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": as_seconds(longest_s),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": as_seconds(longest_s + 60),
        GLOO_TIMEOUT: as_seconds(limits.stop_after_s + 30),
    }


def as_seconds(limit_s: float) -> str:
    """Return a limit as Horovod and gloo read it: whole seconds in 32 bits. Beyond them gloo ends the process."""
    return str(math.ceil(min(limit_s, 2**31 - 1)))


def _open_server(group: WorkerGroup) -> Server | None:
    try:
        return Server(choose_host(group.hosts, exchange_interfaces()), group.size)
    except OSError as error:
        to_stderr(f"warning: the ranks are not watched: root cannot listen: {error}")
        return None


class HostClaim:
    """Which rank of a host prints a line that all of its ranks know: the first that asks. One that died cannot ask.

    The ranks of a host share an empty file, `path`. It loses its name when all have opened it, so that nothing is left
    from then on, however they end. It lies in memory, not on a disk, which may hang when a run fails: a rank that asks
    must not wait. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        weakref.finalize(self, os.close, self._descriptor)

    def take(self) -> bool:
        """Return whether this is the first call among the ranks of the host. Does not wait. Raises OSError."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # another rank is taking it at this moment
        try:
            if os.fstat(self._descriptor).st_size:
                return False
            os.write(self._descriptor, b"taken")
            return True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def open_host_claim(group: WorkerGroup) -> HostClaim | None:
    """Collective: open the claim that the ranks of this host share; None if there is no place for it."""
    host = group.hosts[group.rank]
    folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    run_name = group.broadcast_object(secrets.token_hex(8))
    path = folder / f"horovod_train-{run_name}-{group.hosts.index(host)}"
    claim = None
    with suppress(OSError):
        claim = HostClaim(path)
    group.barrier()  # All ranks of the host have opened the file before it loses its name.
    with suppress(OSError):  # Another rank may remove it at the same time.
        remove(path, _FILE)
    return claim


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
            return text, error.exit_code, f"error: {without_autograph(str(error))}"
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
    lines = (one_line(line) for line in without_autograph(str(error)).splitlines())
    begun = itertools.dropwhile(lambda line: not line or _CONTEXT_LINE.match(line), lines)
    reason = one_line(" ".join(itertools.takewhile(lambda line: not _CONTEXT_LINE.match(line), begun)))
    hint = "; NCCL_DEBUG=WARN says more" if is_of_nccl(error) and "NCCL_DEBUG" not in reason else ""
    return f"{kind_of(error)}: {reason[:300]}{hint}" if reason else kind_of(error)
