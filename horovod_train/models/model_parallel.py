"""Cuts a model into stages on several devices of one process: model parallelism. Does not choose the devices.

A stage is a run of layers in the model's own order. Its weights are on its device, and so is everything computed from
them: forward, backward and update. Activations and their gradients cross between stages once each.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.keras_seams import compile_arguments, stateless, take_class
from horovod_train.models import overridden


def cut_into_stages(model: keras.Model, cut_before: Sequence[str], devices: Sequence[str]) -> keras.Model:
    """Return a model with the same weights, names and function, whose stages are on `devices`.

    cut_before: the names of the layers with which the second, third, … stage begins, in the model's order.
    devices: TensorFlow's names of them, such as "CPU:1"; one more than cuts. A layer that is itself a model is not cut.

    Layers keep their names, so that checkpoints and saved models are those of the uncut model. Raises UserError for a
    model or a cut for which this is impossible.
    """
    if not cut_before:
        return model
    assert len(devices) == len(cut_before) + 1
    stage_of = _assign_stages(model, cut_before)

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

    # Keras' copy has copies of what `compile` was given, which functions and classes of users may not have.
    compiles_anew = model.compiled and not overridden(model, ["compile"])
    model.compiled &= not compiles_anew
    try:
        cut = keras.models.clone_model(model, clone_function=clone)
    finally:
        model.compiled |= compiles_anew
    if compiles_anew:
        optimizer = model.optimizer and stateless(model.optimizer)
        cut.compile(**compile_arguments(model) | {"optimizer": optimizer})
    # `variables`, unlike `weights`, includes the seeds of dropout.
    for variable, original in zip(cut.variables, model.variables, strict=True):
        variable.assign(original)
        if variable.trainable != original.trainable:  # of a weight alone, not of its layer
            variable.trainable = original.trainable
    for copy, layer in zip(cut.layers, model.layers, strict=True):
        _copy_vocabulary(copy, layer)
    return cut


def _copy_vocabulary(copy: keras.Layer, layer: keras.Layer) -> None:
    """Give the copy of a layer, or of a model's layers, the words that `adapt` has found, which no config holds."""
    if isinstance(layer, keras.Model):
        for inner_copy, inner in zip(copy.layers, layer.layers, strict=True):
            _copy_vocabulary(inner_copy, inner)
    elif hasattr(layer, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            layer.save_assets(folder)
            if os.listdir(folder):
                copy.load_assets(folder)


def stage_lines(model: keras.Model) -> list[str]:
    """Return a line for each device that holds weights of the model, with the layers whose weights are there."""
    layers_by_device: dict[str, list[str]] = {}
    for weight in model.weights:
        device = tf.DeviceSpec.from_string(weight.value.device)
        layer = weight.path.rsplit("/", 1)[0]
        layers = layers_by_device.setdefault(f"{device.device_type}:{device.device_index}", [])
        if layer not in layers:
            layers.append(layer)
    return [f"weights on {device}: {_list_layers(layers)}" for device, layers in sorted(layers_by_device.items())]


def _list_layers(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{names[0]} … {names[-1]} ({len(names)} layers)"


def follow_inputs() -> AbstractContextManager[Any]:
    """Inside a tf.function: place operations without a device on the device of their inputs, if all inputs share one.

    Needed because a gradient tape creates operations outside the device scopes of the forward pass, and TensorFlow
    would put them all on the first device; the same holds for the optimizer's arithmetic.
    """
    return tf.compat.v1.device(lambda operation: operation.device or _device_of_inputs(operation))


def variable_beside(weight: keras.Variable, value: Any) -> tf.Variable:
    """Return an untrained variable that starts with `value`, on the device of `weight`."""
    with tf.device(weight.value.device):
        return tf.Variable(value, trainable=False)


def _assign_stages(model: keras.Model, cut_before: Sequence[str]) -> dict[str, int]:
    """Map each layer, or operation between layers, to the number of its stage."""
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
    return {name: sum(position >= cut for cut in cuts) for position, name in enumerate(names)}


def _place(operation: Any, device: str) -> Any:
    """Make a layer, or an operation between layers, build and run on `device`; return the same object."""
    base = type(operation)

    class Placed(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with tf.device(device):  # builds here too
                return super().__call__(*args, **kwargs)

        def call(self, *args: Any, **kwargs: Any) -> Any:
            # Not in `__call__`: masks are attached to the tensors that it gets.
            args, kwargs = keras.tree.map_structure(lambda value: _copy_to_device(value, device), (args, kwargs))
            return super().call(*args, **kwargs)

    take_class(operation, Placed)
    return operation


def _copy_to_device(value: Any, device: str) -> Any:
    """Copy a tensor to this stage's device; its gradient is copied back."""
    if not isinstance(value, tf.Tensor) or not value.device or value.device == device:
        return value

    @tf.custom_gradient
    def copy(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def copy_back(gradient: tf.Tensor) -> tf.Tensor:
            with tf.device(value.device):
                return tf.identity(gradient)

        with tf.device(device):
            return tf.identity(tensor), copy_back

    return copy(value)


def _device_of_inputs(operation: tf.Operation) -> str:
    """Return the device of all inputs; of the variables among them, if there are any. "" if devices differ."""
    variables = {_device_of_variable(tensor) for tensor in operation.inputs if tensor.dtype == tf.resource} - {""}
    # Scalars, such as the learning rate, are copied where they are needed.
    devices = variables or {_device_of(tensor) for tensor in operation.inputs if tensor.shape.rank != 0} - {""}
    return devices.pop() if len(devices) == 1 else ""


def _device_of(tensor: tf.Tensor) -> str:
    # TensorFlow places reads of variables outside all device scopes.
    is_read = not tensor.device and tensor.op.type == "ReadVariableOp"
    return _device_of_variable(tensor.op.inputs[0]) if is_read else tensor.device


def _device_of_variable(handle: tf.Tensor) -> str:
    """Return the device of a variable whose handle was captured by the current function or by those around it."""
    graph = handle.graph
    while graph is not None and not hasattr(handle, "numpy"):
        outer_handles = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        if id(handle) not in outer_handles:
            break
        handle, graph = outer_handles[id(handle)], getattr(graph, "outer_graph", None)
    if not handle.device:
        return ""
    device = tf.DeviceSpec.from_string(handle.device)
    return f"/device:{device.device_type}:{device.device_index}"
