"""Finds in a traced function what a resumed run and the other ranks would not have: draws, and variables it assigns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from horovod_train.distributed.group import as_tf_variable
from horovod_train.errors import UserError

_RANDOM = (
    *("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "ParameterizedTruncatedNormal"),
    *("RandomGamma", "RandomPoissonV2", "RandomShuffle", "Multinomial"),
)
"""TensorFlow's operations whose numbers a resumed run does not draw again."""
_CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")
"""Operations whose first input is not handed to their functions."""


def check_draws(function: Any, name: str, where: str) -> None:
    """Raise UserError if a concrete function, called `name` in the message, draws by TensorFlow's own generators."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    drawn = sorted({node.op for node in nodes} & set(_RANDOM))
    if drawn:
        raise UserError(
            f"{where}: {name} draws by TensorFlow's {drawn[0]}, which a resumed run would not draw again. Use "
            "keras.random with seed=self.seed_generator, a keras.random.SeedGenerator that the model keeps."
        )


def check_variables(variables: Iterable[tf.Variable], known: Sequence[Any], does: str, where: str) -> None:
    """Raise UserError for a variable of a step that neither checkpoints nor the other ranks would have.

    does: of the variables, for the message, as "train_step uses".
    """
    names = {as_tf_variable(variable).ref() for variable in known}
    foreign = sorted(variable.name for variable in variables if variable.ref() not in names)
    if foreign:
        raise UserError(
            f"{where}: {does} variables that are not the model's: {', '.join(foreign[:3])}. Make them with "
            "add_weight, or keep the optimizer, layer or keras.random.SeedGenerator that has them as an attribute of "
            "the model; keras.random without seed= draws from a generator of Keras' own."
        )


def assigned_by(function: Any) -> list[tf.Variable]:
    """Return the variables that a concrete function changes, itself or in functions that it calls."""
    graph = function.graph.as_graph_def()
    changed = _changed(graph.node, {each.signature.name: each for each in graph.library.function})
    taken = zip(function.captured_inputs, function.inputs[-len(function.captured_inputs) :], strict=False)
    handles = {id(outer) for outer, inner in taken if inner.op.name in changed}
    return [variable for variable in function.variables if id(variable.handle) in handles]


def _changed(nodes: Iterable[Any], functions: Mapping[str, Any]) -> set[str]:
    """Return the names of the resources that nodes change."""
    changed = set()
    for node in nodes:
        inputs = [name.partition(":")[0] for name in node.input]
        if _changes(node.op):
            changed.add(inputs[0])
        handed = inputs[1:] if node.op in _CONDITIONS else inputs
        for attribute in node.attr.values():
            for called in [attribute.func, *attribute.list.func]:
                if called.name in functions:
                    body = functions[called.name]
                    inside = _changed(body.node_def, functions)
                    arguments = zip(handed, body.signature.input_arg, strict=False)
                    changed |= {outer for outer, argument in arguments if argument.name in inside}
    return changed


def _changes(op: str) -> bool:
    """Return whether an operation changes the variable that is its first input."""
    is_of_resource = op.startswith("Resource") and not op.startswith("ResourceGather")
    return is_of_resource or op.startswith(("Assign", "RngReadAndSkip", "RngSkip"))


def updates_in(function: Any) -> dict[int, str]:
    """Return how a concrete function changes variables, by the id of their handle: "sum", "max", "min" or "other".

    "sum": something is added to the variable; "max", "min": it becomes the larger or the smaller of itself and
    something. What happens in functions that it calls, such as branches, is left out.
    """
    outer = {inner.op.name: id(handle) for handle, inner in function.graph.captures}
    kinds: dict[int, str] = {}
    for operation in function.graph.get_operations():
        if operation.type not in ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"):
            continue
        handle = outer.get(operation.inputs[0].op.name)
        if handle is None:
            continue
        kind = "sum"
        if operation.type == "AssignVariableOp":
            kind = _kind_of_value(operation.inputs[1].op, operation.inputs[0].op.name)
        kinds[handle] = kind if kinds.get(handle, kind) == kind else "other"
    return kinds


_KINDS = {"Add": "sum", "AddV2": "sum", "Sub": "sum", "AddN": "sum", "Maximum": "max", "Minimum": "min"}


def _kind_of_value(operation: Any, variable: str) -> str:
    """Return what an assigned value is of the variable's former value: see updates_in."""
    operation = _without_casts(operation)
    read = [
        source for source in map(_without_casts, (value.op for value in operation.inputs)) if _reads(source, variable)
    ]
    return _KINDS.get(operation.type, "other") if read else "other"


def _without_casts(operation: Any) -> Any:
    while operation.type in ("Identity", "Cast", "Reshape") and operation.inputs:
        operation = operation.inputs[0].op
    return operation


def _reads(operation: Any, variable: str) -> bool:
    return operation.type == "ReadVariableOp" and operation.inputs[0].op.name == variable
