"""Callbacks for `model.fit` where an epoch has another number of batches than was planned."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD, LossScaleOptimizer, MultiOptimizer, OptimizerMap, schedules

import horovod_train.keras as hvd
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
from horovod_train.keras.fit import EndEpoch, batches_of_epoch, callbacks_of_fit, steps_of_epoch
from horovod_train.tensorflow import agreement


def in_fit(monkeypatch: pytest.MonkeyPatch, steps_per_execution: int) -> Any:
    """The broadcast callback of rank 1, in an epoch."""
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 1)
    monkeypatch.setattr(agreement.guards, "end_epochs_together", True)
    callback: Any = BroadcastGlobalVariablesCallback()
    callback._model = SimpleNamespace(steps_per_execution=steps_per_execution)
    callback._end_epoch, callback._has_warned = EndEpoch([]), False
    return callback


def test_an_epoch_that_ends_early_ends_with_a_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = in_fit(monkeypatch, 2)
    callback._end_together([(1, 5), (1, 7)])
    assert callback._end_epoch.batches == callback._planned_batches == 4


@pytest.mark.parametrize(
    ("plans", "said"),
    [
        ([(1, 5), (2, 5)], "rank 0: epoch 1 of 5 batches; rank 1: epoch 2 of 5 batches"),
        ([(1, 5), (1, callbacks._UNKNOWN)], "rank 0: epoch 1 of 5 batches; rank 1: epoch 1 of an unknown number of"),
        ([(2, 5), (1, callbacks._STOPS)], "rank 0: epoch 2 of 5 batches; rank 1: stops after epoch 1"),
    ],
)
def test_epochs_that_cannot_end_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, plans: list[tuple[int, int]], said: str
) -> None:
    with pytest.raises(UserError, match=rf"^model.fit: all ranks must take the same steps; received {said}"):
        in_fit(monkeypatch, 1)._end_together(plans)


def test_a_compiled_call_of_more_batches_than_a_rank_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^model.fit: steps_per_execution=4 is more than the 3 batches of rank 1, and"):
        in_fit(monkeypatch, 4)._end_together([(1, 5), (1, 3)])


def test_variables_are_local_that_the_callback_or_an_optimizer_of_the_model_names() -> None:
    """Which are neither broadcast nor compared."""
    given, later, of_optimizer, shared = (keras.Variable([1.0]) for _ in range(4))
    optimizer: Any = hvd.DistributedOptimizer(SGD())
    optimizer.register_local_var(of_optimizer)
    for local_variables in (given, [given], {"a": [given, None]}):
        callback: Any = BroadcastGlobalVariablesCallback(local_variables=local_variables)
        callback.register_local_var(later)
        callback._optimizers = [SGD(), optimizer]
        assert [callback._is_local(each) for each in (given, later, of_optimizer, shared)] == [True, True, True, False]


def test_a_rank_that_ends_an_epoch_early_is_refused_unless_all_stop_at_the_same_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each epoch anew; where all stop they meet once, though some evaluate before the epoch ends."""
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 2)
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 1)
    monkeypatch.setattr(callbacks, "_gather_plans", lambda epoch, batches: [(epoch, batches)] * 2)
    others_stop: list[bool] = []
    monkeypatch.setattr(callbacks, "_all_ranks_meet_within", lambda seconds: others_stop.pop(0))
    callback: Any = BroadcastGlobalVariablesCallback()
    callback.params, callback._has_broadcast, callback._model = {"steps": 3}, True, SimpleNamespace(stop_training=False)

    def end(epoch: int, batches: int, *, stops: bool = False) -> None:
        callback.model.stop_training = stops
        callback.on_epoch_begin(epoch)
        for batch in range(batches):
            callback.on_train_batch_end(batch)
        callback.on_test_begin()
        callback._check_epoch_is_complete()

    end(0, 3)
    end(1, 3, stops=True)
    others_stop.append(True)
    end(2, 2)  # the data of all ranks have ended
    others_stop.append(False)
    with pytest.raises(UserError, match=r"^model.fit: rank 1 has taken 2 of 3 batches in epoch 3: its data ended, and"):
        end(2, 2)
    others_stop.append(True)
    end(3, 2, stops=True)
    assert not others_stop
    others_stop.append(False)
    with pytest.raises(UserError, match="2 of 3 batches in epoch 5: a callback stopped it, and not the other ranks"):
        end(4, 2, stops=True)


