"""What is asked of the step of a model, Keras' or its own, and the lines for what cannot be."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from made_records import config as data_config
from made_records import make_images, pipeline

import horovod_train.tensorflow as hvd
from horovod_train.config.loader import build
from horovod_train.config.settings import Config, DataConfig, EvalConfig
from horovod_train.data.batch_source import Batch, StepSize
from horovod_train.data.pipeline import Pipeline
from horovod_train.distributed import allreduce, sync_batch_norm
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.start import horovod_alone
from horovod_train.errors import UserError
from horovod_train.optim.schedules import Horizon
from horovod_train.training import build as training_build
from horovod_train.training import refusals
from horovod_train.training.build import build_evaluation, build_training
from horovod_train.training.compiled import compile_model
from horovod_train.training.nonfinite import nonfinite_names
from horovod_train.training.refusals import list_warnings
from horovod_train.training.steps import figures
from horovod_train.training.steps.histograms import Summaries, draw_step
from horovod_train.training.steps.optimizers import optimizers_in
from horovod_train.training.steps.shares import IF_ANY, Shares
from horovod_train.training.steps.step import EvalStep, TrainStep

ALONE = WorkerGroup(
    rank=0,
    size=2,
    local_rank=0,
    local_size=1,
    launcher="none",
    exchange="none",
    controller="none",
    hosts=("", ""),
    devices=(),
)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """70 records in steps of 16: the last of an epoch has 6."""
    return pipeline(data_config(make_images(tmp_path_factory.mktemp("data") / "train")), 0, 2, batch=16)


class Own(keras.Model):
    """Images → 10 logits. returned, before: what train_step returns, and does first."""

    def __init__(self, returned: Any = None, before: Callable[[Any], Any] = lambda model: 0.0) -> None:
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(10)
        self.returned, self.before = returned, before

    def call(self, image: Any) -> Any:
        return self.dense(self.flatten(image))

    def loss_of(self, data: Any) -> Any:
        x, y = data  # there are no weights
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data) + self.before(self)
        own = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        return {"loss": loss} if self.returned is None else self.returned


def made(model: keras.Model | None = None, compiled: bool = True) -> keras.Model:
    model = model or Own()
    model(keras.Input((4, 4, 1)))
    if compiled:
        model.compile(keras.optimizers.SGD(0.25, momentum=0.9))
    return model


def train(batches: Pipeline, model: keras.Model, /, **sections: Any) -> TrainStep:
    config = build(Config, {"model": "users:model"} | sections, "")
    return build_training(config, ALONE, compile_model(config, model, Horizon(16, 5, 10)), batches, Shares(ALONE), {})


def evaluate(batches: Pipeline, model: keras.Model, **sections: Any) -> EvalStep:
    config = build(Config, {"model": "users:model"} | sections, "")
    return build_evaluation(config, ALONE, compile_model(config, model, None), batches, Shares(ALONE))


class OfOneRank:
    """In place of a GradientExchange, which needs Horovod: there is no other rank."""

    op = "average"

    def combine_each(self, gradients: Any, name: str) -> list[Any]:
        return list(gradients)


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainStep]:
    """(batches, model, **sections of the config) → what trains the model in one process."""
    monkeypatch.setattr(training_build, "GradientExchange", lambda **_: OfOneRank())
    monkeypatch.setattr(WorkerGroup, "sum_in_step", lambda _, value, name: value)

    def step(batches: Pipeline, model: keras.Model, **sections: Any) -> TrainStep:
        config, group = build(Config, {"model": "users:model"} | sections, ""), replace(ALONE, size=1, hosts=("",))
        return build_training(
            config, group, compile_model(config, model, Horizon(16, 5, 10)), batches, Shares(group), {}
        )

    return step


def rate_of(step: TrainStep) -> float:
    return float(step.update.optimizers.learning_rates["learning_rate"])


def test_a_run_whose_weights_are_large_but_finite_continues(
    batches: Pipeline, stepping: Callable[..., TrainStep]
) -> None:
    """Float32 cannot hold their squares. A weight that is not finite ends the call."""
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.dense.kernel.assign(tf.fill((16, 10), 1e19))
    step = stepping(batches, model)
    _, continues, _ = step.run(batches.batches(0, 0, epochs=1), 1, batches.size_of(0))
    assert continues
    assert not nonfinite_names({"kernel": model.dense.kernel.value})  # by which an error would name it
    model.dense.kernel.assign(tf.fill((16, 10), float("inf")))
    _, continues, _ = step.run(batches.batches(0, 1, epochs=1), 1, batches.size_of(1))
    assert not continues


@pytest.mark.parametrize(
    ("label", "kind"), [(0.5, "float32"), (0.5, "float64"), (2.0, "float32"), (np.nan, "float32"), (1, "int64")]
)
def test_a_label_that_is_no_whole_number_is_one_line(
    label: float, kind: str, tmp_path: Path, stepping: Callable[..., TrainStep]
) -> None:
    labels = np.arange(64).astype(kind) % 5
    labels[40] = label
    np.savez(tmp_path / "a.npz", x=np.zeros((64, 3), np.float32), y=labels)
    source = pipeline(data_config(tmp_path / "a.npz", targets=("y",)), batch=16)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layers.Dense(10)(inputs))
    loss = {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}
    step = stepping(source, model, loss=loss, train={"non_finite": "skip"}, lr_schedule={"base_lr": 0.1})
    evaluation = evaluate(source, keras.models.clone_model(model), loss=loss)
    said = (
        r"data\.targets: a record has the label (0\.5|nan); a class is a whole number\. For a quantity write loss: "
        r"mean_squared_error, and give the model one output\."
    )

    def refused() -> AbstractContextManager[Any]:
        return nullcontext() if label in (1, 2) else pytest.raises(UserError, match=said)

    with refused(), source.explaining():
        step.run(source.batches(0, 0, epochs=1), 4, source.size_of(0))
    with refused(), source.explaining():
        for batch in source.batches(0, 0, epochs=1):
            evaluation.rows.data_of(source.scaled(batch))


def test_the_optimizer_is_that_of_compile_or_the_configs(batches: Pipeline) -> None:
    as_compiled = train(batches, made())
    assert rate_of(as_compiled) == pytest.approx(0.25)
    assert len(as_compiled.update.optimizers.variables) == 4  # counter, rate, and momentum of two weights
    scheduled = made()
    scheduled.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.25, 10)), scheduled.loss)
    constant = train(batches, scheduled, lr_schedule={"base_lr": 0.125})
    assert rate_of(constant) == pytest.approx(0.125)
    other = train(batches, made(), optimizer="adam", lr_schedule={"base_lr": 0.5})
    assert rate_of(other) == pytest.approx(0.5)
    assert len(other.update.optimizers.variables) == 6
    built = train(batches, made(compiled=False), optimizer="adam")
    assert len(built.update.optimizers.variables) == 6


class Wrapping(keras.optimizers.Optimizer):
    """Has another one apply, as a wrapper of a library does; its own counter moves too."""

    def __init__(self, inner: keras.optimizers.Optimizer) -> None:
        super().__init__(learning_rate=0.0)
        self.inner = [inner]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.inner[0].apply(grads, trainable_variables)


WRAPPERS: dict[str, tuple[Callable[[], keras.optimizers.Optimizer], int]] = {
    # The scale, the counters and whether it is dynamic are its own; of SGD counter, rate, and momentum of two weights.
    "a loss scale": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.25, momentum=0.9)), 4),
    "a loss scale around a wrapper": (
        lambda: keras.optimizers.LossScaleOptimizer(Wrapping(keras.optimizers.SGD(0.25, momentum=0.9))),
        4,
    ),
    "a wrapper": (lambda: Wrapping(keras.optimizers.Adam(0.25)), 6),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_variables_of_optimizers_inside_others_are_kept(batches: Pipeline, name: str) -> None:
    build_optimizer, of_inner = WRAPPERS[name]
    model, optimizer = Own(), build_optimizer()
    model(keras.Input((4, 4, 1)))
    model.compile(optimizer, auto_scale_loss=False)
    found = train(batches, model).update.optimizers
    inner: Any = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer | Wrapping):
        inner = inner.inner_optimizer if isinstance(inner, keras.optimizers.LossScaleOptimizer) else inner.inner[0]
    kept = {id(variable) for variable in found.variables}
    assert len(inner.variables) == of_inner
    assert {id(variable) for variable in (*inner.variables, *optimizer.variables)} <= kept
    assert len(kept) == len(found.variables)
    assert list(found.by_path) == ["optimizer"]
    assert found.scales_loss == isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def test_rates_of_several_optimizers_have_their_names(batches: Pipeline) -> None:
    found = train(batches, made(_with_two(Own(), learning_rate=0.5))).update.optimizers
    rates = {name: float(rate) for name, rate in found.learning_rates.items()}
    assert rates == {"optimizer_learning_rate": 0.25, "second_learning_rate": 0.5}


def by_variable(*, scaled: bool = False, **options: Any) -> keras.optimizers.Optimizer:
    """Another optimizer for kernels than for biases. scaled: in a LossScaleOptimizer."""
    of_biases = keras.optimizers.SGD(0.5, **options)
    choice = keras.optimizers.OptimizerMap(of_biases, {".*kernel": keras.optimizers.Adam(0.25)})
    optimizer = keras.optimizers.MultiOptimizer(choice)
    return keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer


def built_by_variable(learning_rate: Any) -> keras.optimizers.Optimizer:
    """As a config names it."""
    return by_variable()


def compiled_by_variable(**options: Any) -> keras.Model:
    model = made(compiled=False)
    model.compile(by_variable(**options), auto_scale_loss=False)
    return model


@pytest.mark.parametrize("scaled", [False, True], ids=["alone", "in a loss scale"])
def test_rates_of_a_multi_optimizer_are_those_inside_it(batches: Pipeline, scaled: bool) -> None:
    rates = train(batches, compiled_by_variable(scaled=scaled)).update.optimizers.learning_rates
    assert sorted(float(rate) for rate in rates.values()) == [0.25, 0.5]


def test_averages_are_those_of_the_optimizer_of_compile(batches: Pipeline) -> None:
    """Another optimizer of the model's own may overwrite weights with its averages, which stay its own."""
    model = made(compiled=False)
    model.compile(keras.optimizers.SGD(0.25, use_ema=True))
    averages = train(batches, model).state.averages
    assert averages.are_of_optimizer
    assert list(averages.variables) == [weight.path for weight in model.trainable_weights]
    own = train(batches, made(_with_two(Own(), use_ema=True, ema_overwrite_frequency=2)))
    assert not own.state.averages.variables


