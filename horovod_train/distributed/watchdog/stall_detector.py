"""Find the rank that the others wait for, from the last heartbeats. Pure: no threads, no connections, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod_train.distributed.watchdog.heartbeat import LONG_PHASES, Beat

EXCHANGE = "exchange"

_BEATS_PER_S = 256
"""Of all ranks together, at most."""


@dataclass(frozen=True)
class StallLimits:
    """How long no rank may make progress, in seconds."""

    warn_after_s: float = 60.0
    """then a warning names the rank that the others wait for"""
    stop_after_s: float = 600.0
    """then all ranks write their stacks and end"""
    first_step_after_s: float = 1800.0
    """replaces stop_after_s before the first step is done, and while a rank compiles; warnings change in proportion"""
    ranks: int = 1
    """number of ranks that watch each other"""

    @property
    def turn_s(self) -> float:
        """Time between two checks of the ranks."""
        return min(1.0, self.warn_after_s / 8)

    @property
    def beat_s(self) -> float:
        """Time between two heartbeats of a rank; longer if root would have to hear hundreds of them in a second."""
        return max(self.turn_s, self.ranks / _BEATS_PER_S)

    @property
    def silent_after_s(self) -> float:
        """A rank without a heartbeat for so long counts as frozen or unreachable."""
        return max(self.warn_after_s / 2, 4 * self.beat_s)


@dataclass
class _Seen:
    beat: Beat
    heard_at: float
    changed_at: float
    first_step: int | None


class StallDetector:
    """Hears the heartbeats of ranks. `now` is seconds on any one clock.

    names: of every rank, as shown in messages. judged: the ranks whose heartbeats arrive here; the others count as
    waiting.
    """

    def __init__(self, names: Sequence[str], judged: Sequence[int], limits: StallLimits) -> None:
        self.names, self.limits = names, limits
        self._judged = set(judged)
        self._seen: dict[int, _Seen] = {}
        self._has_stepped = False

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        before = self._seen.get(rank)
        if before is None:
            self._seen[rank] = _Seen(beat, now, now, beat.step)
            return
        if not beat.is_where(before.beat):
            before.changed_at = now
        if before.first_step is None:
            before.first_step = beat.step
        elif beat.step is not None and beat.step > before.first_step:
            self._has_stepped = True
        before.beat, before.heard_at = beat, now

    def forget(self, rank: int) -> None:
        """Remove a rank that has finished: it is neither waited for nor waiting."""
        self._judged.discard(rank)
        self._seen.pop(rank, None)

    def discount_own_pause(self, seconds: float) -> None:
        """Subtract a time in which this process was frozen and could not hear anything."""
        for seen in self._seen.values():
            seen.heard_at += seconds
            seen.changed_at += seconds

    def idle_s(self, now: float) -> float:
        """Return how long no rank has made progress."""
        return min((now - seen.changed_at for seen in self._seen.values()), default=0.0)

    def warn_after_s(self) -> float:
        return self.limits.warn_after_s * self._patience()

    def stop_after_s(self) -> float:
        return self.limits.stop_after_s * self._patience()

    def silent(self, now: float, after_s: float | None = None) -> list[int]:
        """Return ranks without a heartbeat for so long, after at least one; the longest silent first.

        after_s: the default is so long that chance cannot explain it.
        """
        since = {rank: seen.heard_at for rank, seen in self._seen.items()}
        limit = self.limits.silent_after_s if after_s is None else after_s
        return sorted((rank for rank in since if now - since[rank] > limit), key=lambda rank: (since[rank], rank))

    def sentence(self, now: float) -> str:
        """Name the suspect and say what it was doing, and how many ranks wait."""
        if silent := self.silent(now):
            return f"{_several([self.names[rank] for rank in silent])} {self.silence(silent, now)}"
        places = {rank: seen.beat for rank, seen in self._seen.items()}
        waiting = [rank for rank, beat in places.items() if beat.phase == EXCHANGE]
        suspects = {rank: beat for rank, beat in places.items() if beat.phase != EXCHANGE}
        if not suspects:
            suspects = _furthest_back(places)
        elif not waiting:
            suspects = _furthest_back(suspects)
        if len(suspects) == len(places) > 1 and len({beat.phase for beat in suspects.values()}) == 1:
            return self._tell_of_all(places, now)
        # Of several suspects, choose the furthest back; of these, the one that has been in its phase longest.
        rank = max(_furthest_back(suspects), key=lambda rank: (self._seconds(rank, now), -rank))
        waiting = waiting if waiting and rank not in waiting else [other for other in places if other not in suspects]
        return f"{self.names[rank]} has been {self._place(rank, now)}{_waiters(len(waiting), 'it')}"

    def silence(self, silent: Sequence[int], now: float) -> str:
        """Return what follows the names of silent ranks in a message."""
        seen = self._seen[silent[0]]
        have, them = ("has", "it") if len(silent) == 1 else ("have", "them")
        last = f"last in {seen.beat.phase}{_at_step(seen.beat)}{_detail(seen.beat)}"
        others = len(self.names) - len(silent) - (len(self._judged) - len(self._seen))
        return f"{have} not been heard of for {now - seen.heard_at:.0f} s, {last}{_waiters(others, them)}"

    def _patience(self) -> float:
        """Return the factor by which the limits are longer now."""
        is_long = not self._has_stepped or any(seen.beat.phase in LONG_PHASES for seen in self._seen.values())
        return max(1.0, self.limits.first_step_after_s / self.limits.stop_after_s) if is_long else 1.0

    def _tell_of_all(self, places: Mapping[int, Beat], now: float) -> str:
        rank = max(places, key=lambda rank: self._seconds(rank, now))
        who = "both ranks" if len(places) == 2 else f"all {len(places)} ranks"
        why = ": none is behind the others" if places[rank].phase == EXCHANGE else ""
        return f"{who} have been {self._place(rank, now)}{why}"

    def _place(self, rank: int, now: float) -> str:
        beat = self._seen[rank].beat
        return f"in {beat.phase} for {self._seconds(rank, now):.0f} s{_at_step(beat)}{_detail(beat)}"

    def _seconds(self, rank: int, now: float) -> float:
        seen = self._seen[rank]
        return seen.beat.seconds + now - seen.heard_at


def _furthest_back(places: Mapping[int, Beat]) -> dict[int, Beat]:
    """Return the ranks at the smallest step; a rank without a step is behind all others."""
    steps = {rank: -1 if beat.step is None else beat.step for rank, beat in places.items()}
    return {rank: beat for rank, beat in places.items() if steps[rank] == min(steps.values())}


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _at_step(beat: Beat) -> str:
    return "" if beat.step is None else f" at step {beat.step}"


def _detail(beat: Beat) -> str:
    return f", {beat.detail}" if beat.detail else ""


def _waiters(count: int, them: str) -> str:
    if count <= 0:
        return ""
    return f"; {count} rank{'s wait' if count > 1 else ' waits'} for {them}"
