"""The manifest of a checkpoint, `manifest.json`: facts of the run, the SHA-256 of each file, and a SHA-256 of itself.

Needs no TensorFlow: tensors writes and reads the files. Does not know other checkpoints; see layout.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from horovod_train.config.loader import as_dict
from horovod_train.config.settings import Config
from horovod_train.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
PREFIX = "state"
"""Prefix of the names of TensorFlow's files: `tf.train.load_checkpoint(folder / PREFIX)` opens them."""
_REQUIRED_FILES = (f"{PREFIX}.index", f"{PREFIX}.data-00000-of-00001")
_PAUSES_S = (0.5, 2.0)
"""Before each further attempt to read."""
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN, errno.EBADMSG}
"""Errors that say that a file is missing or its content lost. Others, such as EACCES, say nothing about the content."""

Result = TypeVar("Result")


class Damaged(Exception):
    """A checkpoint differs from what was written; the text names the file, the expected and the found value."""


@dataclass(frozen=True)
class Best:
    """The best evaluation so far. If a checkpoint was saved at its step, it is never removed."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True)
class Facts:
    """What a checkpoint records besides its arrays. `config` and `versions` contain only values that JSON can hold."""

    step: int
    epoch: int
    records: int
    ranks: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    best: Best | None = None
    data: str = ""
    """Fingerprint of the order and content of the training records; if equal, `records` has the same meaning."""
    data_files: str = ""
    """The training files, as data.source packs them; "" of a stream."""
    callbacks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The state of Keras callbacks: values that JSON can hold."""
    built_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The learning rates that the config or the model gave, by name; callbacks may have changed what the arrays hold.
    {} if they follow schedules."""
    class_names: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """The names of classes in the training records, by feature."""
    began_at: str = ""
    """The path in checkpoint.resume at which the run began; "" if at none."""

    def setting(self, path: str) -> Any:
        """Return a setting of the run that wrote it, by `section.key`; today's default if that version lacked it."""
        value: Any = self.config
        default: Any = as_dict(Config())
        for key in path.split("."):
            default = default[key]
            value = value[key] if isinstance(value, Mapping) and key in value else default
        return value


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was whole when it was read."""

    folder: Path
    facts: Facts
    files: Mapping[str, Mapping[str, Any]]
    """The `bytes` and the `sha256` of each file but the manifest."""

    @property
    def size(self) -> int:
        """Bytes of these files."""
        return sum(file["bytes"] for file in self.files.values())


def verify(folder: Path) -> Checkpoint:
    """Read every byte of a checkpoint.

    Raises Damaged, UserError for a format that only later versions know, and OSError for what cannot be read.
    """
    checkpoint = read_manifest(folder)
    with _failures_are_damage():
        for name, expected in checkpoint.files.items():
            if (checksum := _retry(sha256, folder / name)) != expected["sha256"]:
                raise Damaged(f"{name}: expected SHA-256 {expected['sha256'][:12]}…, found {checksum[:12]}…")
    return checkpoint


def read_manifest(folder: Path) -> Checkpoint:
    """Return what the manifest of a checkpoint says; check the sizes of its files but do not read them.

    Raises as `verify` does.
    """
    content = _read(folder)
    with _failures_are_damage():
        if content["format"] > FORMAT:
            raise UserError(
                f"{folder}: is in format {content['format']}; this version of horovod_train reads up to {FORMAT}. "
                "Resume with the version that wrote it."
            )
        files = content["files"]
        _check_names(files)
        for name, expected in files.items():
            _check_size(folder / name, expected["bytes"])
        best = None if content["best"] is None else Best(**content["best"])
        facts = {field.name: content[field.name] for field in dataclasses.fields(Facts) if field.name in content}
        return Checkpoint(folder, Facts(**{**facts, "best": best}), files)


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
    """Raise Damaged unless each name is that of a file directly in the folder, and those are there that are needed."""
    if not files:
        raise Damaged(f"{MANIFEST}: names no files")
    for name in files:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise Damaged(f"{MANIFEST}: names {name!r}, which is not a file of this folder")
    for name in _REQUIRED_FILES:
        if name not in files:
            raise Damaged(f"{MANIFEST}: does not name {name}, which TensorFlow reads")


def _raise_damage(error: OSError) -> NoReturn:
    """Raise Damaged if the error means lost content, else the error."""
    if error.errno in _DAMAGE:
        raise Damaged(reason(error)) from error
    raise error


@contextmanager
def _failures_are_damage() -> Iterator[None]:
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
