"""What layers are besides weights: options, constants, tables, vocabularies; and what they derive from weights.

None of it is sent between ranks. What is derived is derived anew, the rest is compared, by digests.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.consistency import digest
from horovod_train.distributed.sync_batch_norm import layers_inside, parts_in

_TABLES: tuple[type[Any], ...] = (
    tf.lookup.StaticHashTable,
    tf.lookup.experimental.MutableHashTable,
    tf.lookup.experimental.DenseHashTable,
)
CONSTANT, TABLE, VOCABULARY, OPTIONS = "constant", "table", "vocabulary", "options"
"""What the names in `contents` and `how_built` begin with."""


def contents(model: keras.Model, *, of_keras_only: bool = False) -> dict[str, str]:
    """Return digests of the arrays, tensors, tables and files (Keras' assets) that layers hold, by name.

    of_keras_only: of Keras' own layers; what those of a user hold may differ by rank, and not change what is computed.
    """
    layers = [layer for layer in layers_inside(model) if not of_keras_only or is_of_keras(layer)]
    return {f"{what} of layer {layer.path}": value for layer in layers for what, value in _held(layer)}


def is_of_keras(layer: keras.Layer) -> bool:
    return type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.Model)


def deriving_layers(model: keras.Layer) -> list[Any]:
    """Return the layers that derive something from their weights, as Normalization does, and keep it beside them."""
    return [layer for layer in layers_inside(model) if callable(getattr(layer, "finalize_state", None))]


def finalize(model: keras.Layer) -> None:
    """Have layers compute anew what they derive from weights; call after loading weights, or getting them from root."""
    for layer in deriving_layers(model):
        layer.finalize_state()


def structure(model: keras.Model) -> dict[str, str]:
    """Return what must be equal before ranks can send each other weights, by name: Keras' settings, layers, weights."""
    settings = (keras.config.backend(), keras.config.image_data_format(), f"epsilon {keras.config.epsilon():g}")
    facts = {"Keras' settings (keras.json)": ", ".join(settings)}
    for number, weight in enumerate(model.weights):
        facts[f"weight {number} of the model"] = f"{weight.path} {tuple(weight.shape)} {weight.dtype}"
    for number, layer in enumerate(layers_inside(model)):
        # Only Keras' own: a user's config may hold what differs by rank, and not change what is computed.
        if is_of_keras(layer) and (options := _options(layer)) is not None:
            facts[f"options of layer {number}"] = f"{layer.path}: {digest(options.encode())}"
    return facts


def how_built(model: keras.Model) -> dict[str, str]:
    """Return, by name, digests of what makes a model compute something else with the same weights.

    These are the order of layers and the options of Keras' own, but for those that are settings of a run: what is
    trained, and in which precision.
    """
    order = digest("\n".join(layer.path for layer in _layers_with_paths(model)).encode())
    return options(model, left_out=("seed", "trainable", "dtype")) | {"order of layers": order}


def options(model: keras.Model, left_out: Collection[str]) -> dict[str, str]:
    """Return digests of the options of Keras' own layers, but for some names of options, by name."""
    found: dict[str, str] = {}
    for layer in _layers_with_paths(model):
        if is_of_keras(layer) and (text := _options(layer, left_out)) is not None:
            name = f"{OPTIONS} of layer {layer.path}"
            found[name] = digest((found.get(name, "") + text).encode())
    return found


def _layers_with_paths(model: keras.Model) -> list[Any]:
    return [layer for layer in layers_inside(model) if layer.path]  # Keras' inputs have none


def _held(layer: keras.Layer) -> Iterator[tuple[str, str]]:
    for name, value in vars(layer).items():
        arrays = [np.asarray(part) for part in parts_in(value, np.ndarray)]
        # Tensors of graphs have no values.
        arrays += [np.asarray(part.numpy()) for part in parts_in(value, tf.Tensor) if hasattr(part, "numpy")]
        if arrays:
            yield f"{CONSTANT} {name}", digest("".join(map(digest_of_array, arrays)).encode())
        for table in (part for kind in _TABLES for part in parts_in(value, kind)):
            if not name.startswith("_"):  # TensorFlow keeps them under names of its own too
                keys, values = (part.numpy().tolist() for part in table.export())
                yield f"{TABLE} {name}", digest(repr(sorted(zip(keys, map(repr, values), strict=True))).encode())
    if hasattr(layer, "save_assets") and not isinstance(layer, keras.Model):
        assets = _digest_of_assets(layer)
        if assets is not None:
            yield f"{VOCABULARY} or other assets" if is_of_keras(layer) else "assets", assets


def digest_of_array(array: np.ndarray) -> str:
    data = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
    return digest(f"{array.shape} {array.dtype}".encode() + data)


def _digest_of_assets(layer: keras.Layer) -> str | None:
    """Return a digest of a layer's files; None if Keras cannot save it, which may train all the same."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            layer.save_assets(folder)
        except Exception:  # a user's layer may raise anything
            return None
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        texts = [f"{path.relative_to(folder)} {digest(path.read_bytes())}" for path in files]
    return digest("\n".join(texts).encode())


def _options(layer: keras.Layer, left_out: Collection[str] = ("seed",)) -> str | None:
    """Return a layer's config as text; None if Keras cannot save the layer, as with an activation of functools.partial.

    Without seeds, which do not decide what ranks compute (see step.Seeds), and without the code of lambdas, which
    names the file that it is from.
    """

    def compared(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("class_name") == "__lambda__":
                return "lambda"
            return {str(key): compared(part) for key, part in value.items() if key not in left_out}
        return [compared(part) for part in value] if isinstance(value, list | tuple) else value

    def other(value: Any) -> str:
        return digest_of_array(value) if isinstance(value, np.ndarray) else type(value).__name__

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lambdas in what is saved; nothing is
            config = layer.get_config()
    except Exception:  # what Keras raises depends on the option
        return None
    return json.dumps(compared(config), sort_keys=True, default=other)
