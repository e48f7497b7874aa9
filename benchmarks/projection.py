"""What a run of hundreds of ranks on a network pays for ranks: exchange, agreement check, vote, watch, start.

python benchmarks/projection.py --to 64,512 --over gloo

A network takes --hop-us for each message that waits for another, and a time for each byte. The work of a rank itself,
such as hashing, takes what it takes on this machine, which is measured. Nothing overlaps: the figures are upper limits.
"""

from __future__ import annotations

import argparse
import bisect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import xxhash
from growth import COLLECTIVES, Topology, hops, sent_bytes

from horovod_train.commands.cli import above_0, count, open_screen, several
from horovod_train.config.settings import Config, WatchConfig
from horovod_train.distributed import objects
from horovod_train.distributed.launch import key_value_store
from horovod_train.distributed.launch.rendezvous_server import NEWS_BYTES, StepServer
from horovod_train.distributed.watchdog.heartbeat import Beat, StallDetector, intervals
from horovod_train.distributed.watchdog.transport import Connection, Lost, Server, connect
from horovod_train.training.stopping import seconds_between_votes

RESNET_50_WEIGHTS = 25_583_592
"""Trainable weights of keras.applications.ResNet50."""
RESNET_50_STATE = 2 * 4 * RESNET_50_WEIGHTS
"""Bytes of weights and momentum in float32."""

VOTE_BYTES = 8 * 8
DIGEST_BYTES = 80
"""Of one rank's digest in a gather; DEVICE_BYTES: of its host and device."""
DEVICE_BYTES = 200

RANKS_PER_HOST = 8
MOST_SHARE = 0.01
MOST_RANKS = 1 << 16
HASHED_BYTES = 64 << 20
TIMES = 200
"""Of what is timed: its repetitions."""
STEP = "benchmarks/projection.py"
OVER: dict[str, tuple[Topology, str]] = {
    "MPI": ("tree", "by doubling, as MPI sends it"),
    "gloo": ("ring", "round a ring, as gloo sends it"),
}


class Network(NamedTuple):
    """bits_per_s: of each rank. hop_s: until a message that a rank waits for has arrived."""

    bits_per_s: float
    hop_s: float
    topology: Topology

    def small_s(self, ranks: int, collectives: int) -> float:
        """Return the seconds of so many collectives of a few bytes, each with the one in which ranks agree on it."""
        return COLLECTIVES * collectives * hops(self.topology, ranks) * self.hop_s

    def wire_s(self, sent: float) -> float:
        return 8 * sent / self.bits_per_s


class Part(NamedTuple):
    """One part of what ranks cost. interval_s: from one to the next, at so many ranks; None for what is done once."""

    name: str
    when: str
    seconds: Callable[[int, Network], float]
    interval_s: Callable[[int, Network], float] | None

    def share(self, ranks: int, network: Network) -> float:
        """Return the share of the run's time."""
        assert self.interval_s is not None
        return self.seconds(ranks, network) / self.interval_s(ranks, network)


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
    name_s: float
    """to answer one request of gloo's start for the name of a rank's host"""
    addresses_s: float
    """to answer one for the addresses of a rank"""
    news_s: float
    """root: to answer a relay with the addresses of many ranks"""


