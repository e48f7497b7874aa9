"""Which Keras callbacks a config can name, and what is kept of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import user_callbacks
import user_steps

from horovod_train.checkpoint.layout import Checkpoint, Facts
from horovod_train.config.loader import as_dict
from horovod_train.config.settings import Config, Spec, TrainConfig
from horovod_train.errors import RunError, UserError
from horovod_train.training.callbacks import load_callbacks
from horovod_train.training.hooks.evaluate import _without_other_values, saved_state
from horovod_train.training.state import Averages, moving_averages
from horovod_train.training.steps.optimizers import Optimizers, optimizers_in
from horovod_train.training.stopping import StopReason

NO_AVERAGES = Averages([])

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "model_checkpoint",
        {"filepath": "x.keras"},
        "model_checkpoint has no use here; use the settings under checkpoint,",
    ),
    ("user_callbacks:OwnCheckpoint", {"filepath": "x.keras"}, "OwnCheckpoint has no use here; use the settings under"),
    ("TensorBoard", {}, "TensorBoard has no use here; use log.tensorboard."),
    ("keras.callbacks:CSVLogger", {"filename": "x"}, "CSVLogger has no use here; use metrics.jsonl of the run"),
    ("BackupAndRestore", {"backup_dir": "x"}, "has no use here; use checkpoint.resume: auto, which is the default."),
    ("user_callbacks:OwnSwap", {}, "user_callbacks:OwnSwap is derived from SwapEMAWeights, which is replaced here;"),
    (
        "EarlyStopping",
        {"restore_best_weights": True},
        "EarlyStopping has restore_best_weights, which a resume would lose; leave it out, and use checkpoint.best.",
    ),
    (
        "user_callbacks:KeepsTheBest",
        {},
        "KeepsTheBest has restore_best_weights, which a resume would lose;",
    ),
    ("EarlyStoping", {}, "callbacks[0]: Keras has no 'EarlyStoping'; did you mean EarlyStopping"),
    (
        "EarlyStopping",
        {"patient": 3},
        "callbacks[0].options: EarlyStopping: got an unexpected keyword argument 'patient'",
    ),
    ("user_callbacks:no_callback", {}, "user_callbacks:no_callback must make a Keras callback; it made int."),
    ("user_callbacks:Predicts", {}, "Predicts has on_predict_end, which a training run never calls."),
    (
        "LambdaCallback",
        {"on_test_batch_end": print},
        "LambdaCallback has on_test_batch_end, which a training run never calls.",
    ),
    (
        "LearningRateScheduler",
        {"schedule": "half"},
        "callbacks[0].options.schedule: expected a function, as package.module:function; received 'half'.",
    ),
    ("LearningRateScheduler", {"schedule": "user_callbacks:nothing"}, "options.schedule: user_callbacks has no 'noth"),
    ("keras.callbacks:LambdaCallback", {"on_epoch_end": 3}, "options.on_epoch_end: expected a function, as package"),
    ("user_callbacks:HalfAState", {}, "HalfAState needs both get_state() and set_state(state), or neither."),
]


@pytest.mark.parametrize(("name", "options", "expected"), REFUSED)
def test_what_has_no_use_is_one_line(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        load_callbacks([Spec(name, options)])
    assert expected in str(error.value)
    assert str(error.value).startswith("callbacks[0]")


def test_a_function_of_a_lambda_callback_sees_batches() -> None:
    assert load_callbacks([Spec("LambdaCallback", {"on_train_batch_end": print})]).see_batches
    assert not load_callbacks([Spec("LambdaCallback", {"on_epoch_end": print})]).see_batches


def test_functions_of_keras_callbacks_are_named_as_all_else_is() -> None:
    """A callback of a user's own gets its options as they are."""
    name = "user_callbacks:half"
    scheduler, of_lambda, own = load_callbacks(
        [
            Spec("LearningRateScheduler", {"schedule": name}),
            Spec("LambdaCallback", {"on_epoch_end": name, "on_train_end": None}),
            Spec("user_callbacks:HalvesTheRate", {"schedule": name}),
        ]
    ).named
    assert scheduler.callback.schedule is of_lambda.callback.on_epoch_end is user_callbacks.half
    assert of_lambda.runs_users_code("on_epoch_end")
    assert own.callback.schedule == name


def made(rate: Any = 0.5) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def applied(model: keras.Model) -> Optimizers:
    """What a run that trains the model by `fit` would apply."""
    optimizers = Optimizers({})
    optimizers.by_path["optimizer"] = model.optimizer
    return optimizers


