"""What the commands write to paths that users choose, so that a later run of a command may replace it.

Recognises our own files by content. Does not write or remove them; see removal.
"""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path

from horovod_train.output.removal import Artifact

CLASS = "class"
"""The column of a table of predictions that names the class with the largest output."""


def _members(path: Path) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist())
    except zipfile.BadZipFile:
        return set()


def _begins(path: Path, *heads: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(64).startswith(heads)


def _is_csv_of_outputs(path: Path) -> bool:
    """Return whether a table has a column record, and in its first row nothing but numbers, and the name of a class."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        head, row = next(rows, []), next(rows, [])
    try:
        numbers = row[:-1] if head[-1:] == [CLASS] else row
        all_are_numbers = len([float(value) for value in numbers]) == len(numbers)
        return all_are_numbers and head[:1] == ["record"] and len(row) in (0, len(head))
    except ValueError:
        return False


def _is_figures(path: Path) -> bool:
    try:
        data = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(data, dict) and {"step", "epoch", "records", "ranks", "weights", "checkpoint"} <= data.keys()


_SAVED = ("saved_model.pb", "fingerprint.pb", "variables", r"variables/variables\.[^/]+", "assets", "assets/[^/]+")

KERAS_FILE = Artifact(
    "a Keras file", r".+\.keras", content_matches=lambda path: {"config.json", "metadata.json"} <= _members(path)
)
KERAS_DRAFT = Artifact("an unfinished Keras file", r"\..+\.[0-9a-f]{8}\.partial\.keras")

SAVED_MODEL = Artifact("a SavedModel", ".+", "folder", _SAVED, lambda path: (path / "saved_model.pb").is_file())
SAVED_MODEL_DRAFT = Artifact(
    "an unfinished SavedModel", r"\..+\.[0-9a-f]{8}\.partial", "folder", (*_SAVED, "variables/.+")
)

PREDICTIONS = Artifact(
    "a file that predict wrote",
    r".+\.(npz|csv)",
    content_matches=lambda path: _is_csv_of_outputs(path) or "record.npy" in _members(path),
)
PREDICTIONS_DRAFT = Artifact("unfinished predictions", r"\..+\.[0-9a-f]{8}\.partial", "folder", (r"\d+\.npy", "whole"))

FIGURES = Artifact("a file that evaluate wrote", ".+", content_matches=_is_figures)
FINDINGS = Artifact("a file that doctor wrote", ".+", content_matches=lambda path: _begins(path, b'{\n  "checks": '))
