"""Callbacks for `model.fit` where an epoch has another number of batches than was planned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD, LossScaleOptimizer, MultiOptimizer, OptimizerMap, schedules

from horovod_train.distributed import objects
from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError
from horovod_train.keras import callbacks, elastic
from horovod_train.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from horovod_train.keras.fit import EndEpoch


def in_fit(monkeypatch: pytest.MonkeyPatch, steps_per_execution: int) -> Any:
    """The broadcast callback of rank 1, in an epoch."""
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 1)
    monkeypatch.setattr(callbacks, "guards", lambda: SimpleNamespace(end_epochs_together=True))
    callback: Any = BroadcastGlobalVariablesCallback()
    callback._model = SimpleNamespace(steps_per_execution=steps_per_execution)
    callback._end_epoch, callback._has_warned = EndEpoch(), False
    return callback


def test_an_epoch_that_ends_early_ends_with_a_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = in_fit(monkeypatch, 2)
    callback._end_together([(1, 5), (1, 7)])
    assert callback._end_epoch.batches == callback._planned_batches == 4


def test_a_compiled_call_of_more_batches_than_a_rank_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^model.fit: steps_per_execution=4 is more than the 3 batches of rank 1, and"):
        in_fit(monkeypatch, 4)._end_together([(1, 5), (1, 3)])


def test_rates_follow_the_batches_that_each_epoch_really_has() -> None:
    """The first ends after 4 of 8, the second has all, the third ends after 2."""
    end = EndEpoch()
    rates: list[float] = []
    callback: Any = LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False)
    callback.params, callback._callbacks, callback._set_rate = {"steps": 8}, [end], rates.append
    for epoch, batches in enumerate((4, None, 2)):
        end.batches = batches
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            callback.on_train_batch_begin(batch)
    assert rates == [0, 0.25, 1, 1.125, 2, 2.5]


def test_logs_that_are_no_numbers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the mean, twice the value."""
    monkeypatch.setattr(objects, "gather", lambda names, _: [names, names])
    monkeypatch.setattr("horovod.tensorflow.allreduce", lambda values, **_: tf.constant(2 * values))
    others = {"when": "now", "count": "3", "none": None, "parts": {"a": 1.0}, "texts": np.array(["a"])}
    logs: dict[str, Any] = {**others, "loss": 1.0, "rate": tf.constant(0.5)}
    MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {**others, "loss": 2.0, "rate": 1.0}


def test_every_checkpoint_of_keras_is_written_by_root_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 1)
    kinds = [getattr(keras.callbacks, name) for name in dir(keras.callbacks) if name.endswith("Checkpoint")]
    given: list[Any] = [kind.__new__(kind) for kind in kinds]
    callbacks._keep_to_root(given, 0)
    assert {type(callback) for callback in given} == {keras.callbacks.Callback}


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        (lambda: SGD(schedules.ExponentialDecay(0.1, 10, 0.9)), "SGD, whose rate cannot be set"),
        (lambda: LossScaleOptimizer(SGD(schedules.ExponentialDecay(0.1, 10, 0.9))), "LossScaleOptimizer, whose rate"),
        (lambda: MultiOptimizer(OptimizerMap(SGD())), "MultiOptimizer, whose rate cannot be set"),
        (lambda: None, "no optimizer"),
    ],
)
@pytest.mark.parametrize("callback", [LearningRateScheduleCallback(0.1, 1.0), LearningRateWarmupCallback(0.1)])
def test_an_optimizer_whose_rate_cannot_be_set_is_refused_before_the_first_batch(
    callback: Any, optimizer: Any, what: str
) -> None:
    callback._model, callback.params = SimpleNamespace(optimizer=optimizer()), {"steps": 3}
    with pytest.raises(UserError, match=f"^{type(callback).__name__}: it sets the rate .* received {what}"):
        callback.on_train_begin()


@pytest.mark.parametrize("optimizer", [lambda: SGD(0.1), lambda: LossScaleOptimizer(SGD(0.1))])
def test_a_rate_that_is_a_number_stays_as_it_is_until_the_first_batch(optimizer: Any) -> None:
    callback: Any = LearningRateScheduleCallback(0.5, 1.0)
    callback._model = SimpleNamespace(optimizer=optimizer())
    callback.on_train_begin()
    assert float(callback.model.optimizer.learning_rate) == pytest.approx(0.1)


ELASTIC = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_ELASTIC": "1"}


def fitted(*given: keras.callbacks.Callback, **options: Any) -> None:
    """Train a model of one weight for an epoch of two batches."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=1, verbose=0, callbacks=list(given), **options)


@pytest.mark.parametrize("other", [BroadcastGlobalVariablesCallback(0), elastic.CommitStateCallback(Any)])
@pytest.mark.parametrize("is_first", [True, False])
def test_elastic_ranks_restore_no_backup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: keras.callbacks.Callback, is_first: bool
) -> None:
    """Which would be older than the last commit, from which they begin again."""
    monkeypatch.setattr(launcher, "detect", lambda: launcher.read_launch(ELASTIC))
    given = [keras.callbacks.BackupAndRestore(tmp_path), other]
    with pytest.raises(UserError, match=r"^model.fit: BackupAndRestore .* older .*; use ModelCheckpoint"):
        fitted(*given[:: 1 if is_first else -1])


@pytest.mark.parametrize(
    ("schedule", "initial_epoch", "rank", "is_said"),
    [
        (keras.callbacks.LearningRateScheduler(lambda epoch: 0.1), 0, 0, True),
        (LearningRateWarmupCallback(0.1), 0, 0, True),
        (LearningRateScheduleCallback(0.1, 1.0), 0, 1, False),
        (LearningRateScheduleCallback(0.1, 1.0), 2, 0, False),
        (keras.callbacks.Callback(), 0, 0, False),
    ],
)
def test_a_schedule_that_begins_again_after_a_change_of_ranks_is_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    schedule: keras.callbacks.Callback,
    initial_epoch: int,
    rank: int,
    is_said: bool,
) -> None:
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: rank)
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 2)
    state = SimpleNamespace(epoch=2)
    fitted(elastic.UpdateEpochStateCallback(state), schedule, initial_epoch=initial_epoch, epochs=initial_epoch + 2)
    assert state.epoch == 4
    said = [
        f"model.fit: {type(schedule).__name__} begins again at epoch 1, though state.epoch says that 2 are done. Give "
        "fit(epochs=..., initial_epoch=state.epoch), epochs over all calls of fit."
    ]
    assert caplog.messages == said * is_said


def test_rates_follow_the_batches_that_an_epoch_had_before_a_change_of_ranks() -> None:
    state, rates = SimpleNamespace(batch=1), list[float]()
    schedule: Any = LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False)
    schedule._set_rate = rates.append
    fitted(elastic.UpdateBatchStateCallback(state), schedule, epochs=2)
    assert rates == [0.5, 1, 1.5]
