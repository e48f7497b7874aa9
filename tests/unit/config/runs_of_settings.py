"""Trains once with each of some configs, on one rank, and writes down which settings each run read.

    python runs_of_settings.py JOBS.json OUT

JOBS: a list of {"words": arguments of the command line, "unchecked": leave out the rules between settings}. OUT gets a
list of {"exit_code", "stderr", "read": settings}. A run is a process of its own, forked when TensorFlow is loaded, so
that loading it is paid for once. Also holds the model, the parse function and what else those configs name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import fsspec
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from made_records import pixels

from horovod_train.config import loader, rules, settings

# These look at all settings alike, to check, copy, compare or write them: none of that makes a setting useful.
_LOOK_AT_ALL = {rules.__file__, loader.__file__, dataclasses.__file__, "<string>"}


def model() -> keras.Model:
    """Images [4, 4, 1] → 10 logits, with a layer of each kind that some setting is about."""
    image = keras.Input((4, 4, 1))
    x = layers.Dense(8, activation="relu", name="first")(layers.Flatten()(image))
    x = layers.BatchNormalization()(x)
    return keras.Model(image, layers.Dense(10, dtype="float32", name="last")(x))


def weights() -> dict[str, np.ndarray]:
    """Some of the model's, for model.init_from."""
    return {"first/kernel": np.ones((16, 8), np.float32), "first/bias": np.ones(8, np.float32)}


def parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
    """What the dataset.json of made_records says, as a function of the user's own."""
    features = {"image_raw": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    found = tf.io.parse_example(records, features)
    pixels = tf.cast(tf.io.decode_raw(found["image_raw"], tf.uint8), tf.float32)
    return {"image_raw": tf.ensure_shape(tf.reshape(pixels, [-1, 4, 4, 1]), [None, 4, 4, 1]), "label": found["label"]}


def preprocess(images: tf.Tensor) -> tf.Tensor:
    """The images as they are."""
    return tf.cast(images, tf.float32)


def stream(rank: int, size: int, epoch: int, seed: int, training: bool) -> tf.data.Dataset:
    """The same records, one after the other."""
    numbers = tf.data.Dataset.range(27)
    return numbers.map(lambda n: (tf.zeros([4, 4, 1]) + tf.cast(n, tf.float32) / 27, n % 10))


class Images:
    """Records as those of made_records, from no file."""

    def __init__(self, path: str) -> None: ...

    def __len__(self) -> int:
        return 27

    def __getitem__(self, record: int) -> dict[str, Any]:
        return {"image_raw": pixels(record), "label": record % 10, "words": np.arange(record % 3)}

    def fingerprint(self) -> str:
        return "made"


class Writer:
    """A form of metrics that keeps nothing."""

    def __init__(self, directory: Path) -> None: ...

    def write(self, step: int, epoch: int, split: str, values: dict[str, float]) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


def hook(run: Any, step: int) -> None:
    """Does nothing."""


class Callback(keras.callbacks.Callback):
    """Does nothing."""


def watch_reads() -> set[str]:
    """The settings that are read from now on in this process, as `section.key`, as they come."""
    read: set[str] = set()
    prefixes = {settings.Config: "", settings.Watched: "checkpoint.best."}
    prefixes |= {
        type(f.default): f"{f.name}."
        for f in dataclasses.fields(settings.Config)
        if dataclasses.is_dataclass(f.default) and type(f.default) is not settings.Spec
    }

    def read_and_note(section: Any, name: str) -> Any:
        if sys._getframe(1).f_code.co_filename not in _LOOK_AT_ALL and type(section) in prefixes:
            read.add(prefixes[type(section)] + name)
        return object.__getattribute__(section, name)

    for section in prefixes:
        section.__getattribute__ = read_and_note  # type: ignore[assignment,method-assign]
    return read


def run_forked(words: list[str], unchecked: bool, out: Path) -> dict[str, Any]:
    """Trains with these arguments in a process of its own: exit code, standard error, settings read."""
    facts, said = out.with_suffix(".facts"), out.with_suffix(".stderr")
    if not (pid := os.fork()):
        code = 70
        try:
            os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if unchecked:
                loader.broken_rules = lambda config: iter(())  # type: ignore[attr-defined]
            read = watch_reads()
            from horovod_train.main import main

            code = main(words)
            facts.write_text(json.dumps(sorted(read)))
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    read_settings = json.loads(facts.read_text()) if facts.exists() else []
    return {"exit_code": status, "stderr": said.read_text(errors="replace"), "read": read_settings}


if __name__ == "__main__":
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    fsspec.filesystem("memory").put(str(out.parent / "data"), "memory://made", recursive=True)
    from horovod_train.training import run  # noqa: F401  so that no fork has to

    found = [
        run_forked(job["words"], job.get("unchecked", False), out.parent / f"job-{n}") for n, job in enumerate(jobs)
    ]
    out.write_text(json.dumps(found))
