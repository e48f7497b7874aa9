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
from pathlib import Path

from horovod_train.data import compression
from horovod_train.data.index_file import Source
from horovod_train.errors import UserError


class Stage:
    """The copies of one node, or of one process where `folder` is None. For several threads and processes at once."""

    def __init__(self, folder: str | None) -> None:
        self._folder = _open_folder(folder) if folder else None
        self._lock = threading.Lock()
        self._copies: dict[Source, _Copy] = {}
        self._unpacked: dict[Source, int] = {}

    def load(self, source: Source, block: int, blocks: int, offset: int, length: int) -> bytes | None:
        """A block's bytes if this node has them. `block` of `blocks` counts within the file."""
        if self._folder is None:
            return None
        return self._copy(self._folder, source, blocks).load(block, offset, length)

    def save(self, source: Source, block: int, blocks: int, offset: int, data: bytes) -> None:
        """Keeps a block for the next who asks. A full disk ends the copying, not the run."""
        if self._folder is not None:
            self._copy(self._folder, source, blocks).save(block, offset, data)

    def unpacked(self, source: Source) -> int:
        """A descriptor of the file's unpacked content. The first call unpacks; with a folder, once per node."""
        with self._lock:
            if source not in self._unpacked:
                self._unpacked[source] = self._unpack(source)
            return self._unpacked[source]

    def _unpack(self, source: Source) -> int:
        if self._folder is None:
            file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as its descriptor, which is returned
            with file:
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

    def _copy(self, folder: Path, source: Source, blocks: int) -> _Copy:
        with self._lock:
            if source not in self._copies:
                self._copies[source] = _Copy(folder / _name(source), blocks)
            return self._copies[source]


class _Copy:
    """A sparse file with each block at its own offset, and one byte per block that says whether it is there."""

    def __init__(self, path: Path, blocks: int) -> None:
        self._data = os.open(path.with_suffix(".blocks"), os.O_RDWR | os.O_CREAT, 0o600)
        there = os.open(path.with_suffix(".there"), os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(there, blocks)
        self._there = mmap.mmap(there, blocks)
        os.close(there)

    def load(self, block: int, offset: int, length: int) -> bytes | None:
        return os.pread(self._data, length, offset) if self._there[block] else None

    def save(self, block: int, offset: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the disk is full: the source still serves
            if os.pwrite(self._data, data, offset) == len(data):
                self._there[block] = 1  # only now: another rank may look at any moment


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


def _name(source: Source) -> str:
    facts = f"{os.path.realpath(source.path)} {source.size} {source.mtime_ns}"
    return hashlib.sha256(facts.encode()).hexdigest()[:24]
