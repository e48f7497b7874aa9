"""Several ranks: whole runs, their start alone, and their watchdogs alone.

The watchdogs need no Horovod: an Exchange takes its place, so that a try costs a tenth of a second of CPU.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_scenarios import TRAIN, broken_run, command, load_tensorflow, make_data
from scenario import KNOWN_EXIT_CODES, START_AGAIN, Scenario, lines, nothing

SENDS = frozenset({"send"})
ABORTS = KNOWN_EXIT_CODES | {-signal.SIGABRT, -signal.SIGTERM}
"""Horovod's C++ knows no other end if the rendezvous fails for good; the launcher then ends the other ranks."""


def own_rank() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the zygote has put them into the environment."""
    return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])


# Watchdogs.

STEPS, STEP_S = 16, 0.1
TROUBLE_AT_STEP = 6
NO_LUCK = "no luck at step 6"


class Exchange:
    """Named pipes between the ranks. As with Horovod over gloo, all ranks get an error once one has gone."""

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
        except (BrokenPipeError, EOFError) as error:
            raise hvd.elastic.HorovodInternalError("Horovod has been shut down") from error

    def wait_until_all_have_gone(self) -> None:
        for source in self.sources.values():
            with suppress(EOFError):
                while self._read(source, 1 << 12):
                    pass

    def _hear(self, source: int) -> str:
        (length,) = struct.unpack("!I", self._read(source, 4))
        return self._read(source, length).decode() if length else ""

    @staticmethod
    def _read(source: int, count: int) -> bytes:
        ready = select.poll()
        ready.register(source, select.POLLIN)
        found = b""
        while len(found) < count:
            ready.poll()  # before the first writer has come, read would return the end
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
        from horovod_train.distributed.watchdog.run_end import RunEnd
        from horovod_train.distributed.watchdog.watchdog import open_watchdog
        from horovod_train.errors import AlreadySaid
        from horovod_train.output import rank_log

        rank, size = own_rank()
        group = Group(rank, size, Exchange(rank, size, Path("exchange")), Heartbeat())
        Path("run").mkdir(exist_ok=True)
        rank_log.make_folder(Path("run") if group.is_root else None)
        group.exchange.meet()
        log = rank_log.open_rank_log("run", rank, "here", said="begins")
        limits = WatchConfig(warn_after_s=2.0, stop_after_s=3.0, first_step_after_s=30.0)
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
            os.kill(frozen, signal.SIGCONT)
            os._exit(0)
        os.kill(frozen, signal.SIGSTOP)

    return trouble


def said_once(error: str, exit_code: int) -> Callable[[Any, Any], list[str]]:
    """The ranks end with exit_code, and one line tells why; two may where the network of a rank stays away."""

    def untrue(fault: Any, finished: Any) -> list[str]:
        found, errors = [], lines(finished.said, "error:")
        if set(finished.exit_codes) != {exit_code}:
            found.append(f"exit codes {finished.exit_codes}, not {exit_code}")
        if len(errors) != 1 and not (fault.mode == "on" and len(errors) > 1):
            found.append(f"{len(errors)} lines that begin with error:")
        found += [f"not why: {line}" for line in errors if error not in line]
        if fault.mode == "once" and "disappeared" in finished.said:
            found.append("says of a rank that it disappeared")
        return found

    return untrue


def said_nothing(fault: Any, finished: Any) -> list[str]:
    """Of a run that has ended well. A rank that cannot send any more cannot say either that it has finished."""
    missed = f"stopped: rank {fault.point.rank} (" if fault.mode == "on" else "nothing"
    found = [line for line in lines(finished.said, "stopped:") if not line.startswith(missed)]
    return [] if set(finished.exit_codes) - {0, START_AGAIN} else [f"said of a good run: {line}" for line in found]


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
        load=load_tensorflow,
    )


# Starts and whole runs.


def start_and_end() -> int:
    """All that ranks send while they find each other."""
    from horovod_train.distributed.group import start

    group = start()
    assert float(group.sum([group.rank + 1])[0]) == sum(range(1, group.size + 1))
    group.close()
    return 0


FEW_FILES = (*TRAIN, "log.tensorboard=false", "log.graph=false", "log.histograms_every_steps=null")


def stopped_by_a_signal() -> int:
    """Rank 1 gets SIGTERM once the run has trained for a little; not when it is started again."""
    asked, rows = Path("asked"), Path("run/metrics.jsonl")

    def ask() -> None:
        while not rows.exists():
            time.sleep(0.01)
        asked.touch()
        os.kill(os.getpid(), signal.SIGTERM)

    if own_rank()[0] == 1 and not asked.exists():
        threading.Thread(target=ask, daemon=True).start()
    more = ("train.epochs=60", "train.steps_per_call=1", "checkpoint.every_steps=50", "log.every_steps=20")
    return command(*FEW_FILES, *more)()


def damaged_data() -> int:
    """A record in the middle of a file is damaged, so one rank fails when it comes to it."""
    code = make_data()
    path = Path.cwd().parent / "data/train/0.tfrecord"
    found, at = bytearray(path.read_bytes()), 0
    for _ in range(20):
        at += 16 + struct.unpack_from("<Q", found, at)[0]
    found[at + 12] ^= 1  # the first byte after length and checksum
    path.write_bytes(found)
    return code


def run_scenario(name: str, run: Callable[[], int], prepare: Callable[[], int] = make_data, **more: Any) -> Scenario:
    return Scenario(
        f"ranks: {name}",
        run,
        prepare,
        broken=broken_run,
        untrue=said_nothing,
        ranks=2,
        kinds=SENDS,
        exit_codes=ABORTS,
        load=load_tensorflow,
        **more,
    )


RANK_SCENARIOS = [
    watch_scenario("done, root last", no_trouble),
    watch_scenario("done, root first", no_trouble, last=1),
    watch_scenario("root fails", fail_on(0), NO_LUCK, 1),
    watch_scenario("a rank fails", fail_on(1), NO_LUCK, 1),
    watch_scenario("all fail", fail_on(0, 1, 2), NO_LUCK, 1),
    watch_scenario("a rank stands still", stand_still, "rank 1 (here) has been in input", 87),
    watch_scenario("a rank is frozen", freeze(1), "rank 1 (here) has not been heard of", 87),
    watch_scenario("root is frozen", freeze(0), "rank 0 (here) has not been heard of", 87),
    Scenario(
        "start", start_and_end, nothing, ranks=2, kinds=SENDS, exit_codes=ABORTS, resumes=True, load=load_tensorflow
    ),
    run_scenario("done", command(*FEW_FILES), resumes=True),
    run_scenario("a rank fails", command(*FEW_FILES), damaged_data, ends=1),
    run_scenario("SIGTERM", stopped_by_a_signal, ends=START_AGAIN, resumes=True),
]
