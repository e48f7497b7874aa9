"""Attributes of Keras and tf.data that are not public and that we read: each is still there, with what it held.

Only keras_seams reads them. A failure here, after a new Keras, says which of its functions needs another name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import horovod_train
from horovod_train import keras_seams

X, Y = np.ones((4, 3), np.float32), np.zeros((4, 1), np.float32)


def compiled(loss: Any = "mse", **more: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", loss, **more)
    return model


def test_the_axis_of_classes_is_that_of_the_loss() -> None:
    """_fn_kwargs."""
    assert keras_seams.class_axis(keras.losses.SparseCategoricalCrossentropy(axis=1)) == 1
    assert keras_seams.class_axis(keras.losses.SparseCategoricalCrossentropy()) == -1
    assert keras_seams.class_axis("mse") == -1


def test_what_a_layer_has_added_to_the_loss_is_where_it_is_left_out() -> None:
    """_losses."""
    layer = layers.Dense(1, activity_regularizer="l2")
    layer(X)
    (added,) = vars(layer)[keras_seams.ADDED_LOSSES]
    assert any(added is loss for loss in layer.losses)


def test_weights_of_an_optimizer_are_those_it_was_built_for() -> None:
    """_trainable_variables."""
    weights = compiled().trainable_variables[::-1]
    for optimizer in (keras.optimizers.SGD(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())):
        optimizer.build(weights)
        assert [id(each) for each in keras_seams.weights_of(optimizer)] == [id(each) for each in weights]


def test_averages_of_an_optimizer_are_those_that_it_ends_with() -> None:
    """_model_variables_moving_average."""
    for wrap in (lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer):
        model, optimizer = compiled(), wrap(keras.optimizers.SGD(use_ema=True))
        weights = model.trainable_variables[::-1]
        optimizer.build(weights)
        pairs = keras_seams.averages_of(optimizer)
        assert [id(weight) for weight, _ in pairs] == [id(each) for each in weights]
        for _, average in pairs:
            average.assign(tf.fill(average.shape, 3.0))
        optimizer.finalize_variable_values(weights)
        assert all((weight == 3.0).all() for weight in model.get_weights())
    assert keras_seams.averages_of(keras.optimizers.SGD()) == []


def test_compile_arguments_are_the_objects_that_compile_was_given() -> None:
    """_compile_config, and its config."""
    loss, metric, users = keras.losses.Huber(), keras.metrics.AUC(), lambda y_true, y_pred: y_true - y_pred
    found = keras_seams.compile_arguments(compiled(loss, metrics=[metric, users], loss_weights=None))
    assert found["loss"] is loss
    assert found["metrics"][0] is metric
    assert found["metrics"][1] is users
    assert "loss_weights" not in found
    assert keras_seams.compile_arguments(keras.Sequential([keras.Input((3,)), layers.Dense(1)])) == {}


@pytest.mark.parametrize(
    "loss", ["mse", keras.losses.Huber(), lambda y_true, y_pred: y_true - y_pred], ids=["name", "loss", "function"]
)
def test_compiled_losses_are_those_that_compute_loss_calls(loss: Any) -> None:
    """_compile_loss, its _flat_losses, and their loss."""
    model = compiled(loss)
    assert keras_seams.compiled_losses(model) == []
    model.compute_loss(X, Y, model(X), None)
    (found,) = keras_seams.compiled_losses(model)
    assert isinstance(found, keras.losses.Loss)
    called: list[Any] = []
    base = type(found)

    class Noting(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append(args)
            return super().__call__(*args, **kwargs)

    found.__class__ = Noting
    model.compute_loss(X, Y, model(X), None)
    assert len(called) == 1


def test_losses_of_several_outputs_are_all_found() -> None:
    x = keras.Input((3,))
    model = keras.Model(x, {"a": layers.Dense(1, name="a")(x), "b": layers.Dense(1, name="b")(x)})
    model.compile("sgd", {"a": "mse", "b": keras.losses.Huber()})
    model.compute_loss(X, {"a": Y, "b": Y}, model(X), None)
    assert [type(loss) for loss in keras_seams.compiled_losses(model)][1] is keras.losses.Huber
    assert len(keras_seams.compiled_losses(model)) == 2


def test_losses_by_output_are_weighed_where_no_shape_tells_their_rows() -> None:
    """metrics of _compile_loss."""
    x = keras.Input((3,))
    model = keras.Model(x, {name: layers.Dense(1, name=name)(x) for name in "ab"})
    model.compile("sgd", "mse")
    y = {"a": Y, "b": Y}
    model.compute_loss(X, y, model(X))
    with keras_seams.losses_weighed(model, tf.constant(7.0)):
        trackers = [metric for metric in model.metrics if metric.name in ("a_loss", "b_loss")]
        for tracker in trackers:
            tracker.reset_state()
            tracker.update_state(1.0)
    assert [float(tracker.count) for tracker in trackers] == [7.0, 7.0]


def test_the_loss_tracker_is_the_mean_that_train_step_updates() -> None:
    """_loss_tracker."""
    model = compiled()
    tracker = keras_seams.loss_tracker(model)
    assert isinstance(tracker, keras.metrics.Mean)
    assert tracker is model.metrics[0]
    assert float(tracker.count) == 0.0
    model.train_step((tf.constant(X), tf.constant(Y)))
    assert float(tracker.count) == len(X)


def test_masks_stay_with_the_tensors_that_layers_return() -> None:
    """_keras_mask, which losses read."""
    tokens = tf.constant([[1, 2, 0], [1, 0, 0]])
    outputs = layers.Embedding(3, 2, mask_zero=True)(tokens)
    mask = keras_seams.mask_of(outputs)
    assert mask is not None
    assert np.array_equal(mask, tokens > 0)
    assert keras_seams.mask_of(tokens) is None
    lost = tf.identity(outputs)
    assert keras_seams.mask_of(lost) is None
    targets, loss = tf.zeros((2, 3, 2)), keras.losses.MeanSquaredError()
    assert float(loss(targets, lost)) != pytest.approx(float(loss(targets, outputs)), rel=1e-4)
    keras_seams.set_mask(lost, mask)
    assert float(loss(targets, lost)) == float(loss(targets, outputs))
    keras_seams.set_mask(lost, None)
    assert keras_seams.mask_of(lost) is mask


def test_names_are_numbered_anew_where_their_counts_are_cleared() -> None:
    """object_name_uids, in keras.src.backend.common.global_state."""
    counts = keras_seams.name_counts()
    before = dict(counts)
    counts.clear()
    assert [layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"]
    counts.clear()
    assert layers.Dense(1).name == "dense"
    counts.clear()
    counts.update(before)


OPTIMIZERS = [keras.optimizers.Adam, keras.optimizers.Ftrl, keras.optimizers.Nadam, keras.optimizers.Adafactor]


@pytest.mark.parametrize("build", [*OPTIMIZERS, lambda: keras.optimizers.Adafactor(use_ema=True)])
def test_each_slot_belongs_to_the_weight_for_which_it_was_made(build: Any) -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.LayerNormalization(), layers.Dense(2)])
    optimizer = build()
    optimizer.build(model.trainable_variables)
    pairs = keras_seams.weights_of_slots(optimizer.variables, model.weights)
    assert [slot for slot, _ in pairs] == optimizer.variables
    weights = {id(weight): weight for weight in model.trainable_variables}
    assert {id(weight) for _, weight in pairs if weight is not None} == weights.keys()
    names = {re.sub(r"_\d+$", "", slot.name) for slot, weight in pairs if weight is None}
    assert names <= {"iteration", "learning_rate", "variable"}  # the last is Nadam's product of momentums
    for slot, weight in pairs:
        if weight is not None:  # the slots of Adafactor lack one axis, or are placeholders
            assert tuple(slot.shape) in (weight.shape, weight.shape[:-1], weight.shape[1:], ())


RANGE = tf.data.Dataset.range(8)
PAIRS = tf.data.Dataset.from_tensor_slices((X, Y))


def of_three(number: tf.Tensor) -> tf.data.Dataset:
    return tf.data.Dataset.range(3)


def of_three_shuffled(number: tf.Tensor) -> tf.data.Dataset:
    return of_three(number).shuffle(8)


def of_shuffled(number: tf.Tensor) -> tf.data.Dataset:
    return of_three(number).flat_map(of_three_shuffled)


def captured(number: tf.Tensor) -> tf.data.Dataset:
    return SHUFFLED


def one_more(number: tf.Tensor) -> tf.Tensor:
    return number + 1


def made() -> Iterator[int]:
    yield from range(8)


def not_deterministic() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = False
    return options


SHUFFLED = RANGE.shuffle(8)
RANDOM = tf.data.Dataset.random()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (RANGE, None),
        (SHUFFLED, "shuffle"),
        (RANGE.shuffle(8, seed=1, reshuffle_each_iteration=False), "shuffle"),
        (SHUFFLED.map(one_more).cache().repeat(2), "shuffle"),
        (tf.data.Dataset.zip((RANGE, SHUFFLED)), "shuffle"),
        (RANGE.apply(tf.data.experimental.shuffle_and_repeat(8)), "shuffle"),
        (tf.data.Dataset.list_files(__file__), "shuffle"),
        (tf.compat.v1.data.Dataset.range(8).shuffle(8), "shuffle"),
        (RANGE.interleave(of_three_shuffled), "shuffle"),
        (RANGE.flat_map(of_three_shuffled), "shuffle"),
        (RANGE.group_by_window(lambda x: x % 2, lambda _, part: part.shuffle(4).batch(2), 2), "shuffle"),
        (RANGE.flat_map(of_shuffled).batch(2), "shuffle"),
        (RANGE.interleave(captured, num_parallel_calls=2), "shuffle"),
        (tf.data.Dataset.sample_from_datasets([RANGE, RANGE]), "sample_from_datasets"),
        (tf.data.Dataset.sample_from_datasets([RANGE, RANGE], seed=1), "sample_from_datasets"),
        (RANGE.map(one_more, num_parallel_calls=2, deterministic=False), "deterministic=False"),
        (RANGE.batch(2, num_parallel_calls=2, deterministic=False).unbatch(), "deterministic=False"),
        (RANGE.interleave(of_three, num_parallel_calls=2, deterministic=False), "deterministic=False"),
        (RANGE.map(one_more, num_parallel_calls=2).with_options(not_deterministic()), "deterministic=False"),
        (RANGE.map(one_more, num_parallel_calls=2), None),
        (RANGE.interleave(of_three, num_parallel_calls=2), None),
        (RANGE.flat_map(of_three).filter(lambda number: number > 0), None),
        (tf.data.Dataset.choose_from_datasets([RANGE, RANGE], tf.data.Dataset.range(2).repeat()), None),
        (tf.data.Dataset.zip((RANGE, RANDOM)), None),
        (tf.data.Dataset.from_generator(made, output_signature=tf.TensorSpec((), tf.int64)), None),
    ],
)
def test_what_may_put_a_dataset_in_another_order_is_found(data: tf.data.Dataset, expected: str | None) -> None:
    """_inputs, _deterministic."""
    assert keras_seams.unsure_order(data) == expected


def test_the_data_service_has_no_order() -> None:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    data = RANGE.apply(service.distribute(service.ShardingPolicy.OFF, dispatcher.target))
    assert keras_seams.unsure_order(data) == "the data service"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (PAIRS, False),
        (PAIRS.batch(4), True),
        (PAIRS.batch(4, drop_remainder=True).prefetch(1), True),
        (PAIRS.map(lambda x, y: (x, y, 1.0)).batch(4), True),
        (PAIRS.batch(4, num_parallel_calls=2).take(1), True),
        (PAIRS.padded_batch(4).map(lambda x, y: (x / 2, y)), True),
        (PAIRS.batch(4).unbatch(), False),
        (PAIRS.batch(4).unbatch().batch(2), True),
        (PAIRS.batch(4).flat_map(lambda x, y: tf.data.Dataset.from_tensor_slices((x, y))), False),
        (PAIRS.batch(4, drop_remainder=True).map(lambda x, y: (x, y[-1])), False),
        (RANGE.batch(4, drop_remainder=True).map(lambda window: (window[:-1], window[1:])), False),
        (tf.data.Dataset.from_generator(list, output_signature=PAIRS.element_spec), False),
    ],
)
def test_batches_of_pairs_are_told_from_records(data: tf.data.Dataset, expected: bool) -> None:
    """_inputs."""
    assert keras_seams.is_of_batches(data) == expected


SPLIT, _ = keras.utils.split_dataset((X, Y), left_size=0.5, shuffle=True)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (PAIRS, True),
        (PAIRS.skip(1).take(2).repeat(2).concatenate(PAIRS).prefetch(1), True),
        (tf.data.Dataset.zip((RANGE, PAIRS)), True),
        (SPLIT, True),
        (PAIRS.map(lambda x, y: (y, x)), False),
        (PAIRS.cache("file"), False),
        (SHUFFLED, False),
        (tf.data.Dataset.zip((RANGE, RANDOM)), False),
        (tf.data.TFRecordDataset([__file__]).take(1), False),
        (tf.data.Dataset.from_generator(list, output_signature=PAIRS.element_spec), False),
    ],
)
def test_datasets_of_arrays_are_told_from_those_that_compute_or_read(data: tf.data.Dataset, expected: bool) -> None:
    """_inputs."""
    assert keras_seams.is_in_memory(data) == expected


def test_arrays_are_not_copied_to_find_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be in the graph, which cannot have 2 GiB."""
    monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", None)
    assert keras_seams.unsure_order(tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (x + 1, y))) is None


