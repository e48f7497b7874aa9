"""What a distributed optimizer refuses, wrappers around it and local variables, and how it combines gradients."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import weakref
from types import SimpleNamespace
from typing import Any, cast

import horovod.tensorflow
import keras
import pytest
import tensorflow as tf
from keras.optimizers import SGD, LossScaleOptimizer, MultiOptimizer, OptimizerMap

import horovod_train.keras as hvd
import horovod_train.tensorflow as hvd_tf
from horovod_train.distributed import optimizer as exchange_module
from horovod_train.distributed.allreduce import with_values
from horovod_train.distributed.optimizer import GradientExchange
from horovod_train.errors import UserError
from horovod_train.tensorflow import agreement, gradients


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


def test_a_local_layer_that_has_no_variables_yet_is_refused() -> None:
    """Else all ranks would train it together."""
    with pytest.raises(UserError, match=r"^PartialDistributedOptimizer: local layer own has no variables yet"):
        hvd.PartialDistributedOptimizer(SGD(), local_layers=keras.layers.Dense(1, name="own"))
    with pytest.raises(
        UserError, match=r"^PartialDistributedGradientTape: local layer own has no variables yet. Build"
    ):
        hvd_tf.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[keras.layers.Dense(1, name="own")])


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


def test_the_count_of_exchanges_does_not_fall_when_a_model_is_freed() -> None:
    """Each rank frees it at a time of its own: that rank would count as behind the others."""
    weight = tf.Variable(1.0)
    agreement._counters[0][weight].assign(3)
    before, freed = agreement.exchange_count(), weakref.ref(weight)
    del weight
    gc.collect()
    assert freed() is None
    assert agreement.exchange_count() == before


@pytest.fixture
def two_of_four(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process set of two ranks of a job of four."""
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 4)
    return SimpleNamespace(size=lambda: 2, process_set_id=1)


def test_the_ranks_of_a_process_set_divide_by_their_own_number(two_of_four: Any) -> None:
    arithmetic = GradientExchange(ranks=two_of_four, predivide=8.0)._arithmetic()
    assert (arithmetic["prescale_factor"], arithmetic["postscale_factor"]) == (1 / 8, 4.0)


@pytest.mark.parametrize(("op", "divisor"), [("average", 2), ("sum", 1)])
def test_only_an_average_in_bf16_is_divided_by_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, two_of_four: Any, op: Any, divisor: int
) -> None:
    monkeypatch.setattr(exchange_module, "combine_bf16", lambda values, name, ranks, divisor: divisor)
    assert GradientExchange(op, "bf16", two_of_four)._combine_dense(tf.ones(3), "x") == divisor


@pytest.mark.parametrize(("op", "place"), [("average", ""), ("adasum", "/device:CPU:0")])
def test_adasum_is_exchanged_in_main_memory(monkeypatch: pytest.MonkeyPatch, op: Any, place: str) -> None:
    """Horovod's own of gradients on GPUs with NCCL takes the mean within a host."""
    monkeypatch.setattr("horovod.tensorflow.allreduce", lambda wire, **options: tf.identity(wire, name="exchange"))
    monkeypatch.setattr(exchange_module, "is_alone", lambda ranks: False)
    monkeypatch.setattr(GradientExchange, "__post_init__", lambda exchange: None)
    with tf.Graph().as_default() as graph:
        GradientExchange(op)._combine_dense(tf.ones(3), "x")
    assert graph.get_operation_by_name("exchange").device == place


def doubled(grads: Any, variables: Any) -> list[Any]:
    """In place of an exchange with one other rank, which has the same."""
    return [2 * grad for grad in grads]


