"""One scenario that is tried under faults, and what must hold whatever call fails.

No traceback and no signal; a bad end is one line that begins "error:", or on several ranks "stopped:"; what is lost
against the run without faults has been said; every checkpoint that has its name is whole and holds what that of the
plain run holds; and a run that has not come to its end does so when it is started again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN_EXIT_CODES = frozenset({0, 1, 2, 73, 75, 76, 86, 87})
START_AGAIN = 75
"""Stopped early on request; the next start resumes the run."""
SENDS = frozenset({"send"})
ENDED = KNOWN_EXIT_CODES | {-signal.SIGTERM}
"""By the launcher, once another rank has ended badly."""

Lost = Callable[[Path, Path], list[str]]


def nothing() -> int:
    return 0


def lines(said: str, beginning: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(beginning)]


def own_rank() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the zygote has put them into the environment."""
    return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])


def said_nothing(fault: Any, finished: Any) -> list[str]:
    """Of a run that has ended well. A rank that cannot send any more cannot say either that it has finished."""
    missed = f"stopped: rank {fault.point.rank} (" if fault.mode == "on" else "nothing"
    found = [line for line in lines(finished.said, "stopped:") if not line.startswith(missed)]
    return [] if set(finished.exit_codes) - {0, START_AGAIN} else [f"said of a good run: {line}" for line in found]


@dataclass
class Scenario:
    """run: called in a folder that holds what `prepare` left, the data below it excepted; returns the exit code.

    ends: the exit code of every rank without faults. A bad end is any but 0 and START_AGAIN.
    lost, broken: (folder, folder of the plain run) → what the first lacks; what in it is not what its name says.
    untrue: (fault, how it ended) → what was said that is not so, or not said that is.
    resumes: whether a second start must come to the end. differs: (folder, folder of the plain run) → what it then has
    that is not as in a run that nothing has disturbed.
    """

    name: str
    run: Callable[[], int]
    prepare: Callable[[], int] = nothing
    lost: Lost = lambda here, plain: []
    broken: Lost = lambda here, plain: []
    untrue: Callable[[Any, Any], list[str]] = lambda fault, finished: []
    ranks: int = 1
    kinds: frozenset[str] = frozenset()
    limit_s: float = 240.0
    ends: int = 0
    exit_codes: frozenset[int] = KNOWN_EXIT_CODES
    resumes: bool = False
    differs: Lost = lambda here, plain: []
    load: Callable[[], None] = field(default=lambda: None)

    def judge(self, zygote: Any, plain: Any, fault: Any, finished: Any) -> list[str]:
        found = self._ends_well(finished) + self.untrue(fault, finished)
        here, plain_here = zygote.here, zygote.plain
        found += self.broken(here, plain_here)
        is_whole = not any(finished.exit_codes)
        lost = self.lost(here, plain_here) if is_whole else []
        if lost and finished.said.count("warning:") <= plain.said.count("warning:"):
            found.append(f"lost without a word: {lost}")
        if not found and self.resumes and not is_whole:
            again = zygote.start_again()
            if set(again.exit_codes) == {START_AGAIN}:  # asked to stop only now
                again = zygote.start_again()
            differs = self.broken(here, plain_here) + self.differs(here, plain_here)
            if any(again.exit_codes) or differs:
                found.append(f"does not resume: {differs} {again.text}")
        return found

    def _ends_well(self, finished: Any) -> list[str]:
        said, exit_codes = finished.said, finished.exit_codes
        found = ["a traceback"] if "Traceback (most recent call last)" in said else []
        found += [f"exit code {exit_code}" for exit_code in exit_codes if exit_code not in self.exit_codes]
        errors = lines(said, "error:")
        ends = errors if self.ranks == 1 else (errors + lines(said, "stopped:"))[:1]
        is_bad = any(exit_code not in (0, START_AGAIN) for exit_code in exit_codes)
        if is_bad and len(ends) != 1:
            found.append(f"{len(ends)} lines that begin with error: for exit codes {exit_codes}")
        if not is_bad and errors:
            found.append(f"exit codes {exit_codes} after: {errors[0]}")
        repeated = [line for line in set(said.splitlines()) if said.splitlines().count(line) > 1 and "warning:" in line]
        return found + [f"said more than once: {line}" for line in repeated]
