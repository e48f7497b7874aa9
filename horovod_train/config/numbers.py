"""Numbers and durations as people write them in YAML and for schedulers."""

from __future__ import annotations

import math
import re
from typing import Any

CLOCK = r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})"
"""Pattern of a scheduler's [D-]HH:MM:SS."""


def parse_clock(text: str) -> float | None:
    """Return the seconds of [D-]HH:MM:SS; None if the text has another form."""
    clock = re.fullmatch(CLOCK, text)
    if clock is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def seconds_of(value: Any) -> float:
    """Return a number of seconds, or that of [D-]HH:MM:SS. Raises ValueError."""
    if isinstance(value, str) and (seconds := parse_clock(value.strip())) is not None:
        return seconds
    if not is_number(value):
        raise ValueError(f"expected seconds or [D-]HH:MM:SS; received {value!r}.")
    return float(value)


def is_number(value: Any) -> bool:
    """Whether it is a finite number; also strings like "1e-3", which YAML 1.1 does not read as a number."""
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
