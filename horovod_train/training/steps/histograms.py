"""What TensorBoard shows of a step besides scalars: histograms, and the graph of a step. Writes nothing.

Histograms of weights, outputs of chosen layers, and gradients averaged over ranks are computed by a separate function
on separate records. So the compiled step and the state of the run do not change: dropout seeds, BatchNorm statistics,
metrics, the place in the data. The graph is traced again and never run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import suggest
from horovod_train.data.batch_source import Batch, StepSize
from horovod_train.distributed.group import as_tf_variable
from horovod_train.errors import UserError
from horovod_train.keras_seams import results_noted
from horovod_train.training.steps.shares import IF_ANY
from horovod_train.training.steps.step import TrainStep
from horovod_train.training.sync import by_path

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


class Summaries:
    """Uses the same records each time: from one histogram to the next only the weights change."""

    def __init__(
        self, train_step: TrainStep, read: Callable[[], Batch], size: StepSize, activations: Mapping[str, Any]
    ) -> None:
        """read: returns this rank's part of a step of a size; called once. activations: name to show → layer's name."""
        self.train_step, self._read, self._size = train_step, read, size
        self.layers = find_layers(train_step.state.model, activations)
        self._batch: Batch | None = None
        self._run: Any = None
        self._traces = -1  # of the step when `_run` was made

    def compute(self) -> dict[str, tf.Tensor]:
        """Collective: return the values of each histogram, any shape; by name, as `hidden1/kernel`.

        `gradients/hidden1/kernel` is of the mean over the records of all ranks, before clipping; a sparse one gives the
        rows that it contains. Outputs are this rank's own.
        """
        if self._batch is None:
            self._batch = self._read()
        compiles = self._traces != self.train_step.traces  # none before, or other variables are trained
        if compiles:
            self._run = tf.function(self._gradients_and_outputs, autograph=False)
            self._traces = self.train_step.traces
        heartbeat = self.train_step.rows.group.heartbeat
        with heartbeat.phase("compile", "the histograms") if compiles else nullcontext():
            gradients, outputs = self._run(self._batch)
        weights = by_path(self.train_step.state.model.weights)
        names = {variable.ref(): name for name, variable in weights.items()}
        trained = [as_tf_variable(variable) for variable in self.train_step.state.model.trainable_variables]
        values: dict[str, Any] = {name: variable for name, variable in weights.items() if variable.dtype.is_floating}
        for variable, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                values[f"gradients/{names[variable.ref()]}"] = gradient
        for name, tensors in outputs.items():
            for number, output in enumerate(tensors):
                values[name if len(tensors) == 1 else f"{name}/{number}"] = output
        return values

    def _gradients_and_outputs(self, batch: Batch) -> tuple[list[Any], dict[str, list[tf.Tensor]]]:
        """Collective: compute what a step computes, and leave everything as it was."""
        step, update = self.train_step, self.train_step.update
        outputs: dict[str, list[tf.Tensor]] = {name: [] for name in self.layers}
        by_optimizer = step.gradients(batch, self._size, _noting_outputs(self.layers, outputs))
        combined: dict[Any, Any] = {}
        for call, gradients in by_optimizer.items():
            scale = update.optimizers.by_path[call.partition("#")[0]].scale_loss(tf.constant(1.0))
            whole = update.exchange.combine_each(gradients, f"histograms.{call}")
            for variable, gradient in zip(update.variables[call], whole, strict=True):
                if gradient is not None:
                    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                    combined[variable.ref()] = tf.cast(values, tf.float32) / scale
        trained = [as_tf_variable(variable) for variable in step.state.model.trainable_variables]
        real = batch.ids >= 0
        return (
            [combined.get(variable.ref()) for variable in trained],
            {name: [_without_padding(output, real) for output in tensors] for name, tensors in outputs.items()},
        )


def find_layers(model: keras.Model, activations: Mapping[str, Any]) -> dict[str, keras.Layer]:
    """Map each name to show to its layer. Raises UserError if the model has no layer of that name."""
    known = dict(_layers(model))
    for label, name in activations.items():
        if name not in known:
            raise UserError(
                f"log.activations.{label}: the model has no layer {name!r}; {suggest(str(name), list(known))}"
            )
    return {label: known[name] for label, name in activations.items()}


def _layers(model: keras.Model, prefix: str = "") -> Iterator[tuple[str, keras.Layer]]:
    """Yield all layers by name; those of a model inside a model as `inner/layer`."""
    for layer in model.layers:
        yield f"{prefix}{layer.name}", layer
        if isinstance(layer, keras.Model):
            yield from _layers(layer, f"{prefix}{layer.name}/")


def _noting_outputs(
    layers: Mapping[str, keras.Layer], noted: Mapping[str, list[tf.Tensor]]
) -> AbstractContextManager[None]:
    """Add what the layers return inside the block to `noted`: each tensor of each call, in every kind of model."""

    def note(layer: keras.Layer, outputs: Any) -> None:
        tensors = [tensor for tensor in tf.nest.flatten(outputs) if isinstance(tensor, tf.Tensor)]
        for name in [name for name, each in layers.items() if each is layer]:
            noted[name] += [tensor for tensor in tensors if tensor.dtype.is_floating]

    return results_noted(layers.values(), "call", note)


def _without_padding(output: tf.Tensor, real: tf.Tensor) -> tf.Tensor:
    has_rows = output.shape.rank and output.shape[0] == real.shape[0]
    return tf.boolean_mask(output, real) if has_rows else output


def check_names(model: keras.Model, names: Mapping[str, Any]) -> None:
    """Raise UserError if `log.graph_names` has a part that does not exist, or a name that is not valid."""
    known = [*PARTS, model.name, *(layer.name for layer in model.layers)]
    for part, name in names.items():
        if part not in known:
            raise UserError(f"log.graph_names.{part}: the graph has no such part; {suggest(part, known)}")
        if name is not None and not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9.][\w./-]*", name)):
            raise UserError(
                f"log.graph_names.{part}: expected a name of letters, digits and _ - . /, or null; received {name!r}."
            )


def draw_step(
    train_step: TrainStep, batch: Batch, size: StepSize, *, rank: int, names: Mapping[str, str | None]
) -> Any:
    """Return the GraphDef of one step of a size on a batch like `batch` (of tf.TensorSpec).

    Its top-level folds are `input_data`, `rank_N` with the model and its layers, `exchange`, `update_parameters`, and
    the variables of each layer. names: other names for these or for layers; None: remove the fold, keep its content.
    """

    def one_step(batches: Any) -> tf.Tensor:
        with tf.name_scope("input_data"):
            batch = train_step.rows.scaled(next(batches))
        return train_step.train_on(batch, size)

    traced = tf.function(one_step, autograph=False).get_concrete_function(tf.data.IteratorSpec(batch))
    model = train_step.state.model
    return fold(
        show_branches(traced.graph.as_graph_def()),
        variables=_variables(train_step, traced),
        names={"rank": f"rank_{rank}", "train_step": None} | dict(names),
        layers={model.name, *(layer.name for layer in model.layers)},
    )


def _variables(train_step: TrainStep, traced: Any) -> dict[str, str]:
    """Map each node that stands for a variable to the variable's name under its fold."""
    state = {id(variable.handle): name for name, variable in train_step.state.variables().items()}
    others = {id(variable.handle): f"counters/{variable.name.split(':')[0]}" for variable in traced.graph.variables}
    names = {}
    handles = traced.captured_inputs
    for handle, node in zip(handles, traced.inputs[-len(handles) :], strict=True):
        name = (others | state).get(id(handle))
        if name:
            name = name.removeprefix("model/")
            for prefix, part in (("optimizer/", "update_parameters/"), ("ema/", "moving_average/")):
                name = part + name.removeprefix(prefix) if name.startswith(prefix) else name
            names[node.op.name] = re.sub(r"[^\w./\\-]", "_", name)
    return names


