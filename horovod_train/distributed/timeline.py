"""Where Horovod writes its timeline: a file for each start, in the run directory. Horovod itself writes it, on rank 0.

Horovod must know the file before it initialises. `hvd.start_timeline`, which takes it later, ends the process by a
failed assertion if another rank has announced a tensor before.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from horovod_train.errors import UserError
from horovod_train.output.files import must_be_writable

VARIABLE = "HOROVOD_TIMELINE"


def timeline_environment(run_dir: Path, *, is_root: bool) -> dict[str, str]:
    """Return the variable that makes Horovod write a timeline; call on every rank. On root, create its folder.

    Raises UserError if the folder cannot be created, or the environment names another file.
    """
    if VARIABLE in os.environ:
        raise UserError(
            f"horovod.timeline: the environment has {VARIABLE}={os.environ[VARIABLE]} too. Unset it, or leave the "
            "setting out."
        )
    # Ranks must agree that there is one, but only root's file is written. DYNAMIC names none.
    return {VARIABLE: str(_new_file(run_dir / "timeline")) if is_root else "DYNAMIC"}


def forget() -> None:
    """Remove the variable when the run is over: another start of Horovod in this process would write over the file."""
    os.environ.pop(VARIABLE, None)


def _new_file(folder: Path) -> Path:
    """Return a free path, named by the present time in UTC."""
    with must_be_writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        start_time = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
        stems = itertools.chain([start_time], (f"{start_time}-{number}" for number in itertools.count(2)))
        return next(path for path in (folder / f"{stem}.json" for stem in stems) if not path.exists())
