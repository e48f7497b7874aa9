"""Names and options that a config gives: what is wrong with them is one line with what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import user_faults  # noqa: F401  found by its name below
import user_models

from horovod_train.config.settings import Config, LrScheduleConfig, MetricSpec, OptimizerSpec, Spec
from horovod_train.errors import UserError
from horovod_train.models import build_model
from horovod_train.optim.optimizers import build_optimizer
from horovod_train.optim.schedules import Horizon
from horovod_train.training.compiled import build_metrics, targets_of
from horovod_train.training.losses import build_loss

HORIZON = Horizon(global_batch_size=64, steps_per_epoch=10, total_steps=100)


def optimizer(name: str, **options: object) -> object:
    return build_optimizer(Config(optimizer=OptimizerSpec(name, options)), HORIZON)


def decay(name: str, **options: object) -> object:
    return build_optimizer(Config(lr_schedule=LrScheduleConfig(decay=Spec(name, options))), HORIZON)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "unknown model": (lambda: build_model(Spec("convent")), "model.name: unknown name 'convent'; did you mean convnet"),
    "unknown option": (lambda: build_model(Spec("mlp", {"depth": 3})), "model.options: mlp: got an unexpected keyword"),
    "no such module": (lambda: build_model(Spec("nowhere:build")), "model.name: cannot import 'nowhere:build'"),
    "no such function": (
        lambda: build_model(Spec("user_models:smal")),
        "model.name: user_models has no 'smal'; did you mean small",
    ),
    "an error of the function's own": (
        lambda: build_model(Spec("user_faults:missing_key")),
        "model: user_faults:missing_key: KeyError: 'hidden' (at ",
    ),
    "no model": (lambda: build_model(Spec("user_models:not_a_model")), "must return a keras.Model; it returned int"),
    "unknown optimizer": (lambda: optimizer("sdg"), "optimizer.name: Keras has no 'sdg'; did you mean SGD"),
    "optimizer option": (lambda: optimizer("sgd", momentums=1), "optimizer: sgd with options {'momentums': 1}"),
    "optimizer value": (lambda: optimizer("sgd", momentum=2.0), "optimizer: sgd with options {'momentum': 2.0}"),
    "rate twice": (lambda: optimizer("sgd", learning_rate=1), "the rate is set by lr_schedule.base_lr"),
    "unknown decay": (lambda: decay("cosin"), "lr_schedule.decay.name: unknown name 'cosin'; did you mean cosine"),
    "rate missing": (lambda: decay("exponential"), "lr_schedule.decay.options: exponential: missing a required"),
    "lengths": (
        lambda: decay("piecewise", boundaries_epochs=[1], factors=[0.1, 0.2]),
        "must be of one length; received 1 and 2",
    ),
    "unknown loss": (lambda: build_loss(Spec("crossentropy")), "loss.name: Keras has no 'crossentropy'; did you mean"),
    "unknown metric": (
        lambda: build_metrics([Spec("acuracy")]),
        "metrics: Keras has no 'acuracy'; did you mean accuracy",
    ),
    "metric option": (
        lambda: build_metrics([Spec("auc", {"threshold": 3})]),
        "metrics.options: auc: got an unexpected keyword argument 'threshold'",
    ),
    "no metric": (
        lambda: build_metrics([Spec("user_models:not_a_model")]),
        "metrics: user_models:not_a_model must make a keras.metrics.Metric; it made int.",
    ),
    "outputs of some metrics": (
        lambda: build_metrics([MetricSpec("mean_absolute_error", output="one"), MetricSpec("mean_absolute_error")]),
        "metrics: give each metric its output, or none of them.",
    ),
    "a target without an output": (
        lambda: targets_of([MetricSpec("accuracy", target="label")], {}),
        "metrics: accuracy: target 'label' needs an output to be compared with.",
    ),
    "two targets of an output": (
        lambda: targets_of([MetricSpec("acc", output="one", target=target) for target in ("a", "b")], {}),
        "metrics: one has two targets, a and b; loss and metrics of an output share one.",
    ),
    "another target than in the loss": (
        lambda: targets_of([MetricSpec("acc", output="one")], {"one": "a"}),
        "metrics: one has two targets, a and one; loss and metrics of an output share one.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_is_one_line_with_what_would_be_right(name: str) -> None:
    attempt, expected = WRONG[name]
    with pytest.raises(UserError) as found:
        attempt()
    assert expected in str(found.value)
    assert "\n" not in str(found.value)
    assert found.value.exit_code == 2


def test_metrics_are_what_compile_takes() -> None:
    """By output, if they have one; names that depend on shapes are left to Keras."""
    plain = build_metrics([Spec("accuracy"), Spec("mean_absolute_error"), Spec("accuracy", {"name": "exact"})])
    assert plain[0] == "accuracy"
    assert [metric.name for metric in plain[1:]] == ["mean_absolute_error", "exact"]
    by_output = build_metrics([MetricSpec("AUC", output="one"), MetricSpec("acc", output="two")])
    assert list(by_output) == ["one", "two"]
    assert isinstance(by_output["one"][0], keras.metrics.AUC)
    assert by_output["two"] == ["acc"]
    assert targets_of([MetricSpec("AUC", output="one", target="t"), MetricSpec("acc", output="two")], {}) == {
        "one": "t",
        "two": "two",
    }
    assert build_metrics([]) == []


def test_the_name_of_a_metric_is_not_numbered_by_looking_for_its_class() -> None:
    keras.backend.clear_session()
    assert [metric.name for metric in build_metrics([Spec("auc"), Spec("AUC"), Spec("recall")])] == [
        "auc",
        "auc_1",  # as in `fit`
        "recall",
    ]


def test_short_names_and_functions_are_taken_as_compile_takes_them() -> None:
    """Keras' short names, which it then shows; a function of (targets, outputs) besides one that makes a metric."""
    assert isinstance(build_loss(Spec("mse")).loss, keras.losses.MeanSquaredError)
    assert isinstance(build_loss(Spec("kld", {"reduction": "sum"})).loss, keras.losses.KLDivergence)
    short, named, function = build_metrics(
        [Spec("mae"), Spec("mae", {"name": "error"}), Spec("user_models:huber_per_record", {"delta": 0.5})]
    )
    assert short == "mae"
    assert isinstance(named, keras.metrics.MeanAbsoluteError)
    targets, outputs = np.array([1, 2]), np.eye(10, dtype=np.float32)[[1, 4]]
    function.update_state(targets, outputs)
    assert function.name == "huber_per_record"
    expected = float(np.mean(user_models.huber_per_record(targets, outputs, 0.5)))
    assert float(function.result()) == pytest.approx(expected)


def test_what_a_users_function_raises_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line on the screen is all that a user sees of it."""
    (tmp_path / "models_of_mine.py").write_text(
        "import keras\n\n\ndef build(width=8):\n    return keras.layers.Dense(width='wide')\n\n\n"
        "def adds():\n    return 1 + 'one'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for function, line in {"build": 5, "adds": 9}.items():
        with pytest.raises(UserError) as raised:
            build_model(Spec(f"models_of_mine:{function}"))
        assert str(raised.value).endswith(f" (at {tmp_path / 'models_of_mine.py'}:{line})")
    with pytest.raises(UserError) as raised:
        optimizer("sgd", momentum=2.0)
    assert "(at " not in str(raised.value)