class CountsBatches(keras.callbacks.Callback):
    """Counts the batches of each epoch, and those that were planned for it."""

    def __init__(self, end_first_after: int | None = None) -> None:
        super().__init__()
        self.end_first_after = end_first_after
        self.counts, self.planned = list[int](), list[int | None]()

    def on_train_begin(self, logs: Any = None) -> None:
        self.callbacks = callbacks_of_fit()
        self.end = EndEpoch(self.callbacks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            self.end.batches = self.end_first_after
        self.counts.append(0)
        self.planned.append(batches_of_epoch(steps_of_epoch(self), self.callbacks))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.counts[-1] += 1


def test_an_epoch_that_was_ended_early_changes_no_later_one() -> None:
    counting, filters = CountsBatches(end_first_after=1), list(warnings.filters)
    fitted(counting, epochs=3)
    assert counting.counts == counting.planned == [1, 2, 2]
    assert list(warnings.filters) == filters  # while it ended, Keras' warning of too little data was not shown


@pytest.mark.parametrize(("done", "expected"), [(0, [2, 2]), (1, [1, 2]), (2, [1, 2])])
def test_the_batches_that_are_planned_for_an_epoch_that_resumes_are_those_that_it_takes(
    done: int, expected: list[int]
) -> None:
    counting = CountsBatches()
    fitted(elastic.UpdateBatchStateCallback(SimpleNamespace(batch=done)), counting, epochs=2)
    assert counting.counts == counting.planned == expected


def test_rates_follow_the_batches_that_each_epoch_really_has() -> None:
    """The first ends after 4 of 8, the second has all, the third ends after 2."""
    end = EndEpoch([])
    rates: list[float] = []
    callback: Any = LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False)
    callback.params, callback._callbacks, callback._set_rate = {"steps": 8}, [end], rates.append
    for epoch, batches in enumerate((4, None, 2)):
        end.batches = batches
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            callback.on_train_batch_begin(batch)
    assert rates == [0, 0.25, 1, 1.125, 2, 2.5]


def positions(schedule: Any, steps: int, *others: Any) -> list[float]:
    """Where in training the first batches of the second epoch are, for a schedule of `fit` with `steps` an epoch."""
    found: list[float] = []
    schedule.params, schedule._callbacks, schedule._set_rate = {"steps": steps}, list(others), found.append
    schedule._model = SimpleNamespace(steps_per_execution=1)
    schedule.on_epoch_begin(1)
    for batch in range(2):
        schedule.on_train_batch_begin(batch)
    return found


@pytest.mark.parametrize(("steps_per_epoch", "expected"), [(None, [1, 1.25]), (8, [1, 1.125])])
def test_the_number_of_steps_that_a_script_gives_counts_for_rates(
    steps_per_epoch: int | None, expected: list[float]
) -> None:
    given: Any = {"steps_per_epoch": steps_per_epoch}
    smooth = LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False, **given)
    for schedule in (smooth, LearningRateWarmupCallback(0.1, **given)):
        assert positions(schedule, 4) == expected


@pytest.mark.parametrize(("per_call", "last"), [(1, 2), (2, 2), (3, 2)])
def test_a_warmup_ends_at_its_last_rate_with_calls_of_several_batches_too(
    monkeypatch: pytest.MonkeyPatch, per_call: int, last: float
) -> None:
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 8)
    found: list[float] = []
    warmup: Any = LearningRateWarmupCallback(2.0, warmup_epochs=2)
    warmup.params, warmup._set_rate = {"steps": 8}, lambda epoch: found.append(2.0 * warmup.multiplier(epoch))
    warmup._model = SimpleNamespace(steps_per_execution=per_call)
    for epoch in range(2):
        warmup.on_epoch_begin(epoch)
        for batch in range(0, 8, per_call):
            warmup.on_train_batch_begin(batch)
    assert found == sorted(found)
    assert found[-1] == last
    assert found[0] == pytest.approx(2 * (1 + 7 * per_call / 16) / 8)


