"""What the watchdog costs rank 0 in a run of many ranks: CPU, memory, and how fast a failure reaches all.

python benchmarks/watch_members.py --ranks 512 --seconds 20

Rank 0's watchdog runs here as in a run, without a trainer beside it. All other ranks are connections of one other
process, over loopback; they send the heartbeats that ranks of a run send, as often as these, and read rank 0's.

connected: until all are admitted. of a core: rank 0's CPU time, watchdog included, by the time. memory: what rank 0's
process has gained. failure told: from the message of one rank that has failed until all others know.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import selectors
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

from horovod_train.commands.cli import build_table, open_screen
from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.watchdog.heartbeat import Beat, Heartbeat, intervals
from horovod_train.distributed.watchdog.transport import Address, Connection, Server, connect
from horovod_train.distributed.watchdog.watch_thread import Coordinator, WatchThread
from horovod_train.output.rank_log import RankLog

LIMITS = WatchConfig()
CONNECT_WITHIN_S = 60.0
TOLD_WITHIN_S = 60.0


@dataclass(frozen=True)
class Group:
    """What the watchdog asks of a WorkerGroup. launcher: none, so that the watchdog does not end this process."""

    size: int
    rank: int = 0
    launcher: str = "none"
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def hosts(self) -> list[str]:
        return [f"node{rank // 8}" for rank in range(self.size)]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})"


def measure(ranks: int, seconds: float) -> dict[str, float]:
    """Return figures of rank 0 among so many ranks. Seconds, unless the name says otherwise."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    memory_kb = _resident_kb()
    server = Server("127.0.0.1", ranks)
    members = context.Process(target=run_members, args=(tuple(server.address), ranks, there), daemon=True)
    members.start()
    there.close()
    watch = Coordinator(Group(ranks), RankLog(), LIMITS, server)  # type: ignore[arg-type]
    try:
        WatchThread(watch).start()
        connect_s = float(_next(here, members))
        began, cpu_s = time.monotonic(), _cpu_s()
        _keep_training(watch.group.heartbeat, began + seconds)
        watched_s, cpu_s = time.monotonic() - began, _cpu_s() - cpu_s
        figures = {
            "ranks": ranks,
            "connect_s": connect_s,
            "beat_every_s": watch.intervals.beat_s,
            "cpu_share": cpu_s / watched_s,
            "memory_mb": (_resident_kb() - memory_kb) / 1e3,
        }
        silent = watch.detector.silent_ranks(time.monotonic())
        if silent or len(server.ranks) != ranks - 1:
            sys.exit(f"{ranks} ranks: {ranks - 1 - len(server.ranks)} lost, {len(silent)} not heard of")
        here.send("fail")
        return figures | {"all_told_s": float(_next(here, members))}
    finally:
        here.close()
        members.join()
        with watch.changed:
            watch.close()


def run_members(address: Sequence[Any], ranks: int, pipe: Pipe) -> None:
    """Be all ranks but root until told to fail; then measure until all others know."""
    began = time.monotonic()
    own = {rank: connect(Address(*address), rank, CONNECT_WITHIN_S) for rank in range(1, ranks)}
    pipe.send(time.monotonic() - began)
    selector = selectors.DefaultSelector()
    for rank, connection in own.items():
        selector.register(connection.socket, selectors.EVENT_READ, rank)
    beat_s = intervals(LIMITS, ranks).beat_s
    due = {rank: time.monotonic() + beat_s * rank / ranks for rank in own}
    while not pipe.poll():
        _receive(selector, own)
        now = time.monotonic()
        for rank in [rank for rank, at in due.items() if at <= now]:
            due[rank] += beat_s
            own[rank].send({"kind": "beat", "beat": vars(_beat(now))})
    failed = time.monotonic()
    own[1].send({"kind": "cause", "cause": {"rank": 1, "what": "failed: on purpose", "exit_code": 1}})
    untold = set(own)
    while untold and time.monotonic() < failed + TOLD_WITHIN_S:
        untold -= _receive(selector, own)
    if untold:
        sys.exit(f"{len(untold)} of {ranks} ranks were not told of the failure within {TOLD_WITHIN_S:.0f} s")
    pipe.send(time.monotonic() - failed)


def _receive(selector: selectors.BaseSelector, own: dict[int, Connection]) -> set[int]:
    """Read what has arrived, for a tenth of a second at most; return the ranks that were told why the run ends."""
    told = set()
    for key, _ in selector.select(0.1):
        for _, message in own[key.data].receive():
            if not isinstance(message, dict):
                sys.exit(f"root has closed the connection of rank {key.data}")
            if message["kind"] == "cause":
                told.add(key.data)
    return told


def _beat(now: float) -> Beat:
    return Beat("compute", int(10 * now), "reading train-00031.tfrecord", int(now), 0.5, has_stepped=True)


def _keep_training(heartbeat: Heartbeat, until: float) -> None:
    heartbeat.has_stepped = True
    while time.monotonic() < until:
        with heartbeat.phase("compute"):
            time.sleep(0.5)


def _next(pipe: Pipe, process: Any) -> Any:
    """Return what the process sends. Exits if it ends instead."""
    if pipe not in wait([pipe, process.sentinel]) and not pipe.poll():
        sys.exit("the process of the other ranks has failed")
    try:
        return pipe.recv()
    except EOFError:
        sys.exit("the process of the other ranks has failed")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident_kb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], metavar="N", help="default 8 64 512")
    parser.add_argument("--seconds", type=float, default=20.0, help="watched in each; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each number of ranks")
    arguments = parser.parse_args()
    if min(arguments.ranks) < 2 or arguments.seconds <= 0:
        parser.error("--ranks must be at least 2, --seconds above 0")
    _allow_descriptors(max(arguments.ranks) + 64)
    # Each in a process of its own, which has no memory left from the one before.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        found = [pool.submit(measure, ranks, arguments.seconds).result() for ranks in arguments.ranks]
    if arguments.json:
        print(*map(json.dumps, found), sep="\n")
        return
    rows = [
        (
            f"{row['ranks']:.0f}",
            f"{row['connect_s']:.2f} s",
            f"{row['beat_every_s']:.2f} s",
            f"{row['cpu_share']:.2%}",
            f"{row['memory_mb']:.1f} MB",
            f"{1e3 * row['all_told_s']:.0f} ms",
        )
        for row in found
    ]
    titles = ("ranks", "connected", "beat every", "of a core", "memory", "failure told")
    open_screen().print(build_table(titles, rows, left=()))


def _allow_descriptors(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))


if __name__ == "__main__":
    main()
