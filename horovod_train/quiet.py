"""Loads TensorFlow and Keras without what nobody needs: the lines that every start prints, and scikit-learn."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOISE = re.compile(r"WARNING: All log messages before absl|I0000 |To enable the following instructions")
_NO_DRIVER = re.compile(r".*failed call to cuInit")


def load_tensorflow() -> None:
    """Imports TensorFlow and Keras and lets TensorFlow look for GPUs, which is when it prints."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with _without_noise(), _without_scikit_learn():
        import tensorflow as tf

        importlib.import_module("keras")
        tf.config.list_physical_devices("GPU")


@contextmanager
def _without_scikit_learn() -> Iterator[None]:
    """Keras imports it where it finds it, for wrappers of its own alone: a quarter of a rank's start.

    Whoever imports it afterwards gets it.
    """
    if "sklearn" in sys.modules:
        yield
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # an import of it now fails
    try:
        yield
    finally:
        del sys.modules["sklearn"]


@contextmanager
def _without_noise() -> Iterator[None]:
    """Holds back what C++ writes to file descriptor 2, and then passes on all of it that is not noise."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if not _is_noise(line):
                    sys.stderr.write(line)


def _is_noise(line: str) -> bool:
    # Without a device file there is no GPU to miss; with one, a driver that fails is what the user must know.
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return bool(_NOISE.match(line) or (_NO_DRIVER.match(line) and not has_gpu))
