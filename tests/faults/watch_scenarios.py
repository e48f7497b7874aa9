"""The watchdogs of three ranks, by themselves.

They need no Horovod: an Exchange takes its place, so that a try costs 0.3 s of CPU.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_scenarios import load_tensorflow
from scenario import ENDED, SENDS, Scenario, lines, own_rank, said_nothing

STEPS, STEP_S = 60, 0.1
TROUBLE_AT_STEP = 35
"""All ranks have told each other by then that they make progress."""
NO_LUCK = "no luck in the middle"
SILENT_AFTER_S, STOP_AFTER_S, GIVE_UP_AFTER_S = 4.0, 5.0, 12.0
"""Of the watchdogs, and of the exchange. The answers in a stalled run take less than SILENT_AFTER_S."""


class Exchange:
    """Named pipes between the ranks. As with Horovod over gloo, all get an error once one has gone or for too long."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        others = [other for other in range(size) if other != rank]
        folder.mkdir(exist_ok=True)
        for name in [f"{rank}-{other}" for other in others] + [f"{other}-{rank}" for other in others]:
            with suppress(FileExistsError):
                os.mkfifo(folder / name)
        self.sources = {other: os.open(folder / f"{other}-{rank}", os.O_RDONLY | os.O_NONBLOCK) for other in others}
        self._sinks = {}
        for other in others:
            self._sinks[other] = os.open(folder / f"{rank}-{other}", os.O_WRONLY)  # waits until the other one reads
            (folder / f"{rank}-{other}").unlink()

    def meet(self, said: str = "") -> dict[int, str]:
        """Collective: tell the others, and return what they have told."""
        import horovod.tensorflow as hvd

        words = said.encode()
        try:
            for sink in self._sinks.values():
                os.write(sink, struct.pack("!I", len(words)) + words)
            return {other: self._hear(source) for other, source in self.sources.items()}
        except (BrokenPipeError, EOFError, TimeoutError) as error:
            raise hvd.elastic.HorovodInternalError("Horovod has been shut down") from error

    def wait_until_all_have_gone(self) -> None:
        for source in self.sources.values():
            with suppress(EOFError):
                while self._read(source, 1 << 12, None):
                    pass

    def _hear(self, source: int) -> str:
        (length,) = struct.unpack("!I", self._read(source, 4, GIVE_UP_AFTER_S))
        return self._read(source, length, GIVE_UP_AFTER_S).decode()

    @staticmethod
    def _read(source: int, count: int, timeout_s: float | None) -> bytes:
        ready = select.poll()
        ready.register(source, select.POLLIN)
        found = b""
        while len(found) < count:
            # Before the first writer has come, read would return the end.
            if not ready.poll(timeout_s and 1000 * timeout_s):
                raise TimeoutError
            if not (part := os.read(source, count - len(found))):
                raise EOFError
            found += part
        return found


@dataclass(frozen=True)
class Group:
    """What a watchdog asks of a WorkerGroup."""

    rank: int
    size: int
    exchange: Exchange
    heartbeat: Any
    launcher: str = "srun"

    @property
    def hosts(self) -> list[str]:
        return ["here"] * self.size

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def name(self, rank: int) -> str:
        return f"rank {rank} (here)"

    def broadcast_object(self, value: Any) -> Any:
        heard = self.exchange.meet(json.dumps(value))
        return value if self.is_root else json.loads(heard[0])


def watched(trouble: Callable[[Group], None], last: int) -> Callable[[], int]:
    """Ranks that take some steps under watch. trouble: what happens to them in the middle. last: who closes last."""

    def run() -> int:
        from horovod_train.config.settings import WatchConfig
        from horovod_train.distributed.watchdog.heartbeat import Heartbeat
        from horovod_train.distributed.watchdog.watchdog import RunEnd, open_watchdog
        from horovod_train.errors import AlreadySaid
        from horovod_train.output import rank_log

        rank, size = own_rank()
        group = Group(rank, size, Exchange(rank, size, Path("exchange")), Heartbeat())
        Path("run").mkdir(exist_ok=True)
        rank_log.make_folder(Path("run") if group.is_root else None)
        group.exchange.meet()
        log = rank_log.open_rank_log("run", rank, "here", start_text="begins")
        limits = WatchConfig(True, 2 * SILENT_AFTER_S, STOP_AFTER_S, first_step_after_s=6 * STOP_AFTER_S)
        run_end = RunEnd(group, log, open_watchdog(group, log, limits))  # type: ignore[arg-type]
        try:
            with run_end:
                take_steps(group, trouble)
                time.sleep(5 * STEP_S if rank == last else 0)
                run_end.close()
        except AlreadySaid as error:
            return error.exit_code
        return 0

    return run


