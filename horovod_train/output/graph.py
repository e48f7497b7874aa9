"""Renames the nodes of a TensorFlow graph so that TensorBoard folds it well. Knows graphs as data; builds none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

PARTS = (
    "input_data",
    "rank",
    "loss_function",
    "gradient_tape",
    "exchange",
    "update_parameters",
    "moving_average",
    "dropout_seeds",
    "watch",
)
"""Scopes of the compiled step, other than layers."""

_INPUT = re.compile(r"(\^?)([^:]+)(.*)")


def fold(graph: Any, *, variables: Mapping[str, str], names: Mapping[str, str | None], layers: Iterable[str]) -> Any:
    """Copy a GraphDef with other node names.

    variables: node → name, for nodes that hold variables. names: other names for single scopes; None: remove the scope.
    layers: Keras opens a layer's scope twice, so that TensorFlow calls it `hidden1_1`; here it is `hidden1`.
    Gradients, which TensorFlow keeps apart, move into the fold of the rank that computes them.
    """
    prefixes = {prefix for node in graph.node for prefix in _prefixes(node.name)}
    plain = _plain(prefixes, set(layers))
    taken: set[str] = set()
    new = {}
    for node in graph.node:
        parts = [plain[prefix] for prefix in _prefixes(node.name)]
        if parts[:2] == ["gradient_tape", "rank"]:
            parts[:2] = ["rank", "gradient_tape"]
        if "moving_average" in parts:  # covers all weights, so not part of one update
            parts = parts[parts.index("moving_average") :]
        if node.name in variables:
            parts = variables[node.name].split("/")
        path = "/".join(new_part for part in parts if (new_part := names.get(part, part)))
        new[node.name] = _unused(path or node.name, taken)
        taken.add(new[node.name])
    copy = type(graph)()
    copy.CopyFrom(graph)
    for node in copy.node:
        node.name = new[node.name]
        node.attr.pop("_class", None)  # lists nodes that must share a device
        for index, edge in enumerate(node.input):
            control, source, output = _INPUT.fullmatch(edge).groups()  # type: ignore[union-attr]
            node.input[index] = f"{control}{new[source]}{output}"
    return copy


def show_branches(graph: Any) -> Any:
    """Copy a GraphDef and add, below each condition and loop, the nodes of the functions that it calls.

    For display only: output indices of inner edges are dropped.
    """
    functions = {function.signature.name: function for function in graph.library.function}
    copy = type(graph)()
    copy.CopyFrom(graph)
    waiting = list(graph.node)
    while waiting:
        node = waiting.pop()
        for branch in ("then_branch", "else_branch", "body"):
            called = functions.get(node.attr[branch].func.name) if branch in node.attr else None
            if called is not None:
                inside = _inside(node, called, branch.removesuffix("_branch"))
                copy.node.extend(inside)
                waiting += inside
    return copy


def _inside(node: Any, called: Any, branch: str) -> list[Any]:
    sources = [source for source in node.input if not source.startswith("^")]
    parameters = [argument.name for argument in called.signature.input_arg]
    # A condition's first input selects the branch; its function does not get it.
    names = dict(zip(parameters, sources[len(sources) - len(parameters) :], strict=True))
    names |= {n.name: f"{node.name}/{branch}/{n.name.removeprefix(f'{node.name}/')}" for n in called.node_def}
    nodes = []
    for inner in called.node_def:
        node_copy = type(inner)()
        node_copy.CopyFrom(inner)
        node_copy.name = names[inner.name]
        for index, source in enumerate(inner.input):
            control, name = ("^" if source.startswith("^") else ""), source.lstrip("^").split(":")[0]
            node_copy.input[index] = f"{control}{names[name]}"
        nodes.append(node_copy)
    return nodes


def _prefixes(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]


def _plain(prefixes: Iterable[str], layers: set[str]) -> dict[str, str]:
    """Map each path to its last part, named like the layer or the part of the step."""
    plain = {prefix: prefix.rpartition("/")[2] for prefix in prefixes}
    taken = set(plain)
    # Shorter names first: `dense_1` becomes `dense`, which makes room for `dense_1_2`.
    for prefix in sorted(plain, key=lambda path: (len(path), path)):
        base = re.sub(r"_\d+$", "", prefix)
        last = base.rpartition("/")[2]
        if base != prefix and last in layers and base not in taken:
            taken.remove(prefix)
            taken.add(base)
            plain[prefix] = last
        elif last in PARTS:
            plain[prefix] = last
    return plain


def _unused(name: str, taken: set[str]) -> str:
    number, free = 0, name
    while free in taken:
        number, free = number + 1, f"{name}_{number + 1}"
    return free
