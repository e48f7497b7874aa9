"""What a fine-tuned model starts from and trains: model.init_from, freeze, unfreeze and lora, optimizer.lr_multipliers.

Initial weights are of a run, a function of the user, or a file of Keras 3: `.keras`, or the `.weights.h5` that
`save_weights` writes. Broadcasts nothing and compiles no step; see run.unfreeze.
"""

from __future__ import annotations

import functools
import itertools
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np
import tensorflow as tf

from horovod_train.checkpoint.layout import Checkpoint, Damaged, open_checkpoint
from horovod_train.checkpoint.tensors import read_arrays
from horovod_train.config.registry import find, is_users, load_function, raised_at, suggest
from horovod_train.config.settings import ModelSpec
from horovod_train.data.random_access.hdf5 import open_hdf5
from horovod_train.data.random_access.store import opening
from horovod_train.data.schema import check_same_classes
from horovod_train.distributed.group import as_tf_variable
from horovod_train.distributed.layer_contents import TABLE, VOCABULARY, contents, layers_inside, parts_in
from horovod_train.errors import UserError, one_line
from horovod_train.keras_seams import take_class, weights_of_slots
from horovod_train.models import names_numbered_as_at_first
from horovod_train.shown_text import listed
from horovod_train.training.sync import by_path

_LORA = re.compile(r"/lora_(kernel|embeddings)_([ab])(#\d+)?$")
"""The paths of what `enable_lora` adds, as in a checkpoint: these weights exist to be trained, so `freeze` leaves them
alone."""
_WHERE = "model.init_from"
_ALL_BUT = "all but "
_IN_KERAS_FILE = "model.weights.h5"
_NOT_THE_MODEL = ("optimizer", "compile_metrics", "_loss_tracker", "loss_tracker")
"""Groups of a file that hold the state of `compile` and `fit`."""

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
ClassNames = Mapping[str, Sequence[str]]


class Freezing:
    """Sets `trainable` of a model's weights and layers.

    A layer all of whose weights are frozen is frozen itself, so that a BatchNormalization uses its moving statistics
    and does not change them.
    """

    def __init__(self, model: keras.Model, spec: ModelSpec) -> None:
        """model: built, with every variable; `apply` changes it. Raises UserError for patterns that match nothing."""
        self._layers = [(layer, layer.trainable) for layer in layers_inside(model)]
        self._weights = [(weight, weight.trainable) for weight in model.weights]
        paths = [weight.path for weight in model.weights if not is_lora(weight.path)]
        self._frozen = _matching(spec.freeze, paths, "model.freeze")
        self._unfrozen: dict[int, set[str]] = {}
        for epoch, patterns in spec.unfrozen_by_epoch():
            where, earlier = f"model.unfreeze.{epoch}", {path for paths in self._unfrozen.values() for path in paths}
            self._unfrozen[epoch] = _matching(patterns, sorted(self._frozen - earlier), where)
        if self._frozen and not any(was and weight.path not in self._frozen for weight, was in self._weights):
            raise UserError(f"model.freeze: {', '.join(spec.freeze)} leaves nothing to train at the start.")

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each weight and each layer is trained now, which a step has compiled in."""
        return tuple(each.trainable for each, _ in [*self._weights, *self._layers])

    @property
    def epochs(self) -> tuple[int, ...]:
        """The numbers of complete epochs after which more is trained."""
        return tuple(self._unfrozen)

    def apply(self, epoch: float) -> list[str]:
        """Freeze what is frozen after so many complete epochs, or for ever (infinity); return the weights' paths."""
        frozen = self._frozen.difference(
            *(paths for first_epoch, paths in self._unfrozen.items() if first_epoch <= epoch)
        )
        for layer, was in self._layers if self._frozen else ():
            # This sets the layers inside it too; they follow in the list, with their own values.
            layer.trainable = was and not (layer.weights and all(weight.path in frozen for weight in layer.weights))
        for weight, was in self._weights if self._frozen else ():
            weight.trainable = was and weight.path not in frozen
        return sorted(frozen)

    def unfrozen_at(self, epoch: int) -> list[str]:
        """Return the paths of the weights that are trained from the end of an epoch on."""
        return sorted(self._unfrozen.get(epoch, ()))


