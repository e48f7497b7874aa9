"""One checkpoint: a folder with TensorFlow's checkpoint files and a manifest. Writes, verifies and loads it.

Does not know other checkpoints; see manager. See manifest for what the manifest proves.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_train.checkpoint import manifest
from horovod_train.checkpoint.manifest import FORMAT, MANIFEST, Damaged, reason, sha256
from horovod_train.config.loader import as_dict
from horovod_train.config.settings import Config
from horovod_train.errors import UserError

PREFIX = "state"
"""Prefix of the names of TensorFlow's files: `tf.train.load_checkpoint(folder / PREFIX)` opens them."""
_REQUIRED_FILES = (f"{PREFIX}.index", f"{PREFIX}.data-00000-of-00001")


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
    """The training files, as data.source packs them; "" if an earlier version saved."""
    callbacks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The state of Keras callbacks: values that JSON can hold."""
    built_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The learning rates that the config or the model gave, by name; callbacks may have changed what the arrays hold.
    {} if they follow schedules, or if an earlier version saved."""
    class_names: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """The names of classes in the training records, by feature; none if an earlier version saved."""
    began_at: str = ""
    """The path in checkpoint.resume at which the run began; "" if at none, or if an earlier version saved."""

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
    written_at: str
    """Time in ISO 8601, UTC."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The config under which it was written."""
        return self.facts.config

    @property
    def began_at(self) -> str:
        """See Facts."""
        return self.facts.began_at

    def read(self) -> dict[str, np.ndarray]:
        """Return all arrays by name. Raises Damaged if TensorFlow cannot read files that the manifest lists."""
        try:
            reader = tf.train.load_checkpoint(str(self.folder / PREFIX))
            return {name: np.asarray(reader.get_tensor(name)) for name in sorted(reader.get_variable_to_shape_map())}
        except (OSError, ValueError, RuntimeError, tf.errors.OpError) as error:
            raise Damaged(f"cannot be read: {reason(error)}") from error

    def names(self) -> set[str]:
        """Return the names of all arrays. Raises Damaged as `read` does."""
        try:
            return set(tf.train.load_checkpoint(str(self.folder / PREFIX)).get_variable_to_shape_map())
        except (OSError, ValueError, RuntimeError, tf.errors.OpError) as error:
            raise Damaged(f"cannot be read: {reason(error)}") from error


def write(folder: Path, arrays: Mapping[str, np.ndarray], facts: Facts) -> None:
    """Create `folder` with a complete checkpoint, synced to disk; the manifest comes last.

    Raises OSError or tf.errors.OpError where the file system refuses; leaves partial files.
    """
    folder.mkdir()  # SaveV2 would create the parents too, even on a disk that is gone
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=str(folder / PREFIX),
            tensor_names=list(arrays),
            shape_and_slices=[""] * len(arrays),
            tensors=[_as_tensor(array) for array in arrays.values()],
        )
    files = sorted(folder.iterdir())
    for file in files:
        sync(file)
    content = {
        "format": FORMAT,
        **dataclasses.asdict(facts),
        "written_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files},
    }
    with (folder / MANIFEST).open("xb") as stream:
        stream.write(manifest.pack(content))
    sync(folder / MANIFEST)
    sync(folder)


def _as_tensor(array: np.ndarray) -> tf.Tensor:
    """Return a tensor that shares the array's memory, where `convert_to_tensor` would copy it."""
    if array.dtype.kind not in "biufc":
        return tf.convert_to_tensor(array)  # DLPack has no other types
    return tf.experimental.dlpack.from_dlpack(np.require(array, requirements=["C", "W"]).__dlpack__())


def verify(folder: Path) -> Checkpoint:
    """Read every byte of a checkpoint. Raises Damaged, and UserError for a format that only later versions know."""
    content = manifest.verify(folder)
    for name in _REQUIRED_FILES:
        if name not in content["files"]:
            raise Damaged(f"{MANIFEST}: does not name {name}, which TensorFlow reads")
    with manifest.failures_are_damage():
        best = None if content["best"] is None else Best(**content["best"])
        facts = {field.name: content[field.name] for field in dataclasses.fields(Facts) if field.name in content}
        return Checkpoint(folder, Facts(**{**facts, "best": best}), content["written_at"])


def load(variables: Mapping[str, tf.Variable], checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Set variables to their saved values; return the arrays that no variable has, including `ranks/...`.

    Raises UserError, before changing anything, if a variable was not saved or has another shape or dtype.
    """
    try:
        arrays = checkpoint.read()
    except Damaged as error:
        raise UserError(f"{checkpoint.folder}: {error}.") from error
    for name, variable in variables.items():
        if name not in arrays:
            raise UserError(f"{checkpoint.folder}: has no {name}; it was saved {_describe_writer(name, arrays)}.")
        saved, shape = arrays[name], variable.shape.as_list()
        if list(saved.shape) != shape or saved.dtype.name != variable.dtype.name:
            raise UserError(
                f"{checkpoint.folder}: {name} is {saved.dtype.name} {list(saved.shape)}; "
                f"the model's is {variable.dtype.name} {shape}."
            )
    for name, variable in variables.items():
        variable.assign(arrays.pop(name))
    return arrays


def _describe_writer(name: str, saved: Iterable[str]) -> str:
    """Return how the run that lacks a variable differed, as the end of a sentence."""
    differences = {"ema/": "without train.ema_decay or use_ema", "exchange/": "with another train.synchronization"}
    matches = [
        difference
        for prefix, difference in differences.items()
        if name.startswith(prefix) and not any(saved_name.startswith(prefix) for saved_name in saved)
    ]
    return matches[0] if matches else "from another model or optimizer"


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders, and report that.
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