def test_averages_of_an_optimizer_that_is_built_already_are_found(batches: Pipeline) -> None:
    model = made(compiled=False)
    model.compile(keras.optimizers.SGD(0.25, use_ema=True))
    model.optimizer.build(model.trainable_variables)
    averages = train(batches, model).state.averages
    assert averages.are_of_optimizer
    assert list(averages.variables) == [weight.path for weight in model.trainable_weights]


def test_every_optimizer_of_a_model_is_found_once() -> None:
    model = made()
    first, second, third = (keras.optimizers.SGD() for _ in range(3))
    model.several, model.alias, model.dense.own = {"a": first, "b": [second]}, second, third
    found = optimizers_in(model)
    assert list(found.values()) == [found["optimizer"], first, second, third]
    assert set(found) == {"optimizer", "several.a", "several.b.0", f"{model.dense.name}.own"}


ENTROPY = {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}


def test_a_model_with_a_loss_is_evaluated_by_it_and_else_needs_a_test_step(batches: Pipeline) -> None:
    evaluation = evaluate(batches, made(), loss=ENTROPY, metrics=["accuracy", "sparse_categorical_accuracy"])
    assert evaluation.metrics.names == ["loss", "accuracy", "sparse_categorical_accuracy"]
    with pytest.raises(UserError, match=r"^data.eval: the model has a train_step of its own and no test_step"):
        evaluate(batches, made())


def test_an_evaluation_of_many_records_moves_its_sums_into_float64(
    batches: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RECORDS_IN_FLOAT32", 20)  # of 40 rows on this rank
    model = compiled("sparse_categorical_crossentropy", layers.Softmax())
    step, tracker = evaluate(batches, model), model.metrics[0]
    counts = []
    for number in range(batches.steps_per_epoch - 1):
        step.run(batches.batches(0, number, epochs=1), 1, batches.size_of(number))
        counts.append(float(tracker.count))
    assert counts == [8.0, 16.0, 0.0, 8.0]


def test_an_own_evaluation_has_the_figures_that_it_returns(batches: Pipeline) -> None:
    class Tested(Own):
        def test_step(self, data: Any) -> Any:
            return {"own": self.loss_of(data)}

    assert evaluate(batches, made(Tested())).metrics.names == ["own"]


def test_numbers_of_an_own_evaluation_are_means_over_its_records(
    batches: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tested(Own):
        def test_step(self, data: Any) -> Any:
            return {"own": ops.mean(ops.cast(data[1], "float32"))}

    monkeypatch.setattr(WorkerGroup, "sum_in_step", lambda _, value, name: value)
    step, last = evaluate(batches, made(Tested())), batches.steps_per_epoch - 1
    step.run(batches.batches(0, 0, epochs=1), last, batches.size_of(0))
    step.run(batches.batches(0, last, epochs=1), 1, batches.size_of(last))
    group = SimpleNamespace(size=1, rank=0, sum=lambda arrays: [np.asarray(array, float) for array in arrays])
    found = step.metrics.result(cast(WorkerGroup, group))
    labels = [np.asarray(batch.targets)[batch.ids >= 0] for batch in batches.batches(0, epochs=1)]
    assert {len(each) for each in labels} == {8, 3}
    assert found["own"] == pytest.approx(np.concatenate(labels).mean())


class Plain(keras.Model):
    """Keras' own step."""

    def __init__(self, last: keras.Layer | None = None) -> None:
        super().__init__()
        self.flatten, self.dense, self.last = layers.Flatten(), layers.Dense(10), last or layers.Identity()

    def call(self, image: Any, training: bool = False) -> Any:
        return self.last(self.dense(self.flatten(image)))


def compiled(loss: Any, last: keras.Layer | None = None, *, trains: bool = True) -> keras.Model:
    """trains: whether the dense layer is trained."""
    model = Plain(last)
    model(keras.Input((4, 4, 1)))
    model.dense.trainable = trains
    model.compile(keras.optimizers.SGD(0.25), loss)
    return model


def test_a_loss_over_a_batch_has_a_line_that_says_how_ranks_combine_it(batches: Pipeline) -> None:
    class Compares(keras.losses.Circle):
        """Takes labels and embeddings, as Circle does."""

    for loss in (keras.losses.Circle(), Compares()):
        assert [*list_warnings(Config(), 2, train(batches, compiled(loss)))] == [
            "the loss circle compares the records of a batch; it is averaged over ranks.",
        ]


def mean_of_batch(targets: Any, outputs: Any) -> Any:
    """One number for a batch."""
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True))


@pytest.mark.parametrize(
    ("loss", "weighted", "is_told"),
    [
        (mean_of_batch, True, True),
        (mean_of_batch, False, False),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), True, False),
    ],
)
def test_a_loss_of_one_number_beside_weights_has_a_line(
    batches: Pipeline, loss: Any, weighted: bool, is_told: bool
) -> None:
    source: Any = SimpleNamespace(scaled_spec=batches.scaled_spec, has_weights=weighted, scaled=lambda batch: batch)
    step = train(source, compiled(loss))
    told = "the loss mean_of_batch returns one number for a batch, which weights of records only multiply by their mean"
    if loss is mean_of_batch and not weighted:  # which may be divided by anything
        told, is_told = "the loss mean_of_batch returns one number for a batch; over ranks and parts of a step", True
    assert [line[: len(told)] for line in list_warnings(Config(), 2, step)] == [told] * is_told
    assert not [*list_warnings(Config(), 1, step)]


IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, name="ignoring")
BY_WEIGHT = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight", name="by_weight")


@pytest.mark.parametrize(
    ("loss", "last", "weighted", "exchanged"),
    [
        (IGNORING, None, False, "ignoring"),
        (BY_WEIGHT, None, True, "by_weight"),
        ("sparse_categorical_crossentropy", layers.Masking(), False, "sparse_categorical_crossentropy"),
        (keras.losses.SparseCategoricalCrossentropy(), layers.Masking(), True, "sparse_categorical_crossentropy"),
        (BY_WEIGHT, None, False, ""),
        (keras.losses.SparseCategoricalCrossentropy(reduction="sum"), layers.Masking(), True, ""),
        ("sparse_categorical_crossentropy", None, True, ""),
    ],
)
def test_a_loss_for_which_ranks_meet_in_each_step_has_a_line_under_local(
    batches: Pipeline, loss: Any, last: Any, weighted: bool, exchanged: str
) -> None:
    source: Any = SimpleNamespace(scaled_spec=batches.scaled_spec, has_weights=weighted, scaled=lambda batch: batch)
    loss = loss if isinstance(loss, str) else keras.losses.deserialize(keras.losses.serialize(loss))
    words = {"train": {"synchronization": "local", "average_every_steps": 4}}
    step = train(source, compiled(loss, last and keras.layers.deserialize(keras.layers.serialize(last))), **words)
    step.shares.given_logits.clear()  # another test is about these
    lines = [*list_warnings(build(Config, {"model": "users:model"} | words, ""), 2, step)]
    expected = [f"the loss {exchanged} is divided by what a mask or weights count"] if exchanged else []
    assert [line.partition(",")[0] for line in lines] == expected
    assert not [*list_warnings(Config(), 2, step)]