def enable_lora(model: keras.Model, ranks: Mapping[str, int]) -> None:
    """Call Keras' `enable_lora` of the layers that patterns name, by their paths. Raises UserError.

    ranks: pattern → rank. It freezes the kernels of these layers and adds two narrow matrices to each (Hu et al. 2021,
    arXiv:2106.09685).
    """
    capable: dict[str, list[Any]] = {}  # several layers may have one path
    for layer in layers_inside(model):
        if hasattr(layer, "enable_lora"):
            capable.setdefault(layer.path, []).append(layer)
    for pattern, rank in ranks.items():
        where = f"model.lora.{pattern}"
        for path in find(pattern, capable, where):
            try:
                for layer in capable[path]:
                    layer.enable_lora(rank)
            except (ValueError, NotImplementedError) as error:
                raise UserError(f"{where}: layer {path}: {one_line(error)}") from error


def is_lora(path: str) -> bool:
    """Return whether a weight is one that `enable_lora` adds."""
    return _LORA.search(path) is not None


def _matching(patterns: Sequence[str], paths: Sequence[str], where: str) -> set[str]:
    """Return the paths in which a pattern matches; for "all but NAME, NAME" those of no layer with such a name."""
    layers_of = {path: path.split("/")[:-1] for path in paths}
    layers = list(dict.fromkeys(itertools.chain(*layers_of.values())))
    matching: set[str] = set()
    for pattern in patterns:
        if not pattern.startswith(_ALL_BUT):
            matching.update(find(pattern, paths, where))
            continue
        names = [name.strip() for name in pattern.removeprefix(_ALL_BUT).split(",")]
        for name in names:
            if name not in layers:
                raise UserError(f"{where}: {pattern}: there is no layer {name!r}; {suggest(name, layers)}")
        matching.update(path for path in paths if not {*names} & {*layers_of[path]})
    return matching


def multiply_rates(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], multipliers: Mapping[str, float]
) -> None:
    """Make an optimizer multiply its learning rate for the weights that patterns name.

    variables: those that are trained. multipliers: pattern → factor; of several patterns that match a weight's path the
    first counts. Decoupled weight decay (AdamW's, or `weight_decay` of any Keras optimizer) is not multiplied: it is no
    part of `update_step`, Keras' method for the update of one variable. Raises UserError for a pattern that matches
    nothing.
    """
    factors: dict[str, float] = {}
    for pattern, factor in multipliers.items():
        paths = find(pattern, [variable.path for variable in variables], f"optimizer.lr_multipliers.{pattern}")
        factors = dict.fromkeys(paths, float(factor)) | factors
    if factors:
        by_id = {
            id(as_tf_variable(variable)): factors[variable.path] for variable in variables if variable.path in factors
        }
        updating = getattr(optimizer, "inner_optimizer", optimizer)
        take_class(updating, _with_own_rates(type(updating), by_id))


def _with_own_rates(base: type, factors: Mapping[int, float]) -> type:
    class WithOwnRates(base):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            factor = factors.get(id(as_tf_variable(variable)))  # Keras passes the inner tf.Variable
            super().update_step(gradient, variable, learning_rate if factor is None else learning_rate * factor)

    return WithOwnRates


class Match(NamedTuple):
    """What a source and a model have in common."""

    taken: Arrays
    """By the path of the model's weight."""
    left: list[str]
    """Weights of the source that the model does not have, or that init_exclude names."""
    new: list[str]
    """Weights of the model that keep their initial values."""
    warnings: Sequence[str]
    """Why weights taken may not mean in the model what they meant in the source."""

    def line(self) -> str:
        """Return a sentence for the log."""
        parts = [f"{len(self.taken)} weights taken: {listed([*self.taken])}"]
        parts += [f"{len(self.left)} left: {listed(self.left)}"] if self.left else []
        parts += [f"{len(self.new)} new: {listed(self.new)}"] if self.new else []
        return "; ".join(parts)


