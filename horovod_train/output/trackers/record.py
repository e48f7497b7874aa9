"""trackers/NAME.json in the run directory: the id of the run in that tracker, and what has been logged there."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from horovod_train.errors import UserError
from horovod_train.output.files import json_text, must_be_writable, write_atomically
from horovod_train.output.removal import Artifact, begins

_RECORD = Artifact(
    "the record of a run's tracker", r".+\.json", content_matches=lambda path: begins(path, '{"run_id": ')
)

log = logging.getLogger(__name__)


class Record:
    """What root knows of one tracker. A disk that is full costs one warning."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._path = run_dir / "trackers" / f"{name.replace(':', '.')}.json"
        self.run_id: str | None = None
        self.logged: dict[str, int] = {}
        """By split, the last step that was logged."""
        self._is_failing = False

    def load(self) -> None:
        """Read what an earlier start has written, if anything. Raises UserError."""
        if not self._path.exists():
            return
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            self.run_id = str(content["run_id"])
            self.logged = {str(split): int(step) for split, step in content["logged"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"log.trackers: {self._path}: expected a record of a run's tracker: {error}. Remove the file to begin "
                "a new run in the tracker."
            ) from error

    def save_first(self) -> None:
        """Write it where nothing may fail yet. Raises UserError."""
        with must_be_writable(self._path):
            self._write()

    def save(self) -> None:
        try:
            self._write()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                lost = "After a kill, the tracker may get rows twice."
                log.warning(f"{self._path} cannot be written: {error.strerror}. {lost} Training continues.")
            self._is_failing = True

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        content = {"run_id": self.run_id, "logged": self.logged}
        write_atomically(self._path, json_text(content) + "\n", _RECORD, sync=False)
