"""Loads TensorFlow and Keras without what no rank needs: lines printed at every start, and two libraries."""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from horovod_train.output.console import unfailing

_NOISE = re.compile(r"WARNING: All log messages before absl|I0000 |To enable the following instructions")
_SPARED = ("sklearn", "matplotlib")
"""Libraries that Keras imports if installed, only for wrappers and plots: a third of the start time of a rank."""
_NO_DRIVER = re.compile(r".*failed call to cuInit")


def load_tensorflow() -> None:
    """Import TensorFlow and Keras and let TensorFlow look for GPUs, which is when it prints."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with _without_noise(), _without(_SPARED), _without_collecting_garbage():
        import tensorflow as tf

        importlib.import_module("keras")
        tf.config.list_physical_devices("GPU")


@contextmanager
def _without(names: Iterable[str]) -> Iterator[None]:
    """Make these modules unimportable inside the block."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: an import of it fails
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextmanager
def _without_collecting_garbage() -> Iterator[None]:
    """Disable garbage collection inside the block: searching imported objects takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _without_noise() -> Iterator[None]:
    """Hold back what C++ writes to file descriptor 2; then forward everything but noise."""
    stderr = unfailing(sys.stderr)
    stderr.flush()
    stderr_copy = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines(keepends=True):
                if not _is_noise(line):
                    stderr.write(line)


def _is_noise(line: str) -> bool:
    # Without a device file there is no GPU; with one, the user must see a driver that fails.
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return bool(_NOISE.match(line) or (_NO_DRIVER.match(line) and not has_gpu))
