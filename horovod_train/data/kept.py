"""Where to keep what was found out about records by reading them, so that the next start need not read them again.

Beside the records, in `data.index_dir`, or in the user's cache folder. Does not know what is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from horovod_train.config.remote_paths import is_remote
from horovod_train.data.storage.storage import real


def places_of(folder: str, name: str, index_dir: str | None) -> list[Path]:
    """Return where a file about the records of a folder may be, best first. name: what it is called beside them."""
    digest = hashlib.sha256(real(folder).encode(errors="surrogateescape")).hexdigest()[:16]
    beside = [] if index_dir or is_remote(folder) else [Path(folder, name)]
    return [*beside, *places_for(f"{digest}{Path(name).suffix}", index_dir)]


def places_for(name: str, index_dir: str | None) -> list[Path]:
    """Return where a file of a name of its own may be: one place, or none."""
    if index_dir:
        return [Path(index_dir, name)]
    try:
        return [Path.home() / ".cache/horovod_train/index" / name]
    except RuntimeError:  # in a container a user may have neither HOME nor an entry in passwd
        return []


def save_to_first(places: Sequence[Path], save: Callable[[Path], None]) -> None:
    """Save at the first place that can be written. If none can, the records are read again at the next start."""
    for place in places:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            save(place)
            return
