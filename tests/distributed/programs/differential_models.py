"""Layers, models, metrics and optimizers of users, for differential_cases, after keras.io's examples."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Penalised(layers.Layer):
    """Adds a loss of its inputs, a mean over records."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


class Scaling(layers.Layer):
    """Divides by a moving average of the mean of its inputs."""

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")

    def call(self, inputs: Any, training: bool = False) -> Any:
        scaled = inputs / self.scale
        if training:
            self.scale.assign(0.9 * self.scale + 0.1 * (1.0 + ops.mean(inputs)))
        return scaled


class Counting(layers.Layer):
    """Counts its calls in training."""

    def build(self, input_shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
        return inputs


class CountingRows(layers.Layer):
    """Counts the rows that it sees in training, of all ranks."""

    def build(self, input_shape: Any) -> None:
        self.rows = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False, aggregation="sum", name="rows"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.rows.assign_add(ops.shape(inputs)[0])
        return inputs


class Following(layers.Layer):
    """Follows the mean of its inputs, in evaluations too."""

    def build(self, input_shape: Any) -> None:
        self.mean = self.add_weight(shape=input_shape[1:], initializer="zeros", trainable=False, name="mean")

    def call(self, inputs: Any) -> Any:
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
        return inputs


class OwnMetric(keras.metrics.Metric):
    """The mean square of the errors, whatever their weights."""

    def __init__(self, gives: str = "number", **options: Any) -> None:
        super().__init__(**options)
        self.gives = gives
        self.total, self.count = (self.add_variable((), "zeros", name=name) for name in ("total", "count"))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = ops.square(ops.cast(y_true, "float32") - y_pred)
        self.total.assign_add(ops.sum(errors))
        self.count.assign_add(ops.cast(ops.size(errors), "float32"))

    def result(self) -> Any:
        mean = self.total / self.count
        return mean if self.gives == "number" else {"own_mean": mean, "own_root": ops.sqrt(mean)}


def network(inputs: int = 5, outputs: int = 1, name: str | None = None) -> keras.Sequential:
    parts = [keras.Input((inputs,)), layers.Dense(8, "tanh"), layers.Dense(outputs)]
    return keras.Sequential(parts, name=name)


class OwnStep(keras.Model):
    """keras.io's guide to custom steps: a loss by hand, a Mean tracker and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.loss_tracker, self.mae = keras.metrics.Mean("own_loss"), keras.metrics.MeanAbsoluteError("own_mae")

    @classmethod
    def made(cls) -> keras.Model:
        model = cls()
        model(np.zeros((1, 5), np.float32))
        model.compile(keras.optimizers.Adam(0.01))
        return model

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.network(inputs, training=training)

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.mae]

    def _figures(self, data: Any, training: bool) -> tuple[Any, dict[str, Any]]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self(x, training=training)
        errors = ops.mean(ops.square(y - outputs), axis=-1)
        loss = ops.mean(errors if weights is None else errors * weights)
        self.loss_tracker.update_state(loss, sample_weight=ops.shape(x)[0])
        self.mae.update_state(y, outputs)
        return loss, {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, figures = self._figures(data, True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return figures

    def test_step(self, data: Any) -> dict[str, Any]:
        return self._figures(data, False)[1]


class OwnEvaluation(keras.Model):
    """Trains as Keras does, and evaluates by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.error = network(), keras.metrics.Mean("error")

    @classmethod
    def made(cls) -> keras.Model:
        model = cls()
        model(np.zeros((1, 5), np.float32))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.network(inputs, training=training)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        outputs = self(x, training=False)
        self.error.update_state(ops.abs(y - outputs))
        return {"error": self.error.result()}


class OwnMetrics(OwnEvaluation):
    """Has figures of its own beside those of compile."""

    test_step = keras.Model.test_step

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        figures = super().compute_metrics(x, y, y_pred, sample_weight)
        self.error.update_state(ops.abs(y - y_pred))
        return {**figures, "error": self.error.result()}


class Distilled(keras.Model):
    """A student that follows a frozen teacher, by compute_loss."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(outputs=3, name="student"), network(outputs=3, name="teacher")
        self.teacher.trainable = False
        self.divergence = keras.losses.KLDivergence()

    @classmethod
    def made(cls) -> keras.Model:
        model = cls()
        model(np.zeros((1, 5), np.float32))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not self.teacher.built:
            self.teacher(inputs)
        return self.student(inputs, training=training)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        of_labels = super().compute_loss(x, y, y_pred, sample_weight)
        wanted = ops.softmax(self.teacher(x, training=False) / 2)
        return 0.3 * of_labels + 0.7 * self.divergence(wanted, ops.softmax(y_pred / 2))


class LeavesOut(layers.Layer):
    """Makes padding of a token, in training only."""

    def call(self, tokens: Any, training: bool = False) -> Any:
        return ops.where(tokens == 5, 0, tokens) if training else tokens


class Auxiliary(keras.Model):
    """Has a second head in training only, as Inception does."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.head, self.second = network(outputs=4), layers.Dense(3), layers.Dense(3)

    @classmethod
    def made(cls) -> keras.Model:
        model = cls()
        model(np.zeros((1, 5), np.float32), training=True)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def call(self, inputs: Any, training: bool = False) -> Any:
        found = self.network(inputs)
        return {"main": self.head(found), "aux": self.second(found)} if training else self.head(found)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        if not training:
            return super().compute_loss(x, y, y_pred, sample_weight)
        main, aux = (super(Auxiliary, self).compute_loss(x, y, y_pred[name], sample_weight) for name in ("main", "aux"))
        return main + 0.3 * aux


class OfLosses(keras.losses.Loss):
    """Made of two losses, of which none is divided by rows."""

    def __init__(self) -> None:
        super().__init__(name="of_losses")
        self.kept = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
        self.added = [keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1, reduction="sum")]

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.kept(y_true, y_pred) + 0.01 * self.added[0](y_true, y_pred)


