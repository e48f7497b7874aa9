"""The manifest of a checkpoint, `manifest.json`: size and SHA-256 of each file, and a SHA-256 of itself.

Needs no TensorFlow. tensors defines the other entries of the manifest and the content of the files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from horovod_train.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
_PAUSES_S = (0.5, 2.0)
"""Before each further attempt to read."""
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN, errno.EBADMSG}
"""Errors that say that a file is missing or its content lost. Others, such as EACCES, say nothing about the content."""

Result = TypeVar("Result")


class Damaged(Exception):
    """A checkpoint differs from what was written; the text names the file, the expected and the found value."""


def verify(folder: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint; return its manifest.

    Raises Damaged, UserError for a format that only later versions know, and OSError for what cannot be read.
    """
    content = read_manifest(folder)
    with failures_are_damage():
        for name, expected in content["files"].items():
            if (checksum := _retry(sha256, folder / name)) != expected["sha256"]:
                raise Damaged(f"{name}: expected SHA-256 {expected['sha256'][:12]}…, found {checksum[:12]}…")
    return content


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; check the sizes of its files but do not read them.

    Raises as `verify` does.
    """
    content = _read(folder)
    with failures_are_damage():
        if content["format"] > FORMAT:
            raise UserError(
                f"{folder}: is in format {content['format']}; this version of horovod_train reads up to {FORMAT}. "
                "Resume with the version that wrote it."
            )
        _check_names(content["files"])
        for name, expected in content["files"].items():
            _check_size(folder / name, expected["bytes"])
    return content


def pack(content: Mapping[str, Any]) -> bytes:
    """Return a manifest as bytes, including the SHA-256 of its other entries."""
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": checksum}, indent=2) + "\n").encode()


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def reason(error: Exception) -> str:
    """Return a short text for an error of the file system or of TensorFlow."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    # TensorFlow: "{{function_node ...}} PATH; No space left on device [Op:SaveV2]"
    path, _, problem = first_line.rpartition("}} ")[2].partition(" [Op:")[0].rpartition("; ")
    return f"{problem}: {path}" if path else problem


def _retry(read: Callable[[Path], Result], path: Path) -> Result:
    """Return read(path); try again after an OSError, because NFS and other file systems may fail for a moment."""
    for pause_s in _PAUSES_S:
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError:
            time.sleep(pause_s)
    return read(path)


def _read(folder: Path) -> dict[str, Any]:
    try:
        packed = _retry(Path.read_bytes, folder / MANIFEST)
        content = json.loads(packed)
        content.pop("sha256")
    except FileNotFoundError as error:
        raise Damaged(f"{MANIFEST} is missing") from error
    except OSError as error:
        _raise_damage(error)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{MANIFEST}: expected JSON with its own sha256, found something else: {error}") from error
    # Check this first, before the format is read: manifests of every format are packed like this.
    if packed != pack(content):
        raise Damaged(f"{MANIFEST}: its entries do not match its own sha256")
    return content


def _check_names(files: Mapping[str, Any]) -> None:
    """Raise Damaged unless there are names, and each is that of a file directly in the folder."""
    if not files:
        raise Damaged(f"{MANIFEST}: names no files")
    for name in files:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise Damaged(f"{MANIFEST}: names {name!r}, which is not a file of this folder")


def _raise_damage(error: OSError) -> NoReturn:
    """Raise Damaged if the error means lost content, else the error."""
    if error.errno in _DAMAGE:
        raise Damaged(reason(error)) from error
    raise error


@contextmanager
def failures_are_damage() -> Iterator[None]:
    """Raise Damaged where reading a checkpoint fails, or its manifest has other entries than this format."""
    try:
        yield
    except OSError as error:
        _raise_damage(error)
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST}: expected the entries of format {FORMAT}, found others: {error}") from error


def _check_size(file: Path, expected: int) -> None:
    try:
        size = _retry(Path.stat, file).st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{file.name} is missing") from error
    if size != expected:
        raise Damaged(f"{file.name}: expected {expected} bytes, found {size}")