def fold(graph: Any, *, variables: Mapping[str, str], names: Mapping[str, str | None], layers: Iterable[str]) -> Any:
    """Copy a GraphDef with other node names.

    variables: node → name, for nodes that hold variables. names: other names for single scopes; None: remove the scope.
    layers: Keras opens a layer's scope twice, so that TensorFlow calls it `hidden1_1`; here it is `hidden1`.
    Gradients, which TensorFlow keeps apart, move into the fold of the rank that computes them. A step that is left out
    where it has no records is shown as others are.
    """
    prefixes = {prefix for node in graph.node for prefix in _prefixes(node.name)}
    plain = _plain(prefixes, set(layers))
    taken: set[str] = set()
    new = {}
    for node in graph.node:
        parts = [plain[prefix] for prefix in _prefixes(node.name)]
        if parts[:2] == [IF_ANY, "then"]:
            parts = [part for part in parts[2:] if part != IF_ANY]
        if parts[:2] == ["gradient_tape", "rank"]:
            parts[:2] = ["rank", "gradient_tape"]
        if "moving_average" in parts:  # covers all weights, so not part of one update
            parts = parts[parts.index("moving_average") :]
        if node.name in variables:
            parts = variables[node.name].split("/")
        path = "/".join(new_part for part in parts if (new_part := names.get(part, part)))
        new[node.name] = _unused(path or node.name, taken)
        taken.add(new[node.name])
    copy = deepcopy(graph)
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
    copy = deepcopy(graph)
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
        node_copy = deepcopy(inner)
        node_copy.name = names[inner.name]
        for index, source in enumerate(inner.input):
            control, name = ("^" if source.startswith("^") else ""), source.lstrip("^").split(":")[0]
            node_copy.input[index] = f"{control}{names[name]}"
        nodes.append(node_copy)
    return nodes


def _prefixes(name: str) -> list[str]:
    return list(itertools.accumulate(name.split("/"), "{}/{}".format))


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
