"""Writes, finds and reads the checkpoints of a TrainState. Does not decide when; see hooks. Root alone has a store."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.state import TrainState


class NoStore:
    """What every rank but root has: it gets its state by broadcast."""

    def find(self, resume: str) -> str | None:
        return None

    def load(self, state: TrainState, path: str) -> None:
        raise AssertionError("only root reads checkpoints")

    def save(self, state: TrainState) -> None: ...


class CheckpointStore(NoStore):
    """The newest `keep` checkpoints of a run, in one folder."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep

    def find(self, resume: str) -> str | None:
        """The checkpoint to start from: the newest (auto), none (never), or the one at a path.

        Raises UserError for a path that holds none, and for "never" in a folder that holds some: they would be lost.
        """
        newest = tf.train.latest_checkpoint(str(self.directory))
        if resume == "auto":
            return newest
        if resume == "never":
            if newest is not None:
                raise UserError(
                    f"checkpoint.resume: never, but {self.directory} holds checkpoints, which the run would replace. "
                    "Choose another --output-dir, or remove them."
                )
            return None
        found = tf.train.latest_checkpoint(resume) or (resume if Path(f"{resume}.index").is_file() else None)
        if found is None:
            raise UserError(
                f"checkpoint.resume: no checkpoint at {resume}; expected a checkpoints folder or .../ckpt-N."
            )
        return found

    def load(self, state: TrainState, path: str) -> None:
        """Gives the state's variables their saved values. Raises UserError where those are of another model."""
        reader = tf.train.load_checkpoint(path)
        saved = {_name_in_file(key): shape for key, shape in reader.get_variable_to_shape_map().items()}
        for name, variable in state.variables().items():
            if name not in saved:
                raise UserError(f"{path}: has no {name}; it was saved from another model or optimizer.")
            if saved[name] != variable.shape.as_list():
                raise UserError(f"{path}: {name} has shape {saved[name]}; the model's is {variable.shape.as_list()}.")
        tf.train.Checkpoint(**_as_tree(state)).restore(path).assert_existing_objects_matched().expect_partial()

    def save(self, state: TrainState) -> None:
        """Writes the state under its step and removes the oldest beyond `keep`."""
        manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(**_as_tree(state)), str(self.directory), max_to_keep=self.keep
        )
        manager.save(checkpoint_number=int(state.step.numpy()))


def open_store(directory: Path | None, keep: int) -> NoStore:
    """The checkpoints under a run directory; without one (not root) a store that does nothing."""
    return NoStore() if directory is None else CheckpointStore(directory / "checkpoints", keep)


def _as_tree(state: TrainState) -> dict[str, dict[str, tf.Variable]]:
    return {"variables": state.variables()}


def _name_in_file(key: str) -> str:
    """tf.train.Checkpoint writes `variables/model.Sconv1.Skernel/.ATTRIBUTES/VARIABLE_VALUE` for model/conv1/kernel."""
    return (
        key.removeprefix("variables/").removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").replace(".S", "/").replace("..", ".")
    )