def test_rates_of_an_epoch_that_resumes_and_ends_early_follow_all_its_batches() -> None:
    """One was before, and three come of the seven that are left."""
    end = EndEpoch([])
    end.batches = 3
    schedule = LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False)
    assert positions(schedule, 8, SimpleNamespace(batches_before=1), end) == [1.25, 1.5]


@pytest.mark.parametrize(
    ("schedule", "corrects"),
    [
        (LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, momentum_correction=False), False),
        (LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch), True),
        (LearningRateWarmupCallback(0.2, 2, momentum_correction=False, steps_per_epoch=1), False),
        (LearningRateWarmupCallback(0.2, 2, steps_per_epoch=1), True),
    ],
)
def test_momentum_is_corrected_unless_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, schedule: Any, corrects: bool
) -> None:
    """From a rate of 0 there is nothing to correct, and no factor."""
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 4)
    weight, optimizer = keras.Variable([1.0]), SGD(0.0, momentum=0.9)
    optimizer.build([weight])
    (momentum,) = (variable for variable in optimizer.variables if variable.path.endswith("_momentum"))
    momentum.assign([3.0])
    schedule._model, schedule.params = SimpleNamespace(optimizer=optimizer, steps_per_execution=1), {"steps": 1}
    rates, momenta = [0.0], [3.0]
    for epoch in range(2):
        schedule.on_epoch_begin(epoch)
        schedule.on_train_batch_begin(0)
        rates.append(float(optimizer.learning_rate))
        momenta.append(float(momentum.numpy()[0]))
    assert rates[2] > rates[1] > 0
    assert momenta == pytest.approx([3, 3, 3 * (rates[2] / rates[1] if corrects else 1)])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_the_warmup_is_told_once_by_root_if_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """The rate is among the figures of each epoch."""
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: rank)
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 2)
    for verbose in (0, 1):
        seen: list[float] = []
        note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs, seen=seen: seen.append(logs["lr"]))
        fitted(LearningRateWarmupCallback(0.25, warmup_epochs=2, verbose=verbose), note, epochs=3)
        assert seen == [0.1875, 0.25, 0.25]
        said = "\nEpoch 2: finished gradual learning rate warmup to 0.25.\n"
        assert capsys.readouterr().out == said * (verbose and rank == 0)


def test_logs_that_are_no_numbers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the mean, twice the value."""
    monkeypatch.setattr(objects, "gather", lambda names, _: [names, names])
    monkeypatch.setattr("horovod.tensorflow.allreduce", lambda values, **_: tf.constant(2 * values))
    others = {"when": "now", "count": "3", "none": None, "parts": {"a": 1.0}, "texts": np.array(["a"])}
    logs: dict[str, Any] = {**others, "loss": 1.0, "rate": tf.constant(0.5), "confusion": np.arange(6).reshape(2, 3)}
    MetricAverageCallback().on_epoch_end(0, logs)
    assert logs.pop("confusion").tolist() == [[0, 2, 4], [6, 8, 10]]
    assert logs == {**others, "loss": 2.0, "rate": 1.0}


def test_figures_are_averaged_by_name_though_ranks_log_them_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(objects, "gather", lambda names, _: sent.append(names) or [names, names])
    monkeypatch.setattr(
        "horovod.tensorflow.allreduce", lambda values, **_: sent.append(values.numpy().tolist()) or values
    )
    for logs in ({"loss": 1.0, "accuracy": 2.0, "f1": np.ones(2)}, {"f1": np.ones(2), "accuracy": 2.0, "loss": 1.0}):
        MetricAverageCallback().on_epoch_end(0, dict(logs))
    assert sent[:2] == sent[2:]


def test_what_one_rank_alone_logs_stays_as_it_is_where_only_the_best_model_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As root may evaluate alone. In place of the mean, twice the value."""
    monkeypatch.setattr(objects, "gather", lambda names, _: [names, ["loss"]])
    monkeypatch.setattr("horovod.tensorflow.allreduce", lambda values, **_: tf.constant(2 * values))
    averages, logs = MetricAverageCallback(), {"loss": 1.0, "val_loss": 3.0}
    with pytest.raises(UserError, match="all ranks must log the same metrics; rank 0 logs loss, val_loss, rank 1 logs"):
        averages.on_epoch_end(0, dict(logs))
    averages.needs_all = False
    averages.on_epoch_end(0, logs)
    assert logs == {"loss": 2.0, "val_loss": 3.0}