HALF = "mixed_float16"
ENDS: dict[str, tuple[Callable[[], keras.Layer], bool]] = {
    "dense": (layers.Identity, True),
    "reshaped": (lambda: layers.Reshape((10,)), True),
    "without bias": (lambda: keras.Sequential([layers.ReLU(), layers.Dense(10, use_bias=False)]), True),
    "half": (lambda: layers.Dense(10, dtype=HALF), True),
    "a position each": (lambda: keras.Sequential([layers.Reshape((1, 10)), layers.Dense(10), layers.Flatten()]), True),
    "einsum": (lambda: layers.EinsumDense("ab,bc->ac", output_shape=(10,), bias_axes="c"), True),
    "softmax": (layers.Softmax, False),
    "activation": (lambda: layers.Dense(10, activation="softmax"), False),
    "sigmoid": (lambda: layers.Lambda(ops.sigmoid), False),
    "half softmax": (
        lambda: keras.Sequential([layers.Dense(10, "softmax", dtype=HALF), layers.Activation("linear")]),
        False,
    ),
    "reshaped softmax": (lambda: keras.Sequential([layers.Softmax(), layers.Reshape((10,)), layers.Identity()]), False),
    "confused classes": (lambda: keras.Sequential([layers.Softmax(), layers.Dense(10, use_bias=False)]), False),
    "a mixture": (lambda: layers.Lambda(lambda x: 0.5 * ops.softmax(x) + 0.5 * ops.softmax(2 * x)), False),
}
"""How a model may end, and whether what it gives then are certainly no probabilities."""


@pytest.mark.parametrize("name", ENDS)
def test_logits_for_a_loss_of_probabilities_have_a_line(batches: Pipeline, name: str) -> None:
    build_last, is_told = ENDS[name]
    entropy = "sparse_categorical_crossentropy"
    for loss, words in ((entropy, {}), (keras.losses.SparseCategoricalCrossentropy(), {}), (None, {"loss": entropy})):
        lines = [*list_warnings(Config(), 1, train(batches, compiled(loss, build_last()), **words))]
        expected = f"the loss {entropy} takes probabilities, but the model ends without softmax"
        assert [line[: len(expected)] for line in lines] == [expected] * is_told
    if is_told:
        of_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        assert not [*list_warnings(Config(), 1, train(batches, compiled(of_logits, build_last())))]


LOGITS = {"from_logits": True}
OF_LOGITS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "compiled": (lambda: keras.losses.SparseCategoricalCrossentropy(**LOGITS), {}),
    "of the config": (lambda: None, {"loss": ENTROPY}),
    "ours": (lambda: None, {"loss": {"name": "smoothed_sparse_categorical_crossentropy"}}),
}


@pytest.mark.parametrize("name", OF_LOGITS)
def test_a_loss_of_logits_after_a_softmax_is_one_line(batches: Pipeline, name: str) -> None:
    build_loss, sections = OF_LOGITS[name]
    train(batches, compiled(build_loss(), layers.ReLU()), **sections)
    for attempt in (train, evaluate):
        with pytest.raises(UserError) as error:
            attempt(batches, compiled(build_loss(), layers.Softmax()), **sections)
        assert "takes logits, but the model ends in a softmax" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_loss_of_pairs_of_records_is_one_line(batches: Pipeline) -> None:
    class Squared(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return (tf.cast(y_true, tf.float32) - y_pred) ** 2

    with pytest.raises(UserError, match=r"loss squared compares each record with all others: it gave \(8, 8\)"):
        train(batches, compiled(Squared(name="squared"), layers.Dense(1)))


class Values(keras.losses.Loss):
    """Without a reduction. mean: whether its `call` gives the mean of the batch."""

    def __init__(self, mean: bool) -> None:
        super().__init__(name="values", reduction=None)
        self.mean = mean

    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return ops.mean(values) if self.mean else values


class OwnLoss(Plain):
    """mean: whether it gives one number, or one for each record."""

    def __init__(self, mean: bool = True) -> None:
        super().__init__()
        self.mean = mean

    def compute_loss(self, *args: Any, **more: Any) -> Any:
        return Values(self.mean)(*args[1:3])


class Averaging(Own):
    """Takes the mean of what compute_loss gives."""

    def loss_of(self, data: Any) -> Any:
        return ops.mean(self.compute_loss(data[0], data[1], self(data[0])))


def averaging(loss: Any) -> keras.Model:
    model = made(Averaging(), compiled=False)
    model.compile(keras.optimizers.SGD(0.25), loss)
    return model


OF_EACH_RECORD: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], str]] = {
    "of the config": (
        lambda: compiled(None),
        {"loss": {"name": ENTROPY["name"], "options": {"from_logits": True, "reduction": "none"}}},
        "loss: sparse_categorical_crossentropy has no reduction, and gives numbers of shape [8]",
    ),
    "compiled": (lambda: compiled(Values(False)), {}, "loss: values has no reduction, and gives numbers of shape [8]"),
    "a compute_loss": (lambda: made(OwnLoss(False)), {}, "loss: the model's compute_loss gives numbers of shape [8]"),
}


@pytest.mark.parametrize("name", OF_EACH_RECORD)
def test_a_loss_that_fit_adds_up_over_the_batch_is_one_line(batches: Pipeline, name: str) -> None:
    build_model, sections, expected = OF_EACH_RECORD[name]
    with pytest.raises(UserError) as error:
        train(batches, build_model(), **sections)
    assert expected in str(error.value)
    assert "fit adds up; expected one number" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_loss_without_a_reduction_that_gives_one_number_is_taken(batches: Pipeline) -> None:
    assert train(batches, compiled(Values(True))).state.knows_loss


def test_a_train_step_may_average_what_compute_loss_gives_for_each_record(batches: Pipeline) -> None:
    assert train(batches, averaging(Values(False))).update.optimizers.by_path


class Adding(layers.Layer):
    """Adds what a function of its inputs gives to the loss, in training."""

    def __init__(self, penalty: Callable[[Any], Any]) -> None:
        super().__init__(name="adding")
        self.penalty = penalty

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(self.penalty(inputs))
        return inputs


def test_an_added_loss_of_each_record_is_one_line(batches: Pipeline) -> None:
    """`fit` adds them up, over the records of all; the mean over ranks of such sums is another penalty."""
    of_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with pytest.raises(UserError) as error:
        train(batches, compiled(of_loss, Adding(lambda outputs: ops.mean(ops.square(outputs), axis=-1))))
    assert "loss: add_loss of adding gives numbers of shape [8], which fit adds up; expected one" in str(error.value)
    assert "\n" not in str(error.value)
    for one_number in (Adding(ops.mean), Adding(lambda outputs: ops.mean(outputs, keepdims=True))):
        assert train(batches, compiled(of_loss, one_number)).state.knows_loss


class Added(Own):
    """Takes the mean of what it adds."""

    def __init__(self) -> None:
        super().__init__(before=lambda model: ops.mean(model.losses[0]))

    def call(self, image: Any) -> Any:
        outputs = super().call(image)
        self.add_loss(ops.mean(ops.square(outputs), axis=-1))
        return outputs


def test_a_step_that_computes_its_loss_itself_may_add_a_loss_of_each_record(batches: Pipeline) -> None:
    assert train(batches, made(Added())).update.optimizers.by_path


class Auxiliary(layers.Layer):
    """Has a loss of its own, which counts those of its inputs that a mask keeps; it computes it in training only."""

    def __init__(self) -> None:
        super().__init__(name="auxiliary")
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, name="side")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(self.loss(ops.argmax(inputs, axis=-1), inputs))
        return inputs


@pytest.mark.long
def test_a_loss_that_a_layer_computes_in_training_only_is_divided_by_what_counts_in_all_passes(
    batches: Pipeline, stepping: Callable[..., TrainStep]
) -> None:
    trained = []
    for accumulate_steps in (1, 2):
        keras.utils.set_random_seed(1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        model = compiled(loss, Auxiliary())
        step = stepping(batches, model, train={"accumulate_steps": accumulate_steps})
        step.run(batches.batches(0, 0, epochs=1), 1, batches.size_of(0))
        trained.append(np.concatenate([weight.numpy().ravel() for weight in model.trainable_variables]))
    np.testing.assert_allclose(trained[0], trained[1], atol=1e-6)


def test_l2_is_added_to_the_regularizer_of_matrices_only(batches: Pipeline) -> None:
    """½ λ Σ W², as tf.nn.l2_loss; and to what a matrix has."""
    model = compiled("sparse_categorical_crossentropy")
    model.dense.kernel.regularizer = keras.regularizers.L1(0.5)
    train(batches, model, train={"l2": 0.1})
    values = tf.constant([[3.0, -1.0]])
    assert float(model.dense.kernel.regularizer(values)) == pytest.approx(0.5 * 4 + 0.1 * 0.5 * 10)
    assert model.dense.bias.regularizer is None


def test_what_the_forward_pass_assigns_is_known(batches: Pipeline) -> None:
    norm = layers.BatchNormalization()
    found = train(batches, compiled("sparse_categorical_crossentropy", norm)).forward_state.variables
    assert [variable.ref() for variable in found] == [
        variable.value.ref() for variable in (norm.moving_mean, norm.moving_variance)
    ]
    norm.trainable = False
    model = compiled("sparse_categorical_crossentropy", norm)
    assert train(batches, model).forward_state.variables == []


@pytest.mark.parametrize("passes", [1, 2])
def test_rows_that_are_no_records_leave_moving_averages_alone(
    batches: Pipeline, stepping: Callable[..., TrainStep], passes: int
) -> None:
    """A step without any, and one with fewer than passes."""
    norm = layers.BatchNormalization(momentum=0.5)
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True), norm)
    step = stepping(batches, model, data={"on_bad_record": "skip"}, train={"accumulate_steps": passes})
    train_on = tf.function(lambda batch: step.train_on(batch, StepSize(None, is_full=False)), autograph=False)
    batch = batches.scaled(next(batches.batches(0, epochs=1)))
    expected = 0.5 * model.dense(model.flatten(batch.inputs))[0].numpy()
    means = []
    for records in (1, 0):
        ids = tf.where(tf.range(tf.size(batch.ids)) < records, batch.ids, -1)
        train_on(batch._replace(ids=ids))
        means.append(norm.moving_mean.numpy().tolist())
    assert means[0] == pytest.approx(expected.tolist(), rel=1e-5)
    assert means[1] == means[0]


