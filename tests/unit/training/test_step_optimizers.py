"""What happens to the gradients that a model gives its optimizers: they are scaled, added up, exchanged, applied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.optimizer import GradientExchange
from horovod_train.training.steps.optimizers import LARGEST_SCALE, Optimizers, Update, add_gradients, only_count
from horovod_train.training.steps.shares import Shares
from horovod_train.training.sync import SyncStrategy


def rows(values: list[float], indices: list[int]) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values)[:, None], tf.constant(indices), tf.constant([3, 1]))


def dense(gradient: Any) -> list[float]:
    values: list[float] = tf.convert_to_tensor(gradient).numpy().ravel().tolist()
    return values


def test_gradients_of_passes_add_up_in_their_kind() -> None:
    """Sparse ones stay sparse with all rows; one that is not there stays None, so that weight decay leaves it alone."""
    both = add_gradients(rows([1.0, 2.0], [0, 2]), rows([4.0], [2]))
    assert isinstance(both, tf.IndexedSlices)
    assert len(both.indices) == 3
    assert dense(both) == [1.0, 0.0, 6.0]
    assert dense(add_gradients(rows([1.0], [1]), tf.ones((3, 1)))) == [1.0, 2.0, 1.0]
    assert dense(add_gradients(tf.ones(2), tf.ones(2))) == [2.0, 2.0]
    assert add_gradients(None, None) is None
    only = tf.ones(2)
    assert add_gradients(None, only) is only
    assert add_gradients(only, None) is only


class Doubling:
    """In place of a GradientExchange: an exchange with one other rank, which has the same."""

    def combine_each(self, gradients: Any, name: str) -> list[Any]:
        return [None if gradient is None else 2 * gradient for gradient in gradients]


class Given:
    """A weight of 1, and an optimizer that a step applies to it by rate 1."""

    def __init__(self, optimizer: Any = None, *, scaled: bool = False, **scale: Any) -> None:
        """scale: options of the loss scale."""
        self.weight = keras.Variable([1.0, 1.0], name="weight")
        optimizer = optimizer or keras.optimizers.SGD(1.0)
        scale = {"initial_scale": 8.0} | scale
        self.optimizer = keras.optimizers.LossScaleOptimizer(optimizer, **scale) if scaled else optimizer
        self.optimizers = Optimizers({"optimizer": self.optimizer})
        with self.optimizers.only_noted():
            self.optimizer.apply([tf.zeros(2)], [self.weight])
        self.shares = Shares(cast(WorkerGroup, SimpleNamespace(size=2)))
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
        exchange, enter = cast(GradientExchange, Doubling()), lambda phase, after=(): tf.no_op()
        self.update = Update(self.optimizers, exchange, SyncStrategy(), self.shares, step, enter)
        self.optimizers.distribute(self.update)

    def apply(self, *gradients: list[float], share: float | None = None, loss: float | None = None) -> list[float]:
        """Apply each in turn, the last for good, as passes of a step. Returns the weight."""

        @tf.function(autograph=False)
        def step() -> None:
            with self.shares.of_pass(None if share is None else tf.constant(share)):
                earlier: dict[str, Any] = {}
                for gradient in gradients[:-1]:
                    self.update.begin_pass()
                    with self.update.collecting() as collected:
                        self.optimizer.apply([tf.constant(gradient)], [self.weight])
                    earlier = {
                        path: [add_gradients(*pair) for pair in zip(earlier.get(path, [None]), found, strict=True)]
                        for path, found in collected.items()
                    }
                self.update.earlier = earlier
                self.update.begin_pass()
                self.update.loss = None if loss is None else tf.constant(loss)
                self.optimizer.apply([tf.constant(gradients[-1])], [self.weight])

        step()
        values: list[float] = self.weight.numpy().tolist()
        return values


def test_a_gradient_is_scaled_by_its_share_and_exchanged_before_it_is_applied() -> None:
    assert Given().apply([1.0, 2.0]) == [1.0 - 2.0, 1.0 - 4.0]
    assert Given().apply([1.0, 2.0], share=0.25) == [1.0 - 0.5, 1.0 - 1.0]
    assert Given().apply([np.nan, np.inf], share=0.0) == [1.0, 1.0]  # of a borrowed row
    assert Given().apply([1.0, 0.0], [0.0, 3.0], [1.0, 1.0], share=0.5) == [1.0 - 2.0, 1.0 - 4.0]


def test_gradients_and_variables_are_any_iterables_as_keras_takes_them() -> None:
    given = Given()

    @tf.function(autograph=False)
    def step() -> None:
        with given.shares.of_pass(None):
            given.update.begin_pass()
            given.optimizer.apply(iter([tf.constant([1.0, 2.0])]), iter([given.weight]))

    step()
    assert given.weight.numpy().tolist() == [1.0 - 2.0, 1.0 - 4.0]


@pytest.mark.parametrize(("gradient", "loss"), [([1.0, np.nan], 1.0), ([1.0, 1.0], np.inf)], ids=["gradient", "loss"])
def test_numbers_that_are_not_finite_are_not_applied(gradient: list[float], loss: float) -> None:
    given = Given()
    assert given.apply(gradient, loss=loss) == [1.0, 1.0]
    assert bool(given.optimizers.failed)
    assert bool(given.optimizers.is_cause)
    assert int(given.optimizer.iterations) == 1  # for schedules
    given.optimizers.failed.assign(False)
    assert given.apply([1.0, 1.0], loss=1.0) == [-1.0, -1.0]
    assert not bool(given.optimizers.failed)


def test_a_schedule_counts_the_steps_that_are_left_out() -> None:
    """So that the rate of a step is that of the plan, whatever was left out before it."""
    given = Given(keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([0, 2], [1.0, 4.0, 16.0])))
    ends = [given.apply([1.0, last]) for last in (1.0, np.nan, np.inf, 1.0)]
    assert ends == [[-1.0, -1.0]] * 3 + [[-1.0 - 32.0] * 2]


@pytest.mark.parametrize("is_empty", [False, True], ids=["skipped", "without records"])
def test_averages_of_an_optimizer_begin_with_its_first_update(is_empty: bool) -> None:
    """As Keras begins them at step 0; those of a step after it would be of zeros, with which they are made."""
    given = Given(keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5))
    (average,) = (variable for variable in given.optimizer.variables if "average" in variable.path)
    found = []
    for is_left_out in (True, False, True, False):
        if is_left_out and is_empty:
            only_count(given.optimizer)
        else:
            given.apply([1.0, np.nan if is_left_out else 1.0])
        found.append((*given.weight.numpy().tolist(), *average.numpy().tolist()))
    assert found == [(1.0, 1.0, 0.0, 0.0), (-1.0,) * 4, (-1.0,) * 4, (-3.0, -3.0, -2.0, -2.0)]


@pytest.mark.parametrize("second", [1.0, 3e38], ids=["good", "overflows when it is combined"])
@pytest.mark.parametrize("holds_back", [False, True])
def test_a_failure_of_the_first_of_two_updates_in_a_step_remains_noted(holds_back: bool, second: float) -> None:
    given = Given()
    given.update.holds_back = holds_back

    @tf.function(autograph=False)
    def step() -> None:
        with given.shares.of_pass(None):
            given.update.begin_pass()
            for gradient in ([np.nan, 1.0], [second, 1.0]):
                given.optimizer.apply([tf.constant(gradient, tf.float32)], [given.weight])

    step()
    assert bool(given.optimizers.failed)
    assert bool(given.optimizers.is_cause)


@pytest.mark.parametrize("holds_back", [False, True])
def test_gradients_that_overflow_when_they_are_combined_are_laid_to_no_rank(holds_back: bool) -> None:
    given = Given()
    given.update.holds_back = holds_back
    given.apply([3e38, 1.0])
    assert bool(given.optimizers.failed)
    assert not bool(given.optimizers.is_cause)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("holds_back", [False, True])
def test_a_loss_that_is_not_finite_is_a_failure_whatever_its_gradients_are(holds_back: bool, ranks: int) -> None:
    given = Given()
    given.update.holds_back = holds_back
    cast(Any, given.shares.group).size = ranks
    given.apply([1.0, 1.0], loss=np.inf)
    assert bool(given.optimizers.failed)
    assert bool(given.optimizers.is_cause)


def test_a_loss_scale_is_lowered_by_gradients_that_are_not_finite() -> None:
    given = Given(scaled=True)
    assert given.optimizers.scales_loss
    assert given.apply([8.0, np.inf]) == [1.0, 1.0]
    assert float(given.optimizer.dynamic_scale) == 4.0
    assert int(given.optimizer.inner_optimizer.iterations) == 0  # as in Keras
    assert given.apply([4.0, 8.0]) == [1.0 - 2.0, 1.0 - 4.0]


@pytest.mark.parametrize("holds_back", [False, True])
def test_a_large_gradient_is_no_failure(holds_back: bool) -> None:
    """Float32 cannot hold its square."""
    given = Given()
    given.update.holds_back = holds_back
    assert given.apply([1e25, -1e26]) == pytest.approx([-2e25, 2e26])
    assert not bool(given.optimizers.failed)


def test_a_loss_scale_that_no_gradient_of_float16_stops_leaves_out_what_keras_leaves_out() -> None:
    """Squares of scaled gradients are past float32 from a scale of about 2^64 on, and the scale itself at 2^128."""
    given = Given(scaled=True, initial_scale=2.0**15, dynamic_growth_steps=1)
    alone: Any = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 2.0**15, 1)
    weight = keras.Variable([1.0, 1.0])
    alone.build([weight])
    gradient = tf.constant([2.0**-9, 2.0**-11])

    @tf.function(autograph=False)
    def step(factor: tf.Tensor) -> None:
        with given.shares.of_pass(None):
            given.update.begin_pass()
            given.optimizer.apply([factor * given.optimizer.scale_loss(gradient)], [given.weight])

    for number in range(130):
        step(tf.constant(1.0))
        assert not bool(given.optimizers.failed), number
        if number < 110:
            alone.apply([2.0 * alone.scale_loss(gradient)], [weight])
            assert given.weight.numpy().tolist() == weight.numpy().tolist()
            assert float(given.optimizer.dynamic_scale) == float(alone.dynamic_scale) == 2.0 ** (16 + number)
    assert given.weight.numpy().tolist() == [1.0 - 130 * 2.0**-8, 1.0 - 130 * 2.0**-10]
    assert float(given.optimizer.dynamic_scale) == LARGEST_SCALE
    step(tf.constant(np.inf))
    assert bool(given.optimizers.failed)
    assert float(given.optimizer.dynamic_scale) == LARGEST_SCALE / 2


def test_gradients_of_an_optimizer_that_is_applied_twice_in_a_pass_are_kept_by_call() -> None:
    given = Given()

    @tf.function(autograph=False)
    def collected() -> dict[str, list[Any]]:
        given.update.begin_pass()
        with given.update.collecting() as found:
            for factor in (1.0, 3.0):
                given.optimizer.apply([factor * tf.constant([1.0, 2.0])], [given.weight])
        return dict(found)

    calls = {call: gradients[0].numpy().tolist() for call, gradients in collected().items()}
    assert calls == {"optimizer": [1.0, 2.0], "optimizer#2": [3.0, 6.0]}
    assert given.weight.numpy().tolist() == [1.0, 1.0]