@pytest.mark.parametrize("root_rank", [0, 1])
def test_every_checkpoint_of_keras_and_what_else_writes_or_shows_progress_is_on_root_only(
    monkeypatch: pytest.MonkeyPatch, root_rank: int
) -> None:
    names = [name for name in dir(keras.callbacks) if name.endswith("Checkpoint")]
    kinds = [getattr(keras.callbacks, name) for name in (*names, "TensorBoard", "CSVLogger", "ProgbarLogger")]
    monkeypatch.setattr(objects, "gather", lambda names, _: [names, names])
    for rank in (0, 1):
        monkeypatch.setattr("horovod.tensorflow.rank", lambda rank=rank: rank)
        given: list[Any] = [kind.__new__(kind) for kind in kinds]
        callbacks._keep_to_one_rank(given, root_rank)
        here = kinds if rank == root_rank else [keras.callbacks.Callback] * len(kinds)
        assert [type(callback) for callback in given] == here


class Means(keras.callbacks.CSVLogger):
    """Writes means over the ranks."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        def mean(value: float) -> float:
            return float(hvd.allreduce(value))

        super().on_epoch_end(epoch, {name: mean(value) for name, value in (logs or {}).items()})


class Shorter(keras.callbacks.CSVLogger):
    """Calls nothing of Horovod's."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print(", ".join(logs or {}))
        super().on_epoch_end(epoch, dict(list((logs or {}).items())[:3]))


@pytest.mark.parametrize(
    ("given", "by_rank", "left"),
    [
        ([Means, Shorter], [["Shorter"], ["Shorter"]], [Means, keras.callbacks.Callback]),
        ([keras.callbacks.CSVLogger], [[], ["CSVLogger"]], [keras.callbacks.CSVLogger]),
        ([keras.callbacks.CSVLogger], [["CSVLogger"], ["CSVLogger"]], [keras.callbacks.Callback]),
    ],
    ids=["it exchanges", "of this rank alone", "of both"],
)
def test_a_rank_keeps_a_writer_that_exchanges_and_one_that_no_other_has(
    monkeypatch: pytest.MonkeyPatch, given: list[Any], by_rank: list[list[str]], left: list[type]
) -> None:
    monkeypatch.setattr(objects, "gather", lambda names, _: by_rank)
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 1)
    callbacks_given: list[Any] = [kind.__new__(kind) for kind in given]
    callbacks._keep_to_one_rank(callbacks_given, 0)
    assert [type(callback) for callback in callbacks_given] == left