def match(
    model: keras.Model,
    spec: ModelSpec,
    class_names: ClassNames | None = None,
    of_preprocess: Mapping[str, str] | None = None,
) -> Match:
    """Read the source and compare it with a built model, which is not changed. Raises UserError.

    class_names: of the training records, by feature; None if not known. of_preprocess: see contents_of_function.
    """
    source = spec.init_from
    assert source is not None
    weights = by_path(model.weights)
    excluded = {
        path
        for number, pattern in enumerate(spec.init_exclude)
        for path in find(pattern, weights, f"model.init_exclude[{number}]")
    }
    wanted = {path: tuple(weight.shape) for path, weight in weights.items() if path not in excluded}
    with ExitStack() as files:
        arrays: Mapping[str, Any]
        checkpoint: Checkpoint | None = None
        merged: Sequence[str] = ()
        if is_users(source):
            arrays = _from_function(source)
        elif source.endswith((".keras", ".h5")):
            arrays = _from_file(source, model, wanted, files)
        else:
            checkpoint = open_checkpoint(source, _WHERE)
            arrays, merged = _from_run(checkpoint, wanted)
        common = [path for path in wanted if path in arrays]
        if not common:
            raise UserError(
                f"{_WHERE}: {source}: no weight of it is one of the model's. It has {listed(sorted(arrays))}; the "
                f"model has {listed([*weights])}."
            )
        for path in common:  # values are read only after all shapes have been compared
            there, shape = arrays[path].shape, wanted[path]
            if there != shape:
                raise UserError(
                    f"{_WHERE}: {source}: {path} has shape {list(there or ())} there and {list(shape)} in the model. "
                    "Give the layer another name, or leave it as it is by model.init_exclude."
                )
        left = [path for path in arrays if path not in common]
        taken = {path: _values(arrays[path], path, source) for path in common}
    warnings: list[str] = []
    if checkpoint is not None:
        head = [path for path in weights if not is_lora(path)][-1]  # a new one learns the classes of now
        held = contents(model) | dict(of_preprocess or {})
        warnings += _changed_vocabularies(checkpoint, held)
        warnings += _guessed_lora(checkpoint, merged)
        warnings += _changed_classes(checkpoint, class_names or {}) if head in taken else ()
        warnings = [f"{_WHERE}: {checkpoint.folder}: {warning}" for warning in warnings]
    return Match(taken, left, [path for path in weights if path not in common], warnings)


def assign(model: keras.Model, taken: Mapping[str, np.ndarray]) -> None:
    """Set weights of the model to arrays by path."""
    for path, variable in by_path(model.weights).items():
        if path in taken:
            variable.assign(tf.cast(taken[path], variable.dtype))


def slots_like_weights(slots: Sequence[Any], weights: Sequence[keras.Variable]) -> list[tuple[Any, keras.Variable]]:
    """Return the slots of a new optimizer that begin as copies of their weights, as those of ScheduleFreeAdamW do.

    A kind of slot copies if each of its slots does.
    """
    kinds: dict[str, list[tuple[Any, keras.Variable]]] = {}
    for slot, weight in weights_of_slots(slots, weights):
        if weight is not None:
            kind = slot.path.removesuffix(slot.name) + slot.name.removeprefix(weight.path.replace("/", "_"))
            kinds.setdefault(kind, []).append((slot, weight))
    copying = (pairs for pairs in kinds.values() if _are_copies(pairs))
    return [pair for pairs in copying for pair in pairs]


