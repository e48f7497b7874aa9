"""What a run of hundreds of ranks on a network pays for ranks: exchange, agreement check, vote, watch, start.

A network takes `hop_s` for each message that waits for another, and a time for each byte. The work of a rank itself,
such as hashing, takes what it takes on this machine; see rank_costs. Nothing overlaps: the figures are upper limits.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

from horovod_train.commands.bench.cost_model import COLLECTIVES, Topology, hops, sent_bytes
from horovod_train.commands.bench.rank_costs import RankCosts
from horovod_train.config.settings import Config
from horovod_train.distributed.watchdog.stall_detector import intervals
from horovod_train.training.stopping import seconds_between_votes

RESNET_50_WEIGHTS = 25_583_592
"""Trainable weights of keras.applications.ResNet50."""
RESNET_50_STATE = 2 * 4 * RESNET_50_WEIGHTS
"""Bytes of weights and momentum in float32."""

VOTE_BYTES = 8 * 8
DIGEST_BYTES = 80
"""Of one rank's digest in a gather; DEVICE_BYTES: of its host and device."""
DEVICE_BYTES = 200

MOST_SHARE = 0.01
MOST_RANKS = 1 << 16


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
        """gloo: each rank asks root for the addresses of each other rank, twice: 140 bytes a rank."""
        requests = 2 * ranks * (ranks - 1)
        return requests * max(costs.request_s, network.wire_s(140 * ranks))

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