class PrivateLoss(Distilled):
    """A loss in an attribute that begins with an underscore, added up over the records."""

    def __init__(self) -> None:
        super().__init__()
        self._added = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        return 0.1 * self._added(y, y_pred)


class Vae(keras.Model):
    """keras.io's variational autoencoder, with draws that are not random."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(5, 4, "encoder"), network(2, 5, "decoder")
        self.total, self.divergence = keras.metrics.Mean("total_loss"), keras.metrics.Mean("kl_loss")

    @classmethod
    def made(cls) -> keras.Model:
        model = cls()
        model(np.zeros((1, 5), np.float32))
        model.compile(optimizer=keras.optimizers.Adam(0.01))
        return model

    def call(self, inputs: Any) -> Any:
        return self.decoder(self.encoder(inputs)[:, :2])

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.divergence]

    def _loss(self, data: Any) -> tuple[Any, Any]:
        x = data
        mean, spread = ops.split(self.encoder(x), 2, axis=-1)
        latent = mean + ops.exp(0.5 * spread) * ops.sin(37.0 * x[:, :2])
        of_records = ops.sum(ops.square(x - self.decoder(latent)), axis=-1)
        divergence = -0.5 * (1 + spread - ops.square(mean) - ops.exp(spread))
        divergence = ops.mean(ops.sum(divergence, axis=1))
        return ops.mean(of_records) + divergence, divergence

    def _figures(self, loss: Any, divergence: Any) -> dict[str, Any]:
        self.total.update_state(loss)
        self.divergence.update_state(divergence)
        return {"total_loss": self.total.result(), "kl_loss": self.divergence.result()}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, divergence = self._loss(data)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self._figures(loss, divergence)

    def test_step(self, data: Any) -> dict[str, Any]:
        return self._figures(*self._loss(data))


class Gan(keras.Model):
    """keras.io's GAN: two optimizers, a loss in compile, latent vectors that are not random."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = network(5, 1, "critic"), network(2, 5, "generator")
        self.critic_loss, self.generator_loss = keras.metrics.Mean("critic_loss"), keras.metrics.Mean("generator_loss")

    @classmethod
    def made(cls) -> keras.Model:
        model = cls()
        model(np.zeros((1, 5), np.float32))
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02), loss)
        return model

    def compile(self, critic_optimizer: Any, generator_optimizer: Any, loss_function: Any) -> None:
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer
        self.loss_function = loss_function

    def call(self, inputs: Any) -> Any:
        return self.critic(self.generator(inputs[:, :2])) + self.critic(inputs)

    @property
    def metrics(self) -> list[Any]:
        return [self.critic_loss, self.generator_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data
        latent = ops.sin(37.0 * x[:, :2])
        both = ops.concatenate([self.generator(latent), x], axis=0)
        labels = ops.concatenate([ops.ones((ops.shape(x)[0], 1)), ops.zeros((ops.shape(x)[0], 1))], axis=0)
        with tf.GradientTape() as tape:
            critic_loss = self.loss_function(labels, self.critic(both))
        gradients = tape.gradient(critic_loss, self.critic.trainable_weights)
        self.critic_optimizer.apply_gradients(zip(gradients, self.critic.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            outputs = self.critic(self.generator(latent))
            generator_loss = self.loss_function(ops.zeros((ops.shape(x)[0], 1)), outputs)
        gradients = tape.gradient(generator_loss, self.generator.trainable_weights)
        self.generator_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.critic_loss.update_state(critic_loss)
        self.generator_loss.update_state(generator_loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        x = data
        self.critic_loss.update_state(self.loss_function(ops.zeros((ops.shape(x)[0], 1)), self.critic(x)))
        return {"critic_loss": self.critic_loss.result()}


class Contrastive(OwnStep):
    """In-batch negatives: each record is compared with the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(5, 4)

    def _figures(self, data: Any, training: bool) -> tuple[Any, dict[str, Any]]:
        x = data
        first, second = self(x, training=training), self(x + 0.1 * ops.sin(37.0 * x), training=training)
        similarities = ops.matmul(first, ops.transpose(second))
        labels = ops.arange(ops.shape(x)[0])
        loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True))
        self.loss_tracker.update_state(loss)
        return loss, {"own_loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


class Quantizer(layers.Layer):
    """A codebook that follows moving averages of the vectors nearest to each code (VQ-VAE)."""

    def build(self, input_shape: Any) -> None:
        self.codes = self.add_weight(
            shape=(4, input_shape[-1]), initializer="glorot_uniform", trainable=False, name="codes"
        )
        self.counts = self.add_weight(shape=(4,), initializer="ones", trainable=False, name="counts")

    def call(self, inputs: Any, training: bool = False) -> Any:
        distances = ops.sum(ops.square(inputs[:, None] - self.codes[None]), axis=-1)
        nearest = ops.one_hot(ops.argmin(distances, axis=-1), 4)
        quantized = ops.matmul(nearest, self.codes)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(nearest, axis=0))
            sums = ops.matmul(ops.transpose(nearest), ops.stop_gradient(inputs))
            self.codes.assign(0.9 * self.codes + 0.1 * sums / (1.0 + self.counts[:, None]))
        self.add_loss(0.25 * ops.mean(ops.square(ops.stop_gradient(quantized) - inputs)))
        return inputs + ops.stop_gradient(quantized - inputs)


class Codebook(Vae):
    """A vector-quantized autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.quantizer = network(5, 2, "encoder"), Quantizer()

    @property
    def metrics(self) -> list[Any]:
        return [self.total]

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.decoder(self.quantizer(self.encoder(inputs), training=training))

    def _pass(self, data: Any, training: bool) -> Any:
        x = data
        return ops.mean(ops.square(x - self(x, training=training))) + ops.sum(self.losses)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._pass(data, True)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        return {"total_loss": self.total.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.total.update_state(self._pass(data, False))
        return {"total_loss": self.total.result()}


class _Error(layers.Layer):
    """An endpoint: takes predictions and what they should be, and adds the loss itself."""

    def call(self, outputs: Any, wanted: Any) -> Any:
        self.add_loss(ops.mean(ops.square(outputs - wanted)))
        return outputs


class Endpoint:
    """A model whose loss is added by a layer, with an input for the targets."""

    @staticmethod
    def made() -> keras.Model:
        z, wanted = keras.Input((5,), name="z"), keras.Input((5,), name="a")
        model = keras.Model({"z": z, "a": wanted}, _Error()(layers.Dense(5)(layers.Dense(8, "tanh")(z)), wanted))
        model.compile(keras.optimizers.Adam(0.01))
        return model


class Byol(Vae):
    """A network and an average of it that the step assigns, which the network is to predict."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(5, 5, "online"), network(5, 5, "target")
        self.decoder.trainable = False

    @property
    def metrics(self) -> list[Any]:
        return [self.total]

    def call(self, inputs: Any) -> Any:
        self.decoder(inputs)
        return self.encoder(inputs)

    def _error(self, data: Any) -> Any:
        x = data
        return ops.mean(ops.square(self.encoder(x) - self.decoder(x + 0.1 * ops.sin(37.0 * x))))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._error(data)
        gradients = tape.gradient(loss, self.encoder.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.encoder.trainable_weights, strict=True))
        for average, weight in zip(self.decoder.weights, self.encoder.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.total.update_state(loss)
        return {"total_loss": self.total.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.total.update_state(self._error(data))
        return {"total_loss": self.total.result()}


class Normaliser(OwnStep):
    """Subtracts the mean of the batch, which is that of a rank."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.network(inputs - ops.mean(inputs, axis=0, keepdims=True), training=training)


class OverridesUpdateStep(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(ops.sign(gradient) * ops.sqrt(ops.abs(gradient)), variable, learning_rate)


class OverridesApply(keras.optimizers.SGD):
    """Centralises gradients."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        centred = [grad - ops.mean(grad, axis=0, keepdims=True) if len(grad.shape) > 1 else grad for grad in grads]
        return super().apply(centred, trainable_variables)


class OverridesApplyGradients(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(0.5 * grad, variable) for grad, variable in grads_and_vars])


class WrapsAnother(keras.optimizers.Optimizer):
    """Halves gradients and leaves the update to the optimizer that it holds."""

    def __init__(self, inner: keras.optimizers.Optimizer) -> None:
        super().__init__(learning_rate=0.01)
        self.inner = inner

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.inner.build(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        self.inner.apply([0.5 * grad for grad in grads], trainable_variables)
        self.iterations.assign_add(1)
