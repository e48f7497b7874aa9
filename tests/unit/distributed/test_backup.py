"""A BackupAndRestore that root runs keeps its last complete save, wherever a kill ends the next one; no ranks."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from horovod_train.keras.backup import RootsBackup


class Killed(BaseException):
    """Stands for the end of the process: what is on disk stays as it is."""


def built() -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", "mse")
    return model


def backup_of(folder: Path, model: keras.Model, **options: Any) -> RootsBackup:
    callback = keras.callbacks.BackupAndRestore(folder, **options)
    callback.set_model(model)
    return RootsBackup(callback)


def save(folder: Path, epoch: int, **options: Any) -> None:
    """End epoch number `epoch` of a model whose weight is that number."""
    model = built()
    model.set_weights([np.full((1, 1), float(epoch))])
    backup_of(folder, model, **options).on_epoch_end(epoch - 1)


def restored(folder: Path, **options: Any) -> tuple[float, int]:
    """Return weight and epoch after a new start; 0 epochs: there was nothing to restore."""
    model = built()
    model.set_weights([np.zeros((1, 1))])
    backup_of(folder, model, **options).restore()
    return float(model.get_weights()[0][0, 0]), int(model._initial_epoch or 0)


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> bool:
    """Run `step` and end it at its change number `number` of the disk, before or in the middle; return whether."""
    changes = 0

    def killing(function: Callable[..., Any], spoils: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes == number:
                if spoils:
                    spoils(*arguments, **options)
                raise Killed
            return function(*arguments, **options)

        return changed

    with monkeypatch.context() as patched:
        for owner, name in ((os, "replace"), (Path, "unlink"), (Path, "touch"), (json, "dumps")):
            patched.setattr(owner, name, killing(getattr(owner, name)))
        patched.setattr(keras.Model, "save_weights", killing(keras.Model.save_weights, spoil))
        try:
            step()
        except Killed:
            return True
    return False


def spoil(model: keras.Model, filepath: str, **options: Any) -> None:
    Path(filepath).write_bytes(b"half a file")


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("saves_before", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_kill_anywhere_in_a_save_leaves_the_save_before_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves_before: int, double: bool
) -> None:
    number, was_killed, found = 0, True, []
    while was_killed:
        number, folder = number + 1, tmp_path / str(number)
        for epoch in range(1, saves_before + 1):
            save(folder, epoch, double_checkpoint=double)
        last_save = functools.partial(save, folder, saves_before + 1, double_checkpoint=double)
        restores = functools.partial(restored, folder, double_checkpoint=double)
        was_killed = kill_at(number, monkeypatch, last_save)
        # A start that is killed too, at its first change of the disk, changes nothing.
        kill_at(1, monkeypatch, restores)
        found.append(restored(folder, double_checkpoint=double))
        assert not list(folder.glob("*.before"))
    old, new = ((float(epoch), epoch) for epoch in (saves_before, saves_before + 1))
    assert set(found) == {old, new}
    assert found[-1] == new
    assert number > 3


def test_a_kill_anywhere_while_the_files_are_removed_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, was_killed = 0, True
    while was_killed:
        number, folder = number + 1, tmp_path / str(number)
        save(folder, 1)
        was_killed = kill_at(number, monkeypatch, backup_of(folder, built()).on_train_end)
        assert restored(folder) in [(1.0, 1), (0.0, 0)]
    assert not folder.exists() or not list(folder.iterdir())
