"""Writes a model for use with TensorFlow alone, as a Keras file or a SavedModel, and checks it by loading it back.

Knows no checkpoints and no command line; see commands/export.
"""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.checkpoint.layout import reason
from horovod_train.errors import RunError, UserError, one_line

CLASS_NAMES = "class_names.json"
_OPEN_SIZES = (32, 8, 1)
"""Replace sizes that a model leaves open in the test input; the next one where an input is too long for the model."""


def write_model(model: keras.Model, path: Path, class_names: Sequence[str] = ()) -> None:
    """Write to `path`, which must not exist: a Keras file if it ends in .keras, else a SavedModel folder.

    class_names: of the outputs, in their order; the file holds them as class_names.json, a list. The file has no
    optimizer: a compiled model is not compiled any more. Raises UserError if Keras cannot write the
    model or read it back. Raises RunError if the loaded model computes something else; OSError from the disk.
    """
    if model.compiled:
        model.compiled, model.optimizer = False, None
    is_keras = path.suffix == ".keras"
    try:
        if is_keras:
            model.save(path)
            serve = keras.saving.load_model(path, compile=False)
        else:
            model.export(path, format="tf_saved_model", verbose=False)
            loaded = tf.saved_model.load(str(path))  # keep the reference: it owns the variables that `serve` uses
            serve = loaded.serve
    except (NotImplementedError, TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        kind = "Keras file" if is_keras else "SavedModel"
        hint = " A SavedModel, --out DIR, needs no code to load; or see docs/models.md." if is_keras else ""
        text = one_line(error)[:400]
        raise UserError(f"export: {model.name} cannot be made a {kind}: {text}{hint}") from error
    except tf.errors.OpError as error:  # a SavedModel is written by TensorFlow's own C++
        raise OSError(reason(error)) from error
    _add_names(path, class_names)
    inputs = _inputs(model)
    if inputs is None:
        return
    # Half precision rounds otherwise in a graph, and that adds up over the layers: compare graph with graph.
    call = functools.partial(model, training=False)
    if not is_keras:
        call = tf.function(call, input_signature=[keras.tree.map_structure(_spec, inputs)], autograph=False)
    for size in _OPEN_SIZES:
        sample = keras.tree.map_structure(functools.partial(_sample, open_size=size), inputs)
        try:
            expected = call(sample)
        except tf.errors.InvalidArgumentError:
            continue  # if it is never suitable, such as for a table lookup, nothing is compared
        _compare(expected, serve(sample))
        return


def _add_names(path: Path, class_names: Sequence[str]) -> None:
    """Add the names of classes to a file of Keras, which is a zip archive, or to the extra assets of a SavedModel."""
    text = json.dumps(list(class_names), ensure_ascii=False)
    if class_names and path.suffix == ".keras":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(CLASS_NAMES, text)
    elif class_names:
        (path / "assets.extra").mkdir()
        with (path / "assets.extra" / CLASS_NAMES).open("x", encoding="utf-8") as file:
            file.write(text)


def _inputs(model: keras.Model) -> Any:
    """Return the structure of the model's inputs; None if a subclassed model does not declare them."""
    if not getattr(model, "inputs", None):
        return None
    # A Sequential model has exactly one input and no input structure.
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def _spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _sample(tensor: keras.KerasTensor, open_size: int) -> tf.Tensor:
    """Return made-up values for an input, for two records where the model leaves their number open."""
    records, *sizes = tensor.shape
    shape = [records or 2, *(size or open_size for size in sizes)]
    if tensor.dtype == "string":
        return tf.fill(shape, "text")
    is_float = tf.as_dtype(tensor.dtype).is_floating
    values = np.random.default_rng(0).uniform(-0.5, 0.5, shape) if is_float else np.ones(shape)
    return tf.cast(values, tensor.dtype)


def _compare(expected: Any, computed: Any) -> None:
    pairs = zip(keras.tree.flatten(expected), keras.tree.flatten(computed), strict=True)
    for number, pair in enumerate(pairs):
        model_output, output = (np.asarray(tf.cast(value, tf.float64)) for value in pair)
        # The same operations on the same machine: equal, but for sums that a GPU adds in another order.
        is_close = model_output.shape == output.shape and np.allclose(
            model_output, output, rtol=1e-3, atol=1e-3 * np.abs(model_output).max()
        )
        if not is_close:
            raise RunError(f"export: output {number} of the file is not that of the model; nothing was kept of it.")