@pytest.mark.long
@pytest.mark.parametrize("passes", [1, 2])
def test_what_the_forward_pass_assigns_counts_as_the_whole_step_of_a_rank(
    batches: Pipeline, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Not as its last pass: two ranks that have the same keep what each of them has."""
    monkeypatch.setattr(training_build, "GradientExchange", lambda **_: OfOneRank())
    monkeypatch.setattr(WorkerGroup, "sum_in_step", lambda _, value, name: 2 * value)
    norm = layers.BatchNormalization(momentum=1.0)  # keeps what it has
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True), norm)
    norm.moving_mean.assign([3.0] * 10)
    step = train(batches, model, train={"accumulate_steps": passes})
    step.run(batches.batches(0, 0, epochs=1), 1, batches.size_of(0))
    assert np.allclose(norm.moving_mean, 3.0)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("counted", [False, True], ids=["planned", "counted"])
def test_adasum_with_a_rank_without_records_is_the_gradient_of_the_others(
    batches: Pipeline, monkeypatch: pytest.MonkeyPatch, passes: int, counted: bool
) -> None:
    """The update of one record is its gradient; a rank that has none leaves the sums and Adasum as they are."""
    exchange = OfOneRank()
    exchange.op = "adasum"
    monkeypatch.setattr(training_build, "GradientExchange", lambda **_: exchange)
    monkeypatch.setattr(WorkerGroup, "sum_in_step", lambda _, value, name: value)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(loss)
    words = {"data": {"on_bad_record": "skip"}} if counted else {}
    step = train(batches, model, horovod={"op": "adasum"}, train={"accumulate_steps": passes}, **words)
    batch = batches.scaled(next(batches.batches(0, epochs=1)))
    with tf.GradientTape() as tape:
        value = loss(cast(tf.Tensor, batch.targets)[:1], model(cast(tf.Tensor, batch.inputs)[:1]))
    gradients = tape.gradient(value, model.trainable_variables)
    expected = [weight - 0.25 * gradient for weight, gradient in zip(model.trainable_variables, gradients, strict=True)]
    size = StepSize(None if counted else 1, is_full=False)
    ids = tf.where(tf.range(tf.size(batch.ids)) < 1, batch.ids, -1)
    one = batch._replace(ids=ids, count=tf.constant(1, tf.int64))
    shown = Summaries(step, lambda: one, size, {}).compute()
    tf.function(lambda batch: step.train_on(batch, size), autograph=False)(one)
    for weight, end, gradient in zip(model.trainable_variables, expected, gradients, strict=True):
        np.testing.assert_allclose(weight, end, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(shown[f"gradients/{weight.path}"], gradient, rtol=1e-4, atol=1e-6)


def test_a_synchronised_layer_may_be_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the cell of a recurrent layer, whose gradient is a loop of its own."""
    monkeypatch.setattr(sync_batch_norm, "sum_over_ranks", lambda value, name, **_: value)
    monkeypatch.setattr(allreduce, "is_alone", lambda ranks: False)
    norm, x = layers.BatchNormalization(), tf.Variable(np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))
    model = keras.Sequential([keras.Input((3,)), norm])
    sync_batch_norm.synchronise_batch_norm(model)

    @tf.function
    def gradient(in_loop: bool) -> Any:
        with tf.GradientTape() as tape:
            value: Any = x.value()
            if in_loop:
                value = tf.while_loop(
                    lambda step, _: step < 3, lambda step, y: (step + 1, tf.sin(model(y, training=True))), [0, value]
                )[1]
            else:
                for _ in range(3):
                    value = tf.sin(model(value, training=True))
            loss = tf.reduce_sum(value**3)
        return tape.gradient(loss, [x, norm.gamma.value])

    for ours, plain in zip(gradient(True), gradient(False), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("others", [0, 1])
def test_synchronised_averages_are_of_the_rows_of_all_ranks_in_each_pass(
    batches: Pipeline, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """A rank of two has one record for two passes, and the other one, if any, in each; or none has one in the first."""
    batch = batches.scaled(next(batches.batches(0, epochs=1)))
    model = compiled(
        keras.losses.SparseCategoricalCrossentropy(from_logits=True), norm := layers.BatchNormalization(momentum=0.5)
    )
    mine, theirs = model.dense(model.flatten(batch.inputs)).numpy()[:2].astype(np.float64)
    sums = [[float(others)], others * theirs, others * theirs**2]

    def over_ranks(value: tf.Tensor, name: str, **_: Any) -> tf.Tensor:
        if "sync_batch_norm" not in name:  # with equal shares a sum over two ranks that have the same
            return tf.constant(1.0 + 2 * others) if name == "step.count" else value * (1 + 2 * others)
        return value + np.concatenate(sums) if name.endswith("forward") else value

    monkeypatch.setattr(training_build, "GradientExchange", lambda **_: OfOneRank())
    monkeypatch.setattr(sync_batch_norm, "sum_over_ranks", over_ranks)
    monkeypatch.setattr(allreduce, "is_alone", lambda ranks: False)
    monkeypatch.setattr(WorkerGroup, "sum_in_step", lambda _, value, name: over_ranks(value, name))
    sync_batch_norm.synchronise_batch_norm(model)
    step = train(batches, model, data={"on_bad_record": "skip"}, train={"accumulate_steps": 2})
    train_on = tf.function(lambda batch: step.train_on(batch, StepSize(None, is_full=False)), autograph=False)
    train_on(batch._replace(ids=tf.where(tf.range(tf.size(batch.ids)) < 1, batch.ids, -1)))
    mean, variance = np.zeros(10), np.ones(10)
    for rows in ([theirs] * others, [mine] + [theirs] * others):
        if rows:
            mean, variance = 0.5 * (mean + np.mean(rows, axis=0)), 0.5 * (variance + np.var(rows, axis=0))
    np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-4)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (keras.optimizers.Adam(0.1, weight_decay=0.1), {}),
        (keras.optimizers.Adam(0.1, weight_decay=0.1), {"non_finite": "skip"}),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9)), {}),
        (keras.optimizers.SGD(0.1, 0.9), {"synchronization": "stale"}),
    ],
    ids=["decay", "skip", "loss scale", "stale"],
)
def test_a_step_without_a_record_is_no_update(
    batches: Pipeline, stepping: Callable[..., TrainStep], optimizer: Any, words: dict[str, Any], jit_compile: bool
) -> None:
    """Of momentum, decay and averages neither; the place in the data continues."""
    optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(optimizer, model.loss)
    sections = {"data": {"on_bad_record": "skip"}, "train": {"ema_decay": 0.9} | words}
    step = stepping(batches, model, **sections, jit_compile=jit_compile)
    train_on = tf.function(lambda batch: step.train_on(batch, StepSize(None, is_full=False)), autograph=False)
    batch = batches.scaled(next(batches.batches(0, epochs=1)))
    ends: list[dict[str, Any]] = []
    for records in (8, 0, 8):
        ids = tf.where(tf.range(tf.size(batch.ids)) < records, batch.ids, -1)
        assert train_on(batch._replace(ids=ids))
        variables = step.state.variables()
        assert int(variables.pop("progress/step")) == len(ends) + 1
        counters = [name for name in variables if name.endswith("/iteration")]
        # For schedules; inside a loss scale, whose own counter stays 0, what is applied is counted.
        is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        expected = {0, len(ends) // 2 + 1} if is_scaled else {len(ends) + 1}
        assert {int(variables.pop(name)) for name in counters} == expected
        ends.append({name: variable.numpy().tolist() for name, variable in variables.items()})
    assert ends[1] == ends[0]
    assert ends[2] != ends[1]


def test_an_optimizer_that_accumulates_gradients_itself_waits_at_a_step_without_a_record(
    batches: Pipeline, stepping: Callable[..., TrainStep]
) -> None:
    """So that it applies what Keras would without that step: the mean over as many steps with records."""
    loss, trained = keras.losses.SparseCategoricalCrossentropy(from_logits=True), []
    model, alone = compiled(loss), compiled(loss)
    alone.dense.kernel.assign(model.dense.kernel)
    model.compile(keras.optimizers.Adam(0.1, gradient_accumulation_steps=2), loss)
    by_keras = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)
    by_keras.build(alone.trainable_variables)
    step = stepping(batches, model, data={"on_bad_record": "skip"})
    train_on = tf.function(lambda batch: step.train_on(batch, StepSize(None, is_full=False)), autograph=False)
    found = map(batches.scaled, itertools.islice(batches.batches(0, epochs=1), 4))
    for is_empty, batch in itertools.chain.from_iterable(((False, batch), (True, batch)) for batch in found):
        train_on(batch._replace(ids=tf.fill(batch.ids.shape, tf.constant(-1, tf.int64))) if is_empty else batch)
        if not is_empty:
            with tf.GradientTape() as tape:
                value = loss(batch.targets, alone(batch.inputs))
            by_keras.apply(tape.gradient(value, alone.trainable_variables), alone.trainable_variables)
        trained.append(model.dense.kernel.numpy())
        np.testing.assert_allclose(trained[-1], alone.dense.kernel, atol=1e-5)
    assert len({each.tobytes() for each in trained}) == 3
    assert int(step.state.step) == 8


