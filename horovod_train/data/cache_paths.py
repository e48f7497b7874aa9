"""Where indexes, digests and lengths of records are saved, so that the next start need not read the records again.

Next to the records, in `data.index_dir`, or in the user's cache folder. Does not know what the files hold.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from horovod_train.config.remote_paths import is_remote
from horovod_train.data.storage.storage import resolved


def paths_beside(folder: str, name: str, index_dir: str | None) -> list[Path]:
    """Return where a file about the records of a folder may be, best first. name: the file's name in the folder."""
    digest = hashlib.sha256(resolved(folder).encode(errors="surrogateescape")).hexdigest()[:16]
    beside = [] if index_dir or is_remote(folder) else [Path(folder, name)]
    return [*beside, *paths_in_cache(f"{digest}{Path(name).suffix}", index_dir)]


def paths_in_cache(name: str, index_dir: str | None) -> list[Path]:
    """Return where a file that is never next to the records may be: one path, or none."""
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
