"""Where we hold on to Keras and tf.data: reads of what is not public, and objects that take another class.

A test fails if one of those attributes moves.
"""

from __future__ import annotations

import collections
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return what Keras' own `compile` was given, by argument; empty if it was not called.

    `get_compile_config` is public, but gives serialised copies, which lambdas and users' classes cannot have.
    """
    compiled = getattr(model, "_compile_config", None)
    arguments: Mapping[str, Any] = {} if compiled is None else compiled.config
    return {name: value for name, value in arguments.items() if value is not None}


def stateless(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer if it has no slots yet, else a new one of its config."""
    return type(optimizer).from_config(optimizer.get_config()) if optimizer.built else optimizer


def compiled_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Return the losses that `compute_loss` calls, made of what `compile` was given; none before its first call."""
    compiled = getattr(model, "_compile_loss", None)
    return [entry.loss for entry in getattr(compiled, "_flat_losses", None) or ()]


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Return the metric in which Keras' own `train_step` keeps the loss, also where `metrics` is overridden."""
    return model._loss_tracker


ADDED_LOSSES = "_losses"
"""The attribute of a layer in which it keeps what it has added to the loss of the last batch."""


def losses_weighed(model: keras.Model, rows: Any) -> AbstractContextManager[None]:
    """Inside the block: the losses that `compute_loss` keeps by output count by rows where no static shape tells them.

    Keras then counts each batch once. rows: float32 scalar.
    """

    def weighing(_: keras.metrics.Metric, update_state: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, sample_weight=None: update_state(value, rows if sample_weight is None else sample_weight)

    return method_replaced(getattr(getattr(model, "_compile_loss", None), "metrics", ()), "update_state", weighing)


def loss_in_training(model: keras.Model, x: Any, y: Any, outputs: Any, weights: Any) -> Any:
    """Return what `compute_loss` gives in Keras' own `train_step`, which says that it trains if that is asked for."""
    asks = "training" in inspect.signature(model.compute_loss).parameters
    return model.compute_loss(x, y, outputs, weights, **({"training": True} if asks else {}))


def class_axis(loss: Any) -> int:
    """Return the axis of outputs on which a loss has the classes, as it was given; -1 if it has no such option."""
    return int(getattr(loss, "_fn_kwargs", {}).get("axis", -1))


def mask_of(value: Any) -> tf.Tensor | None:
    """Return the mask that Keras keeps with a tensor; None if it has none."""
    return getattr(value, "_keras_mask", None)


def set_mask(value: Any, mask: tf.Tensor | None) -> None:
    """Give a tensor its mask again, which it loses where a tf.function returns it."""
    if mask is not None:
        value._keras_mask = mask


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the weights that a built optimizer is for, of which it takes gradients in this order if none are named."""
    return list(optimizer._trainable_variables)


def averages_of(optimizer: keras.optimizers.Optimizer) -> list[tuple[Any, Any]]:
    """Return each weight of a built optimizer with the average of it (use_ema), which one in a loss scale keeps."""
    averaging = getattr(optimizer, "inner_optimizer", optimizer)
    if not averaging.use_ema:
        return []
    pairs = zip(weights_of(averaging), averaging._model_variables_moving_average, strict=True)
    return [(weight, average) for weight, average in pairs if average is not None]


def weights_of_slots(slots: Sequence[Any], weights: Iterable[keras.Variable]) -> list[tuple[Any, Any]]:
    """Return each slot of an optimizer with the weight that Keras made it for; with None, one of no weight.

    slots: in the optimizer's order. Slots are named after the whole path of their weight. Two of Adafactor's three have
    only its last word, and stand before the third.
    """
    by_name = {weight.path.replace("/", "_"): weight for weight in weights}
    pairs: list[tuple[Any, Any]] = []
    weight = None
    for slot in reversed(slots):
        ends = [match.start() for match in re.finditer("_", slot.name)]
        name = next((slot.name[:end] for end in reversed(ends) if slot.name[:end] in by_name), None)
        if name is not None:
            weight = by_name[name]
        elif weight is not None and slot.name != weight.name:
            weight = None
        pairs.append((slot, weight))
    return pairs[::-1]


_MADE_IN_GRAPHS = re.compile("FlatMap|(?<!Directed)Interleave|GroupByWindow|Adapter")
"""Classes of datasets that do not tell Python all that they are made of."""


def unsure_order(dataset: tf.data.Dataset) -> str | None:
    """Return what may put a tf.data.Dataset in another order in each process; None if nothing is seen that does.

    A seed does not help: that of tf.random.set_seed, which counts too, may differ by process. Not seen is what a
    generator does, Python called in a map, or numbers drawn in a filter or by Dataset.random.
    """
    parts = set(_parts(dataset))
    names = " ".join(name for name, _ in parts)
    if re.search("Shuffle(Dataset|AndRepeat)", names):
        return "shuffle"
    if "DirectedInterleave" in names and "RandomDataset" in names:
        return "sample_from_datasets"
    if "DataService" in names:
        return "the data service"
    if dataset.options().deterministic is False or any(determinism == "false" for _, determinism in parts):
        return "deterministic=False"
    return None


_IN_MEMORY = re.compile("Tensor|TensorSlice|Zip|Take|Skip|Concatenate|Prefetch|Options|Repeat|Range")


def is_in_memory(dataset: tf.data.Dataset) -> bool:
    """Return whether a tf.data.Dataset gives rows of arrays as they are: to read it is cheap, and changes nothing.

    Not so with a map, a generator or files.
    """
    kind = re.fullmatch(r"_?(\w+)Dataset(V\d)?", type(dataset).__name__)
    is_here = kind is not None and _IN_MEMORY.fullmatch(kind[1]) is not None
    return is_here and all(is_in_memory(part) for part in dataset._inputs())


def is_of_batches(dataset: tf.data.Dataset) -> bool:
    """Return whether the elements of a tf.data.Dataset are batches of pairs, or triples, as far as it tells Python.

    Not windows over single values, of which a map makes pairs later.
    """
    return _holds_batches(dataset, _first_axes(dataset))


def _first_axes(dataset: tf.data.Dataset) -> set[Any]:
    """Return the lengths of the first axes of what a dataset gives; () for what has no axis."""
    shapes = [getattr(spec, "shape", tf.TensorShape([])) for spec in tf.nest.flatten(dataset.element_spec)]
    return {shape[0] if shape.rank else () for shape in shapes}


def _holds_batches(dataset: tf.data.Dataset, rows: set[Any]) -> bool:
    """rows: the first axes of what is made of this dataset in the end."""
    name, inputs = type(dataset).__name__, dataset._inputs()
    if "Unbatch" in name or _MADE_IN_GRAPHS.search(name):
        return False
    if "Batch" in name and isinstance(inputs[0].element_spec, tuple) and len(inputs[0].element_spec) in (2, 3):
        return _first_axes(dataset) == rows
    return any(_holds_batches(part, rows) for part in inputs)


def _parts(dataset: tf.data.Dataset) -> Iterator[tuple[str, str]]:
    """Yield (class or operation, "true", "false", "default" or "": is it deterministic) of all that is in a dataset."""
    name = type(dataset).__name__
    if not _MADE_IN_GRAPHS.search(name):
        yield name, getattr(dataset, "_deterministic", "")
        for part in dataset._inputs():
            yield from _parts(part)
        return
    # The graph has a copy of all arrays: not for every dataset.
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE.value,
    )
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    for node in [*graph.node, *(node for function in graph.library.function for node in function.node_def)]:
        yield node.op, node.attr["deterministic"].s.decode()


def name_counts() -> dict[str, int]:
    """Return how many names of each kind Keras has given in this process, which it changes; {} in a later Keras."""
    try:
        from keras.src.backend.common import global_state
    except ImportError:
        return {}  # then a second run has other names, and says so where it resumes
    kept: dict[str, int] = global_state.get_global_attribute(
        "object_name_uids", default=collections.defaultdict(int), set_to_default=True
    )
    return kept


@contextmanager
def names_continued() -> Iterator[None]:
    """After the block let Keras number names on from where it was before, or from where the block has left it."""
    counts = name_counts()
    before = dict(counts)
    try:
        yield
    finally:
        counts.update({name: max(count, counts.get(name, 0)) for name, count in before.items()})


def is_conditional(graph: tf.Graph, step: tf.Graph) -> bool:
    """Return whether a graph inside that of a step is computed if a condition holds: in a branch or a loop."""
    while graph is not step and graph is not None:
        if type(graph).__name__ in ("CondBranchFuncGraph", "WhileBodyFuncGraph"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def take_class(instance: Any, derived: type) -> None:
    """Make `derived` the object's class; Keras saves and loads the object as one of its present class.

    derived: a subclass of the object's class without data of its own; it gets that class's name, module and docstring.
    """
    base = type(instance)
    derived.__name__, derived.__qualname__ = base.__name__, base.__qualname__
    derived.__module__, derived.__doc__ = base.__module__, base.__doc__
    # Registered under the name of `base`, if that is registered; what is saved loads as `base`.
    name = keras.saving.get_registered_name(base)
    package, has_package, class_name = name.partition(">")
    original = keras.saving.get_registered_object(name)
    if has_package and original is not None:
        register = keras.saving.register_keras_serializable(package, class_name)
        register(derived)
        register(original)
    instance.__class__ = derived


@contextmanager
def method_replaced(
    objects: Iterable[Any], name: str, replacement: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Inside the block, each object has replacement(object, method) in place of its method of that name."""
    unique = list({id(each): each for each in objects}.values())
    own = [vars(each).get(name) for each in unique]  # of a block around this one
    for each in unique:
        setattr(each, name, replacement(each, getattr(each, name)))
    try:
        yield
    finally:
        for each, before in zip(unique, own, strict=True):
            delattr(each, name) if before is None else setattr(each, name, before)


def results_noted(
    objects: Iterable[Any], name: str, note: Callable[[Any, Any], None], scope: str | None = None
) -> AbstractContextManager[None]:
    """Inside the block, pass each object and what its method of that name returns to `note`.

    scope: of the names of the operations that the method makes, if they get one.
    """

    def noting(each: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_note(*args: Any, **kwargs: Any) -> Any:
            with tf.name_scope(scope) if scope else nullcontext():
                result = method(*args, **kwargs)
            note(each, result)
            return result

        return call_and_note

    return method_replaced(objects, name, noting)
