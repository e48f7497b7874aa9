"""Cuts a model into stages on several devices of one process: model parallelism. Does not choose the devices.

A stage is a run of layers in the model's own order. Its weights lie on its device, and so does what is computed from
them: forward, backward and update. Activations and their gradients cross between stages, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from horovod_train.errors import UserError


def cut_into_stages(model: keras.Model, cut_before: Sequence[str], devices: Sequence[str]) -> keras.Model:
    """A model of the same weights, names and function, whose stages lie on `devices`.

    cut_before: the names of the layers with which the second, third, … stage begins, in the model's order.
    devices: TensorFlow's names of them, such as "CPU:1"; one more than cuts. A layer that is itself a model is not cut.

    The layers are called what they were, so that checkpoints and saved models are those of the uncut model.
    Raises UserError for a model or a cut that this is not possible with.
    """
    if not cut_before:
        return model
    assert len(devices) == len(cut_before) + 1
    stage_of = _stages(model, cut_before)

    def clone(operation: Any) -> Any:
        try:
            copy = type(operation).from_config(operation.get_config())
        except (NotImplementedError, TypeError, ValueError) as error:
            kind = type(operation).__name__
            raise UserError(
                f"device.cut_before: layer {operation.name} cannot be made again from its config, which a cut needs; "
                f"give {kind} a get_config() that returns the arguments of its __init__."
            ) from error
        return _place(copy, f"/device:{devices[stage_of[operation.name]]}")

    cut = keras.models.clone_model(model, clone_function=clone)
    # Of `variables`, unlike `weights`, the seeds of dropout are a part.
    for variable, original in zip(cut.variables, model.variables, strict=True):
        variable.assign(original)
    return cut


def stage_lines(model: keras.Model) -> list[str]:
    """For each device that holds weights of the model, a line with the layers that do: as it is, not as planned."""
    layers: dict[str, list[str]] = {}
    for weight in model.weights:
        name = tf.DeviceSpec.from_string(weight.value.device)
        layer = weight.path.rsplit("/", 1)[0]
        found = layers.setdefault(f"{name.device_type}:{name.device_index}", [])
        if layer not in found:
            found.append(layer)
    return [f"weights on {device}: {_listed(names)}" for device, names in sorted(layers.items())]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{names[0]} … {names[-1]} ({len(names)} layers)"


def follow_inputs() -> AbstractContextManager[Any]:
    """Inside a tf.function: what is made without a device of its own goes where all its inputs are.

    Needed because a gradient tape makes its operations outside the device scopes of the forward pass, and TensorFlow
    would put them all on the first device; and the optimizer's arithmetic likewise.
    """
    return tf.compat.v1.device(lambda operation: operation.device or _device_of_inputs(operation))


def variable_beside(weight: keras.Variable, value: Any) -> tf.Variable:
    """A variable that is not trained and begins with `value`, on the device of `weight`."""
    with tf.device(weight.value.device):
        return tf.Variable(value, trainable=False)


def _stages(model: keras.Model, cut_before: Sequence[str]) -> dict[str, int]:
    """Name of each layer, or operation between layers → the number of its stage."""
    if isinstance(model, keras.Sequential):
        names = [layer.name for layer in model.layers]
    elif hasattr(model, "operations"):
        names = [operation.name for operation in model.operations]
    else:
        raise UserError(
            f"device.cut_before: can cut a functional or sequential model; {model.name} is a {type(model).__name__}. "
            "Build it with keras.Model(inputs, outputs), or place its layers with tf.device and leave cut_before out."
        )
    for name in cut_before:
        if name not in names:
            raise UserError(f"device.cut_before: the model has no layer {name!r}; it has {', '.join(names)}.")
    cuts = [names.index(name) for name in cut_before]
    if cuts != sorted(set(cuts)) or cuts[0] == 0:
        raise UserError(
            f"device.cut_before: {', '.join(cut_before)} must be in the model's order, none twice nor first; "
            f"it is {', '.join(names)}."
        )
    return {name: sum(place >= cut for cut in cuts) for place, name in enumerate(names)}


def _place(operation: Any, device: str) -> Any:
    """Makes a layer, or an operation between layers, build and run on `device`; the same object is returned."""
    base = type(operation)

    class Placed(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with tf.device(device):  # builds here too
                return super().__call__(*args, **kwargs)

        def call(self, *args: Any, **kwargs: Any) -> Any:
            # Not sooner: masks hang on the tensors that are handed to `__call__`.
            args, kwargs = keras.tree.map_structure(lambda value: _bring(value, device), (args, kwargs))
            return super().call(*args, **kwargs)

    # Saved and cloned, it is the plain one.
    Placed.__name__, Placed.__qualname__ = base.__name__, base.__qualname__
    Placed.__module__, Placed.__doc__ = base.__module__, base.__doc__
    operation.__class__ = Placed
    return operation


def _bring(value: Any, device: str) -> Any:
    """A tensor of another stage as one of this stage; its gradient is brought back to where it came from."""
    if not isinstance(value, tf.Tensor) or not value.device or value.device == device:
        return value

    @tf.custom_gradient
    def bring(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def back(gradient: tf.Tensor) -> tf.Tensor:
            with tf.device(value.device):
                return tf.identity(gradient)

        with tf.device(device):
            return tf.identity(tensor), back

    return bring(value)


def _device_of_inputs(operation: tf.Operation) -> str:
    """The one device of all inputs that have one; of a variable, if one is read or written. "" where they differ."""
    variables = {_device_of_variable(tensor) for tensor in operation.inputs if tensor.dtype == tf.resource} - {""}
    # Scalars, such as the learning rate, go where they are needed.
    found = variables or {_device_of(tensor) for tensor in operation.inputs if tensor.shape.rank != 0} - {""}
    return found.pop() if len(found) == 1 else ""


def _device_of(tensor: tf.Tensor) -> str:
    # TensorFlow makes reads of variables outside all device scopes.
    is_read = not tensor.device and tensor.op.type == "ReadVariableOp"
    return _device_of_variable(tensor.op.inputs[0]) if is_read else tensor.device


def _device_of_variable(handle: tf.Tensor) -> str:
    """Where a variable lies whose handle was captured by the function under construction, or by those around it."""
    graph = handle.graph
    while graph is not None and not hasattr(handle, "numpy"):
        outside = {id(inner): outer for outer, inner in _captures(graph)}
        if id(handle) not in outside:
            break
        handle, graph = outside[id(handle)], getattr(graph, "outer_graph", None)
    if not handle.device:
        return ""
    name = tf.DeviceSpec.from_string(handle.device)
    return f"/device:{name.device_type}:{name.device_index}"


def _captures(graph: Any) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    yield from getattr(graph, "captures", ())
