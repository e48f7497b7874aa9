"""Copies on a node-local disk, made block by block as the ranks of the node read; also of unpacked files.

A block is copied by whoever reads it first and serves all ranks of the node from then on. The source is a file that
the index describes; when that changes, so does the name of the copy. What an earlier boot left is not trusted: its
last writes may be lost. Without a folder, only unpacked files are kept, each process its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from horovod_train.data import compression
from horovod_train.data.index_file import Source
from horovod_train.errors import UserError


class Stage:
    """The copies of one node, or of one process where `folder` is None. For several threads and processes at once."""

    def __init__(self, folder: str | None, sources: Sequence[Source], blocks: int) -> None:
        """`blocks` is how many there are in all the `sources` together. Raises UserError for a folder of no use."""
        self._folder = _open_folder(folder) if folder else None
        self._there = _open_flags(self._folder / f"{_name(*sources)}.there", blocks) if self._folder else None
        self._lock = threading.Lock()
        self._unpacked: dict[Source, int] = {}

    def load(self, source: Source, block: int, offset: int, length: int) -> bytes | None:
        """A block's bytes if this node has them."""
        if self._folder is None or self._there is None or not self._there[block]:
            return None
        try:
            fd = os.open(self._folder / f"{_name(source)}.blocks", os.O_RDONLY)
            try:
                data = os.pread(fd, length, offset)
            finally:
                os.close(fd)
        except OSError:  # somebody cleaned up: the source still serves
            return None
        return data if len(data) == length else None

    def save(self, source: Source, block: int, offset: int, data: bytes) -> None:
        """Keeps a block for the next who asks. A full disk ends the copying, not the run."""
        if self._folder is None or self._there is None:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._folder / f"{_name(source)}.blocks", os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                if os.pwrite(fd, data, offset) == len(data):
                    self._there[block] = 1  # only now: another rank may look at any moment
            finally:
                os.close(fd)

    def unpacked(self, source: Source) -> int:
        """A descriptor of the file's unpacked content. The first call unpacks; with a folder, once per node."""
        with self._lock:
            if source not in self._unpacked:
                self._unpacked[source] = self._unpack(source)
            return self._unpacked[source]

    def _unpack(self, source: Source) -> int:
        if self._folder is None:
            with tempfile.TemporaryFile() as file:
                compression.unpack(source.path, source.packing, file)
                return os.dup(file.fileno())
        path = self._folder / f"{_name(source)}.unpacked"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                partial = path.with_suffix(".partial")
                with open(partial, "wb") as out:
                    compression.unpack(source.path, source.packing, out)
                partial.rename(path)
        return os.open(path, os.O_RDONLY)


def _open_flags(path: Path, blocks: int) -> mmap.mmap:
    """One byte per block, shared by all who open it: whether the block is there."""
    with open(path, "a+b") as file:
        file.truncate(blocks)
        return mmap.mmap(file.fileno(), blocks)


def _open_folder(folder: str) -> Path:
    """The part of the folder that belongs to this boot; removes those of others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    here = Path(folder) / f"horovod_train-{boot}"
    try:
        here.mkdir(parents=True, exist_ok=True)
        for other in Path(folder).glob("horovod_train-*"):
            if other != here:
                shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise UserError(f"data.stage_dir: {folder} cannot be used: {error.strerror}.") from error
    return here


def _name(*sources: Source) -> str:
    """Another name for every other content."""
    facts = [(os.path.realpath(source.path), source.size, source.mtime_ns) for source in sources]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
