"""Streams as users write them, for tests: package.module:function of data.dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

WIDTH = 6
SPEC = (tf.TensorSpec([WIDTH]), tf.TensorSpec([], tf.int64))


def record(number: int) -> tuple[np.ndarray, int]:
    """The record with a number: its inputs, from which the number can be told, and its target."""
    x = np.random.default_rng(number).normal(size=WIDTH).astype(np.float32)
    return x, int(x.sum() > 0)


def rows(numbers: list[int]) -> tf.data.Dataset:
    """A dataset that does not know how many records it has."""

    def give() -> Iterator[tuple[np.ndarray, int]]:
        yield from map(record, numbers)

    return tf.data.Dataset.from_generator(give, output_signature=SPEC)


def uneven(rank: int, size: int, epoch: int, seed: int, training: bool, records: int = 89) -> tf.data.Dataset:
    """Of so many records, rank 0 of three has a quarter, rank 1 the rest and rank 2 none."""
    if not training:
        records, epoch = 25, 0
    order = np.random.default_rng([seed, epoch]).permutation(records).tolist()
    first = records if size == 1 else records // 4
    edges = [0, first, records, records]
    return rows(order[edges[rank] : edges[rank + 1]])


def of_size(rank: int, size: int, epoch: int, seed: int, training: bool, **records: Any) -> tf.data.Dataset | None:
    """records: of each epoch, as epoch_0; no evaluation."""
    return rows(list(range(records[f"epoch_{epoch}"]))) if training else None


def endless(rank: int, size: int, epoch: int, seed: int, training: bool) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(rank, 2**40, size).repeat()
    return numbers.map(lambda n: (tf.fill([WIDTH], tf.cast(n, tf.float32)), n % 2))


def shuffled(rank: int, size: int, epoch: int, seed: int, training: bool) -> tf.data.Dataset:
    return rows(list(range(rank, 89, size))).shuffle(64, seed=seed + epoch)


def unsharded(rank: int, size: int, epoch: int, seed: int, training: bool, batch: int) -> tf.data.Dataset | None:
    """Batches of the same records on all ranks."""
    return rows(list(range(60))).batch(batch, drop_remainder=True) if training else None


def constant(rank: int, size: int, epoch: int, seed: int, training: bool) -> tf.data.Dataset:
    return rows([1] * 20)


def weighted(rank: int, size: int, epoch: int, seed: int, training: bool, least: int = 0) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(rank, 10, size)
    return numbers.map(lambda n: ({"a": tf.cast(n, tf.float32)[None]}, n % 2, tf.cast(n, tf.int32) + least))


def of_arrays(
    rank: int,
    size: int,
    epoch: int,
    seed: int,
    training: bool,
    path: str,
    inputs: list[str],
    targets: list[str],
    weight: str | None = None,
) -> tf.data.Dataset:
    """The rows of an npz file, in another order each epoch; every size-th is of a rank."""
    with np.load(path) as arrays:
        features = {name: arrays[name] for name in [*inputs, *targets, *([weight] if weight else [])]}
    rows = len(features[inputs[0]])
    order = np.random.default_rng([seed, epoch]).permutation(rows) if training else np.arange(rows)

    def some(names: list[str]) -> Any:
        found = {name: features[name][order[rank::size]] for name in names}
        return found if len(names) != 1 else found[names[0]]

    return tf.data.Dataset.from_tensor_slices((some(inputs), some(targets), *([some([weight])] if weight else [])))


def broken(rank: int, size: int, epoch: int, seed: int, training: bool, how: str = "") -> Any:
    """Not what is asked for."""

    def torn() -> Iterator[tuple[np.ndarray, int]]:
        yield from map(record, range(20))
        raise ValueError(f"page 21 of {epoch} is torn")

    def cut_off() -> Iterator[tuple[np.ndarray, int]]:
        yield from map(record, range(20))
        raise ConnectionResetError(104, "Connection reset by peer")

    if how == "cut off" and epoch:
        return tf.data.Dataset.from_generator(cut_off, output_signature=SPEC)
    if how == "raises":
        raise RuntimeError("no connection")
    if how == "torn" and epoch:
        return tf.data.Dataset.from_generator(torn, output_signature=SPEC)
    return {
        "list": [1, 2],
        "single": tf.data.Dataset.range(3),
        "batched": rows([1, 2, 3]).batch(2),
        "empty": rows([]),
        "other": rows([1]) if epoch == 0 else tf.data.Dataset.range(3).map(lambda n: (n, n)),
        "torn": rows(list(range(30))),
        "cut off": rows(list(range(30))),
        "weights": rows([1]).map(lambda x, y: (x, y, x)),
        "none": None,
    }[how]


class ByItself(keras.Model):
    """What `linear` is, with steps of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def _loss(self, data: Any, training: bool) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=training), from_logits=True)
        return keras.ops.mean(losses if sample_weight is None else losses * sample_weight)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self._loss(data, training=True)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"loss": self._loss(data, training=False)}


class Seen(keras.Layer):
    """Keeps the share of passes with a row that is not all 0, and multiplies by it: by 1, if only records count."""

    def build(self, shape: Any) -> None:
        self.share = self.add_weight(shape=(), initializer="ones", trainable=False, name="share")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.share.assign(0.5 * self.share + 0.5 * keras.ops.cast(keras.ops.any(x != 0), "float32"))
        return x * self.share


def by_itself() -> keras.Model:
    model = ByItself()
    model(keras.Input((WIDTH,)))
    return model


def linear() -> keras.Model:
    """WIDTH numbers → 2 logits, one record independent of the others."""
    x = keras.Input((WIDTH,))
    return keras.Model(x, keras.layers.Dense(2)(Seen()(x)))


def of_triples() -> keras.Model:
    """Three times WIDTH numbers → 2 logits for each of the three."""
    x = keras.Input((3, WIDTH))
    return keras.Model(x, keras.layers.Dense(2)(x))
