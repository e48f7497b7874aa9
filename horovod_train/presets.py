"""Models and preprocessors that keras_hub has saved in a local folder: presets. Downloads nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import keras

from horovod_train.config.registry import import_extra
from horovod_train.errors import UserError, one_line

_TASK, _PREPROCESSOR = "task.json", "preprocessor.json"


def load_task(folder: str) -> keras.Model:
    """Load the model of a task with its weights, as plain layers: what it was compiled with is left out.

    Its inputs are what its preprocessor gives. Raises UserError.
    """
    task = _load(folder, _TASK, "model.name")
    # A task's own compile, fit and predict preprocess texts; here a pipeline has done that.
    return keras.Model(task.input, task.output, name=task.name)


def load_preprocessor(folder: str) -> Callable[[Any], Any]:
    """Load what makes the inputs of a task of texts or images, [rows, …] each. Raises UserError."""
    preprocessor: Callable[[Any], Any] = _load(folder, _PREPROCESSOR, "data.preprocess")
    return preprocessor


def _load(folder: str, file_name: str, setting: str) -> Any:
    path = os.path.join(folder, file_name)
    if not os.path.isfile(path):
        raise UserError(f"{setting}: {folder} is no preset of a keras_hub task: it has no {file_name}.")
    import_extra("keras_hub", "keras_hub", f"{setting}: {folder}")  # registers its classes
    try:
        with open(path, encoding="utf-8") as file:
            name = json.load(file)["registered_name"]
        saved_class = keras.saving.get_registered_object(name)
        if saved_class is None:
            raise ValueError(f"this keras_hub has no {name}")
        return saved_class.from_preset(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        text = one_line(error)[:300]
        raise UserError(f"{setting}: {folder}: cannot be loaded: {text}") from error
