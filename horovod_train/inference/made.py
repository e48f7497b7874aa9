"""What the commands write to paths that users choose, so that a later run of a command may replace it.

Recognises our own files by content. Does not write or remove them; see removal.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from horovod_train.output.removal import Made


def _members(path: Path) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist())
    except zipfile.BadZipFile:
        return set()


def _begins(path: Path, *heads: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(64).startswith(heads)


_SAVED = ("saved_model.pb", "fingerprint.pb", "variables", r"variables/variables\.[^/]+", "assets", "assets/[^/]+")

KERAS_FILE = Made("a Keras file", r".+\.keras", is_ours=lambda path: {"config.json", "metadata.json"} <= _members(path))
KERAS_DRAFT = Made("an unfinished Keras file", r"\..+\.[0-9a-f]{8}\.partial\.keras")

SAVED_MODEL = Made("a SavedModel", ".+", "folder", _SAVED, lambda path: (path / "saved_model.pb").is_file())
SAVED_MODEL_DRAFT = Made("an unfinished SavedModel", r"\..+\.[0-9a-f]{8}\.partial", "folder", (*_SAVED, "variables/.+"))

PREDICTIONS = Made(
    "a file that predict wrote",
    r".+\.(npz|csv)",
    is_ours=lambda path: _begins(path, b"record,", b"record\r") or "record.npy" in _members(path),
)
PREDICTIONS_DRAFT = Made("unfinished predictions", r"\..+\.[0-9a-f]{8}\.partial", "folder", (r"\d+\.npy", "whole"))

FIGURES = Made(
    "a file that evaluate wrote", ".+", is_ours=lambda path: b'\n  "checkpoint": ' in path.read_bytes()[-10_000:]
)
FINDINGS = Made("a file that doctor wrote", ".+", is_ours=lambda path: _begins(path, b'{\n  "checks": '))
