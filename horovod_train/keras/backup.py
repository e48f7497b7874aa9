"""Keras' BackupAndRestore on several ranks: root alone writes and reads its files, and all continue at root's epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_train.distributed.launch import launcher
from horovod_train.distributed.objects import HOST
from horovod_train.errors import UserError
from horovod_train.output import files
from horovod_train.tensorflow.lifetime import exchanging

FILES = files.Artifact("a file of BackupAndRestore", r"(latest\.weights\.h5|training_metadata\.json)(\.bkp|\.before)?")


def check_not_elastic(callbacks: list[keras.callbacks.Callback]) -> None:
    """Raise UserError for a BackupAndRestore beside elastic ranks: at each of their changes `fit` would restore it."""
    has_backup = any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks)
    if has_backup and launcher.detect().is_elastic:
        raise UserError(
            "model.fit: BackupAndRestore has an older state than the last commit, from which elastic ranks begin "
            "again; use ModelCheckpoint, and load what it has saved before hvd.elastic's state is made."
        )


def restore_from_root(callbacks: list[keras.callbacks.Callback], model: keras.Model, root_rank: int) -> None:
    """Collective: restore root's backup, if it has one, on root, and give all ranks the epoch at which it was written.

    To be called before the broadcast of weights and optimizer. Replaces each BackupAndRestore in the list: on root by
    a RootsBackup, elsewhere by a callback that does nothing.
    """
    for index, callback in enumerate(callbacks):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            callbacks[index] = keras.callbacks.Callback()
            if hvd.rank() == root_rank:
                callbacks[index] = backup = RootsBackup(callback)
                backup.restore()
    epoch = getattr(model, "_initial_epoch", None) or 0
    with exchanging("the start of model.fit"), tf.device(HOST):
        epoch = int(hvd.broadcast(tf.constant(epoch, tf.int64), root_rank, name="fit.initial_epoch").numpy())
    if epoch:
        model._initial_epoch = epoch


class RootsBackup(keras.callbacks.Callback):
    """Runs a BackupAndRestore and keeps what it has saved last until the next save is complete.

    Keras overwrites its two files in place, so a kill during a save would leave neither state. Here the files of the
    last save wait under names that end in `.before`. While those of the weights do, the next save is not complete; an
    empty file stands for no weights at all.
    """

    def __init__(self, backup: keras.callbacks.BackupAndRestore) -> None:
        super().__init__()
        self._backup: Any = backup
        self._keeps = "://" not in str(backup.backup_dir)  # Keras itself writes to object stores, in one piece
        self._weights, self._epoch = Path(self._backup._weights_path), Path(self._backup._training_metadata_path)
        self._weights_before, self._epoch_before = (Path(f"{path}.before") for path in (self._weights, self._epoch))
        self._save = type(backup)._save_model.__get__(backup)
        self._backup._save_model = self._save_whole

    def restore(self) -> None:
        """Give the model what was saved last, and the epoch after it."""
        if self._keeps:
            self._drop_incomplete_save()
        self._backup.on_train_begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._backup.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._backup.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._keeps and self._backup.delete_checkpoint and self._weights.exists():
            # Keras removes the files in any order, and weights without their epoch would be trained anew.
            self._weights_before.touch()
            self._drop_incomplete_save()
        self._backup.on_train_end(logs)

    def _save_whole(self) -> None:
        if not self._keeps:
            self._save()
            return
        self._weights.parent.mkdir(parents=True, exist_ok=True)
        if self._weights.exists():
            files.replace(self._weights, self._weights_before, FILES)
        else:
            self._weights_before.touch()
        if self._epoch.exists():
            files.replace(self._epoch, self._epoch_before, FILES)
        self._save()
        if self._backup.double_checkpoint and self._weights_before.stat().st_size:
            files.replace(self._weights_before, Path(self._backup._prev_weights_path), FILES)
        else:
            files.remove(self._weights_before, FILES)
        self._put_away_epoch_before()

    def _drop_incomplete_save(self) -> None:
        """Make the files those of the last complete save. May itself be interrupted at any point."""
        if not self._weights_before.exists():
            self._put_away_epoch_before()
        elif self._weights_before.stat().st_size:
            if self._epoch_before.exists():
                files.replace(self._epoch_before, self._epoch, FILES)
            files.replace(self._weights_before, self._weights, FILES)
        else:
            for path in (self._epoch, self._epoch_before, self._weights, self._weights_before):
                files.remove(path, FILES)

    def _put_away_epoch_before(self) -> None:
        if self._epoch_before.exists() and self._backup.double_checkpoint:
            files.replace(self._epoch_before, Path(self._backup._prev_training_metadata_path), FILES)
        else:
            files.remove(self._epoch_before, FILES)