def _are_copies(pairs: Sequence[tuple[Any, keras.Variable]]) -> bool:
    values = [(as_tf_variable(slot).numpy(), as_tf_variable(weight).numpy()) for slot, weight in pairs]
    is_any = any(weight.any() for _, weight in values)  # slots of zeros are no copies of a bias that begins as zeros
    return is_any and all(np.array_equal(slot, weight) for slot, weight in values)


def _values(stored: Any, path: str, source: str) -> np.ndarray:
    """Read what a source has for the weight at `path`."""
    if isinstance(stored, np.ndarray):
        if stored.dtype.kind in "biufc" or stored.dtype == tf.bfloat16.as_numpy_dtype:
            return stored
        raise UserError(f"{_WHERE}: {source}: {path} is {stored.dtype} there; expected numbers.")
    with opening(f"{_WHERE}: {source}", "a file of Keras 3"):
        # As Keras saves it, since HDF5 has no such type.
        dtype = tf.bfloat16.as_numpy_dtype if stored.attrs.get("dtype") == "bfloat16" else stored.dtype
        if np.dtype(dtype).kind in "biufc" or dtype is not stored.dtype:
            return np.array(stored, dtype=dtype)
    raise UserError(f"{_WHERE}: {source}: {path} is {stored.dtype} there; expected numbers.")


def _from_run(checkpoint: Checkpoint, wanted: Shapes) -> tuple[Arrays, list[str]]:
    """Return the weights of a checkpoint, or their moving averages if it holds any; the paths of those LoRA changed.

    wanted: the shapes of the model's weights by path, without those of init_exclude.
    """
    try:
        arrays = read_arrays(checkpoint)
    except Damaged as error:
        raise UserError(f"{_WHERE}: {checkpoint.folder}: {error}.") from error
    weights: Arrays = {}
    for kind in ("model/", "ema/"):
        weights |= {name.removeprefix(kind): value for name, value in arrays.items() if name.startswith(kind)}
    return weights, _merge_lora(weights, wanted)


def _merge_lora(weights: Arrays, wanted: Shapes) -> list[str]:
    """Add what LoRA learned to the weights beside it, unless the model takes it as it is; return their paths."""
    merged = []
    for found in [found for path in weights if (found := _LORA.search(path)) and found[2] == "a"]:
        first, layer = found.string, found.string[: found.start()]
        changed, second = (layer + found.expand(name) for name in (r"/\1\3", r"/lora_\1_b\3"))
        if not {changed, second} <= weights.keys():
            continue  # a user's own layer has such a name
        if not all(wanted.get(path) == weights[path].shape for path in (first, second)):
            if weights[changed].dtype.kind in "biu":
                raise UserError(
                    f"{_WHERE}: {changed} is {weights[changed].dtype} there, and what LoRA learned cannot be added to "
                    "that: export that run to a .keras file, and begin with the file."
                )
            # Keras adds (alpha / rank) · a b, and alpha is the rank unless enable_lora is given another.
            weights[changed] = weights[changed] + weights.pop(first) @ weights.pop(second)
            merged.append(changed)
    return merged


def _changed_vocabularies(checkpoint: Checkpoint, held: Mapping[str, str]) -> Iterator[str]:
    then = checkpoint.facts.contents
    of_words = {name: value for name, value in held.items() if name.startswith((TABLE, VOCABULARY))}
    if changed := [name for name, value in of_words.items() if then.get(name, value) != value]:
        yield (
            f"there is another {listed(changed)} than in that run, so weights taken, such as an Embedding's, may "
            "stand for other words. Give the model those of then, or leave such weights out by model.init_exclude."
        )


def _guessed_lora(checkpoint: Checkpoint, merged: Sequence[str]) -> Iterator[str]:
    patterns = checkpoint.facts.setting("model.lora")
    layers = {path: path.rpartition("/")[0] for path in merged}
    if guessed := [path for path, layer in layers.items() if not any(re.search(each, layer) for each in patterns)]:
        yield (
            f"what LoRA learned is added to {listed(guessed)} as if enable_lora had been given no lora_alpha. If it "
            "was given one, export that run to a .keras file and begin with the file."
        )


