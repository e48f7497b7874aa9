"""What the work of one rank takes on this machine: in checks, in the watch, and at the start. Measured, in seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import xxhash

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed import objects
from horovod_train.distributed.launch import key_value_store
from horovod_train.distributed.launch.rendezvous import StepServer, key_of
from horovod_train.distributed.watchdog.heartbeat import Beat
from horovod_train.distributed.watchdog.stall_detector import StallDetector
from horovod_train.distributed.watchdog.transport import Connection, Lost, Server, connect

_HASHED_BYTES = 64 << 20
_TIMES = 200
_STEP = "bench exchange"


class RankCosts(NamedTuple):
    """Seconds of CPU on one core."""

    hash_byte_s: float
    """for one byte of the state, in the agreement check"""
    read_entry_s: float
    """for one rank's entry in what is gathered from all ranks"""
    watch_beat_s: float
    """root: to receive one rank's heartbeat and to send its own to that rank"""
    watch_rank_s: float
    """root: to consider one rank, in each turn of the stall detector"""
    admit_s: float
    """root: to admit one rank to the watch"""
    request_s: float
    """root: to answer one request of gloo's start"""


def measure(ranks: int) -> RankCosts:
    """ranks: of the run that the stall detector considers, and whose addresses a request of gloo's start carries."""
    data = np.arange(_HASHED_BYTES // 8).view(np.uint8)  # zeros would all be one page, in the cache
    entry = objects.dump("0" * 64)
    beat_s, admit_s = _watch()
    return RankCosts(
        _seconds(lambda: xxhash.xxh3_128_hexdigest(data.data), 5) / _HASHED_BYTES,
        _seconds(lambda: objects.load(entry), _TIMES),
        beat_s,
        _detect(ranks) / ranks,
        admit_s,
        _answer(ranks),
    )


def _seconds(action: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of this thread for one action; the least of three, which other work disturbs least."""
    seconds = []
    for _ in range(3):
        began = time.thread_time()
        for _ in range(times):
            action()
        seconds.append((time.thread_time() - began) / times)
    return min(seconds)


def _beat() -> Beat:
    return Beat("compute", 1000, "reading train-00031.tfrecord", 4000, 0.5, has_stepped=True)


def _watch() -> tuple[float, float]:
    """Return root's seconds for a heartbeat both ways, and for admitting a rank: the real server, over loopback."""
    server = Server("127.0.0.1", _TIMES)
    detector = StallDetector([f"rank {rank}" for rank in range(_TIMES)], range(_TIMES), WatchConfig())
    members: list[Connection] = []
    thread = threading.Thread(
        target=lambda: members.extend(connect(server.address, rank, 10) for rank in range(_TIMES))
    )
    began = time.thread_time()
    thread.start()
    while len(server.ranks) < _TIMES and thread.is_alive():
        server.poll(0.1)
    admit_s = (time.thread_time() - began) / _TIMES
    thread.join()
    message = {"kind": "beat", "beat": vars(_beat())}

    def exchange() -> None:
        for rank, received in server.poll(1):
            assert not isinstance(received, Lost)
            detector.hear(rank, Beat(**received["beat"]), time.monotonic())
        server.send_to(1, message)

    spent = 0.0
    for _ in range(_TIMES):
        members[1].send(message)
        began = time.thread_time()
        exchange()
        spent += time.thread_time() - began
        members[1].poll(1)
    for member in members:
        member.close()
    server.close()
    return spent / _TIMES, admit_s


def _detect(ranks: int) -> float:
    """Return the seconds of a turn of root's stall detector."""
    detector = StallDetector([f"rank {rank}" for rank in range(ranks)], range(ranks), WatchConfig())
    now = time.monotonic()
    for rank in range(ranks):
        detector.hear(rank, _beat(), now)

    def turn() -> None:
        detector.idle_s(now)
        detector.stop_after_s(now)
        detector.warn_after_s(now)
        detector.warn_after_s(now)

    return _seconds(turn, 20)


def _answer(ranks: int) -> float:
    """Return the seconds for one request of gloo's start, for which a server answers with the addresses of a rank.

    The client is a thread of this process; its own seconds do not count.
    """
    value = b"a" * min(140 * ranks, key_value_store.MAX_ANSWER_BYTES // 2)
    with _serving() as (address, port):
        key_value_store.ask(address, port, "PUT", "addresses", value)
        began, client = time.process_time(), time.thread_time()
        for _ in range(_TIMES):
            assert key_value_store.ask(address, port, "GET", "addresses") == value
        return max(0.0, (time.process_time() - began) - (time.thread_time() - client)) / _TIMES


@contextmanager
def _serving() -> Iterator[tuple[str, int]]:
    server = StepServer("127.0.0.1", 0, _STEP, 2)
    port = server.server_address[1]
    server.key = key_of(_STEP, port)
    thread = threading.Thread(target=server.serve_forever, args=(key_value_store.POLL_S,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{port}/{server.key}", port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