@pytest.mark.parametrize(
    ("options", "values", "saved"),
    [
        ({"monitor": "loss"}, [3, 1, 2], 1),
        ({"monitor": "loss", "mode": "max"}, [1, 3, 2], 3),
        ({"monitor": "loss", "save_weights_only": True}, [3, 1, 2], 1),
    ],
    ids=str,
)
def test_the_best_model_and_no_later_one_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], values: list[float], saved: float
) -> None:
    """Into a file that holds what was asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", "mse")
    best = callbacks.BestModelCheckpoint(**options)
    best.set_model(model)
    for epoch, value in enumerate(values):
        model.set_weights([np.full((1, 1), value)])
        best.on_epoch_end(epoch, {options["monitor"]: value})
    (file,) = tmp_path.iterdir()
    assert file.name == ("best.weights.h5" if "save_weights_only" in options else "best.keras")
    model.load_weights(file)
    assert model.get_weights()[0].tolist() == [[saved]]
    if "save_weights_only" not in options:
        assert keras.saving.load_model(file).get_weights()[0].tolist() == [[saved]]


def test_the_best_model_may_be_looked_for_between_the_ends_of_epochs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 0)
    file = tmp_path / "best.keras"
    found: list[bool] = []
    best = callbacks.BestModelCheckpoint("loss", save_freq=2, filepath=str(file))
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(file.exists()))
    fitted(best, look)
    assert found == [False, True]


Mean, Stop, Backup = MetricAverageCallback, keras.callbacks.EarlyStopping, keras.callbacks.BackupAndRestore


class Best(keras.callbacks.ModelCheckpoint):
    save_best_only = True


@pytest.mark.parametrize(
    ("before", "after", "shares_backup", "expected"),
    [
        ([], [Stop], True, (True, True, False)),
        ([], [Best], True, (True, False, False)),
        ([], [Best, Stop], True, (True, True, False)),
        ([], [Mean, Best], True, (False, False, False)),
        ([Best], [], True, (False, False, False)),  # keeps the best of root's own figures, and a line says so
        ([Best], [Stop], True, (True, True, False)),
        ([keras.callbacks.ModelCheckpoint], [], True, (False, False, False)),
        ([], [keras.callbacks.ReduceLROnPlateau], True, (True, True, False)),
        ([], [Mean, Stop], True, (False, False, False)),
        ([], [Stop, Mean], True, (True, True, False)),
        ([Mean, Stop], [], True, (False, False, False)),
        ([Stop], [], True, "EarlyStopping must come after BroadcastGlobalVariablesCallback"),
        ([Stop], [Mean], True, "EarlyStopping must come after BroadcastGlobalVariablesCallback"),
        ([Backup], [], True, "BackupAndRestore must come after BroadcastGlobalVariablesCallback"),
        ([Backup], [], False, (False, False, False)),
        ([], [keras.callbacks.TerminateOnNaN], True, (False, False, True)),
        ([keras.callbacks.TerminateOnNaN, keras.callbacks.CSVLogger], [], True, (False, False, True)),
    ],
)
def test_callbacks_that_decide_get_means_and_those_that_cannot_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    before: list[Any],
    after: list[Any],
    shares_backup: bool,
    expected: Any,
) -> None:
    """Means come before them where a MetricAverageCallback comes before them, and nowhere else."""
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 2)
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 0)
    monkeypatch.setattr(callbacks, "_on_any_rank", lambda name, *flags: flags)
    broadcaster = BroadcastGlobalVariablesCallback()
    given = [*(kind.__new__(kind) for kind in before), broadcaster, *(kind.__new__(kind) for kind in after)]

    def needs() -> tuple[bool, bool, bool]:
        return callbacks._find_needs(given, broadcaster, shares_backup=shares_backup)

    if isinstance(expected, str):
        with pytest.raises(UserError, match=f"^model.fit: {expected}"):
            needs()
        return
    assert needs() == expected
    said = ["Best keeps the best by root's own figures" in line for line in caplog.messages]
    assert said == [True] * (Best in before)
    # What one rank needs, all do; what is wrong on one is refused on all, which would else wait for it.
    monkeypatch.setattr(callbacks, "_on_any_rank", lambda name, *flags: [True, True, True, False])
    assert needs() == (True, True, True)
    monkeypatch.setattr(callbacks, "_on_any_rank", lambda name, *flags: [*flags[:3], True])
    with pytest.raises(UserError, match="must come after"):
        needs()


@pytest.mark.parametrize(
    ("losses", "stops"),
    [([1.0, 1.0], False), ([1.0, np.nan], True), ([np.inf, 1.0], True), ([1.0, -np.inf], True), ([None, 1.0], False)],
)
def test_a_loss_that_is_not_finite_on_any_rank_stops_all(
    monkeypatch: pytest.MonkeyPatch, losses: list[float | None], stops: bool
) -> None:
    """Infinity is not finite either, as for TerminateOnNaN."""
    given: list[tf.Tensor] = []
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 1)
    # The first time each rank learns of those before it, the second time of all.
    monkeypatch.setattr("horovod.tensorflow.allgather", lambda own, **_: given.append(own) or tf.concat(given, axis=0))
    for _ in range(2):
        of_each: list[Any] = [BroadcastGlobalVariablesCallback() for _ in losses]
        for callback, loss in zip(of_each, losses, strict=True):
            callback._model = SimpleNamespace(stop_training=False)
            callback._end_if_not_finite(0, loss)
    assert [callback.model.stop_training for callback in of_each] == [stops] * 2


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