def _changed_classes(checkpoint: Checkpoint, class_names: ClassNames) -> Iterator[str]:
    advice = "If the task is the same, give it the classes of then; if not, leave the head out by model.init_exclude."
    try:
        check_same_classes(checkpoint.facts.class_names, "that run", class_names, "data.train", advice)
    except UserError as error:  # another task may have as many classes
        yield str(error)


def _from_function(name: str) -> Arrays:
    """Call a user's function: () → a keras.Model, or arrays by the paths of weights."""
    function: Callable[[], Any] = load_function(name, _WHERE)
    try:
        with names_numbered_as_at_first():  # as those of the model were
            result = function()
    except Exception as error:  # a user's function may raise anything
        text = one_line(error)
        raise UserError(f"{_WHERE}: {name}: {type(error).__name__}: {text}{raised_at(error)}") from error
    if isinstance(result, keras.Model):
        return {path: variable.numpy() for path, variable in by_path(result.weights).items()}
    if not isinstance(result, Mapping):
        kind = type(result).__name__
        raise UserError(f"{_WHERE}: {name} must return a keras.Model or arrays by path; it returned {kind}.")
    return {str(path): np.asarray(value) for path, value in result.items()}


def _from_file(path: str, model: keras.Model, wanted: Shapes, files: ExitStack) -> dict[str, Any]:
    """Return the datasets of a Keras file, by the paths of the weights of this model where it has the same layers.

    A file knows its layers by name, and the weights of each by number. Others are named `layer/number`.
    """
    unique = dict(zip(map(id, model.weights), by_path(model.weights), strict=True))
    in_model = [
        (layer, [unique.get(id(weight), weight.path) for weight in weights])
        for layer, weights in _weights_by_layer(model, (), set())
    ]
    paths = dict(in_model)
    arrays: dict[str, Any] = {}
    layers = _layers_in(path, files)
    around = _place_of([layer for layer, _ in layers], list(paths))
    layers = [(f"{around}{layer}", values) for layer, values in layers]
    there, here = (Counter(layer for layer, _ in found) for found in (layers, in_model))
    concerned = {layer for layer, names in in_model if wanted.keys() & names}
    if twice := [layer for layer in there & here if (there | here)[layer] > 1 and layer in concerned]:
        raise UserError(
            f"{_WHERE}: {path}: several layers are called {listed(twice)}; a file of Keras tells layers apart by name. "
            "Give them different names, leave them out by model.init_exclude, or begin with a run or a function."
        )
    for layer, values in layers:
        names = paths.get(layer, [f"{layer}/{number}" for number in range(len(values))])
        if len(names) != len(values):
            raise UserError(
                f"{_WHERE}: {path}: layer {layer} has {len(values)} weights there and {len(names)} in the model. "
                "Give the layer another name."
            )
        arrays |= dict(zip(names, values, strict=True))
    return arrays


def _place_of(layers: Sequence[str], in_model: Sequence[str]) -> str:
    """Return the beginning of the names of the model's layer that has all layers of a file, as a backbone's; else "".

    layers: names in the file. in_model: those of the model's layers.
    """
    if {*layers} & {*in_model}:
        return ""
    ends = f"/{layers[0]}"
    places = [name.removesuffix(layers[0]) for name in in_model if name.endswith(ends)]
    whole = [place for place in places if {f"{place}{layer}" for layer in layers} <= {*in_model}]
    return whole[0] if len(whole) == 1 else ""


