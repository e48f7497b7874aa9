"""What is trained without --config: the built-in config digits_convnet, on data that is made at the first start.

Chooses the config and its data. Does not train; see main.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from horovod_train.config.loader import BUILT_IN, Origins
from horovod_train.config.settings import Config
from horovod_train.errors import UserError

CONFIG = str(BUILT_IN / "digits_convnet.yaml")
_NAMED = "data/digits"
"""The folder of data that the config names, which is there in a checkout after `make train`."""


def place_data(config: Config, origins: Origins, cache: Path | None) -> tuple[Config, Path | None]:
    """Return the config, and the folder in the user's cache where its data belongs: None if it reads other data.

    Other data is a dataset data/digits that is here, or what overrides name. Raises UserError if there is no cache.
    """
    from horovod_train.data.schema import DATASET_NAME

    data, origin = config.data, f"no {_NAMED} here"
    splits = [split for split in ("train", "eval") if getattr(data, split) == (f"{_NAMED}/{split}",)]
    if not splits or os.path.isfile(os.path.join(_NAMED, DATASET_NAME)):
        return config, None
    if cache is None:
        raise UserError("no place for the data: there is no home folder. Set XDG_CACHE_HOME, or HOME.")
    folder = cache / "digits"
    if "train" in splits:
        data, origins["data.train"] = dataclasses.replace(data, train=(f"{folder}/train",)), origin
    if "eval" in splits:
        data, origins["data.eval"] = dataclasses.replace(data, eval=(f"{folder}/eval",)), origin
    return dataclasses.replace(config, data=data), folder


def prepare_data(folder: Path) -> None:
    """Make the digits in `folder` if they are missing. Every rank calls this before the ranks meet.

    The first rank that finds them missing makes them, while the other ranks that see the folder wait. A rank that fails
    or dies lets the next one try, and one that hangs holds the others up for a minute. Raises UserError.
    """
    from horovod_train.data.prepare.digits import prepare_once

    try:
        prepare_once(folder)
    except OSError as error:
        about = f": {error.filename}" if error.filename else ""
        raise UserError(
            f"{folder}: the data cannot be made there: {error.strerror or error}{about}. Set XDG_CACHE_HOME to another "
            f"folder, or make it here: python -m horovod_train.main prepare digits --out {_NAMED}"
        ) from error


def describe(config: Config) -> str:
    """Return the line that says what is trained and how to train something else."""
    data, out = ", ".join(map(os.path.dirname, config.data.paths("train"))), config.output_dir
    return (
        "no --config: training the built-in config digits_convnet, a small convnet on handwritten digits; data in "
        f"{data}, output in {out}. Started again, it resumes; --output-dir DIR begins another. Your own run: "
        f"--config FILE, for example a changed copy of {out}/config.yaml; --help lists the commands"
    )