@pytest.mark.parametrize("jit_compile", [False, True])
def test_losses_by_output_are_means_over_records(
    batches: Pipeline, stepping: Callable[..., TrainStep], jit_compile: bool
) -> None:
    """Of steps whose number of rows no shape tells."""
    image, label = batches.scaled_spec.inputs, batches.scaled_spec.targets
    spec = batches.scaled_spec._replace(targets={"a": label, "b": label})
    inputs = keras.Input(tuple(cast(tf.TensorSpec, image).shape[1:]))
    model = keras.Model(inputs, {name: layers.Dense(10, name=name)(layers.Flatten()(inputs)) for name in "ab"})
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.25), {"a": entropy, "b": entropy})
    source = SimpleNamespace(scaled_spec=spec, has_weights=False, scaled=lambda batch: batch)
    step = stepping(source, model, data={"on_bad_record": "skip"}, jit_compile=jit_compile)
    train_on = tf.function(lambda batch: step.train_on(batch, StepSize(None, is_full=False)), autograph=False)
    batch = batches.scaled(next(batches.batches(0, epochs=1)))
    for records in (1, 8):
        ids = tf.where(tf.range(tf.size(batch.ids)) < records, batch.ids, -1)
        train_on(batch._replace(ids=ids, targets={"a": batch.targets, "b": batch.targets}))
    found = {metric.name: float(metric.result()) for metric in model.metrics}
    assert found["a_loss"] + found["b_loss"] == pytest.approx(found["loss"], rel=1e-5)


class Follows(keras.Layer):
    """Assigns a weight in evaluations too."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any) -> Any:
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x


def test_what_an_evaluation_assigns_is_made_equal_on_ranks(batches: Pipeline) -> None:
    layer = Follows()
    found = evaluate(batches, compiled("sparse_categorical_crossentropy", layer)).forward_state.variables
    assert [variable.ref() for variable in found] == [layer.mean.value.ref()]
    norm = layers.BatchNormalization()
    assert not evaluate(batches, compiled("sparse_categorical_crossentropy", norm)).forward_state.variables


def without_records(batch: Batch) -> Batch:
    return batch._replace(ids=tf.fill(batch.ids.shape, tf.constant(-1, tf.int64)))


def test_what_the_forward_pass_assigns_stays_in_a_step_without_records(
    batches: Pipeline, stepping: Callable[..., TrainStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training and, of two ranks, in an evaluation; in a step with records it becomes another."""
    skips: Any = {"data": {"on_bad_record": "skip"}}
    layer, size = Follows(), StepSize(None, is_full=False)
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True), layer)
    step = stepping(batches, model, **skips)
    train_on = tf.function(lambda batch: step.train_on(batch, size), autograph=False)
    batch = batches.scaled(next(batches.batches(0, epochs=1)))
    evaluation = evaluate(batches, model, **skips)
    found = []
    for is_empty in (False, True):
        layer.mean.assign(tf.ones(layer.mean.shape))
        train_on(without_records(batch) if is_empty else batch)
        found.append((layer.mean.numpy() == 1).all())
        layer.mean.assign(tf.ones(layer.mean.shape))
        evaluation.rows.scaled = (lambda given: without_records(batches.scaled(given))) if is_empty else batches.scaled
        evaluation.retrace()
        evaluation.run(batches.batches(0, epochs=1), 1, size)
        found.append((layer.mean.numpy() == 1).all())
    assert found == [False, False, True, True]


@pytest.mark.parametrize("skips", [False, True])
def test_the_graph_of_a_step_has_the_same_folds_whether_records_are_counted(
    batches: Pipeline, stepping: Callable[..., TrainStep], skips: bool
) -> None:
    data = {"on_bad_record": "skip" if skips else "error"}
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    step = stepping(batches, model, data=data)
    drawn = draw_step(step, batches.element_spec, batches.size_of(0), rank=0, names={})
    within = {tuple(node.name.split("/")[:2]) for node in drawn.node}
    tops = {top for top, *_ in within}
    assert ("rank_0", "gradient_tape") in within
    assert "gradient_tape" not in tops
    assert {"input_data", "rank_0", "update_parameters", "exchange"} <= tops
    assert (IF_ANY in tops) == skips
    assert not {(IF_ANY, "then"), ("cond", "then")} & within


class Kept(keras.Layer):
    """Assigns the sum of what it gets to a weight that ranks combine by its aggregation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(name="kept")
        self.options = options

    def build(self, shape: Any) -> None:
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept", **self.options)

    def call(self, x: Any) -> Any:
        self.kept.assign(ops.cast(ops.sum(x), self.kept.dtype))
        return x


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"aggregation": "only_first_replica"}, 8.0),
        ({"aggregation": "mean"}, 5.0),
        ({}, 5.0),
        ({"dtype": "int32"}, 8),
        ({"dtype": "int32", "aggregation": "mean"}, 8),
    ],
    ids=str,
)
def test_local_averages_follow_the_aggregation_of_a_weight(
    batches: Pipeline, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: float
) -> None:
    """On the second of two ranks, which has 2 where the first has 8, and which sends nothing where it is rank 0's."""
    monkeypatch.setattr(training_build, "GradientExchange", lambda **_: OfOneRank())
    sent_by_root = tf.constant(8.0)
    monkeypatch.setattr(WorkerGroup, "sum_in_step", lambda _, value, name: value + tf.cast(sent_by_root, value.dtype))
    monkeypatch.setattr(WorkerGroup, "average_in_step", lambda self, value, name: self.sum_in_step(value, name) / 2)
    layer, config = Kept(**options), {"train": {"synchronization": "local", "average_every_steps": 4}}
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True), layer)
    group = replace(ALONE, rank=1)
    made_config = build(Config, {"model": "users:model"} | config, "")
    compiled_model = compile_model(made_config, model, Horizon(16, 5, 10))
    step = build_training(made_config, group, compiled_model, batches, Shares(group), {})
    layer.kept.assign(2)
    assert step.state.synchronization.settle(1)
    assert layer.kept.numpy() == expected


class Noisy(layers.Layer):
    """Drops out in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5)

    def call(self, x: Any) -> Any:
        return self.dropout(x, training=True)


@pytest.mark.parametrize(
    ("ranks", "per_rank", "expected"), [(1, None, 16), (3, None, 16), (20, None, 20), (1, 4, 4), (3, 4, 12)]
)
def test_an_evaluation_has_the_same_batches_at_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, per_rank: int | None, expected: int
) -> None:
    """Else a loss that is a mean over each batch, as with masks, would depend on it; and a best checkpoint with it."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(training_build, "build_pipeline", lambda *_, **options: asked.update(options))
    config = Config(data=DataConfig(global_batch_size=16), eval=EvalConfig(batch_size_per_rank=per_rank))
    group: Any = SimpleNamespace(rank=0, size=ranks, local_size=ranks, devices=[SimpleNamespace(logical=("CPU:0",))])
    training_build.build_split(config, group, cast(Any, None), training=False)
    assert asked["global_batch_size"] == expected


def test_an_evaluation_draws_the_same_each_time(batches: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGroup, "sum_in_step", lambda _, value, name: value)
    step = evaluate(batches, compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True), Noisy()))
    group = SimpleNamespace(size=1, rank=0, sum=lambda arrays: [np.asarray(array, float) for array in arrays])
    found = []
    for _ in range(2):
        step.begin(0)
        step.run(batches.batches(0, 0, epochs=1), 2, batches.size_of(0))
        found.append(step.metrics.result(cast(WorkerGroup, group))["loss"])
    assert found[0] == found[1]


