"""What is asked of a model with steps of its own, and the lines for what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops
from made_records import config as data_config
from made_records import make_images, pipeline

from horovod_train.config.loader import build
from horovod_train.config.settings import Config
from horovod_train.data.pipeline.pipeline import Pipeline
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import UserError
from horovod_train.optim.schedules import Horizon
from horovod_train.training.steps.build import build_evaluation
from horovod_train.training.steps.built import Training
from horovod_train.training.steps.own.build import build_own_training
from horovod_train.training.steps.own.optimizers import optimizers_in

ALONE = WorkerGroup(
    rank=0, size=2, local_rank=0, local_size=1, launcher="none", exchange="none", hosts=("", ""), devices=()
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
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
        return ops.mean(losses * weight)

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


def train(batches: Pipeline, model: keras.Model, **sections: Any) -> Training:
    config = build(Config, sections, "")
    return build_own_training(config, ALONE, model, Horizon(16, 5, 10), batches, lambda batch: batch.count)


def test_the_optimizer_is_that_of_compile_or_the_configs(batches: Pipeline) -> None:
    as_compiled = train(batches, made())
    optimizer: Any = as_compiled.optimizer
    assert float(optimizer.learning_rates["learning_rate"]) == pytest.approx(0.25)
    assert len(optimizer.variables) == 4  # counter, rate, and momentum of two weights
    other = train(batches, made(), optimizer="adam", lr_schedule={"base_lr": 0.5})
    optimizer = other.optimizer
    assert float(optimizer.learning_rates["learning_rate"]) == pytest.approx(0.5)
    assert len(optimizer.variables) == 6
    built = train(batches, made(compiled=False), optimizer="adam")
    assert len(built.optimizer.variables) == 6


def test_averages_are_those_of_the_optimizer_of_compile(batches: Pipeline) -> None:
    """Another optimizer of the model's own may overwrite weights with its averages, which stay its own."""
    model = made(compiled=False)
    model.compile(keras.optimizers.SGD(0.25, use_ema=True))
    averages = train(batches, model).averages
    assert averages is not None
    assert list(averages.variables) == [weight.path for weight in model.trainable_weights]
    assert train(batches, made(_with_two(Own(), use_ema=True, ema_overwrite_frequency=2))).averages is None


def test_every_optimizer_of_a_model_is_found_once() -> None:
    model = made()
    first, second, third = (keras.optimizers.SGD() for _ in range(3))
    model.several, model.alias, model.dense.own = {"a": first, "b": [second]}, second, third
    found = optimizers_in(model)
    assert list(found.values()) == [found["optimizer"], first, second, third]
    assert set(found) == {"optimizer", "several.a", "several.b.0", f"{model.dense.name}.own"}


def test_a_step_that_does_not_look_at_sample_weight_is_noted(batches: Pipeline) -> None:
    class Careless(Own):
        def loss_of(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))

    assert train(batches, made()).warnings == ()
    (warning,) = train(batches, made(Careless())).warnings
    assert "does not use sample_weight: in steps of fewer than 16 records (6) the rows that pad them" in warning


def test_a_model_with_a_loss_is_evaluated_by_it_and_else_needs_a_test_step(batches: Pipeline) -> None:
    config = build(Config, {"loss": {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}}, "")
    assert build_evaluation(config, ALONE, made(), batches).step.metrics.names == ["loss"]
    with pytest.raises(UserError, match=r"^data.eval: the model has a train_step of its own and no test_step"):
        build_evaluation(Config(), ALONE, made(), batches)


def test_an_own_evaluation_takes_no_metrics_of_the_config(batches: Pipeline) -> None:
    class Tested(Own):
        def test_step(self, data: Any) -> Any:
            return {"own": self.loss_of(data)}

    assert build_evaluation(Config(), ALONE, made(Tested()), batches).step.metrics.names == ["own"]
    with pytest.raises(UserError, match=r"^metrics: has no effect, because the model evaluates by its own test_step"):
        build_evaluation(build(Config, {"metrics": ["mean"]}, ""), ALONE, made(Tested()), batches)


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


class Applying(Own):
    """Applies nothing."""

    def train_step(self, data: Any) -> Any:
        return {"loss": self.loss_of(data)}


REFUSED: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], str]] = {
    "accumulating": (made, {"train": {"accumulate_steps": 2}}, "train.accumulate_steps: has no effect, because the"),
    "l2": (
        made,
        {"train": {"l2": 0.1}},
        "train.l2: has no effect, because the model trains by its own train_step.",
    ),
    "histograms": (made, {"log": {"histograms_every_steps": 2}}, "log.histograms_every_steps: has no effect, because"),
    "float16": (made, {"precision": "mixed_float16"}, "precision: mixed_float16 does not go with it: the model trains"),
    "a loss scale": (
        lambda: made(_with_two(Own(), scaled=True)),
        {},
        "model.name: second is a LossScaleOptimizer, which leaves out updates, and the model trains by its own",
    ),
    "rate of two": (
        lambda: made(_with_two(Own())),
        {"lr_schedule": {"base_lr": 1.0}},
        "lr_schedule: has no effect",
    ),
    "no dict": (
        lambda: made(Own(3.0)),
        {},
        "data.train: train_step must return a dict of figures by name; it",
    ),
    "no figure": (lambda: made(Own({"a": "b"})), {}, "data.train: train_step must return numbers; a is str."),
    "a vector": (lambda: made(Own({"a": tf.ones(3)})), {}, "must return single numbers; a has shape (3,)."),
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
