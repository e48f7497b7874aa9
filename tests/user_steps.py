"""Models with steps of their own as a user would keep them: a WGAN with gradient penalty, and a contrastive one.

Their noise comes with the records, so that one process and several ranks draw the same. `fit` trains them too.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

PIXELS, LATENT, CRITIC_STEPS = 64, 3, 2


def arrays(records: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Images of 8 × 8 that a few numbers explain, and noise for each of them."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(records, 4))
    images = np.tanh(hidden @ rng.normal(size=(4, PIXELS)))
    return {
        "image": images.astype(np.float32),
        "noise": rng.normal(size=(records, CRITIC_STEPS + 1, LATENT)).astype(np.float32),
        "mix": rng.uniform(size=(records, CRITIC_STEPS)).astype(np.float32),
        "views": rng.normal(size=(records, 2, PIXELS)).astype(np.float32),
    }


def mean(values: Any, sample_weight: Any) -> Any:
    """The mean over the rows, as Keras' losses weigh it. values: [rows]."""
    return ops.mean(values if sample_weight is None else values * sample_weight)


def _inputs(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: keras.Input(shape, name=name) for name, shape in shapes.items()}


class Wgan(keras.Model):
    """Two optimizers, given to a compile() of its own; the critic is updated more often. Returns plain numbers."""

    def __init__(self, spoils: bool = False) -> None:
        """spoils: divides by zero in the second step on the second rank."""
        super().__init__()
        self.spoils = spoils
        self.critic = keras.Sequential(
            [keras.Input((PIXELS,)), layers.Dense(16, "tanh"), layers.Dense(1)], name="critic"
        )
        self.generator = keras.Sequential(
            [keras.Input((LATENT,)), layers.Dense(16, "tanh"), layers.Dense(PIXELS, "tanh")], name="generator"
        )

    def compile(self, critic_optimizer: Any, generator_optimizer: Any) -> None:
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer

    def call(self, x: Any) -> Any:
        return self.critic(self.generator(x["noise"][:, 0]))

    def penalty(self, real: Any, made: Any, mix: Any) -> Any:
        between = real + mix[:, None] * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between, training=True)
        slopes = tape.gradient(scores, between)
        return ops.square(ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-12) - 1.0)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _, weight = keras.utils.unpack_x_y_sample_weight(data)
        for step in range(CRITIC_STEPS):
            with tf.GradientTape() as tape:
                made = self.generator(x["noise"][:, step], training=True)
                gap = (self.critic(made, training=True) - self.critic(x["image"], training=True))[:, 0]
                if self.spoils:
                    gap = gap / _zero_once(self.generator_optimizer.iterations)
                critic_loss = mean(gap + 10.0 * self.penalty(x["image"], made, x["mix"][:, step]), weight)
            own = self.critic.trainable_weights
            self.critic_optimizer.apply_gradients(zip(tape.gradient(critic_loss, own), own, strict=True))
        with tf.GradientTape() as tape:
            made = self.generator(x["noise"][:, CRITIC_STEPS], training=True)
            generator_loss = mean(-self.critic(made, training=True)[:, 0], weight)
        own = self.generator.trainable_weights
        self.generator_optimizer.apply_gradients(zip(tape.gradient(generator_loss, own), own, strict=True))
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


def _zero_once(steps: Any) -> Any:
    import horovod_train.tensorflow as hvd

    return ops.where(ops.logical_and(ops.equal(steps, 1), hvd.rank() == hvd.size() - 1), 0.0, 1.0)


def wgan(spoils: bool = False, rates: tuple[float, float] = (0.003, 0.003)) -> keras.Model:
    """rates: of the critic and of the generator."""
    model = Wgan(spoils)
    model(_inputs(image=(PIXELS,), noise=(CRITIC_STEPS + 1, LATENT), mix=(CRITIC_STEPS,)))
    model.compile(keras.optimizers.Adam(rates[0], beta_1=0.5), keras.optimizers.RMSprop(rates[1]))
    return model


class Contrastive(keras.Model):
    """The two views of an image among all views of the batch; gathers: of the batch of all ranks."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.encode = keras.Sequential([keras.Input((PIXELS,)), layers.Dense(16, "tanh"), layers.Dense(4)])
        self.gathers = gathers

    def call(self, x: Any) -> Any:
        encoded = [self.encode(x["image"] + 0.3 * x["views"][:, view]) for view in range(2)]
        return ops.stack([one / ops.norm(one, axis=-1, keepdims=True) for one in encoded], axis=1)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            pairs = self(data, training=True)
            own_rows = ops.shape(pairs)[0]
            if self.gathers:
                import horovod_train.tensorflow as hvd

                pairs = hvd.allgather(ops.cast(pairs, "float32"))
            likeness = 5.0 * ops.matmul(pairs[:, 0], ops.transpose(pairs[:, 1]))
            loss = ops.mean(ops.logsumexp(likeness, axis=1) - ops.diagonal(likeness))
        own = self.trainable_weights
        # Each rank has the loss of all, and gives the gradient of its own rows; the mean over ranks is by rows.
        factor = ops.cast(ops.shape(pairs)[0] / own_rows, "float32")
        gradients = [factor * gradient for gradient in tape.gradient(loss, own)]
        self.optimizer.apply_gradients(zip(gradients, own, strict=True))
        if not self.gathers:
            return {"loss": loss}
        # A constant on all ranks but the first.
        return {"loss": loss, "of_root": hvd.allreduce(tf.where(hvd.rank() == 0, loss, 0.0), op=hvd.Sum)}


def contrastive(gathers: bool = True) -> keras.Model:
    model = Contrastive(gathers)
    model(_inputs(image=(PIXELS,), views=(2, PIXELS)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    return model
