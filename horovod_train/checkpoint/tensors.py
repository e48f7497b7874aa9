"""The arrays of one checkpoint, in TensorFlow's files: writes them with their manifest, reads and loads them.

Handles a single checkpoint; manager handles all of a run. layout defines the manifest and verifies it.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import tensorflow as tf

from horovod_train.checkpoint.layout import FORMAT, MANIFEST, PREFIX, Checkpoint, Damaged, Facts, pack, reason, sha256
from horovod_train.errors import UserError
from horovod_train.shown_text import listed


def read_arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Return all arrays by name. Raises Damaged if TensorFlow cannot read files that the manifest lists."""
    with _failures_are_damage():
        reader = tf.train.load_checkpoint(str(checkpoint.folder / PREFIX))
        dtypes = reader.get_variable_to_dtype_map()  # TypeError for one that TensorFlow does not know
        for name, dtype in dtypes.items():
            # To read a reference would end the process.
            if dtype != dtype.base_dtype or not dtype.is_numpy_compatible:
                raise ValueError(f"{name} has type {dtype.name}, which no array has")
        return {name: np.asarray(reader.get_tensor(name)) for name in sorted(dtypes)}


def array_names(checkpoint: Checkpoint) -> set[str]:
    """Return the names of all arrays. Raises Damaged as `read_arrays` does."""
    with _failures_are_damage():
        return set(tf.train.load_checkpoint(str(checkpoint.folder / PREFIX)).get_variable_to_shape_map())


@contextmanager
def _failures_are_damage() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, MemoryError, RuntimeError, tf.errors.OpError) as error:
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
        stream.write(pack(content))
    sync(folder / MANIFEST)
    sync(folder)


def _as_tensor(array: np.ndarray) -> tf.Tensor:
    """Return a tensor that shares the array's memory, where `convert_to_tensor` would copy it."""
    if array.dtype.kind not in "biufc":
        return tf.convert_to_tensor(array)  # DLPack has no other types
    return tf.experimental.dlpack.from_dlpack(np.require(array, requirements=["C", "W"]).__dlpack__())


def load(
    variables: Mapping[str, tf.Variable],
    checkpoint: Checkpoint,
    *,
    unwanted: Collection[str] = (),
    changes: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Set variables to their saved values; return the arrays that no variable has, including `ranks/...`.

    unwanted: the model's weights whose values are left out. changes: what has changed since, by name, for the errors.

    Raises UserError, before changing anything, if a variable was not saved or has another shape or dtype, or if a
    weight was saved that the model does not have.
    """
    try:
        arrays = read_arrays(checkpoint)
    except Damaged as error:
        if not os.path.exists(checkpoint.folder):
            raise UserError(
                f"{checkpoint.folder}: has been removed while this run was built, as by a run that still trains there "
                "and keeps its newest ones. Start again, or from a copy of the checkpoint."
            ) from error
        raise UserError(f"{checkpoint.folder}: {error}.") from error
    why = f"with other settings: {'; '.join(f'{name} {change}' for name, change in changes.items())}" if changes else ""
    for name, variable in variables.items():
        if name not in arrays:
            writer = why or _describe_writer(name, arrays)
            raise UserError(f"{checkpoint.folder}: has no {name}; it was saved {writer}.")
        saved, shape = arrays[name], variable.shape.as_list()
        if list(saved.shape) != shape or saved.dtype.name != variable.dtype.name:
            raise UserError(
                f"{checkpoint.folder}: {name} is {saved.dtype.name} {list(saved.shape)}; "
                f"the model's is {variable.dtype.name} {shape}{f'; it was saved {why}' if why else ''}."
            )
    known = {*variables, *unwanted}
    if lost := [name for name in arrays if name.startswith("model/") and name not in known]:
        writer = why or "from another model"
        raise UserError(f"{checkpoint.folder}: has {listed(lost)}, which the model lacks; it was saved {writer}.")
    for name, variable in variables.items():
        variable.assign(arrays.pop(name))
    return arrays


def _describe_writer(name: str, saved: Iterable[str]) -> str:
    """Return how the run that lacks a variable differed, as the end of a sentence."""
    differences = {"ema/": "without train.ema_decay or use_ema", "exchange/": "with another train.synchronization"}
    for prefix, difference in differences.items():
        if name.startswith(prefix) and not any(saved_name.startswith(prefix) for saved_name in saved):
            return difference
    return "from another model or optimizer"


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
