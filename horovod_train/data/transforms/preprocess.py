"""Applies `data.preprocess` to the inputs of a batch: a user's function, or a preset's preprocessor.

Runs in tf.data, on the host, in training, evaluation and prediction.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from horovod_train.config.registry import load_function, raised_at
from horovod_train.data.pipeline.batch import Tensors
from horovod_train.errors import UserError, one_line

Preprocess = Callable[[Tensors], Tensors]
"""Inputs [rows, …] → inputs [rows, …]."""


def load_preprocess(name: str | None) -> Preprocess | None:
    """Load `package.module:function`, or the preprocessor of a keras_hub preset's folder. Raises UserError."""
    if name is None:
        return None
    if ":" in name:
        return load_function(name, "data.preprocess")
    from horovod_train.presets import load_preprocessor  # keras_hub takes seconds

    return load_preprocessor(name)


def apply_preprocess(preprocess: Preprocess, name: str, inputs: Tensors, rows: int) -> Tensors:
    """Return the results for these inputs, with a known number of rows. Raises UserError if the number differs."""
    input_types = tf.nest.map_structure(lambda tensor: f"{tensor.dtype.name}{tensor.shape}", inputs)
    try:
        results = preprocess(inputs)
        leaves = list(results.values()) if isinstance(results, dict) else [results]
        if not leaves or not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
            raise ValueError(f"expected a tensor, or tensors by name; received {results}")
        return tf.nest.map_structure(lambda leaf: tf.ensure_shape(leaf, [rows, *leaf.shape[1:]]), results)
    except (ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
        text = one_line(error)[:300]
        raise UserError(f"data.preprocess: {name}, for inputs of {input_types}: {text}{raised_at(error)}") from error