def test_branches_and_loops_are_told_from_functions_inside_a_step() -> None:
    """Names of classes of graphs."""
    found: dict[str, bool] = {}

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        graph = tf.compat.v1.get_default_graph()

        def look(name: str) -> tf.Tensor:
            found[name] = keras_seams.is_conditional(tf.compat.v1.get_default_graph(), graph)
            return x

        look("here")
        tf.function(lambda: look("function"), autograph=False)()
        tf.cond(x > 0, lambda: look("branch"), lambda: x)
        tf.cond(x > 0, tf.function(lambda: look("function in a branch"), autograph=False), lambda: x)
        return tf.while_loop(lambda i: i < 2, lambda i: [i + look("loop")], [x])

    step(tf.constant(1))
    conditional = {"branch", "function in a branch", "loop"}
    assert found == {"here": False, "function": False} | dict.fromkeys(conditional, True)


PRIVATE = re.compile(r"_[a-z]\w*")


def test_every_private_name_of_the_module_is_in_a_test_here() -> None:
    source = Path(keras_seams.__file__).read_text()
    tree = ast.parse(source)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used = {name for name in names if PRIVATE.fullmatch(name)}
    of_keras = {"_compile_config", "_compile_loss", "_flat_losses", "_loss_tracker", "_keras_mask", "_fn_kwargs"}
    of_keras |= {"_trainable_variables", "_model_variables_moving_average", "_losses"}
    assert used == of_keras | {"_inputs", "_deterministic"}
    tested = Path(__file__).read_text()
    assert all(tested.count(name) > 1 for name in used)


def test_no_other_module_reads_private_names_of_keras() -> None:
    names = "_compile_config|_compile_loss|_compile_metrics|_flat_losses|_loss_tracker|_keras_mask"
    reads = re.compile(rf"""\.({names})\b|getattr\([^)]*"({names})\"""")
    package = Path(horovod_train.__file__).parent
    readers = {path.name for path in package.rglob("*.py") if reads.search(path.read_text())}
    assert readers == {"keras_seams.py"}
