"""Traces a model's step on the shapes of a batch, before training: does it fit, and what does it use?

Finds what a resumed run and the other ranks would not have: random draws, and variables that the step assigns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import raised_at
from horovod_train.data.batch_source import Batch
from horovod_train.distributed.allreduce import in_step
from horovod_train.distributed.group import as_tf_variable
from horovod_train.distributed.layer_contents import layers_inside
from horovod_train.errors import RunError, UserError, kind_of, one_line
from horovod_train.keras_seams import method_replaced, results_noted
from horovod_train.output.metrics import ABOUT
from horovod_train.training.steps.figures import Source, flat_logs, metrics_in, noting_results, sources_of
from horovod_train.training.steps.shares import Data

_DRAW_NOTHING = ("CudnnRNN", "ComputeAccidentalHits")
"""How operations begin that have a seed, and draw nothing as Keras calls them."""
_CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")
"""Operations whose first input is not handed to their functions."""
_LOOPS = ("While", "StatelessWhile")
_KINDS = {
    **dict.fromkeys(("Add", "AddV2", "AddN", "Sub", "AssignAddVariableOp", "AssignSubVariableOp"), "sum"),
    **dict.fromkeys(("ResourceScatterAdd", "ResourceScatterSub"), "sum"),
    "Maximum": "max",
    "Minimum": "min",
}
"""How a variable is changed by an operation, or by the assignment of its result: see updates_in."""


@dataclass(frozen=True)
class Tried:
    """What a step turned out to be."""

    sources: dict[str, Source]
    """Of what it returns, by name."""
    reads: list[tf.Variable]
    """The variables that it reads or changes."""
    assigns: list[tf.Variable]
    """Those that it changes, without its optimizers."""
    updates: dict[int, str]
    """How it changes them, by the id of their handle; see updates_in."""
    calls_compute_loss: bool
    calls_compute_metrics: bool
    shape_of_losses: list[Any] | None = None
    """The shape of what `compute_loss` returned, if that is not one number."""
    added_losses: Mapping[str, list[Any]] = field(default_factory=dict)
    """The shapes of what `add_loss` was given that is not one number, by the name of the layer."""
    named_by_graph: Sequence[str] = ()
    """Operations of Horovod in it that have names by which ranks with other graphs do not find each other."""


def try_step(
    model: keras.Model,
    method: str,
    spec: Any,
    data_of: Callable[[Any], Data],
    where: str,
    applied: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tried:
    """Trace model.METHOD on data of tf.TensorSpecs, without computing. Raises UserError.

    where: begins the message. data_of: what the step gets of the records. applied: the context in which optimizers only
    note that they are applied.
    """
    trials: list[dict[str, Source]] = []
    losses: list[Any] = []
    several: list[Any] = []
    figures: list[Any] = []
    added: dict[str, list[Any]] = {}

    def trace(records: Any) -> None:
        with (
            applied(),
            noting_results(metrics_in(model)) as source_of,
            noting_loss(model, losses.append, several.append),
            _refusing_pairs(metrics_in(model)),
            results_noted([model], "compute_metrics", lambda _, values: figures.append(values), scope="metrics"),
            _noting_added_losses(model, added),
        ):
            data = data_of(records)
            with in_step(tf.constant(True)):
                logs = getattr(model, method)(data)
            _check_logs(logs, method, where)
            trials[:] = [sources_of(logs, source_of)]

    def traced() -> Any:
        return tf.function(trace, autograph=False).get_concrete_function(spec)

    variables_before = [len(metric.variables) for metric in metrics_in(model)]
    try:
        function = traced()
        if [len(metric.variables) for metric in metrics_in(model)] != variables_before:
            function = traced()  # the first trace has made metrics, whose results it has not noted
    except RunError:
        raise
    except Exception as error:  # a user's step may raise anything
        raise UserError(_unfit(spec, method, where, error)) from error
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    _check_draws(nodes, method, where)
    _refuse_text(nodes, spec, method)
    updates = updates_in(function)
    # Exchanges of Horovod that find those of other ranks by their whole names.
    named = [node for node in nodes if "ignore_name_scope" in node.attr and not node.attr["ignore_name_scope"].b]
    return Tried(
        trials[0],
        list(function.variables),
        [variable for variable in function.variables if id(variable.handle) in updates],
        updates,
        bool(losses),
        bool(figures),
        list(several[0].shape) if several else None,
        added,
        sorted({node.op for node in named}),
    )


def make_metrics(model: keras.Model, spec: Any, data_of: Callable[[Any], Data]) -> None:
    """Have Keras make the metrics that a model was compiled with, which it makes when it has a batch and its outputs.

    TensorFlow traces a function that makes variables twice. So metrics are made in a function of their own, which takes
    the model's outputs: neither the forward pass nor the trial is traced twice.
    """

    def make(records: Any, outputs: Any) -> None:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data_of(records))
        model.compute_loss(x, y, outputs, weights)
        model.compute_metrics(x, y, outputs, weights)

    # What is wrong with the model, its losses or metrics, the trial says.
    with suppress(Exception):
        tf.function(make, autograph=False).get_concrete_function(spec, try_outputs(model, spec.inputs, ""))


def _refuse_text(nodes: Sequence[Any], spec: Any, method: str) -> None:
    """Raise UserError for a step that takes text for numbers, which TensorFlow notices only when it computes."""
    parts = {"targets": spec.targets, "inputs": spec.inputs} if isinstance(spec, Batch) else {"dataset": spec}
    texts = [key for key, part in parts.items() if any(each.dtype == tf.string for each in tf.nest.flatten(part))]
    if not texts:
        return
    if any(node.op == "Cast" and node.attr["SrcT"].type == tf.string.as_datatype_enum for node in nodes):
        tensors = parts[texts[0]]
        names = [name for name, each in tensors.items() if each.dtype == tf.string] if isinstance(tensors, dict) else []
        raise UserError(
            f"data.{texts[0]}: {', '.join(names) or 'the values'} must be numbers, because the model's {method} "
            "computes with them; the records hold text. Store numbers, such as 0 and 1 for two classes."
        )


def try_outputs(model: keras.Model, inputs: Any, where: str) -> Any:
    """Return the outputs of a model on inputs of tf.TensorSpecs, as specs in their structure. Raises UserError."""
    forward = tf.function(lambda records: model(records, training=False), autograph=False)
    try:
        function = forward.get_concrete_function(inputs)
    except Exception as error:
        raise UserError(_unfit(inputs, "call", where, error)) from error
    return tf.nest.map_structure(lambda value: tf.TensorSpec(value.shape, value.dtype), function.structured_outputs)


def noting_loss(
    model: keras.Model, note: Callable[[Any], None], note_several: Callable[[Any], None] = lambda loss: None
) -> AbstractContextManager[None]:
    """Inside the block, pass what `compute_loss` returns to `note`, or to `note_several` if it is not one number."""

    def note_tensor(_: keras.Model, loss: Any) -> None:
        if tf.is_tensor(loss):
            (note_several if loss.shape.rank else note)(loss)

    return results_noted([model], "compute_loss", note_tensor, scope="loss_function")


def _noting_added_losses(model: keras.Model, shapes: dict[str, list[Any]]) -> AbstractContextManager[None]:
    """Inside the block, put the shape of each loss that a layer adds, and that is not one number, into the dict."""

    def noting(layer: keras.Layer, add_loss: Callable[[Any], None]) -> Callable[[Any], None]:
        def add_and_note(loss: Any) -> None:
            add_loss(loss)
            for each in keras.tree.flatten(loss):
                if each.shape.rank and {*each.shape} - {1}:
                    shapes[layer.name] = list(each.shape)

        return add_and_note

    return method_replaced(layers_inside(model), "add_loss", noting)


def _takes_no_labels(metric: keras.metrics.Metric) -> bool:
    """Return whether it is one of Keras' metrics that take labels without an error, for other figures in each batch."""
    is_of_keras, name = type(metric).__module__.startswith("keras."), type(metric).__name__
    is_categorical = "Categorical" in name and "Sparse" not in name
    of_class = getattr(metric, "class_id", None) is not None  # Precision and Recall
    return is_of_keras and (is_categorical or of_class or not getattr(metric, "sparse_y_true", True))


