"""What an optimizer refuses once it is distributed, before any exchange: wrappers around it, and local variables."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.optimizers import SGD, LossScaleOptimizer, MultiOptimizer, OptimizerMap

import horovod_train.keras as hvd
from horovod_train.errors import UserError
from horovod_train.tensorflow import agreement


def each_its_own(variable: Any) -> keras.optimizers.Optimizer:
    return SGD(global_clipnorm=1.0)


def variables() -> list[Any]:
    return [keras.Variable([1.0], name=name) for name in ("shared", "local")]


@pytest.mark.parametrize("build", [SGD, lambda: MultiOptimizer(OptimizerMap(SGD()))])
def test_no_loss_scale_goes_around_a_distributed_optimizer(build: Any) -> None:
    distributed = hvd.DistributedOptimizer(build())
    for optimizer in (distributed, type(distributed).from_config(distributed.get_config())):
        with pytest.raises(UserError, match="is distributed, and LossScaleOptimizer and MultiOptimizer take only"):
            LossScaleOptimizer(optimizer)


@pytest.mark.parametrize(
    "build",
    [
        lambda: SGD(global_clipnorm=1.0),
        lambda: MultiOptimizer(OptimizerMap(SGD(), {".*": SGD(global_clipnorm=1.0)})),
        lambda: MultiOptimizer(OptimizerMap(SGD(global_clipnorm=1.0))),
        lambda: MultiOptimizer(each_its_own),
    ],
)
@pytest.mark.parametrize("registers_first", [False, True])
def test_local_variables_do_not_go_with_a_norm_over_all_gradients(build: Any, registers_first: bool) -> None:
    optimizer, (shared, local) = hvd.DistributedOptimizer(build()), variables()

    def register_and_build() -> None:
        if not registers_first:
            optimizer.build([shared, local])
        optimizer.register_local_var(local)
        optimizer.build([shared, local])

    with pytest.raises(UserError, match=r"local variables do not go with global_clipnorm.* Use clipnorm\."):
        register_and_build()


def test_local_variables_go_with_a_norm_of_each_gradient() -> None:
    optimizer, (shared, local) = hvd.DistributedOptimizer(MultiOptimizer(OptimizerMap(SGD(clipnorm=1.0)))), variables()
    optimizer.register_local_var(local)
    optimizer.build([shared, local])
    assert optimizer.gradient_combiner.is_local(local)


def test_the_watch_counts_exchanges_without_an_operation_on_the_device_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """read_value, which Variable.numpy calls, copies to the default device; on a GPU that waits for the step."""
    weight = tf.Variable(1.0)
    counter = agreement._counters[0][weight]
    counter.assign(3)

    def copy(variable: Any) -> None:
        raise AssertionError("a copy is made on the default device")

    monkeypatch.setattr(type(counter), "read_value", copy)
    before = agreement.exchange_count()
    counter.assign_add(4, read_value=False)
    assert agreement.exchange_count() == before + 4