def _weights_by_layer(
    layer: keras.Layer, names: tuple[str, ...], visited: set[int]
) -> Iterator[tuple[str, list[keras.Variable]]]:
    """Yield each layer that has weights itself, without those of the layers in it: its names and its weights.

    names: of `layer` and those around it, without the model. visited: ids of layers to leave out.
    """
    visited.add(id(layer))
    children = list(_layers_of(layer))
    if weights := [weight for weight in _own_weights(layer, children) if not is_lora(weight.path)]:
        yield "/".join(names), weights
    for child in children:
        if id(child) not in visited:
            yield from _weights_by_layer(child, (*names, child.name), visited)


def _layers_of(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Yield the layers in a layer as Keras saves them: a model's own list first, then by attribute, private ones last.

    So a layer that several hold gets the same name as in a file.
    """
    if isinstance(layer, keras.Sequential) or hasattr(layer, "operations"):
        yield from layer.layers
    attributes = vars(layer).keys() - _attributes_of_any_layer()
    for name in sorted(attributes, key=lambda name: (name.startswith("_"), name)):
        yield from parts_in(vars(layer)[name], keras.Layer)


@functools.cache
def _attributes_of_any_layer() -> frozenset[str]:
    return frozenset(dir(keras.layers.Layer(name="any")))  # with a name, since Keras counts those that it gives


def _own_weights(layer: keras.Layer, children: Sequence[keras.Layer]) -> list[keras.Variable]:
    """Return the weights that Keras saves for a layer itself, in the order of a file."""
    stored: dict[str, Any] = {}
    with suppress(Exception):  # a user's method may raise anything
        layer.save_own_variables(stored)
        weights = [stored[key] for key in sorted(stored, key=_as_in_a_file)]
        if {id(weight) for weight in weights} <= {id(weight) for weight in layer.weights}:
            return weights
    # It saves values that it makes of weights, or cannot be saved.
    of_children = {id(weight) for child in children for weight in child.weights}
    return [weight for weight in layer.weights if id(weight) not in of_children]


def _layers_in(path: str, files: ExitStack) -> list[tuple[str, list[Any]]]:
    """Return the layers of a Keras file, as `_weights_by_layer` names them, and their datasets. Raises UserError."""
    where, kind = f"{_WHERE}: {path}", "a file of Keras 3"
    with opening(where, kind):
        file: Any = files.enter_context(Path(path).open("rb"))  # noqa: SIM115
        if path.endswith(".keras"):
            archive = files.enter_context(zipfile.ZipFile(file))
            file = files.enter_context(archive.open(_IN_KERAS_FILE))
        opened, items = open_hdf5(file, where, kind)
        files.callback(opened.close)
        layers = list(_stored_layers(items))
    if not layers:
        raise UserError(f"{where}: holds no weights as Keras 3 saves them.")
    return layers


def _stored_layers(items: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each layer's names and its datasets. items: the groups and datasets of the file, by path."""
    weights: dict[str, dict[str, Any]] = {}
    for path, item in items.items():
        layer, _, key = path.rpartition("/vars/") if "/vars/" in path else ("", "", path.removeprefix("vars/"))
        is_in_vars = path == f"{layer}/vars/{key}".lstrip("/") and "/" not in key and "vars" not in layer.split("/")
        if is_in_vars and isinstance(item, h5py.Dataset) and layer.partition("/")[0] not in _NOT_THE_MODEL:
            weights.setdefault(layer, {})[key] = item
    for layer, stored in weights.items():
        paths = itertools.accumulate(layer.split("/") if layer else (), "{}/{}".format)
        # A group without `vars` is a list of layers. Keras before 3.10 did not store names.
        names = [_name(items[f"{group}/vars"], group) for group in paths if f"{group}/vars" in items]
        yield "/".join(names), [stored[key] for key in sorted(stored, key=_as_in_a_file)]


def _as_in_a_file(key: str) -> tuple[int, str]:
    """Order the names of a layer's weights, most of which are numbers, which h5py sorts as strings."""
    return len(key), key


def _name(weights: Any, group: str) -> str:
    name = weights.attrs.get("name")
    return name if isinstance(name, str) else group.rpartition("/")[2]
