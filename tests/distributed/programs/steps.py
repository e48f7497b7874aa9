"""Weights after a few uneven steps through TrainStep, against one process that sees all records at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import frozen
import keras
import modes
import numpy as np
import overlap
import tensorflow as tf
import together
from facts import leave, rel_error
from sparse_steps import error_of
from stepping import ANY_SIZE, like
from uneven import (
    COUNTS,
    CROSS_ENTROPY,
    FULL,
    batches,
    build_model,
    group,
    rank,
    records,
    share,
    train,
    train_alone,
    weights,
)

from horovod_train.config.settings import Config, TrainConfig
from horovod_train.data.batch_source import Batch
from horovod_train.training.build import build_evaluation
from horovod_train.training.compiled import compile_model
from horovod_train.training.steps.shares import Shares
from horovod_train.training.steps.step import EvalStep, TrainStep

facts: dict[str, Any] = {"rank": rank, "errors": {}}
step = train(keras.optimizers.SGD(0.5), build_model(), size_of_first=FULL)
alone = build_model()
losses = train_alone(keras.optimizers.SGD(0.5), alone)
facts["errors"]["sgd"] = rel_error(weights(step.state.model), weights(alone))
facts["loss"] = [step.figures.result(group)["loss"], np.dot(losses, COUNTS) / sum(COUNTS)]
average = 0.1 * (0.81 * losses[0] + 0.9 * losses[1] + losses[2])
facts["loss_average"] = [step.state.average_loss(group)["loss_average"], average / (1 - 0.9**3)]
facts["steps"] = int(step.state.step)

# The penalty of the config, which halves the square and leaves out biases.
alone = build_model(l2=0.1, l2_of_output=0.1)
losses = train_alone(keras.optimizers.SGD(0.5), alone)
step = train(keras.optimizers.SGD(0.5), build_model(), TrainConfig(l2=0.2, accumulate_steps=2))
facts["errors"]["l2"] = rel_error(weights(step.state.model), weights(alone))
facts["penalised_loss"] = [step.figures.result(group)["loss"], np.dot(losses, COUNTS) / sum(COUNTS)]

facts["errors"]["sparse"] = error_of("sparse")

# Negative: the mean of each rank's own mean is not the mean over records once the shares are uneven.
naive = train(keras.optimizers.SGD(0.5), build_model(), shares_are_equal=True)
plain = build_model()
train_alone(keras.optimizers.SGD(0.5), plain)
facts["errors"]["mean_of_means"] = rel_error(weights(naive.state.model), weights(plain))

# Every record once in evaluation, whatever lies in the padding.
facts["counted"] = []


class Watched(keras.layers.Layer):
    """Notes at each batch of an evaluation what the watchdog would see."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def look(values: np.ndarray) -> np.ndarray:
            if evaluation is not None:
                facts["counted"].append(evaluation.counter()[2])
            return values

        return tf.ensure_shape(tf.numpy_function(look, [x], x.dtype), x.shape)


def build_watched(loss: Any, metrics: list[Any]) -> keras.Model:
    model = keras.Sequential([*build_model().layers, Watched()])
    model.compile("sgd", loss, metrics=metrics)
    return model


def evaluator(model: keras.Model, share: Callable[[int], Batch]) -> EvalStep:
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, share(0))
    return build_evaluation(Config(), group, compile_model(Config(), model, None), like(spec), Shares(group))


evaluation: EvalStep | None = None
model = build_watched(CROSS_ENTROPY, ["accuracy"])
evaluation = evaluator(model, share)
evaluation.run(batches(), 3, ANY_SIZE)
x, y = (np.concatenate(parts) for parts in zip(*(records(step) for step in range(3)), strict=True))
found, evaluation = evaluation.metrics.result(group), None
facts["evaluation"] = [found, model.evaluate(x, y, verbose=0, return_dict=True, batch_size=len(x))]


def one_hot_share(step: int) -> Batch:
    return share(step)._replace(targets=tf.one_hot(share(step).targets, 3))


# A metric that makes its variables in its first update.
model = build_watched(keras.losses.CategoricalCrossentropy(from_logits=True), [keras.metrics.F1Score("macro")])
late = evaluator(model, one_hot_share)
late.run(batches(one_hot_share), 3, ANY_SIZE)
metric = keras.metrics.F1Score("macro")
metric.update_state(tf.one_hot(y, 3), model(x))
facts["late_metric"] = [late.metrics.result(group)["f1_score"], float(metric.result())]


# The same masks in a second run, others in the step after. What the forward pass assigns is equal on all ranks after
# each step; where ranks exchange now and then, it differs between exchanges and is averaged for a save.
def note_statistics(name: str, trained: TrainStep) -> None:
    statistics = trained.state.model.layers[2].moving_mean
    facts[f"statistics {name}"] = statistics.numpy()
    trained.state.settle(group)
    facts[f"statistics {name}, settled"] = statistics.numpy()


for name in ("mask", "mask_again"):
    step = train(keras.optimizers.SGD(0.1), build_model(dropout=0.5))
    facts[name] = step.state.model.layers[1].mask
note_statistics("every_step", step)
step.run(batches(first=2), 1, ANY_SIZE)
facts["mask_later"] = step.state.model.layers[1].mask
local = TrainConfig(synchronization="local", average_every_steps=2)
note_statistics("local", train(keras.optimizers.SGD(0.1), build_model(dropout=0.5), local))

facts |= modes.facts() | frozen.facts() | together.facts() | {"waiting": overlap.facts()}
leave(rank, facts)
group.close()