def take_steps(group: Group, trouble: Callable[[Group], None]) -> None:
    step = 0
    group.heartbeat.set_probe(lambda: (step, None, ""))
    for step in range(STEPS):
        group.heartbeat.phase("train")
        time.sleep(STEP_S)
        if step == TROUBLE_AT_STEP:
            trouble(group)
        with group.heartbeat.phase("exchange"):
            group.exchange.meet()
        group.heartbeat.has_stepped = True


def no_trouble(group: Group) -> None: ...


def fail_on(*ranks: int) -> Callable[[Group], None]:
    def trouble(group: Group) -> None:
        from horovod_train.errors import RunError

        if group.rank in ranks:
            raise RunError(NO_LUCK)

    return trouble


def stand_still(group: Group) -> None:
    if group.rank == 1:
        group.heartbeat.phase("input")
        time.sleep(600)


def freeze(rank: int) -> Callable[[Group], None]:
    """Stop the process of a rank until the others have ended."""

    def trouble(group: Group) -> None:
        if group.rank != rank:
            return
        frozen = os.getpid()
        if not os.fork():
            group.exchange.wait_until_all_have_gone()
            with suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGCONT)
            os._exit(0)
        os.kill(frozen, signal.SIGSTOP)

    return trouble


def said_once(error: str, exit_code: int) -> Callable[[Any, Any], list[str]]:
    """One line tells why, and all ranks end with exit_code.

    Where a rank cannot send any more, the others can say only that they miss it, and Horovod or the launcher ends it.
    """

    def untrue(fault: Any, finished: Any) -> list[str]:
        if fault.mode == "on":
            return [f"exit codes {finished.exit_codes} of a run that failed"] if 0 in finished.exit_codes else []
        errors = set(lines(finished.said, "error:"))
        found = [f"not why: {line}" for line in errors if error not in line]
        if len(errors) != 1:
            found.append(f"{len(errors)} different lines that begin with error:")
        if set(finished.exit_codes) != {exit_code}:
            found.append(f"exit codes {finished.exit_codes}, not {exit_code}")
        if "disappeared" in finished.said:
            found.append("says of a rank that it disappeared")
        return found

    return untrue


def all_goes_on(fault: Any, finished: Any) -> list[str]:
    found = [f"exit codes {finished.exit_codes}"] if any(finished.exit_codes) else []
    return found + said_nothing(fault, finished)


def watch_scenario(
    name: str, trouble: Callable[[Group], None], error: str = "", ends: int = 0, last: int = 0
) -> Scenario:
    untrue = said_once(error, ends) if ends else all_goes_on
    return Scenario(
        f"watch: {name}",
        watched(trouble, last),
        untrue=untrue,
        ranks=3,
        kinds=SENDS,
        ends=ends,
        exit_codes=ENDED,
        load=load_tensorflow,
    )


WATCH_SCENARIOS = [
    watch_scenario("done, root last", no_trouble),
    watch_scenario("done, root first", no_trouble, last=1),
    watch_scenario("root fails", fail_on(0), NO_LUCK, 1),
    watch_scenario("a rank fails", fail_on(1), NO_LUCK, 1),
    watch_scenario("all fail", fail_on(0, 1, 2), NO_LUCK, 1),
    watch_scenario("a rank stands still", stand_still, "rank 1 (here) has been in input", 87),
    watch_scenario("a rank is frozen", freeze(1), "rank 1 (here) has sent no heartbeat", 87),
    watch_scenario("root is frozen", freeze(0), "rank 0 (here) has sent no heartbeat", 87),
]
