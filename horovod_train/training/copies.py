"""Copies of variables and of ranks' values on root, for a save. Does not know what is saved; see state."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import tensorflow as tf


class Copies:
    """Copies of variables, in memory that each save uses again.

    A process gets new memory page by page, when it first writes there, which takes longer than the copying itself.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._reserves: threading.Thread | None = None

    def reserve(self, variables: Mapping[str, tf.Variable]) -> None:
        """Get the memory in the background, so that the first save does not have to wait for it."""
        specs = {name: (variable.shape, variable.dtype.as_numpy_dtype) for name, variable in variables.items()}

        def fill() -> None:
            for name, (shape, dtype) in specs.items():
                self._arrays[name] = np.empty(shape, dtype)
                self._arrays[name].fill(0)

        self._reserves = threading.Thread(target=fill, name="copies", daemon=True)
        self._reserves.start()

    def take(self, variables: Mapping[str, tf.Variable]) -> dict[str, np.ndarray]:
        """Return copies of these variables, which the next call overwrites."""
        if self._reserves is not None:
            self._reserves.join()
        for name, variable in variables.items():
            if name not in self._arrays:
                self._arrays[name] = np.empty(variable.shape, variable.dtype.as_numpy_dtype)
            self._arrays[name].reshape(-1).view(np.uint8)[:] = bytes_of(variable)
        return {name: self._arrays[name] for name in variables}


def bytes_of(variable: tf.Variable) -> memoryview:
    """Return the bytes, on the host without a copy, where `numpy` would make one."""
    return np.asarray(memoryview(variable.value())).reshape(-1).view(np.uint8).data