class Teaching(Own):
    """Its step moves a weight that is trained, another that is not, and the state of a metric."""

    def __init__(self) -> None:
        super().__init__(before=self.teach)
        self.teacher = self.add_weight(shape=(10,), name="teacher")
        self.steps = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="steps")
        self.seen = keras.metrics.Sum(name="seen")

    def teach(self, model: Any) -> Any:
        self.teacher.assign(0.9 * self.teacher + 0.1)
        self.steps.assign(self.steps + 1)
        self.seen.update_state(1.0)
        return 0.0 * ops.sum(self.teacher)


def test_histograms_leave_all_that_a_step_assigns_as_it_was(
    batches: Pipeline, stepping: Callable[..., TrainStep]
) -> None:
    model = made(Teaching())
    step = stepping(batches, model)
    variables = [*model.variables, *step.update.optimizers.variables]

    def values() -> list[Any]:
        return [variable.numpy().tolist() for variable in variables]

    def first_batch() -> Batch:
        return batches.scaled(next(batches.batches(0, epochs=1)))

    before = values()
    shown = Summaries(step, first_batch, batches.size_of(0), {}).compute()
    assert f"gradients/{model.dense.kernel.path}" in shown
    assert values() == before
    step.run(batches.batches(0, 0, epochs=1), 1, batches.size_of(0))
    moved = {variable.path for variable, old, new in zip(variables, before, values(), strict=True) if old != new}
    assert {model.teacher.path, model.steps.path} <= moved


@pytest.mark.parametrize(
    "sections",
    [{}, {"jit_compile": True}, {"train": {"accumulate_steps": 2}}, {"data": {"on_bad_record": "skip"}}],
    ids=["plain", "XLA", "accumulated", "counted"],
)
def test_outputs_of_layers_are_those_of_the_pass_that_trains(
    batches: Pipeline, stepping: Callable[..., TrainStep], sections: dict[str, Any]
) -> None:
    """Dropout's are 0 or twice what it gets. A loss without masks has no part in it."""
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True), layers.Dropout(0.5, name="drop"))
    step = stepping(batches, model, **sections)
    batch = batches.scaled(next(batches.batches(0, epochs=1)))
    shown = Summaries(step, lambda: batch, batches.size_of(0), {"h": "drop"}).compute()
    assert {name for name in shown if name.startswith("h")} == {"h"}
    outputs, given = shown["h"].numpy(), model.dense(model.flatten(batch.inputs)).numpy()
    given = given[: len(outputs)]
    assert np.isclose(outputs, 2 * given, rtol=1e-5).sum() + (outputs == 0).sum() == given.size
    assert 0.3 < np.mean(outputs == 0) < 0.7


