"""Watch the ranks of a run: name the rank that the others wait for, end a stalled run, report which rank is lost.

Runs outside Horovod, in a thread on each rank (see watch_thread). It therefore works while every main thread is inside
a compiled call or an exchange, and while a rank is frozen. Does not end a run that makes progress, however slow.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.launch.network import choose_host, exchange_interfaces
from horovod_train.distributed.watchdog.state import ANSWER_WITHIN_S, Cause, WatchState, in_background, open_host_claim
from horovod_train.distributed.watchdog.transport import Address, Server, connect
from horovod_train.distributed.watchdog.watch_thread import LEAVE_WITHIN_S, Coordinator, Role, WatchThread, Worker
from horovod_train.output.console import to_stderr
from horovod_train.output.rank_log import RankLog

if TYPE_CHECKING:  # The watchdog itself needs no TensorFlow.
    from horovod_train.distributed.group import WorkerGroup

_CONNECT_WITHIN_S = 10.0
_FINISHED_AFTER_S = 1.0
"""Other causes arrive earlier than this after Horovod has shut down."""


class Watchdog(Protocol):
    """What the main thread asks of the watchdog; see run_end."""

    def claim_to_speak(self, exit_code: int) -> bool:
        """Return whether this rank shows its failure. If several ranks fail, one of them does."""

    def announce_cause(self, cause: Cause) -> None:
        """Tell all ranks why the run ends."""

    def find_cause(self) -> Cause | None:
        """Return why Horovod has shut down; None if that is still unknown after LEAVE_WITHIN_S."""

    def print_once_per_host(self, line: str) -> None:
        """Print a line, unless a rank of this host has already printed why the run ends."""

    def reporting_failure(self) -> AbstractContextManager[None]:
        """Return a context in which this rank reports its failure. The process then ends within a limited time."""

    def close(self) -> None:
        """Tell the other ranks that this one has finished."""


class NullWatchdog:
    """Does not watch: this rank shows its own failures and learns nothing of others."""

    def claim_to_speak(self, exit_code: int) -> bool:
        return True

    def announce_cause(self, cause: Cause) -> None: ...

    def find_cause(self) -> Cause | None:
        return None

    def print_once_per_host(self, line: str) -> None:
        to_stderr(line)

    def reporting_failure(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...


class RankWatchdog:
    """The main thread's access to the watchdog's thread."""

    def __init__(self, state: WatchState, role: Role) -> None:
        self._state, self._role = state, role

    def claim_to_speak(self, exit_code: int) -> bool:
        state = self._state
        with state.changed:
            state.start_exit_timer(exit_code)
            if state.cause is None:
                self._role.claim()
            state.changed.wait_for(lambda: state.speaker is not None or state.cause is not None, ANSWER_WITHIN_S)
            return state.cause is None and state.speaker in (None, state.group.rank)

    def announce_cause(self, cause: Cause) -> None:
        with self._state.changed:
            self._state.announce_cause(cause)

    def find_cause(self) -> Cause | None:
        state, deadline = self._state, time.monotonic() + LEAVE_WITHIN_S
        with state.changed:
            state.start_exit_timer(1)
            while state.cause is None and time.monotonic() < deadline:
                state.changed.wait(state.intervals.turn_s)
                state.report_silent(time.monotonic())
                if time.monotonic() > deadline - LEAVE_WITHIN_S + _FINISHED_AFTER_S:
                    state.report_finished()
            return state.cause

    def print_once_per_host(self, line: str) -> None:
        with self._state.changed:
            self._state.print_once_per_host(line)

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        state = self._state
        if state.group.launcher != "none":
            _end_process_in_time(state.log)
        # Report the step of this moment, or that of the last heartbeat if a device is stuck.
        in_background(state.group.heartbeat.read_probe).join(0.5)
        yield
        with state.changed:  # The thread keeps this lock while it ends a stalled run, until it ends the process.
            # This rank has reported its failure, so it must not count as disappeared.
            state.transport.send({"kind": "bye"})

    def close(self) -> None:
        with self._state.changed:
            self._state.close()


def open_watchdog(group: WorkerGroup, log: RankLog, limits: WatchConfig) -> Watchdog:
    """Collective: start watching the ranks, unless `limits.enabled` is false.

    A rank that cannot reach root reports this and continues unwatched.
    """
    if not limits.enabled:
        return NullWatchdog()
    server = _open_server(group) if group.is_root else None
    root = server.address if server else None
    fields = group.broadcast_object((root.host, root.port, root.token) if root else None)
    if fields is None:
        return NullWatchdog()
    address = Address(*fields)
    host_claim = open_host_claim(group)
    role: Role
    if server is not None:
        log.write("watch", f"listens at {address.host}:{address.port}")
        state = WatchState(group, log, limits, server, range(group.size), host_claim)
        role = Coordinator(state, server)
    else:
        try:
            connection = connect(address, group.rank, _CONNECT_WITHIN_S)
        except OSError as error:
            where = f"root at {address.host}:{address.port}"
            to_stderr(f"warning: {group.name(group.rank)} is not watched: cannot reach {where}: {error}")
            return NullWatchdog()
        state = WatchState(group, log, limits, connection, [0, group.rank], host_claim)
        role = Worker(state)
    WatchThread(state, role).start()
    return RankWatchdog(state, role)


def stall_environment(limits: WatchConfig) -> dict[str, str]:
    """Return settings with which the watchdog reports before Horovod does; Horovod ends what the watchdog cannot.

    HOROVOD_GLOO_TIMEOUT_SECONDS is how long gloo tolerates a frozen rank, and also how long it waits for ranks to
    start.
    """
    if not limits.enabled:
        return {}
    longest_s = math.ceil(max(limits.stop_after_s, limits.first_step_after_s))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(longest_s),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(longest_s + 60),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(limits.stop_after_s) + 30),
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