def test_a_state_returns_and_equal_names_are_told_apart() -> None:
    plateau = Spec("ReduceLROnPlateau", {"patience": 1})
    before, after = (load_callbacks([plateau, Spec("user_callbacks:Recorder"), plateau]) for _ in range(2))
    assert [named.name for named in before.named] == [plateau.name, "user_callbacks:Recorder", f"{plateau.name}#2"]
    before.named[0].callback.wait, before.named[2].callback.best, before.epoch_ended_at = 3, 0.25, 40
    before.named[1].callback.epochs = 7
    assert before.digests() != after.digests()
    after.restore(before.state(), 0)
    assert before.digests() == after.digests()
    assert (after.named[0].callback.wait, after.named[1].callback.epochs, after.epoch_ended_at) == (3, 7, 40)
    assert load_callbacks([]).state() == {"ended_at": -1, "hooks_left_at": -1, "hook_ended": None}


def test_that_a_hook_or_a_callback_has_ended_the_run_counts_while_the_config_names_the_same() -> None:
    state = {"have_stopped": True, "hook_ended": "enough", "ended_at": 7}
    then = Config(hooks=("mine:check",), callbacks=(Spec("mine:Stops"),))
    facts = Facts(step=7, epoch=1, records=0, ranks=1, config=as_dict(then), versions={}, callbacks=state)
    saved = Checkpoint(Path("any"), facts, {})
    assert saved_state(saved, then) == state
    assert saved_state(saved, dataclasses.replace(then, hooks=())) == {"have_stopped": True, "ended_at": 7}
    assert saved_state(saved, dataclasses.replace(then, callbacks=())) == {"hook_ended": "enough", "ended_at": 7}
    callbacks = load_callbacks([])
    callbacks.restore(state | {"have_stopped": False}, 7)
    assert callbacks.ended() == StopReason("enough")
    callbacks.restore({}, 7)
    assert callbacks.ended() is None


@pytest.mark.parametrize(
    ("monitor", "changed", "named"),
    [
        ("val_loss", {}, ""),
        ("val_loss", {"content": "other"}, "data.eval"),
        ("val_loss", {"train": TrainConfig(l2=0.1)}, "train.l2"),
        ("val_accuracy", {"train": TrainConfig(l2=0.1)}, ""),
        ("loss", {"content": "other"}, ""),
        ("loss", {"train": TrainConfig(l2=0.1), "content": "other"}, "train.l2"),
    ],
)
def test_the_best_value_of_a_callback_counts_unless_its_figure_means_something_else_now(
    said: list[str], monitor: str, changed: dict[str, Any], named: str
) -> None:
    """Other records of the evaluation give other figures of evaluations, and the same of training."""
    content = changed.pop("content", "records")
    specs = [Spec("EarlyStopping", {"monitor": monitor, "mode": "max"}), Spec("user_callbacks:Recorder")]
    state = {"told": 7, "states": {"EarlyStopping": {"best": 0.25}, "user_callbacks:Recorder": {"epochs": 7}}}
    facts = Facts(7, 1, 0, 1, config=as_dict(Config()), versions={}, callbacks=state, eval_data="records")
    train, evaluation = SimpleNamespace(features={}), SimpleNamespace(content=content)
    parts = SimpleNamespace(callbacks=load_callbacks(specs), train=train, eval=evaluation)
    run: Any = SimpleNamespace(config=Config(**changed), parts=parts)
    kept = _without_other_values(run, Checkpoint(Path("any"), facts, {}))
    assert kept["told"] == 7
    assert kept["states"].keys() == {"user_callbacks:Recorder"} | ({"EarlyStopping"} if not named else set())
    line = f"callbacks: EarlyStopping begins anew, because another {named} gives other values"
    assert said == [line] * bool(named)


@pytest.mark.parametrize("name", ["EarlyStopping", "ReduceLROnPlateau"])
@pytest.mark.parametrize(
    ("monitor", "mode", "wait"), [("val_loss", "min", 3), ("loss", "min", 0), ("val_loss", "max", 0)]
)
def test_a_state_does_not_return_to_a_callback_that_monitors_something_else(
    name: str, monitor: str, mode: str, wait: int
) -> None:
    (before,) = load_callbacks([Spec(name, {"monitor": "val_loss", "mode": "min"})]).named
    (after,) = load_callbacks([Spec(name, {"monitor": monitor, "mode": mode})]).named
    for named in (before, after):
        named.callback.on_train_begin()
    before.callback.best, before.callback.wait = 0.25, 3
    after.restore(before.state())
    assert after.callback.wait == wait
    assert (after.callback.best == 0.25) == (wait == 3)


