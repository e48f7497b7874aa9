"""The models that a config can name: MODELS = {name: build}. A build function takes options and returns a model.

To add one: write `build(**options) -> keras.Model` in a file here and a line below. Or leave it in another package and
name it `package.module:function`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from horovod_train.config.registry import call, choose, load_task
from horovod_train.config.settings import Spec
from horovod_train.errors import UserError, one_line
from horovod_train.keras_seams import name_counts, names_continued, stateless
from horovod_train.models import convnet, mlp, resnet, transformer

MODELS: dict[str, Callable[..., keras.Model]] = {
    "mlp": mlp.build,
    "image_mlp": mlp.build_for_images,
    "convnet": convnet.build,
    "resnet50": resnet.build,
    "transformer": transformer.build,
}

OWN_STEPS = ("compute_loss", "compute_metrics", "test_step", "train_step")
"""Methods of a Keras model that define a step. A model that overrides one of them has a step of its own."""
NEVER_CALLED = ("predict_step",)
"""Methods of a Keras model that Keras' `predict` calls. This trainer calls the model instead."""


def overridden(instance: Any, methods: Sequence[str], base: type = keras.Model) -> list[str]:
    """Return which of these methods of a base class an object has of its own, by its class or set on itself."""
    own = [(method, getattr(instance, method)) for method in methods]
    return [method for method, bound in own if getattr(bound, "__func__", bound) is not getattr(base, method)]


def is_stored(spec: Spec) -> bool:
    """Return whether `spec` names a file or a preset's folder, which has weights, too."""
    return spec.name.endswith(".keras") or (spec.name not in MODELS and os.path.isdir(spec.name))


def build_model(spec: Spec) -> keras.Model:
    """Build the model that `spec` names, with its variables. Raises UserError for a wrong name, option or result."""
    if is_stored(spec):
        is_file = spec.name.endswith(".keras")
        if spec.options:
            kind = "file" if is_file else "preset"
            raise UserError(f"model.options: {spec.name} is a {kind}, which takes no options; received {spec.options}.")
        _number_names_as_at_first()
        model = _load(spec.name) if is_file else load_task(spec.name)
    else:
        build = choose(MODELS, spec.name, "model.name")  # may import a module that has layers of its own
        _number_names_as_at_first()
        model = call(build, spec, "model")
    if not isinstance(model, keras.Model):
        raise UserError(f"model.name: {spec.name} must return a keras.Model; it returned {type(model).__name__}.")
    if not model.built:
        raise UserError(
            f"model.name: {spec.name} must return a model with a known input shape; call it once, or build it."
        )
    _refuse_ignored(model, spec.name)
    return model


_counts_at_first: dict[str, int] | None = None
"""How many names of each kind Keras had given in this process when it built its first model here."""


def _number_names_as_at_first() -> None:
    """Let Keras number names as for the first model of this process, so that a second run has the same names.

    They are those of checkpoints. Not `clear_session`, which resets what the program has set, such as its dtype policy.
    """
    global _counts_at_first
    counts = name_counts()
    if _counts_at_first is None:
        _counts_at_first = dict(counts)
    counts.clear()
    counts.update(_counts_at_first)


@contextmanager
def names_numbered_as_at_first() -> Iterator[None]:
    """Inside the block let Keras number names as for the first model of this process; afterwards it goes on."""
    with names_continued():
        _number_names_as_at_first()
        yield


@contextmanager
def names_numbered_as_in_a_new_process() -> Iterator[None]:
    """Inside the block let Keras number names as a process does that has built no model; what it imports counts.

    Afterwards Keras goes on with larger numbers than it has given before the block, and, unless it raises, inside.
    """
    global _counts_at_first
    kept, _counts_at_first = _counts_at_first, None
    try:
        with names_continued():
            name_counts().clear()
            try:
                yield
            except BaseException:
                name_counts().clear()
                raise
    finally:
        _counts_at_first = kept


def _load(path: str) -> keras.Model:
    """Load a whole model from a Keras file, with its weights and what it was compiled with. Raises UserError."""
    try:
        with warnings.catch_warnings():  # the trainer does not take the state of the file's optimizer
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model = keras.saving.load_model(path)
        if model.compiled and model.optimizer is not None:
            model.optimizer = stateless(model.optimizer)
    except Exception as error:  # code of users' layers may raise anything
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise UserError(f"model.name: {path}: cannot be loaded: {kind}{one_line(error)[:300]}") from error
    return model


def _refuse_ignored(model: keras.Model, name: str) -> None:
    """Raise UserError for parts of a model that would be ignored silently."""
    kind = type(model).__name__
    if methods := overridden(model, NEVER_CALLED):
        raise UserError(
            f"model.name: {name} returns a {kind} that overrides {', '.join(methods)}, which the trainer does not "
            "call: `predict` writes the outputs of call(). Put it there, and leave this method out."
        )
    if model.compiled and overridden(model, ["compile"]) and not overridden(model, ["train_step"]):
        advice = "Leave it out, and give loss, metrics and optimizer in the config; or give the model a train_step."
        if any(base.__module__.startswith("keras_hub.") for base in type(model).__mro__):  # a task compiles itself
            advice = "Return keras.Model(task.input, task.output), with loss, metrics and optimizer in the config."
        raise UserError(
            f"model.name: {name} returns a {kind} compiled by a compile() of its own, whose arguments are not known. "
            f"{advice}"
        )