def test_gradients_are_combined_unless_a_tape_has_combined_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is clipped after the tape is a new tensor."""
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 0)
    applied: list[Any] = []
    optimizer = SimpleNamespace(apply_combined=lambda grads, variables: applied.extend(grads))
    of_tape, clipped = tf.ones(2), tf.ones(2)
    gradients._combined_by_tape[id(of_tape)] = of_tape
    apply = gradients._applying(cast(gradients.GradientCombiner, doubled))
    apply(optimizer, [of_tape, clipped], [])
    assert [grad.numpy().tolist() for grad in applied] == [[2.0, 2.0]] * 2
    apply(optimizer, [of_tape], [])
    assert applied[2] is of_tape


@pytest.fixture
def two_alike(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """As on rank 0 of two ranks with equal gradients: an exchange doubles them. What each exchange was given."""
    exchanged: list[list[Any]] = []

    def exchange(exchange: Any, grad: Any, name: str) -> Any:
        exchanged.append([grad])
        return with_values(grad, lambda values: 2 * values)

    def exchange_together(exchange: Any, grads: Any, name: str) -> Any:
        exchanged.append(list(grads))
        return [2 * grad for grad in grads]

    ranks = horovod.tensorflow.global_process_set
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 0)
    monkeypatch.setattr(ranks, "included", lambda: True)
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(gradients, "count_exchange", lambda *_: None)
    monkeypatch.setattr(GradientExchange, "__call__", exchange)
    monkeypatch.setattr(GradientExchange, "combine_together", exchange_together)
    gradients._warn_of_inputs.cache_clear()
    return exchanged


@pytest.mark.usefixtures("two_alike")
def test_gradients_of_inputs_are_combined_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = tf.constant(1.0), tf.Variable(1.0)
    with hvd_tf.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        tape.watch(x)
        loss = x * weight
    assert float(tape.gradient(loss, [weight])[0]) == 2
    assert not caplog.messages
    assert [float(tape.gradient(loss, [weight, x])[1]) for _ in range(2)] == [2, 2]
    (message,) = caplog.messages
    assert message.endswith("use a plain GradientTape.")


@pytest.mark.usefixtures("two_alike")
def test_one_rank_alone_is_not_warned_of_gradients_of_inputs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(horovod.tensorflow.global_process_set, "size", lambda: 1)
    x = tf.constant(1.0)
    with hvd_tf.DistributedGradientTape(tf.GradientTape()) as tape:
        tape.watch(x)
        loss = x * x
    tape.gradient(loss, x)
    assert not caplog.messages


@pytest.mark.usefixtures("two_alike")
@pytest.mark.parametrize(
    "options", [{}, {"output_gradients": [tf.constant([3.0, 5.0])]}, {"unconnected_gradients": "zero"}], ids=str
)
def test_a_tape_takes_the_arguments_of_a_plain_one(options: dict[str, Any]) -> None:
    used, unused = tf.Variable([1.0, 2.0]), tf.Variable([4.0])
    found: list[Any] = []
    for tape in (tf.GradientTape(), hvd_tf.DistributedGradientTape(tf.GradientTape())):
        with tape:
            targets = [used * used]
        found.append(tape.gradient(targets, {"a": used, "b": [unused]}, **options))
    plain, distributed = found
    assert distributed["a"].numpy().tolist() == (2 * plain["a"]).numpy().tolist()
    (plain_unused,), (distributed_unused,) = plain["b"], distributed["b"]
    assert (plain_unused is None) == (distributed_unused is None) == ("unconnected_gradients" not in options)
    assert plain_unused is None or distributed_unused.numpy().tolist() == [0.0]


@pytest.mark.parametrize(("options", "own"), [({}, 0.5), ({"scale_local_gradients": False}, 1)], ids=str)
def test_gradients_of_local_variables_are_this_ranks_divided_by_the_number_of_ranks(
    two_alike: list[list[Any]], options: dict[str, Any], own: float
) -> None:
    """So that a step on N ranks moves them as far as one on all rows would; both kinds are told apart."""
    shared, local = tf.Variable(1.0), tf.Variable(1.0)
    for factor in (1, 3):
        with tf.GradientTape() as plain:
            loss = 4 * shared + 8 * local
        tape: Any = hvd_tf.DistributedGradientTape(plain, **options)
        tape.register_local_source(local)
        of_local, of_others = tape.get_local_and_global_gradients(
            loss, [shared, local], output_gradients=tf.constant(1.0 * factor)
        )
        for pairs, variable, expected in ((of_local, local, 8 * own), (of_others, shared, 2 * 4)):
            ((source, grad),) = pairs
            assert source is variable
            assert float(grad) == factor * expected
    assert [len(each) for each in two_alike] == [1, 1]


def test_gradients_travel_in_the_groups_that_were_asked_for(two_alike: list[list[Any]]) -> None:
    """Those of one dtype in each; a sparse one alone, and each that is in no group."""
    dense = [tf.Variable(float(number)) for number in range(4)]
    half, table = tf.Variable(4.0, dtype=tf.float16), tf.Variable([[5.0], [6.0]])
    variables = [*dense, half, table]
    sparse = tf.IndexedSlices(tf.constant([[5.0]]), tf.constant([0]), tf.constant([2, 1]))
    grads = [*(tf.constant(float(number)) for number in range(4)), tf.constant(4.0, tf.float16), sparse]

    def groups(**options: Any) -> list[list[float]]:
        two_alike.clear()
        combiner: Any = hvd.DistributedOptimizer(SGD(), **options).gradient_combiner
        combined = combiner(grads, variables)
        of_each = [float(tf.reduce_sum(getattr(grad, "values", grad))) for grad in combined]
        assert of_each == [0, 2, 4, 6, 8, 10]
        return sorted([float(tf.reduce_sum(getattr(grad, "values", grad))) for grad in each] for each in two_alike)

    assert groups() == [[0], [1], [2], [3], [4], [5]]
    assert groups(num_groups=1) == [[0, 1, 2, 3], [4], [5]]
    assert groups(num_groups=2) == [[0, 1, 2], [3], [4], [5]]
    assert groups(groups=[[dense[3], dense[0], half, table]]) == [[0, 3], [1], [2], [4], [5]]


@pytest.mark.usefixtures("two_alike")
@pytest.mark.parametrize(("options", "of_sparse"), [({}, "2"), ({"sparse_as_dense": True}, "1")], ids=str)
def test_dense_and_sparse_gradients_are_exchanged_on_the_device_that_is_given_for_each(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], of_sparse: str
) -> None:
    devices: dict[bool, str] = {}

    def exchange(exchange: Any, grad: Any, name: str) -> Any:
        devices[isinstance(grad, tf.IndexedSlices)] = tf.identity(0).device[-1]
        return grad

    monkeypatch.setattr(GradientExchange, "__call__", exchange)
    given = {"device_dense": "/cpu:1", "device_sparse": "/cpu:2", **options}
    combiner: Any = hvd.DistributedOptimizer(SGD(), **given).gradient_combiner
    variables = [tf.Variable([[1.0]]), tf.Variable([[1.0]])]

    @tf.function(autograph=False)
    def combine() -> None:
        sparse = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([1, 1]))
        combiner([tf.ones([1, 1]), sparse], variables)

    combine.get_concrete_function()
    assert devices == {False: "1", True: of_sparse}


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_without_variables_are_of_those_that_the_optimizer_is_built_for(
    monkeypatch: pytest.MonkeyPatch, two_alike: list[list[Any]], passes: int
) -> None:
    """Else nothing would count their exchanges, nor compare the weights."""
    counted: list[Any] = []
    monkeypatch.setattr(gradients, "count_exchange", lambda weights, *_: counted.extend(weights))
    optimizer: Any = hvd.DistributedOptimizer(SGD(1.0, name="sgd"), backward_passes_per_step=passes)
    shared, local = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer.register_local_var(local)
    with pytest.raises(UserError, match=r"apply got 2 gradients without variables, and sgd is not built\. Give it"):
        optimizer.apply([tf.ones(1), tf.ones(1)])
    optimizer.build([shared, local])
    with pytest.raises(UserError, match=r"apply got 1 gradients without variables, and sgd is built for 2\. Give it"):
        optimizer.apply([tf.ones(1)])
    for _ in range(passes):
        optimizer.apply([tf.ones(1), tf.ones(1)])
    assert len(two_alike) == 1
    assert [each is shared for each in counted] == [True]
    assert (float(shared[0]), float(local[0])) == (1 - 2 * passes, 1 - passes / 2)


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_copy_of_a_distributed_optimizer_which_would_be_none_is_refused(copy_of: Any) -> None:
    with pytest.raises(UserError, match=r"^sgd is distributed, which no copy of it would be\."):
        copy_of(hvd.DistributedOptimizer(SGD(name="sgd")))


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (lambda: hvd.DistributedOptimizer(SGD()), "DistributedOptimizer"),
        (hvd.callbacks.BroadcastGlobalVariablesCallback, "BroadcastGlobalVariablesCallback"),
    ],
)
def test_another_backend_of_keras_which_would_exchange_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, make: Any, owner: str
) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UserError, match=rf"^{owner}: Keras' backend is jax, whose gradients would not be exchanged\."):
        make()


class Around(keras.optimizers.Optimizer):
    """Lets an optimizer inside it do the updates."""

    def __init__(self, inner: keras.optimizers.Optimizer) -> None:
        super().__init__(learning_rate=0.1)
        self.inner = inner

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return self.inner.apply_gradients(grads_and_vars)


class EverySecond(SGD):
    """Leaves out every second update."""

    calls = 0

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        self.calls += 1
        return None if self.calls % 2 else super().apply_gradients(grads_and_vars)


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_optimizer_that_lets_another_one_apply_the_gradients_is_refused(in_graph: bool) -> None:
    optimizer, weight = hvd.DistributedOptimizer(Around(SGD())), keras.Variable([1.0])
    optimizer.inner.build([weight])

    def apply() -> None:
        optimizer.apply_gradients([(tf.ones(1), weight)])

    with pytest.raises(UserError, match="apply_gradients of Around does not call its apply, in which gradients are"):
        (tf.function(apply, autograph=False) if in_graph else apply)()


@pytest.mark.parametrize(
    "build",
    [
        lambda: hvd.DistributedOptimizer(EverySecond(1.0)),
        lambda: hvd.DistributedOptimizer(SGD(1.0), backward_passes_per_step=2),
        lambda: hvd.DistributedOptimizer(SGD(1.0, gradient_accumulation_steps=2)),
        lambda: hvd.DistributedOptimizer(LossScaleOptimizer(SGD(1.0), initial_scale=1.0), backward_passes_per_step=2),
        lambda: hvd.DistributedOptimizer(MultiOptimizer(OptimizerMap(SGD(1.0))), backward_passes_per_step=2),
    ],
    ids=["own", "passes", "Keras", "loss scale", "multi"],
)
def test_an_optimizer_may_leave_out_updates(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    monkeypatch.setattr(gradients.GradientCombiner, "__call__", lambda combiner, grads, variables: list(grads))
    optimizer, weight = build(), keras.Variable([1.0])
    optimizer.build([weight])
    for _ in range(2):
        optimizer.apply_gradients([(tf.ones(1), weight)])
    assert float(weight.numpy()[0]) < 1.0


def test_both_names_of_horovod_for_its_keras_api_lead_to_one_module() -> None:
    from horovod_train.tensorflow.keras import callbacks, elastic

    assert importlib.import_module("horovod_train.tensorflow.keras") is hvd
    assert importlib.import_module("horovod_train.tensorflow.keras.callbacks") is callbacks is hvd.callbacks
    assert importlib.import_module("horovod_train.tensorflow.keras.elastic") is elastic is hvd.elastic