def _refusal_of_labels(metric: keras.metrics.Metric, shapes: tuple[list[Any], list[Any]]) -> ValueError:
    """Return the error for a metric that takes no labels [n] beside outputs [n, classes]. shapes: of these two."""
    name = type(metric).__name__
    advice = "Leave it out, or store one-hot targets, with loss: categorical_crossentropy"
    if hasattr(metric, "sparse_y_pred"):
        advice = f"For labels there is {name.removeprefix('OneHot')}, with its option sparse_y_pred: false"
    elif name == "Accuracy" or hasattr(keras.metrics, f"Sparse{name}"):
        advice = f"For labels there is {'SparseCategoricalAccuracy' if name == 'Accuracy' else f'Sparse{name}'}"
    return ValueError(
        f"metric {metric.name} takes targets of the shape of the outputs; it gets targets {shapes[0]} and outputs "
        f"{shapes[1]}. {advice}"
    )


def _refusing_pairs(metrics: Sequence[keras.metrics.Metric]) -> AbstractContextManager[None]:
    """Inside the block, raise ValueError for a metric that compares each record with all others, or takes no labels.

    Targets [n] and outputs [n, 1] become [n, n] as NumPy's rules have it. Keras' own metrics and losses add the axis.
    """

    def refusing(metric: keras.metrics.Metric, update_state: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update_state)
        def update_and_check(*args: Any, **kwargs: Any) -> Any:
            compared = [*args, *(value for name, value in kwargs.items() if name != "sample_weight")][:2]
            before = len(tf.compat.v1.get_default_graph().get_operations())
            of_labels = _label_and_outputs(compared)
            if of_labels and _takes_no_labels(metric):
                raise _refusal_of_labels(metric, of_labels)
            try:
                result = update_state(*args, **kwargs)
            except ValueError as error:
                if of_labels and not getattr(metric, "metrics", None):
                    raise _refusal_of_labels(metric, of_labels) from error
                raise
            if len(compared) == 2 and (shapes := _paired(compared[0], compared[1], before)):
                raise ValueError(
                    f"metric {metric.name} compares each record with all others: it gets targets {shapes[0]} and "
                    f"outputs {shapes[1]}; reshape one of them to the shape of the other"
                )
            return result

        return update_and_check

    return method_replaced(_with_inner(metrics), "update_state", refusing)


