"""Sums of rows whose bits do not depend on the order in which a device adds, and names that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_train.tensorflow as hvd
from horovod_train.distributed import allreduce
from horovod_train.distributed.allreduce import add_up_rows, add_up_rows_in_order, exchange_name, over_ranks
from horovod_train.distributed.start import horovod_alone
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.errors import UserError

AddUp = Callable[[tf.IndexedSlices], tf.IndexedSlices]


def gathered(ranks: int) -> tf.IndexedSlices:
    """Rows of several ranks, each of which holds a row once; numbers whose sums depend on the order of addition."""
    rng = np.random.default_rng(ranks)
    indices = np.concatenate([rng.permutation(9)[:6] for _ in range(ranks)])
    values = rng.normal(size=(len(indices), 5)) * 10.0 ** rng.integers(-3, 4, size=(len(indices), 1))
    return tf.IndexedSlices(values.astype(np.float32), indices, tf.constant([9, 5]))


@pytest.fixture
def atomics(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Seed → the operations that GPUs do by atomic additions take their rows in an order drawn from it."""
    segment_sum, scatter_add = tf.math.unsorted_segment_sum, tf.tensor_scatter_nd_add
    rng = np.random.default_rng()

    def shuffle(*rows: Any) -> list[tf.Tensor]:
        order = rng.permutation(len(rows[0]))
        return [tf.gather(each, order) for each in rows]

    def any_segment_sum(values: Any, places: Any, number: Any) -> tf.Tensor:
        return segment_sum(*shuffle(values, places), number)

    def any_scatter_add(total: Any, places: Any, values: Any) -> tf.Tensor:
        return scatter_add(total, *shuffle(places, values))

    def seed(number: int) -> None:
        nonlocal rng
        rng = np.random.default_rng(number)

    monkeypatch.setattr(tf.math, "unsorted_segment_sum", any_segment_sum)
    monkeypatch.setattr(tf, "tensor_scatter_nd_add", any_scatter_add)
    return seed


def bits(add_up: AddUp, rows: tf.IndexedSlices, atomics: Callable[[int], None]) -> set[bytes]:
    found = set()
    for number in range(20):
        atomics(number)
        found.add(tf.convert_to_tensor(add_up(rows)).numpy().tobytes())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_gathered_rows_add_up_to_the_same_bits_in_whatever_order_a_device_adds(
    atomics: Callable[[int], None], ranks: int
) -> None:
    assert len(bits(add_up_rows_in_order, gathered(ranks), atomics)) == 1


def test_a_segment_sum_has_other_bits_in_another_order(atomics: Callable[[int], None]) -> None:
    """The negative of the above."""
    assert len(bits(add_up_rows, gathered(8), atomics)) > 1


@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 8])
def test_rows_in_order_are_a_segment_sum_of_the_cpu_to_the_bit(ranks: int) -> None:
    rows = gathered(ranks) if ranks else tf.IndexedSlices(tf.zeros([0, 5]), tf.zeros([0], tf.int64), [9, 5])
    ours, plain = add_up_rows_in_order(rows), add_up_rows(rows)
    assert ours.indices.numpy().tolist() == plain.indices.numpy().tolist()
    assert ours.values.numpy().tobytes() == plain.values.numpy().tobytes()


@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_a_mean_has_the_same_bits_in_whatever_way_a_rank_computes_it(ranks: int) -> None:
    """TensorFlow's optimizer of graphs changes divisions; where it does, the weights of ranks would part."""
    total, process_set = tf.constant(np.random.default_rng(0).normal(size=1000), tf.float32), SimpleNamespace()
    process_set.size = lambda: ranks

    def mean(total: tf.Tensor) -> tf.Tensor:
        return over_ranks(total, process_set)

    eager, in_graph = mean(total), tf.function(mean)(total)
    assert eager.numpy().tobytes() == in_graph.numpy().tobytes()
    np.testing.assert_allclose(eager, total / ranks, rtol=1e-6)


