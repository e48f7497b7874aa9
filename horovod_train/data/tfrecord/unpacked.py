"""Stores what packed files hold in one unnamed temporary file of this process, which disappears with the process.

For runs without a folder that all ranks of a node share; see staging.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from typing import BinaryIO

from horovod_train.data.storage.storage import DEFAULT, Storage
from horovod_train.data.tfrecord import compression
from horovod_train.data.tfrecord.index_file import ScannedFile
from horovod_train.errors import UserError

log = logging.getLogger(__name__)


class UnpackedFiles:
    """Several threads may use it. Each file has its part of the one temporary file, so one descriptor is enough."""

    def __init__(self, sizes: Mapping[ScannedFile, int], storage: Storage = DEFAULT) -> None:
        """sizes: the bytes of each packed file's content."""
        self._storage = storage
        self._sizes, self._starts, end = sizes, {}, 0
        for file, size in sizes.items():
            self._starts[file] = end
            end += size
        self._total = end
        self._locks = {file: threading.Lock() for file in sizes}
        self._is_unpacked = dict.fromkeys(sizes, False)
        self._opening = threading.Lock()
        self._file: BinaryIO | None = None

    def read(self, file: ScannedFile, offset: int, length: int) -> bytes:
        """Return bytes of a file's content. The first call unpacks it. Raises UserError if that cannot be done."""
        with self._locks[file]:  # per file, so that threads that need another file do not wait
            if not self._is_unpacked[file]:
                self._unpack(file)
                self._is_unpacked[file] = True
        length = min(length, self._sizes[file] - offset)
        return os.pread(self._descriptor(), length, self._starts[file] + offset)

    def log_room_needed(self, folder: str | None, how_often: str) -> None:
        """Log the space that unpacking needs, if a file is packed. how_often: in words, for the log."""
        if not self._sizes:
            return
        place = folder or tempfile.gettempdir()
        free = shutil.disk_usage(place).free
        text = (
            f"{len(self._sizes)} packed files take up to {_gb(self._total)} in {place} once unpacked, {how_often}; "
            f"{_gb(free)} are free"
        )
        if free < self._total:
            log.warning(f"{text}. Make room, or choose a larger disk: data.stage_dir.")
        else:
            log.info(text)

    def _unpack(self, file: ScannedFile) -> None:
        position, end = self._starts[file], self._starts[file] + self._sizes[file]
        for piece in compression.unpack(file.path, file.packing, self._storage):
            if file.problem and position + len(piece) >= end:  # nothing is read after the damage
                self._write(file, piece[: end - position], position)
                return
            if position + len(piece) > end:
                raise UserError(f"{file.path}: holds more than when it was indexed. Put it back as it was.")
            self._write(file, piece, position)
            position += len(piece)

    def _write(self, file: ScannedFile, piece: bytes, position: int) -> None:
        try:
            while piece:
                written = os.pwrite(self._descriptor(), piece, position)
                piece, position = piece[written:], position + written
        except OSError as error:
            raise UserError(
                f"{file.path}: cannot be unpacked into {tempfile.gettempdir()}: {error.strerror}. All packed files "
                f"together need {_gb(self._total)} on each rank; set TMPDIR or data.stage_dir to a disk with more room."
            ) from error

    def _descriptor(self) -> int:
        with self._opening:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - for as long as this lives
            return self._file.fileno()


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