def _label_and_outputs(compared: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """Return the shapes of targets and outputs if those are labels of classes, and these a value for each class."""
    if len(compared) != 2 or not all(tf.is_tensor(value) for value in compared):
        return None
    targets, outputs = ([*value.shape] for value in compared)
    are_labels = len(outputs) > 1 and outputs[-1] != 1 and targets in (outputs[:-1], [*outputs[:-1], 1])
    return (targets, outputs) if are_labels else None


def _with_inner(metrics: Sequence[keras.metrics.Metric]) -> Iterator[keras.metrics.Metric]:
    """Yield metrics and those that they hold, as the one does that `compile` makes of several."""
    for metric in metrics:
        yield metric
        inner = getattr(metric, "metrics", None)
        yield from _with_inner([each for each in inner or () if isinstance(each, keras.metrics.Metric)])


def _paired(targets: Any, outputs: Any, first: int) -> tuple[list[Any], list[Any]] | None:
    """Return the shapes of targets and outputs if an operation makes [n, n] of both; None if not.

    first: the number of the first operation of the graph to look at.
    """
    roots = [
        [tensor for tensor in tf.nest.flatten(value) if tf.is_symbolic_tensor(tensor)] for value in (targets, outputs)
    ]
    made_of: dict[str, frozenset[int]] = {}
    for side, tensors in enumerate(roots):
        for tensor in tensors:
            made_of[tensor.name] = made_of.get(tensor.name, frozenset()) | {side}
    for operation in tf.compat.v1.get_default_graph().get_operations()[first:]:
        sides = [made_of.get(tensor.name, frozenset()) for tensor in operation.inputs]
        made_of |= {tensor.name: frozenset().union(*sides) for tensor in operation.outputs}
        if len(operation.inputs) != 2 or {*sides} != {frozenset({0}), frozenset({1})}:
            continue
        ranks = [tensor.shape.rank for tensor in operation.inputs]
        column = next((tensor for tensor in operation.inputs if tensor.shape.rank == 2), None)
        if sorted(map(str, ranks)) != ["1", "2"] or column is None or column.shape[1] != 1 or column.shape[0] == 1:
            continue
        if any(tensor.shape.rank == 2 and tensor.shape[1] != 1 for tensor in operation.outputs):
            by_side = {side: list(tensor.shape) for (side,), tensor in zip(sides, operation.inputs, strict=True)}
            return by_side[0], by_side[1]
    return None


def _check_logs(logs: Any, method: str, where: str) -> None:
    if not isinstance(logs, dict) or not all(isinstance(name, str) for name in logs):
        raise UserError(f"{where}: {method} must return a dict of figures by name; it returned {type(logs).__name__}.")
    for name, value in flat_logs(logs).items():
        if name in ABOUT:
            raise UserError(f"{where}: {method} returns a figure named {name!r}, which is taken; give it another name.")
        if not hasattr(value, "shape") and not isinstance(value, int | float):
            raise UserError(f"{where}: {method} must return numbers; {name} is {type(value).__name__}.")


def _unfit(spec: Any, method: str, where: str, error: Exception) -> str:
    shown = (spec.inputs, spec.targets) if isinstance(spec, Batch) else spec
    shapes = tf.nest.map_structure(lambda each: f"{each.dtype.name}{each.shape}", shown)
    text, _, _ = str(error).partition("Arguments received by ")  # which Keras adds
    reason = one_line(text)[-400:] + raised_at(error)
    kind = "" if isinstance(error, ValueError) else f"{kind_of(error)}: "
    return f"{where}: the model's {method} does not fit records of {shapes}: {kind}{reason}"


def _check_draws(nodes: Sequence[Any], method: str, where: str) -> None:
    """Raise UserError if a step draws by TensorFlow's own generators. nodes: of its graph, and of functions in it."""
    drawn = sorted({node.op for node in nodes if "seed" in node.attr and not node.op.startswith(_DRAW_NOTHING)})
    if drawn:
        raise UserError(
            f"{where}: {method} draws by TensorFlow's {drawn[0]}, which a resumed run would not draw again. Use "
            "keras.random with seed=self.seed_generator, a keras.random.SeedGenerator that the model keeps."
        )


def check_variables(variables: Iterable[tf.Variable], known: Sequence[Any], does: str) -> None:
    """Raise UserError for a variable of a step that neither checkpoints nor the other ranks would have.

    does: of the variables, for the message, as "train_step uses".
    """
    names = {as_tf_variable(variable).ref() for variable in known}
    foreign = sorted(variable.name for variable in variables if variable.ref() not in names)
    if foreign:
        raise UserError(
            f"model.name: {does} variables that are not the model's: {', '.join(foreign[:3])}. Make them with "
            "add_weight, or keep the optimizer, layer or keras.random.SeedGenerator that has them as an attribute of "
            "the model; keras.random without seed= draws from a generator of Keras' own."
        )


def updates_in(function: Any) -> dict[int, str]:
    """Return how a concrete function changes variables, by the id of their handle: "sum", "max", "min" or "other".

    "sum": something is added to the variable; "max", "min": it becomes the larger or the smaller of itself and
    something. That does not depend on the variable. What a loop changes is "other".
    """
    graph = function.graph.as_graph_def()
    updates = _updates(graph.node, {each.signature.name: each for each in graph.library.function})
    captures = [(id(outer), inner.op.name) for outer, inner in function.graph.captures]
    return {handle: updates[name] for handle, name in captures if name in updates}


def _updates(nodes: Sequence[Any], functions: Mapping[str, Any]) -> dict[str, str]:
    """Return how nodes change resources, by the names of these: see updates_in."""
    inputs = {node.name: [name.partition(":")[0] for name in node.input] for node in nodes}
    by_name = {node.name: node for node in nodes}

    def without_casts(name: str) -> str:
        while name in by_name and by_name[name].op in ("Identity", "Cast", "Reshape"):
            name = inputs[name][0]
        return name

    def reads(name: str, resource: str) -> bool:
        node = by_name.get(without_casts(name))
        return node is not None and node.op == "ReadVariableOp" and inputs[node.name] == [resource]

    def changes(node: Any) -> Iterator[tuple[str, str, Sequence[str]]]:
        """Yield each resource that a node changes, how, and by which inputs."""
        given = inputs[node.name]
        if node.op == "AssignVariableOp":
            value = by_name.get(without_casts(given[1]))
            operands = inputs[value.name] if value is not None else []
            of_itself = [operand for operand in operands if reads(operand, given[0])]
            if value is None or not of_itself or (value.op == "Sub" and of_itself[0] != operands[0]):
                yield given[0], "other", []
            else:
                first = operands.index(of_itself[0])
                yield given[0], _KINDS.get(value.op, "other"), operands[:first] + operands[first + 1 :]
        elif _changes(node.op):
            yield given[0], _KINDS.get(node.op, "other"), given[1:]
        handed = given[1:] if node.op in _CONDITIONS else given
        for attribute in node.attr.values():
            for called in [attribute.func, *attribute.list.func]:
                if called.name in functions:
                    body = functions[called.name]
                    inside = _updates(body.node_def, functions)
                    for outer, argument in zip(handed, body.signature.input_arg, strict=False):
                        if argument.name in inside:
                            kind = "other" if node.op in _LOOPS else inside[argument.name]
                            yield outer, kind, [name for name in given if name != outer]

    found = [change for node in nodes for change in changes(node)]
    bits = {resource: 1 << number for number, resource in enumerate(dict.fromkeys(change[0] for change in found))}
    origins = dict(bits)  # of each node: the resources that it is computed from, a bit each
    for node in nodes:  # each comes after its inputs
        for name in inputs[node.name]:
            origins[node.name] = origins.get(node.name, 0) | origins.get(name, 0)
    kinds: dict[str, str] = {}
    for resource, kind, by in found:
        depends = any(origins.get(name, 0) & bits[resource] for name in by)
        kinds[resource] = kind if kinds.get(resource, kind) == kind and not depends else "other"
    return kinds


def _changes(op: str) -> bool:
    """Return whether an operation changes the variable that is its first input."""
    is_of_resource = op.startswith("Resource") and not op.startswith("ResourceGather")
    return is_of_resource or op.startswith(("Assign", "RngReadAndSkip", "RngSkip"))
