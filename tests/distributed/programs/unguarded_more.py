"""More guards than unguarded.py switches off, and other exchanges: unguarded_more.py OUT."""

from __future__ import annotations

import shutil

from facts import leave
from unguarded import OUT, RANK, Patch, ending, lose, run, without


def resumed(name: str, *words: str, losing: str = "") -> list[str]:
    """How runs end: one that is not stopped, one that is after 9 steps, and that one if it loses some variables."""
    whole, parts, lossy = (OUT / f"{name} {part}" for part in ("whole", "parts", "lossy"))
    codes = [run(whole, 20, *words), run(parts, 9, *words)]
    if RANK == 0:
        shutil.copytree(parts, lossy)
    codes.append(run(parts, 20, *words))
    if losing:
        with Patch.context() as patch:
            lose(patch, losing)
            codes.append(run(lossy, 20, *words))
    assert not any(codes), codes
    return [ending(run_dir) for run_dir in (whole, parts, lossy)] if RANK == 0 else []


facts = without("seeds", "slots", "averages", "place in the data", "own average of the loss")
facts["stale"] = resumed("stale", "train.synchronization=stale", losing="exchange/")
facts["local"] = resumed("local", "train.synchronization=local", "train.average_every_steps=3")
leave(RANK, facts)
