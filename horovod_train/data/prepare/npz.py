"""Arrays in an npz file, or in npy files: one record per row, one feature per array."""

from __future__ import annotations

import argparse
import os

import numpy as np

from horovod_train.data.prepare import columns
from horovod_train.data.prepare.columns import Columns
from horovod_train.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    columns.add_arguments(parser, "npz")
    parser.add_argument("--inputs", nargs="+", required=True, metavar="NAME", help="arrays that the model gets")
    parser.add_argument("--targets", nargs="+", default=[], metavar="NAME", help="arrays that the loss gets")


def run(arguments: argparse.Namespace) -> None:
    names = [*arguments.inputs, *arguments.targets]
    arrays = load_arrays(arguments.file, names)
    held_out = load_arrays(arguments.eval_file, names) if arguments.eval_file else None
    columns.write(arrays, held_out, arguments, arguments.inputs, arguments.targets)


def load_arrays(path: str, names: list[str]) -> Columns:
    """Load the arrays of these names. A folder of NAME.npy files works like an npz file. Raises UserError."""
    try:
        if os.path.isdir(path):
            there = sorted(name[:-4] for name in os.listdir(path) if name.endswith(".npy"))
            columns.check_names(names, there, "--inputs, --targets", path)
            arrays = {name: np.load(os.path.join(path, f"{name}.npy"), allow_pickle=False) for name in names}
        else:
            with np.load(path, allow_pickle=False) as saved:
                columns.check_names(names, saved.files, "--inputs, --targets", path)
                arrays = {name: saved[name] for name in names}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, AttributeError, EOFError) as error:
        raise UserError(f"{path}: is not an npz file of plain arrays, nor a folder of npy files.") from error
    for name, array in arrays.items():
        if array.ndim < 1 or array.dtype.kind not in "biufSU" or not len(array):
            raise UserError(f"{path}: {name} is {array.dtype}{list(array.shape)}; expected rows of numbers or strings.")
        if len(array) != len(arrays[names[0]]):
            raise UserError(
                f"{path}: {name} has {len(array)} rows, {names[0]} {len(arrays[names[0]])}; they must match."
            )
    return arrays