@pytest.mark.parametrize("words", [{}, {"on_bad_record": "skip"}], ids=["planned", "counted"])
def test_histograms_are_of_as_many_records_as_are_computed_together(
    batches: Pipeline, stepping: Callable[..., TrainStep], words: dict[str, Any]
) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(loss, layers.Activation("linear", name="same"))
    step = stepping(batches, model, data=words, train={"accumulate_steps": 4})
    batch = batches.scaled(next(batches.batches(0, epochs=1)))
    shown = Summaries(step, lambda: batch, batches.size_of(0), {"h": "same"}).compute()
    images, labels = (cast(tf.Tensor, part)[:2] for part in (batch.inputs, batch.targets))  # of 8
    np.testing.assert_allclose(shown["h"], model(images), rtol=1e-5)
    with tf.GradientTape() as tape:
        value = loss(labels, model(images))
    gradients = tape.gradient(value, model.trainable_variables)
    for weight, expected in zip(model.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(shown[f"gradients/{weight.path}"], expected, rtol=1e-4, atol=1e-6)


class Counting(Own):
    """Returns the loss as a number beside a metric, and holds a maximum that only evaluations move from -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.largest = keras.metrics.Sum(name="seen"), keras.metrics.Metric(name="largest")
        self.largest.add_variable((), keras.initializers.Constant(-np.inf), name="largest")

    def train_step(self, data: Any) -> Any:
        self.seen.update_state(data[0])
        return super().train_step(data) | {"seen": self.seen.result()}


@pytest.mark.parametrize(
    ("scaled", "words"),
    [(False, {"non_finite": "skip"}), (True, {}), (False, {"synchronization": "stale", "non_finite": "skip"})],
    ids=["skip", "loss scale", "stale"],
)
def test_figures_leave_out_the_step_that_is_not_finite_and_no_other(
    batches: Pipeline, stepping: Callable[..., TrainStep], scaled: bool, words: dict[str, Any]
) -> None:
    model: Any = made(Counting(), compiled=False)
    optimizer: Any = keras.optimizers.SGD(0.0)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)
    step = stepping(batches, model, train=words)
    train_on = tf.function(lambda batch: step.train_on(batch, batches.size_of(0)), autograph=False)
    losses, sums = [], []
    for number, batch in enumerate(map(batches.scaled, itertools.islice(batches.batches(0, epochs=1), 4))):
        inputs, targets = cast(tf.Tensor, batch.inputs), cast(tf.Tensor, batch.targets)
        if number == 1:
            inputs = inputs + np.nan
        else:
            losses.append(float(model.loss_of((inputs, targets))))
            sums.append(inputs.numpy().sum())
        train_on(batch._replace(inputs=inputs))
    group = SimpleNamespace(size=1, rank=0, sum=lambda arrays: [np.asarray(array, float) for array in arrays])
    found = step.figures.result(cast(WorkerGroup, group))
    assert found == pytest.approx({"loss": np.mean(losses), "seen": np.sum(sums)}, rel=1e-5)


def test_so_many_updates_in_a_row_are_skipped_and_the_next_one_ends_the_run(
    batches: Pipeline, stepping: Callable[..., TrainStep]
) -> None:
    """Steps without records are none of them; neither move averages, of weights, of the loss and in layers."""
    words, norm = {"non_finite": "skip", "max_skips_in_a_row": 2, "ema_decay": 0.5}, layers.BatchNormalization()
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True), norm)
    step = stepping(batches, model, data={"on_bad_record": "skip"}, train=words)
    train_on = tf.function(lambda batch: step.train_on(batch, StepSize(None, is_full=False)), autograph=False)
    batch, failure = batches.scaled(next(batches.batches(0, epochs=1))), step.state.failure
    kinds = {
        "good": batch,
        "bad": batch._replace(inputs=cast(tf.Tensor, batch.inputs) + np.nan),
        "empty": batch._replace(ids=-tf.ones_like(batch.ids)),
    }
    found, ends = [], []
    for kind in ("bad", "good", "empty", "bad", "empty", "bad", "bad", "bad"):
        found.append((bool(train_on(kinds[kind])), int(step.skipped), int(failure.step)))
        averages = [each.numpy().tolist() for each in (*step.state.averages.variables.values(), norm.moving_mean)]
        ends.append((averages, step.state.loss_average.numpy().tolist(), float(failure.last_loss)))
    skipped = (1, 1, 1, 2, 2, 3, 4, 5)
    assert found == [(number < 6, skips, 0 if number < 6 else 7) for number, skips in enumerate(skipped)]
    assert int(failure.skips) == 2
    assert ends[1] != ends[0]
    assert ends[2] == ends[1]
    assert all(end[:2] == ends[1][:2] for end in ends[1:])


def test_gradients_that_fail_a_step_late_are_told_with_the_loss_of_their_own_step(
    batches: Pipeline, stepping: Callable[..., TrainStep]
) -> None:
    norm = layers.BatchNormalization()
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True), norm)
    step = stepping(batches, model, train={"synchronization": "stale"})
    train_on = tf.function(lambda batch: step.train_on(batch, batches.size_of(0)), autograph=False)
    batch, failure = batches.scaled(next(batches.batches(0, epochs=1))), step.state.failure
    assert train_on(batch._replace(inputs=cast(tf.Tensor, batch.inputs) + np.nan))
    assert np.all(np.isfinite(norm.moving_mean))
    assert not train_on(batch._replace(weights=batch.weights + np.nan))  # not used, and of another step
    assert int(failure.step) == 1
    assert np.isnan(float(failure.loss))
    assert int(failure.in_record) == 0


class OfTwoRanks(OfOneRank):
    """The other one's gradients are a number."""

    def __init__(self) -> None:
        self.others = tf.Variable(0.0)

    def combine_each(self, gradients: Any, name: str) -> list[Any]:
        return [gradient + self.others for gradient in gradients]


def test_a_rank_whose_update_was_skipped_once_is_not_the_cause_of_what_another_one_does_later(
    batches: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = OfTwoRanks()
    monkeypatch.setattr(training_build, "GradientExchange", lambda **_: exchange)
    monkeypatch.setattr(WorkerGroup, "sum_in_step", lambda _, value, name: 2 * value)
    model = compiled(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    step = train(batches, model, train={"non_finite": "skip", "max_skips_in_a_row": 1})
    train_on = tf.function(lambda batch: step.train_on(batch, batches.size_of(0)), autograph=False)
    batch, failure = batches.scaled(next(batches.batches(0, epochs=1))), step.state.failure
    assert train_on(batch._replace(inputs=cast(tf.Tensor, batch.inputs) + np.nan))
    assert train_on(batch)
    exchange.others.assign(np.inf)
    assert train_on(batch)
    assert not train_on(batch)
    assert (int(failure.step), bool(failure.is_cause)) == (4, False)


class Gathering(Own):
    """Its loss is over the records of all ranks."""

    def loss_of(self, data: Any) -> Any:
        rows = hvd.allgather(ops.cast(super().call(data[0]), "float16"))
        return ops.cast(ops.mean(rows * hvd.allreduce(rows + 1, name="rows")), "float32")

    def test_step(self, data: Any) -> Any:
        return {"loss": self.loss_of(data)}


def exchanges(step: Any, source: Pipeline, number: int) -> list[str]:
    """The names by which a rank exchanges in a step of the epoch; with their scopes, where those count."""
    run = tf.function(lambda cursor: step._run_steps(cursor, tf.constant(1), source.size_of(number)), autograph=False)
    definition = run.get_concrete_function(source.batches(0, epochs=1)._spec).graph.as_graph_def()
    nodes = [*definition.node, *(node for inner in definition.library.function for node in inner.node_def)]
    of_horovod = [node for node in nodes if "ignore_name_scope" in node.attr]
    return sorted(
        node.name.rpartition("/")[2] if node.attr["ignore_name_scope"].b else node.name for node in of_horovod
    )


@pytest.mark.parametrize("accumulate_steps", [1, pytest.param(2, marks=pytest.mark.long)])
def test_collectives_in_a_step_have_names_that_do_not_depend_on_the_ranks_records(
    tmp_path: Path, accumulate_steps: int
) -> None:
    """In the last step the first rank has a record and the second has none."""
    names = []
    data = data_config(make_images(tmp_path / "train", (65,)))
    with horovod_alone():
        for rank in range(2):
            source = pipeline(data, rank, 2, batch=16)
            config = build(Config, {"model": "users:model", "train": {"accumulate_steps": accumulate_steps}}, "")
            model, group = made(Gathering()), replace(ALONE, rank=rank)
            horizon, shares = Horizon(16, 5, 10), Shares(group)
            steps = [
                build_training(config, group, compile_model(config, model, horizon), source, shares, {}),
                build_evaluation(config, group, compile_model(config, model, None), source, shares),
            ]
            names.append([exchanges(step, source, source.steps_per_epoch - 1) for step in steps])
    of_first, of_second = names
    assert of_first == of_second
    assert all("/" not in name for names_of_step in of_first for name in names_of_step)
    # Both of a pass, and their gradients, two of allgather; all passes but the last are one function.
    assert [*map(len, of_first)] == [5 * accumulate_steps, 2]


BY_GRAPH: dict[str, Callable[[], Any]] = {
    "of Horovod": lambda: horovod.tensorflow.allgather(tf.zeros(1)),
    "in a function": lambda: tf.function(lambda: hvd.allgather(tf.zeros(1)), autograph=False)(),
}


@pytest.mark.parametrize("name", BY_GRAPH)
def test_a_collective_with_a_name_of_its_graph_is_one_line_where_a_step_is_short(tmp_path: Path, name: str) -> None:
    def model() -> Own:
        return made(Own(before=lambda model: tf.reduce_sum(BY_GRAPH[name]())))

    make_images(tmp_path / "train")
    with pytest.raises(UserError) as error:
        train(pipeline(data_config(tmp_path / "train"), 0, 2, batch=16), model())
    assert "model.name: train_step calls HorovodAllgather by a name that differs between ranks" in str(error.value)
    assert "\n" not in str(error.value)
    whole = pipeline(data_config(tmp_path / "train", drop_remainder=True), 0, 2, batch=16)
    assert train(whole, model()).update.optimizers.by_path


class OneByOne(Own):
    """Gives each of two optimizers the gradient of its own weight, and does not say which that is."""

    def compile(self, *args: Any, **more: Any) -> None:
        super().compile(*args, **more)
        self.second = keras.optimizers.SGD(0.5)
        self.optimizer.build([self.dense.bias])
        self.second.build([self.dense.kernel])

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        of_kernel, of_bias = tape.gradient(loss, [self.dense.kernel, self.dense.bias])
        self.second.apply([of_kernel])
        self.optimizer.apply([of_bias])
        return {"loss": loss}


@pytest.mark.parametrize("synchronization", ["every_step", "stale"])
def test_gradients_without_variables_are_of_those_that_the_optimizer_is_built_for(
    batches: Pipeline, stepping: Callable[..., TrainStep], synchronization: str
) -> None:
    model = made(OneByOne())
    step = stepping(batches, model, train={"synchronization": synchronization})
    before = [variable.numpy() for variable in model.trainable_variables]
    read = batches.scaled(next(batches.batches(0, epochs=1)))
    shown = Summaries(step, lambda: read, batches.size_of(0), {}).compute()
    gradients = [tf.reshape(shown[f"gradients/{weight.path}"], weight.shape) for weight in model.trainable_variables]
    for number in range(1 + step.state.synchronization.delay):
        step.run(batches.batches(0, 0, epochs=1), 1, batches.size_of(number))
    for weight, old, gradient, rate in zip(model.trainable_variables, before, gradients, (0.5, 0.25), strict=True):
        np.testing.assert_allclose(weight.numpy(), old - rate * gradient.numpy(), atol=1e-6)


ACCEPTED: dict[str, tuple[Callable[[], keras.Model], dict[str, Any]]] = {
    "accumulating": (lambda: made(), {"train": {"accumulate_steps": 2}}),
    "l2": (lambda: made(Own(before=lambda model: sum(model.losses))), {"train": {"l2": 0.1}}),
    "l2 by compute_loss": (lambda: averaging(Values(True)), {"train": {"l2": 0.1}}),
    "histograms": (lambda: made(), {"log": {"histograms_every_steps": 2}}),
    "skipping": (lambda: made(), {"train": {"non_finite": "skip"}}),
    "stale": (lambda: made(), {"train": {"synchronization": "stale"}}),
    "local": (lambda: made(), {"train": {"synchronization": "local", "average_every_steps": 2}}),
    "a loss scale": (lambda: made(_with_two(Own(), scaled=True)), {}),
    "a vector": (lambda: made(Own({"a": tf.ones(3)})), {}),
    "a dict": (lambda: made(Own({"a": {"b": tf.ones(()), "c": 1}})), {}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_models_own_step_goes_with_the_settings_of_any_step(batches: Pipeline, name: str) -> None:
    build_model, sections = ACCEPTED[name]
    assert train(batches, build_model(), **sections).update.optimizers.by_path


def _with_two(
    model: Own, of: Callable[[Own], list[Any]] = lambda model: [], *, scaled: bool = False, **options: Any
) -> Own:
    """Applies another optimizer to the bias, and then to what `of` gives. scaled: in a LossScaleOptimizer."""
    model.second = keras.optimizers.SGD(**options)
    if scaled:
        model.second = keras.optimizers.LossScaleOptimizer(model.second)

    def apply_second(model: Own) -> float:
        for variables in ([model.dense.bias], of(model)):
            if variables:
                model.second.apply([tf.convert_to_tensor(variable) for variable in variables], variables)
        return 0.0

    model.before = apply_second
    return model


elsewhere = keras.optimizers.SGD()


def _applies_another(model: Own) -> Any:
    with tf.GradientTape() as tape:
        loss = ops.sum(ops.square(model.dense.kernel))
    with tf.init_scope():
        elsewhere.build([model.dense.kernel])
    elsewhere.apply(tape.gradient(loss, [model.dense.kernel]), [model.dense.kernel])
    return 0.0


def _gives_too_few(model: Own) -> float:
    model.optimizer.apply([ops.zeros(10)], [model.dense.bias, model.dense.kernel])
    return 0.0


def _with_frozen() -> Own:
    """Applies its second optimizer to a weight that is not trained."""
    model = Own()
    model.second = keras.optimizers.SGD()
    frozen = model.frozen = model.add_weight(shape=(), name="frozen", trainable=False)
    model.before = lambda model: model.second.apply([ops.ones(())], [frozen]) or 0.0
    return model


def _in(inside: Callable[[Callable[[], Any]], Any]) -> Own:
    """Applies its second optimizer inside something."""
    model = Own()
    model.second = keras.optimizers.SGD()

    def apply() -> tf.Tensor:
        model.second.apply([ops.zeros(10)], [model.dense.bias])
        return tf.constant(0.0)

    model.before = lambda model: inside(apply)
    return model


def _made_of(build_model: Callable[[], Own]) -> keras.Model:
    return made(build_model())


INSIDE: dict[str, Callable[[], Own]] = {
    "a branch or a loop": lambda: _in(lambda apply: tf.cond(tf.identity(True), apply, lambda: tf.constant(0.0))),
    "a tf.function of its own": lambda: _in(lambda apply: tf.function(apply, autograph=False)()),
}
TAKING_GRADIENTS: dict[str, dict[str, Any]] = {
    "train.accumulate_steps": {"train": {"accumulate_steps": 2}},
    "log.histograms_every_steps": {"log": {"histograms_every_steps": 3}},
}


class Applying(Own):
    """Applies nothing."""

    def train_step(self, data: Any) -> Any:
        return {"loss": self.loss_of(data)}


@pytest.mark.parametrize("place", ["inputs", "targets"])
def test_a_model_that_is_given_text_is_not_compiled_by_xla(batches: Pipeline, place: str) -> None:
    text = {"text": tf.TensorSpec([None], tf.string)}
    source = cast(Any, SimpleNamespace(scaled_spec=batches.scaled_spec._replace(**{place: text})))
    config = build(Config, {"model": "users:model", "jit_compile": True}, "")
    with pytest.raises(UserError, match="jit_compile: XLA computes with numbers only, and the model is given text"):
        refusals.check_xla_gets_no_text(config, source)
    refusals.check_xla_gets_no_text(replace(config, jit_compile=False), source)
    refusals.check_xla_gets_no_text(config, cast(Any, batches))


OF_ONE_OPTIMIZER: dict[str, dict[str, Any]] = {
    "train.clip_norm": {"train": {"clip_norm": 1.0}},
    "optimizer.lr_multipliers": {"optimizer": {"lr_multipliers": {"dense": 10.0}}},
    "lr_schedule": {"lr_schedule": {"warmup_epochs": 1.0}},
}
BY_VARIABLE: dict[str, Callable[[], keras.Model]] = {
    "": compiled_by_variable,
    " in a loss scale": lambda: compiled_by_variable(scaled=True),
}
REFUSED: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], str]] = {
    "XLA": (
        made,
        {"jit_compile": True},
        "jit_compile: has no effect, because the model trains by its own train_step, in which the exchange",
    ),
    "a loss scale in stale steps": (
        lambda: made(_with_two(Own(), scaled=True)),
        {"train": {"synchronization": "stale"}},
        "train.synchronization: an optimizer scales the loss, which needs every_step; received stale.",
    ),
    "a loss scale in local steps": (
        lambda: compiled_by_variable(scaled=True),
        {"train": {"synchronization": "local"}},
        "train.synchronization: an optimizer scales the loss, which needs every_step; received local.",
    ),
    "a weight that is updated twice in stale steps": (
        lambda: made(_with_two(Own())),
        {"train": {"synchronization": "stale"}},
        "/bias more than once. Write synchronization: every_step or local.",
    ),
    "a weight that is not trained in stale steps": (
        lambda: made(_with_frozen()),
        {"train": {"synchronization": "stale"}},
        "/frozen though it is not trained. Write synchronization: every_step or local.",
    ),
    "a sum over ranks in local steps": (
        lambda: compiled("sparse_categorical_crossentropy", Kept(aggregation="sum")),
        {"train": {"synchronization": "local", "average_every_steps": 4}},
        "/kept, whose aggregation is sum. Leave that out, or write synchronization: every_step.",
    ),
    "fewer gradients than variables": (
        lambda: made(Own(before=_gives_too_few)),
        {},
        "optimizer is applied to 2 variables with gradients for 1",
    ),
    "a loss that nothing computes": (
        made,
        {"loss": ENTROPY},
        "loss: has no effect, because the model's own train_step does not call compute_loss, and there is no data.eval",
    ),
    "l2 that nothing adds": (
        made,
        {"train": {"l2": 0.1}},
        "train.l2: has no effect, because the model's own train_step neither calls compute_loss nor reads self.losses",
    ),
    "l2 that a compute_loss leaves out": (
        lambda: made(OwnLoss()),
        {"train": {"l2": 0.1}},
        "train.l2: has no effect, because the model's own compute_loss does not read self.losses",
    ),
    "l2 of no matrix": (
        lambda: compiled("sparse_categorical_crossentropy", layers.LayerNormalization(), trains=False),
        {"train": {"l2": 0.1}},
        "train.l2: has no effect, because no weight with more than one axis is trained. Leave it out.",
    ),
    "a weight decay of no matrix": (
        lambda: compiled("sparse_categorical_crossentropy", layers.LayerNormalization(), trains=False),
        {"optimizer": {"name": "sgd", "options": {"weight_decay": 0.1}}},
        "optimizer.options.weight_decay: has no effect, because no trained weight is decayed",
    ),
    "a weight decay that patterns leave nothing of": (
        lambda: compiled("sparse_categorical_crossentropy"),
        {
            "optimizer": {"name": "adam", "options": {"weight_decay": 0.1}},
            "train": {"weight_decay_1d": True, "weight_decay_exclude": ["kernel", "bias"]},
        },
        "optimizer.options.weight_decay: has no effect, because no trained weight is decayed",
    ),
    "synchronised norms that are frozen": (
        lambda: compiled("sparse_categorical_crossentropy", layers.BatchNormalization(trainable=False)),
        {"train": {"sync_batch_norm": True}},
        "train.sync_batch_norm: has no effect, because all BatchNormalization layers are frozen",
    ),
    "metrics that nothing computes": (made, {"metrics": ["mean"]}, "metrics: has no effect, because the model's own"),
    "rate of two": (
        lambda: made(_with_two(Own())),
        {"lr_schedule": {"base_lr": 1.0}},
        "lr_schedule: has no effect",
    ),
    **{
        f"{key} of a MultiOptimizer{in_scale}": (build_model, sections, f"{key}: has no effect on a MultiOptimizer")
        for key, sections in OF_ONE_OPTIMIZER.items()
        for in_scale, build_model in BY_VARIABLE.items()
    },
    "multipliers of a MultiOptimizer of a function": (
        lambda: made(compiled=False),
        {"optimizer": {"name": "test_build:built_by_variable", "lr_multipliers": {"dense": 10.0}}},
        "optimizer.lr_multipliers: has no effect on a MultiOptimizer",
    ),
    "no dict": (
        lambda: made(Own(3.0)),
        {},
        "data.train: train_step must return a dict of figures by name; it",
    ),
    **{
        f"{setting} of what is in {place}": (
            functools.partial(_made_of, build_model),
            sections,
            f"{setting}: takes gradients out of the step, but train_step applies second in {place}.",
        )
        for setting, sections in TAKING_GRADIENTS.items()
        for place, build_model in INSIDE.items()
    },
    "stale gradients of a branch": (
        lambda: made(INSIDE["a branch or a loop"]()),
        {"train": {"synchronization": "stale"}},
        "train.synchronization: stale: takes gradients out of the step, but train_step applies second in a branch",
    ),
    "no figure": (lambda: made(Own({"a": "b"})), {}, "data.train: train_step must return numbers; a is str."),
    "a taken name": (lambda: made(Own({"step": 1})), {}, "train_step returns a figure named 'step', which is taken"),
    "one more": (lambda: made(Own({"seconds": 1})), {}, "train_step returns a figure named 'seconds', which is taken"),
    "raises": (lambda: made(Own(before=lambda model: model.nothing)), {}, "train_step does not fit records of ("),
    "draws": (
        lambda: made(Own(before=lambda model: tf.random.normal([]))),
        {},
        "train_step draws by TensorFlow's RandomStandardNormal, which a resumed run would not draw again.",
    ),
    "draws of Keras' own": (
        lambda: made(Own(before=lambda model: keras.random.normal([]))),
        {},
        "train_step uses variables that are not the model's: seed_generator",
    ),
    "an optimizer from elsewhere": (
        lambda: made(Own(before=_applies_another)),
        {},
        "train_step uses variables that are not the model's: sgd",
    ),
    "averages": (
        lambda: made(_with_two(Own(), use_ema=True)),
        {},
        "model.name: second has use_ema, whose averages nothing reads; give train.ema_decay.",
    ),
    "averages in a MultiOptimizer": (
        lambda: compiled_by_variable(use_ema=True, name="biases"),
        {},
        "model.name: biases in optimizer has use_ema, whose averages nothing reads; give train.ema_decay.",
    ),
    "later weights of a MultiOptimizer": (
        compiled_by_variable,
        {"model": {"name": "users:model", "freeze": ["dense"], "unfreeze": {"1": "dense"}}},
        "model.unfreeze: a MultiOptimizer must be given all weights in each step",
    ),
    "other variables": (
        lambda: made(_with_two(Own(), of=lambda model: [model.dense.kernel])),
        {},
        "second is applied to other variables than before; build it with all of them",
    ),
    "applies none": (
        lambda: made(Applying()),
        {},
        "train_step applies none of the optimizers that the model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_one_line(batches: Pipeline, name: str) -> None:
    build_model, sections, expected = REFUSED[name]
    with pytest.raises(UserError) as error:
        train(batches, build_model(), **sections)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
