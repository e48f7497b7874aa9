"""Tell variables apart, whether Keras' or TensorFlow's."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import tensorflow as tf


def key_of(variable: Any) -> Any:
    """Return what stands for a variable or tensor in a dictionary: equal for a Keras variable and its tf one."""
    return (variable if isinstance(variable, tf.Variable | tf.Tensor) else variable.value).ref()


_numbers: dict[int, int] = {}
_next = itertools.count()


def number_of(variable: Any) -> int:
    """Return a number that stands for a variable on all ranks: how many others were asked for before, in this process.

    All ranks ask in the same order. Names would not do: Keras numbers layers and optimizers by how many there have been
    in the process, and rank 0 may have made some more.
    """
    if id(variable) not in _numbers:
        _numbers[id(variable)] = next(_next)
        weakref.finalize(variable, _numbers.pop, id(variable), None)
    return _numbers[id(variable)]


def name_of(variable: Any) -> str:
    """Return a variable's name for messages: "dense/kernel"."""
    return str(getattr(variable, "path", variable.name))
