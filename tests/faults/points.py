"""The calls that a run passes, and which of them fail, with which errors. Runs nothing; see zygote."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import random
import re
from collections import Counter
from typing import Any

FILE_ERRORS: tuple[int, ...] = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOENT)
SEND_ERRORS: tuple[int, ...] = (errno.EPIPE, errno.ECONNRESET, *FILE_ERRORS)
MODES = {"once": 0, "on": 1, "half": 2, "full": 3}
"""once: one call fails; on: it and all after it, of sends or of the rest; half: a write is cut in two; full: so it is,
and the disk is full."""

CHANGING = re.compile(r"\d{9,}\.\d+|[0-9a-f]{8,}|(?<=[.-])\d{2,7}(?=\.|$|/|-old)|(?<=tmp)\w{8}")
"""What differs between the names of two runs: times, tokens, process numbers, temporary names."""
SENT = re.compile(r'(\{"kind": "\w+"|HTTP/1\.\d \d+|(?:GET|PUT) \S+).*')
"""What is sent: of a message of the watchdog its kind, of an answer its status, of a request its path."""


def unchanging(about: str) -> str:
    return CHANGING.sub("#", SENT.sub(r"\1", about))


@dataclasses.dataclass(frozen=True)
class Point:
    """The n-th call of a kind on a rank with this `about`; the n-th of all where that changes from run to run."""

    rank: int
    kind: str
    n: int
    about: str

    @property
    def unchanging(self) -> str:
        return "" if "#" in self.about else self.about

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind} {self.n} {self.about}"


@dataclasses.dataclass(frozen=True)
class Fault:
    point: Point
    error: int
    mode: str

    def __str__(self) -> str:
        return f"{self.point}: {errno.errorcode[self.error]} {self.mode}"


def points_of(rank: int, log: str) -> list[Point]:
    """All calls of a run, from the shim's log."""
    points: list[Point] = []
    counts: Counter[tuple[str, str]] = Counter()
    for line in log.splitlines():
        _, kind, n, about = line.split(" ", 3)
        place = unchanging(about)
        counts[kind, place] += 1
        points.append(Point(rank, kind, int(n) if "#" in place else counts[kind, place], place))
    return points


def choose(points: list[Point], how: dict[str, Any]) -> list[Fault]:
    """how: {"per_place": N or null for all, "faults": "all", "turns" or "one", "about": regex, "kinds": [kind],
    "errors": [name], "at_most": N}.

    kinds, errors: only calls of these kinds, only faults with these errors; default: all.
    about: only points where it is found in what they are about.
    per_place: of the calls of one kind on one file, or the sends of one kind of message, so many, the first and the
    last among them. faults: each with every error, alone and from then on; or alone and from then on with one error
    each, the errors taking turns; or one of both, in turns too. And every write in halves. at_most: so many of these,
    drawn at random.
    """
    places: dict[tuple[int, str, str], list[Point]] = {}
    kinds, errors = how.get("kinds", []), [getattr(errno, name) for name in how.get("errors", [])]
    points = [point for point in points if not kinds or point.kind in kinds]
    for point in (point for point in points if re.search(how.get("about", ""), point.about)):
        places.setdefault((point.rank, point.kind, point.about), []).append(point)
    most = how["per_place"] or len(points)
    kept = [found[:1] + found[1:][-(most - 1) :] if most > 1 else found[:1] for found in places.values()]
    chosen = [point for found in kept for point in found]
    if how["faults"] in ("turns", "one"):
        turns = {errors: itertools.cycle(errors) for errors in (FILE_ERRORS, SEND_ERRORS)}
        other = {errors: itertools.cycle(errors[2:] + errors[:2]) for errors in turns}
        faults = [
            Fault(p, next(turn[_errors(p)]), mode) for p in chosen for turn, mode in ((turns, "once"), (other, "on"))
        ]
        if how["faults"] == "one":
            faults = [faults[2 * number + number % 2] for number in range(len(chosen))]
    else:
        faults = [Fault(p, error, mode) for p in chosen for error in _errors(p) for mode in ("once", "on")]
    faults += [Fault(p, errno.ENOSPC, mode) for p in chosen if p.kind == "write" for mode in ("half", "full")]
    faults = [fault for fault in faults if not errors or fault.error in errors]
    at_most = min(len(faults), how.get("at_most", len(faults)))
    return random.Random(1).sample(faults, at_most) if at_most < len(faults) else faults


def _errors(point: Point) -> tuple[int, ...]:
    return SEND_ERRORS if point.kind == "send" else FILE_ERRORS