@pytest.mark.parametrize("name", ["EarlyStopping", "ReduceLROnPlateau"])
def test_what_is_better_must_be_known_before_the_first_epoch_ends(name: str) -> None:
    there = ["val_loss", "val_accuracy"]
    with pytest.raises(UserError, match=rf"{name} monitors 'val_accuracy': give its option mode, max or min\."):
        load_callbacks([Spec(name, {"monitor": "val_accuracy"})]).check_monitors(there)
    load_callbacks([Spec(name, {"monitor": "val_accuracy", "mode": "max"}), Spec(name)]).check_monitors(there)


def test_a_figure_that_an_earlier_callback_adds_can_be_monitored() -> None:
    adds, falling = Spec("user_callbacks:Adds"), Spec("EarlyStopping", {"monitor": "falling", "mode": "max"})
    load_callbacks([adds, falling]).check_monitors(["loss"])
    for nothing_adds in ([falling], [falling, adds], [Spec("ReduceLROnPlateau", {"monitor": "loss"}), falling]):
        with pytest.raises(UserError, match="EarlyStopping monitors 'falling'; there are loss"):
            load_callbacks(nothing_adds).check_monitors(["loss"])


def test_callbacks_that_a_resumed_run_adds_are_not_told_of_the_epoch_before_it() -> None:
    callbacks = load_callbacks([Spec("user_callbacks:Recorder")])
    callbacks.restore({}, 40)
    assert callbacks.epoch_ended_at == 40
    assert callbacks.ended() is None


def test_a_rate_that_follows_a_schedule_cannot_be_set() -> None:
    callbacks = load_callbacks([Spec("ReduceLROnPlateau", {"monitor": "val_los"})])
    plain, scheduled = made(), made(keras.optimizers.schedules.CosineDecay(0.1, 10))
    callbacks.attach(plain, applied(plain), NO_AVERAGES, epochs=3, steps_per_epoch=5)
    with pytest.raises(UserError, match="sets the learning rate, which follows a schedule here"):
        callbacks.attach(scheduled, applied(scheduled), NO_AVERAGES, epochs=3, steps_per_epoch=5)
    several = made()
    several.compile(
        keras.optimizers.MultiOptimizer([(keras.optimizers.SGD(0.1), "nothing")], keras.optimizers.SGD(0.1))
    )
    with pytest.raises(UserError, match=r"sets the learning rate, and that of model\.optimizer cannot be set"):
        callbacks.attach(several, applied(several), NO_AVERAGES, epochs=3, steps_per_epoch=5)
    with pytest.raises(UserError, match="ReduceLROnPlateau monitors"):
        callbacks.check_monitors(["loss", "val_loss"])


def test_a_rate_that_the_models_step_does_not_apply_cannot_be_set() -> None:
    """Keras' compile, called by that of the model, has made an optimizer that nothing uses."""
    model = user_steps.wgan()
    optimizers = Optimizers(optimizers_in(model))
    with pytest.raises(UserError, match=r"sets the rate of model.optimizer, which the model's step does not apply"):
        load_callbacks([Spec("ReduceLROnPlateau")]).attach(model, optimizers, NO_AVERAGES, epochs=1, steps_per_epoch=1)


def test_a_state_that_json_cannot_hold_is_one_line() -> None:
    (named,) = load_callbacks([Spec("user_callbacks:NoJson")]).named
    with pytest.raises(RunError, match="callbacks: user_callbacks:NoJson: get_state"):
        named.state()


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (None, "needs an optimizer that keeps averages: optimizer.options.use_ema: true. Give that, or leave the"),
        (0.9, "use_ema: true. Those of train.ema_decay are evaluated without it. Give that, or leave"),
    ],
)
def test_averages_to_swap_must_be_the_optimizers(decay: float | None, expected: str) -> None:
    model = made()
    averages = NO_AVERAGES if decay is None else moving_averages(model, decay)
    callbacks = load_callbacks([Spec("SwapEMAWeights", {"swap_on_epoch": True})])
    with pytest.raises(UserError) as error:
        callbacks.attach(model, applied(model), averages, epochs=1, steps_per_epoch=1)
    assert expected in str(error.value)
