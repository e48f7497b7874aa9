"""For `explain`: what to do about an error, by its text, before the run is started again. Reads no files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from horovod_train.errors import RanksDisagree, UserError


class Place(NamedTuple):
    """Where a rank failed, in words for a sentence: its run directory and its log."""

    run_dir: str
    log: str


Advice = Callable[[Place], str]

_BY_TEXT: tuple[tuple[str, Advice], ...] = (
    (
        r"No space left on device|Disk quota exceeded|File too large|the disk of .* has .* free",
        lambda place: f"free space on the disk that is full (df {place.run_dir})",
    ),
    (
        r"output_dir: .* is gone: removed, renamed",
        lambda place: f"bring {place.run_dir} back, or choose another --output-dir",
    ),
    (r"another run has taken the directory", lambda place: "stop the other run, or choose another --output-dir"),
    (
        r"checkpoint could not be saved|saves? (in a row )?ha(s|ve) failed",
        lambda place: f"see to the disk of {place.run_dir}, where saves fail",
    ),
    (
        r"Model diverged at .* not once they are combined",
        lambda place: "set horovod.compression to bf16 or none, or lower lr_schedule.base_lr",
    ),
    (
        r"Model diverged",
        lambda place: "lower lr_schedule.base_lr, or look for values in the data that are not finite (check-data)",
    ),
    (
        r"ResourceExhausted|[Oo]ut of memory|OUT_OF_MEMORY|MemoryError|Unable to allocate|bad_alloc",
        lambda place: "take a smaller data.global_batch_size, or more train.accumulate_steps, to need less memory",
    ),
)
_USERS_LINE = re.compile(r"\(at (\S+:\d+)\)")
"""What registry.raised_at adds to an error of the user's code."""


def next_step(error: str, exit_code: int, place: Place) -> str:
    """Return what to do about the error that ended a rank, as an imperative without a full stop."""
    for pattern, advice in _BY_TEXT:
        if re.search(pattern, error):
            return advice(place)
    if exit_code == RanksDisagree.exit_code:
        return f"find what changes that variable on some ranks only; {place.log} has the traceback"
    if exit_code == UserError.exit_code:
        return "fix that"
    if line := _USERS_LINE.search(error):
        return f"fix {line[1]}; the traceback is in {place.log}"
    return f"read the traceback in {place.log}"
