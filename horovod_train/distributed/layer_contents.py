"""What layers are besides weights: options, constants, tables, vocabularies; and what they derive from weights.

The same of a function that makes a model's inputs. Also finds layers and other objects inside a model.

None of it is sent between ranks. What is derived is derived anew, the rest is compared, by digests.
"""

from __future__ import annotations

import functools
import inspect
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.consistency import digest
from horovod_train.keras_seams import ADDED_LOSSES

_TABLES: tuple[type[Any], ...] = (
    tf.lookup.StaticHashTable,
    tf.lookup.experimental.MutableHashTable,
    tf.lookup.experimental.DenseHashTable,
)
T = TypeVar("T")
_LIBRARIES = ("keras.", "keras_hub.")
_OF_A_RUN = ("seed", "trainable", "dtype")
"""Options of layers that are settings of a run."""
CONSTANT, TABLE, VOCABULARY, OPTIONS = "constant", "table", "vocabulary", "options"
"""What the names in `contents` and `how_built` begin with."""


def layers_inside(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Yield a layer and the layers inside it, each once, in the order of their attachment."""
    return all_parts_in(layer, keras.Layer)


def all_parts_in(value: Any, kind: type[T], visited: set[int] | None = None) -> Iterator[T]:
    """Do as parts_in, and yield the parts of each part after it; each object once. visited: ids to skip."""
    visited = set() if visited is None else visited
    for part in parts_in(value, kind):
        if id(part) not in visited:
            visited.add(id(part))
            yield part
            yield from all_parts_in(vars(part), kind, visited)


def parts_in(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield objects of a kind in an attribute: itself, or in lists, tuples and dictionaries, whatever their keys."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from parts_in(part, kind)


def contents(model: keras.Model, *, of_keras_only: bool = False) -> dict[str, str]:
    """Return digests of the arrays, tensors, tables and files (Keras' assets) that layers hold, by name.

    of_keras_only: of Keras' own layers; what those of a user hold may differ by rank, and not change what is computed.
    """
    held, names = list[tuple[str, str]](), dict[int, str]()
    for layer in layers_inside(model):
        name = names.get(id(layer), layer.path or layer.name)
        # The lookup inside a TextVectorization has no path.
        names |= {id(part): name for part in parts_in(vars(layer), keras.Layer) if not part.path}
        if not of_keras_only or is_of_keras(layer):
            held += [(f"{what} of layer {name}", value) for what, value in _held(layer)]
    return by_unique_name(held)


def contents_of_function(function: Any, owner: str) -> dict[str, str]:
    """Return digests, by name, of what a user's function, or a layer in its place, computes with.

    Of a function: of tables, vocabularies and options of layers in the variables that it uses, as they are now; not of
    constants, which are computed and differ in the last bits between machines. owner: for the names.
    """
    variables = {"": function} if isinstance(function, keras.Layer) else _used_by(function, set())
    held = list[tuple[str, str]]()
    for variable, value in variables.items():
        found = [(TABLE, table) for table in _tables(value)]
        for layer in all_parts_in(value, keras.Layer):
            found += [(what, of_layer) for what, of_layer in _held(layer) if not what.startswith(CONSTANT)]
        for layer in parts_in(value, keras.Layer):  # in its options are those of the layers inside
            options = _options(layer, (*_OF_A_RUN, "build_config"), with_names=False)
            if is_of_keras(layer, _LIBRARIES) and options is not None:
                found.append((OPTIONS, digest(options.encode())))
        where = f"{variable} in {owner}" if variable else owner
        held += [(f"{what} of {where}", found_digest) for what, found_digest in found]
    return by_unique_name(held)


def _used_by(function: Any, seen: set[int]) -> dict[str, Any]:
    """Return the variables that a function uses, also by functions of its package, by name."""
    function = inspect.unwrap(function)
    seen.add(id(function))
    if isinstance(function, functools.partial):
        return {"arguments": [*function.args, *function.keywords.values()], **_used_by(function.func, seen)}
    if inspect.ismethod(function):
        return {"self": [*vars(function.__self__).values()], **_used_by(function.__func__, seen)}
    if not inspect.isfunction(function):
        return dict(getattr(function, "__dict__", {}))
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # one has no value yet
        return {}
    variables, package = {**found.globals, **found.nonlocals}, function.__module__.partition(".")[0]
    for value in list(variables.values()):
        if inspect.isfunction(value) and id(value) not in seen and value.__module__.partition(".")[0] == package:
            variables = {**_used_by(value, seen), **variables}
    return variables


def by_unique_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Append #2, #3, … to repeated names: paths can repeat if a model has two layers of one name."""
    counts: Counter[str] = Counter()
    unique = {}
    for name, value in named:
        counts[name] += 1
        unique[name if counts[name] == 1 else f"{name}#{counts[name]}"] = value
    return unique


def is_of_keras(layer: keras.Layer, packages: tuple[str, ...] = ("keras.",)) -> bool:
    return type(layer).__module__.startswith(packages) and not isinstance(layer, keras.Model)


def deriving_layers(model: keras.Layer) -> list[Any]:
    """Return the layers that derive something from their weights, as Normalization does, and keep it beside them.

    Not a Discretization, which derives its boundaries from what `adapt` has counted; a file does not have that.
    """
    layers = (layer for layer in layers_inside(model) if layer.weights)
    return [layer for layer in layers if callable(getattr(layer, "finalize_state", None))]


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
    options: dict[str, str] = {}
    layers = [layer for layer in layers_inside(model) if layer.path]  # Keras' inputs have none
    for layer in layers:
        if is_of_keras(layer) and (text := _options(layer, left_out=_OF_A_RUN)) is not None:
            name = f"{OPTIONS} of layer {layer.path}"
            options[name] = digest((options.get(name, "") + text).encode())
    order = digest("\n".join(layer.path for layer in layers).encode())
    return options | {"order of layers": order}


def options_of_weightless_layers(model: keras.Model) -> dict[str, str]:
    """Return digests of the options of Keras' own layers that have no weights, by name, in the order of the layers.

    Those of others may differ by rank: initializers, where root sends the weights, and sizes of what is a rank's own.
    Without what differs by process and by batch: names, and the shapes of which a wrapper was built.
    """
    left_out = ("seed", "trainable", "build_config")
    digests: dict[str, str] = {}
    for layer in layers_inside(model):
        is_compared = is_of_keras(layer) and layer.path and not layer.weights
        if is_compared and (text := _options(layer, left_out, with_names=False)) is not None:
            digests[f"{OPTIONS} of layer {layer.path}"] = digest(text.encode())
    return digests


def _held(layer: keras.Layer) -> Iterator[tuple[str, str]]:
    for name, value in vars(layer).items():
        if name == ADDED_LOSSES:  # follows from the rows that this rank computed last
            continue
        arrays = [np.asarray(part) for part in parts_in(value, np.ndarray)]
        # Tensors of graphs have no values.
        arrays += [np.asarray(part.numpy()) for part in parts_in(value, tf.Tensor) if hasattr(part, "numpy")]
        if arrays:
            yield f"{CONSTANT} {name}", digest("".join(map(digest_of_array, arrays)).encode())
        if not name.startswith("_"):  # TensorFlow keeps them under names of its own too
            yield from ((f"{TABLE} {name}", table) for table in _tables(value))
    if hasattr(layer, "save_assets") and not isinstance(layer, keras.Model):
        assets = _digest_of_assets(layer)
        if assets is not None:
            yield f"{VOCABULARY} or other assets" if is_of_keras(layer, _LIBRARIES) else "assets", assets


def _tables(value: Any) -> Iterator[str]:
    wrapped = [list(vars(part).values()) for part in parts_in(value, tf.lookup.StaticVocabularyTable)]
    for table in (part for kind in _TABLES for part in parts_in([value, *wrapped], kind)):
        if hasattr(table.resource_handle, "numpy"):  # those of graphs have no values
            keys, values = (part.numpy().tolist() for part in table.export())
            yield digest(repr(sorted(zip(keys, map(repr, values), strict=True))).encode())


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


def _options(layer: keras.Layer, left_out: Collection[str] = ("seed",), *, with_names: bool = True) -> str | None:
    """Return a layer's config as text; None if Keras cannot save the layer, as with an activation of functools.partial.

    Without seeds, which do not decide what ranks compute (see step.Seeds), and without the code of lambdas, which
    names the file that it is from. with_names: of layers.
    """

    def compared(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("class_name") == "__lambda__":
                return "lambda"
            is_unnamed = "trainable" in value and not with_names
            skipped = {*left_out, "name"} if is_unnamed else left_out
            return {str(key): compared(part) for key, part in value.items() if key not in skipped}
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
