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
from uneven import (
    COUNTS,
    LOSS,
    METRICS,
    batches,
    build_model,
    build_sparse_model,
    group,
    rank,
    records,
    share,
    train,
    train_alone,
    weights,
)

from horovod_train.config.settings import MetricSpec, Spec, TrainConfig
from horovod_train.distributed.optimizer import DistributedOptimizer
from horovod_train.optim.lars import LARS
from horovod_train.training.parts.losses import build_loss
from horovod_train.training.parts.metrics import Accumulator, build_metrics
from horovod_train.training.steps.step import EvalStep

BUILDERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "lars": lambda: LARS(0.5, momentum=0.9, weight_decay=0.01, trust_coefficient=0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
    "clipped": lambda: keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1),
}
facts: dict[str, Any] = {"rank": rank, "errors": {}}
for name, build in BUILDERS.items():
    state, seen = train(build(), build_model())
    alone = build_model()
    means = train_alone(build(), alone)
    facts["errors"][name] = rel_error(weights(state.model), weights(alone))
    if name == "sgd":
        facts["loss"] = [seen.result(group)["loss"], np.dot(means, COUNTS) / sum(COUNTS)]
        average = 0.1 * (0.81 * means[0] + 0.9 * means[1] + means[2])
        facts["loss_average"] = [state.average_losses(group)["loss"], average / (1 - 0.9**3)]
        facts["steps"] = int(state.step)

alone = build_model()
train_alone(BUILDERS["momentum"](), alone)
for name, config in {"accumulated": TrainConfig(accumulate_steps=4), "jit": TrainConfig()}.items():
    state, _ = train(BUILDERS["momentum"](), build_model(), config, jit_compile=name == "jit")
    facts["errors"][name] = rel_error(weights(state.model), weights(alone))

# Penalties: layers' own, and that of the config, which halves the square and leaves out biases.
alone = build_model(l2=0.1)
train_alone(keras.optimizers.SGD(0.5), alone)
state, _ = train(keras.optimizers.SGD(0.5), build_model(l2=0.1))
facts["errors"]["layers_l2"] = rel_error(weights(state.model), weights(alone))
alone = build_model(l2=0.1, l2_of_output=0.1)
train_alone(keras.optimizers.SGD(0.5), alone)
state, _ = train(keras.optimizers.SGD(0.5), build_model(), TrainConfig(l2=0.2, accumulate_steps=2))
facts["errors"]["l2"] = rel_error(weights(state.model), weights(alone))

# Sparse gradients, in which tokens repeat within a record, between records and between ranks, against dense ones.
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse": ("momentum", {}),
    "sparse_as_dense": ("momentum", {"sparse_as_dense": True}),
    "sparse_accumulated": ("clipped", {"config": TrainConfig(accumulate_steps=4)}),
    "sparse_clipped": ("clipped", {}),
    "sparse_adam": ("adam", {}),
}
for name, (optimizer_name, options) in SPARSE.items():
    alone = build_sparse_model()
    train_alone(BUILDERS[optimizer_name](), alone)
    state, _ = train(BUILDERS[optimizer_name](), build_sparse_model(), **options)
    facts["errors"][name] = rel_error(weights(state.model), weights(alone))

# Negative: the mean of each rank's own mean is not the mean over records once the shares are uneven.
naive = build_model()
optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(0.5))
for step in range(3):
    batch = share(step)
    with tf.GradientTape() as tape:
        values = build_loss(LOSS)(batch.targets, naive(batch.inputs))["loss"].values * batch.weights
        mean = tf.reduce_sum(values) / tf.maximum(tf.reduce_sum(batch.weights), 1.0)
    optimizer.apply(tape.gradient(mean, naive.trainable_variables), naive.trainable_variables)
plain = build_model()
train_alone(keras.optimizers.SGD(0.5), plain)
facts["errors"]["mean_of_means"] = rel_error(weights(naive), weights(plain))

# Every record once in evaluation, whatever lies in the padding.
model = build_model()
found = Accumulator(
    build_loss(LOSS), build_metrics([*METRICS, Spec("AUC", {"from_logits": True, "multi_label": True})][:1])
)
facts["counted"] = []


def looked_at(inputs: Any, training: bool) -> tf.Tensor:
    """The model's outputs, at each batch of which the watchdog looks."""
    outputs = model(inputs, training=training)

    def look(values: np.ndarray) -> np.ndarray:
        facts["counted"].append(evaluation.counter()[2])
        return values

    return tf.ensure_shape(tf.numpy_function(look, [outputs], outputs.dtype), outputs.shape)


evaluation = EvalStep(looked_at, build_loss(LOSS), found)
evaluation.run(batches(), 3)
x, y = (np.concatenate(parts) for parts in zip(*(records(step) for step in range(3)), strict=True))
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
facts["evaluation"] = [found.result(group), model.evaluate(x, y, verbose=0, return_dict=True, batch_size=len(x))]

# A metric of one output that makes its variables in its first update.
loss = build_loss(Spec("per_output", {"out": {"name": "categorical_crossentropy", "options": {"from_logits": True}}}))
found = Accumulator(loss, build_metrics([MetricSpec("F1Score", {"average": "macro"}, output="out")]))
for step in range(3):
    batch = share(step)
    targets, outputs = {"out": tf.one_hot(batch.targets, 3)}, {"out": model(batch.inputs)}
    found.add(loss.weigh(targets, outputs, batch.weights), targets, outputs, batch.real)
metric = keras.metrics.F1Score("macro")
metric.update_state(tf.one_hot(y, 3), model(x))
facts["late_metric"] = [found.result(group)["f1_score"], float(metric.result())]

state, _ = train(keras.optimizers.SGD(0.1), build_model(dropout=0.5))
facts["mask"] = state.model.layers[1].mask.numpy()
again, _ = train(keras.optimizers.SGD(0.1), build_model(dropout=0.5))
facts["mask_again"] = again.model.layers[1].mask.numpy()
later, _ = train(keras.optimizers.SGD(0.1), build_model(dropout=0.5), first_step=1)
facts["mask_later"] = later.model.layers[1].mask.numpy()

# Ranks that gathered different statistics hold their mean afterwards, and can have their own back.
own = state.average_statistics(group)
facts["averaged_mask"] = state.model.layers[1].mask.numpy()
state.set_statistics(own)
facts["own_mask"] = state.model.layers[1].mask.numpy()

facts |= modes.facts() | frozen.facts() | together.facts() | {"waiting": overlap.facts()}
leave(rank, facts)
group.close()
