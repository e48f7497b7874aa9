"""Tell variables apart, whether Keras' or TensorFlow's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def key_of(variable: Any) -> Any:
    """Return what stands for a variable or tensor in a dictionary: equal for a Keras variable and its tf one."""
    return (variable if isinstance(variable, tf.Variable | tf.Tensor) else variable.value).ref()


def name_of(variable: Any) -> str:
    """Return a variable's name for messages: "dense/kernel"."""
    return str(getattr(variable, "path", variable.name))