def build_parts(costs: RankCosts, step_s: float) -> list[Part]:
    """costs: as measured for the largest number of ranks. step_s: of ResNet-50 on one rank, without exchange."""
    every_steps = Config().train.check_agreement_every_steps or 1

    def exchange(ranks: int, network: Network) -> float:
        return network.small_s(ranks, 1) + network.wire_s(sent_bytes(ranks, 4 * RESNET_50_WEIGHTS))

    def check(ranks: int, network: Network) -> float:
        # A sum (is all finite?), and a gather of digests: its sizes, and its bytes.
        gathered = network.wire_s(ranks * DIGEST_BYTES) + ranks * costs.read_entry_s
        return RESNET_50_STATE * costs.hash_byte_s + network.small_s(ranks, 3) + gathered

    def vote(ranks: int, network: Network) -> float:
        return network.small_s(ranks, 1) + network.wire_s(sent_bytes(ranks, VOTE_BYTES))

    def watch(ranks: int, network: Network) -> float:
        """Root's seconds in one second."""
        turn_s, beat_s, _ = intervals(Config().watch, ranks)
        return ranks * (costs.watch_beat_s / beat_s + costs.watch_rank_s / turn_s)

    def meeting(ranks: int, network: Network) -> float:
        # Two gathers (devices; has one failed?), a sum, the broadcast of root's address, and root's admissions.
        gathered = network.wire_s(ranks * DEVICE_BYTES) + 2 * ranks * costs.read_entry_s
        start = network.small_s(ranks, 7) + gathered + ranks * costs.admit_s
        return start + (rendezvous(ranks, network) if network.topology == "ring" else 0.0)

    def rendezvous(ranks: int, network: Network) -> float:
        """gloo: each rank asks for the host of each rank before it, and for the addresses of each other rank, twice.

        Those of root's host ask root, and so does the relay of each other host, for all values together. A relay's own
        seconds are counted after root's, though much of both is at the same time.
        """
        addresses = 140 * ranks
        of_a_host = RANKS_PER_HOST * ranks * (costs.name_s / 2 + 2 * max(costs.addresses_s, network.wire_s(addresses)))
        relays = -(-ranks // RANKS_PER_HOST) - 1
        answers = relays * -(-ranks * addresses // NEWS_BYTES)
        return 2 * of_a_host + answers * max(costs.news_s, network.wire_s(NEWS_BYTES))

    def vote_every(ranks: int, network: Network) -> float:
        return seconds_between_votes(ranks, is_ring=network.topology == "ring")

    return [
        Part("gradients of ResNet-50", "each step", exchange, lambda *args: step_s + exchange(*args)),
        Part("agreement check", f"every {every_steps:,} steps", check, lambda *args: every_steps * step_s),
        Part("vote", "every second or more", vote, vote_every),
        Part("watch: root's CPU", "in a second", watch, lambda *args: 1.0),
        Part("meeting at the start", "once", meeting, None),
    ]


def find_rank_limit(part: Part, network: Network) -> int | None:
    """Return from how many ranks on a part takes more than MOST_SHARE; None if not up to MOST_RANKS."""
    ranks = range(2, MOST_RANKS + 1)
    # Shares grow with the ranks.
    index = bisect.bisect_right(ranks, MOST_SHARE, key=lambda count: part.share(count, network))
    return ranks[index] if index < len(ranks) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=several(count), default=[64, 512], metavar="N,N", help="ranks; default 64,512")
    parser.add_argument("--over", choices=OVER, default="MPI", help="what ranks exchange over; default %(default)s")
    links = "Gbit/s of a rank's link; default 10,25,100"
    parser.add_argument("--gbit", type=several(above_0), default=[10, 25, 100], metavar="G,G", help=links)
    hop = "µs for a small message between hosts; default %(default)s"
    parser.add_argument("--hop-us", type=above_0, default=20.0, metavar="US", help=hop)
    step = "ms of a step of ResNet-50 alone; default %(default)s"
    parser.add_argument("--step-ms", type=above_0, default=100.0, metavar="MS", help=step)
    arguments = parser.parse_args()
    if min(arguments.to) < 2:
        parser.error(f"--to: expected numbers of at least 2 ranks; received {min(arguments.to)}.")
    topology, way = OVER[arguments.over]
    networks = [Network(1e9 * gbit, arguments.hop_us / 1e6, topology) for gbit in arguments.gbit]
    parts = build_parts(measure_rank_costs(max(arguments.to)), arguments.step_ms / 1e3)
    title = (
        f"ResNet-50 at {' / '.join(f'{gbit:g}' for gbit in arguments.gbit)} Gbit/s a rank, {arguments.hop_us:g} µs "
        f"a message, {way}, {arguments.step_ms:g} ms a step alone; without overlap:\n"
    )
    open_screen().print(title, *table(parts, networks, arguments.to), sep="\n", markup=False)


def table(parts: Sequence[Part], networks: Sequence[Network], numbers: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a Markdown table. A cell has a value for each network, or the one that all share."""
    yield f"| | when | {' | '.join(f'{ranks} ranks' for ranks in numbers)} | 1 % of the time from |"
    yield f"|---|---|{'--:|' * (len(numbers) + 1)}"
    for part in parts:
        cells = [[cost(part, ranks, network) for network in networks] for ranks in numbers]
        cells.append([limit(part, network) for network in networks])
        texts = [" / ".join(each if len(set(each)) > 1 else each[:1]) for each in cells]
        yield f"| {part.name} | {part.when} | {' | '.join(texts)} |"


def cost(part: Part, ranks: int, network: Network) -> str:
    seconds = part.seconds(ranks, network)
    duration = f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    return duration if part.interval_s is None else f"{duration} ({100 * part.share(ranks, network):.2g} %)"


def limit(part: Part, network: Network) -> str:
    if part.interval_s is None:
        return "—"
    ranks = find_rank_limit(part, network)
    return f"more than {MOST_RANKS:,}" if ranks is None else f"{ranks:,}"


def measure_rank_costs(ranks: int) -> RankCosts:
    """ranks: of the run that the stall detector considers, and whose addresses a request of gloo's start carries."""
    data = np.arange(HASHED_BYTES // 8).view(np.uint8)  # zeros would all be one page, in the cache
    entry = objects.dump("0" * 64)
    beat_s, admit_s = _watch()
    return RankCosts(
        _seconds(lambda: xxhash.xxh3_128_hexdigest(data.data), 5) / HASHED_BYTES,
        _seconds(lambda: objects.load(entry), TIMES),
        beat_s,
        _detect(ranks) / ranks,
        admit_s,
        _answer(16),
        _answer(140 * ranks),
        _answer(NEWS_BYTES),
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
    server = Server("127.0.0.1", TIMES)
    detector = StallDetector([f"rank {rank}" for rank in range(TIMES)], range(TIMES), WatchConfig())
    members: list[Connection] = []
    thread = threading.Thread(target=lambda: members.extend(connect(server.address, rank, 10) for rank in range(TIMES)))
    began = time.thread_time()
    thread.start()
    while len(server.ranks) < TIMES and thread.is_alive():
        server.poll(0.1)
    admit_s = (time.thread_time() - began) / TIMES
    thread.join()
    message = {"kind": "beat", "beat": vars(_beat())}

    def exchange() -> None:
        for rank, received in server.poll(1):
            assert not isinstance(received, Lost)
            detector.hear(rank, Beat(**received["beat"]), time.monotonic())
        server.send_to(1, message)

    spent = 0.0
    for _ in range(TIMES):
        members[1].send(message)
        began = time.thread_time()
        exchange()
        spent += time.thread_time() - began
        members[1].poll(1)
    for member in members:
        member.close()
    server.close()
    return spent / TIMES, admit_s


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


def _answer(size: int) -> float:
    """Return the seconds for one request of gloo's start, which a server answers with a value of so many bytes.

    The client is a thread of this process; its own seconds do not count.
    """
    value, most = b"a" * size, 2 * size + 1000
    with _serving() as (address, port):
        key_value_store.ask(address, port, "PUT", "addresses", value)
        began, client = time.process_time(), time.thread_time()
        for _ in range(TIMES):
            assert key_value_store.ask(address, port, "GET", "addresses", max_bytes=most) == value
        return max(0.0, (time.process_time() - began) - (time.thread_time() - client)) / TIMES


@contextmanager
def _serving() -> Iterator[tuple[str, int]]:
    server = StepServer("127.0.0.1", 0, STEP, 2)
    port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(key_value_store.POLL_S,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{port}/{server.key}", port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    main()