@pytest.mark.parametrize("divisor", [3, 1000])
def test_bfloat16_of_many_ranks_is_added_and_divided_as_float32(monkeypatch: pytest.MonkeyPatch, divisor: int) -> None:
    """As bfloat16, a sum of ones ends at 256; and 1000 / 3, rounded before it is divided and after it, is another."""

    def of_1000_ranks(values: tf.Tensor, reduce: Any, *_: Any, wire_dtype: tf.DType) -> tf.Tensor:
        return tf.bitcast(reduce(tf.stack([tf.bitcast(values, wire_dtype)] * 1000)), values.dtype)

    monkeypatch.setattr(allreduce, "_reduce_by_slices", of_1000_ranks)
    values = tf.constant([1.0, 0.5, 3.0])
    expected = tf.cast(tf.cast(values * 1000 / divisor, tf.bfloat16), tf.float32)
    found = allreduce.combine_bf16(values, "any", cast(Any, None), divisor=divisor)
    assert found.numpy().tolist() == expected.numpy().tolist()


def test_exchanges_of_one_name_in_a_graph_are_numbered() -> None:
    names: list[str] = []

    def trace() -> None:
        names.append(exchange_name("a"))
        with tf.name_scope("deeper"):
            names.append(exchange_name("a"))
        names.append(exchange_name("b"))

    for _ in range(2):
        tf.function(trace, autograph=False).get_concrete_function()
    assert names == ["a", "a.2", "b"] * 2
    assert [exchange_name("a"), exchange_name("a")] == ["a", "a"]  # one after the other


def test_an_exchange_is_refused_in_whatever_xla_compiles() -> None:
    def trace() -> None:
        tf.cond(tf.constant(True), lambda: exchange_name("a"), lambda: "")

    with pytest.raises(UserError, match=r"XLA cannot compile the exchange between ranks: give compile\(..., jit_comp"):
        tf.function(trace, autograph=False, jit_compile=True).get_concrete_function()
    tf.function(lambda: exchange_name("a") and None, autograph=False).get_concrete_function()


def test_a_batch_norm_that_knows_no_renorm_can_be_synchronised() -> None:
    """Keras 3.12, the last for Python 3.10, has none."""
    layer = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), layer])
    del layer.renorm
    synchronise_batch_norm(model)
    assert type(layer) is not keras.layers.BatchNormalization


def constant_gathers(graph: tf.Graph) -> list[str]:
    """Exchanges of a graph whose value TensorFlow knows while it traces, and which it then runs on the spot."""

    def is_known(tensor: tf.Tensor) -> bool:
        op = tensor.op
        if op.type == "Shape" and op.inputs[0].shape.is_fully_defined():
            return True
        if op.type in ("Placeholder", "PlaceholderWithDefault") or op.op_def.is_stateful:
            return False
        return all(map(is_known, op.inputs))

    return [op.name for op in graph.get_operations() if op.type == "HorovodAllgather" and is_known(op.outputs[0])]


def one_by_one(gather: Any, values: list[tf.Tensor]) -> list[tf.Tensor]:
    return [gather(value) for value in values]


def grouped(gather: Any, values: list[tf.Tensor]) -> list[tf.Tensor]:
    return gather(values)


@pytest.mark.parametrize(
    ("call", "ours", "of_horovod"),
    [
        (one_by_one, hvd.allgather, horovod.tensorflow.allgather),
        (grouped, hvd.grouped_allgather, horovod.tensorflow.grouped_allgather),
    ],
)
def test_the_gradient_of_a_gather_exchanges_nothing_while_it_is_traced(call: Any, ours: Any, of_horovod: Any) -> None:
    def gathers(gather: Any) -> list[str]:
        @tf.function(autograph=False)
        def gradients(values: list[tf.Tensor]) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(values)
                loss = sum(tf.reduce_sum(rows**2) for rows in call(gather, values))
            return tape.gradient(loss, values)

        return constant_gathers(gradients.get_concrete_function([tf.TensorSpec([3, 2]), tf.TensorSpec([3])]).graph)

    with horovod_alone():
        assert gathers(ours) == []
        assert len(gathers(of_horovod)) == 2
