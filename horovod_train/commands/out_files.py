"""Files that a command is asked to write: checks before it works for them, and writing."""

from __future__ import annotations

import os
from pathlib import Path

from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError
from horovod_train.output.files import write_atomically
from horovod_train.output.removal import Artifact, check


def check_out(option: str, name: str, artifact: Artifact) -> None:
    """Raise UserError, on root, if `artifact` cannot be written under this name or would replace something else."""
    if launcher.detect().rank != 0:
        return
    folder = os.path.dirname(name) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        problem = f"{folder} is not a folder that can be written to. Make it, or choose another."
        raise UserError(f"{option} {name}: {problem}")
    try:
        check(Path(os.path.abspath(name)), artifact)
    except OSError as error:
        raise UserError(f"{option} {name}: {error.strerror}, and stays as it is. Choose another name.") from error


def check_new(option: str, name: str | None) -> None:
    """Raise UserError if a name is given that is taken, or whose folder is missing."""
    if name and (os.path.lexists(name) or not Path(name).parent.is_dir()):
        raise UserError(f"{option} {name}: expected a new file in a folder that exists.")


def write_out(option: str, name: str, text: str, artifact: Artifact) -> None:
    """Write a file that `check_out` has allowed. Raises UserError if that fails."""
    try:
        write_atomically(Path(name), text, artifact)
    except OSError as error:
        raise UserError(f"{option} {name}: cannot be written: {error.strerror}.") from error
