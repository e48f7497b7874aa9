"""Figures and what the forward pass assigns become those of all ranks, by what they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.distributed.group import WorkerGroup
from horovod_train.training.steps.figures import (
    FIGURES_BY_RANK,
    RECORDS_IN_FLOAT32,
    Figures,
    ForwardState,
    Source,
    metrics_in,
)
from horovod_train.training.steps.shares import Shares
from horovod_train.training.steps.trial import try_step, updates_in


def results(figures: Sequence[Figures], **options: bool) -> list[dict[str, float]]:
    """Return what `result` gives on each rank, a thread here, of a group whose sums are those of all of them."""
    size = len(figures)
    barrier, sent = threading.Barrier(size, timeout=60), [[np.zeros(0)]] * size

    def result(rank: int) -> dict[str, float]:
        def total(arrays: Sequence[Any]) -> list[np.ndarray]:
            sent[rank] = [np.asarray(array, np.float64) for array in arrays]
            barrier.wait()
            totals = [np.sum(parts, axis=0) for parts in zip(*sent, strict=True)]
            barrier.wait()
            return totals

        group = cast(WorkerGroup, SimpleNamespace(size=size, rank=rank, sum=total))
        return figures[rank].result(group, **options)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(result, range(size)))


def figures_of(metric: keras.metrics.Metric, *names: str) -> Figures:
    return Figures({name: Source(metric, part) for part, name in enumerate(names or [metric.name])}, [metric])


RNG = np.random.default_rng(0)
TARGETS, OUTPUTS = (RNG.uniform(size=12) < 0.5).astype("float32"), RNG.uniform(size=12).astype("float32")
BUILDERS: dict[str, Callable[[], keras.metrics.Metric]] = {
    "a mean": lambda: keras.metrics.MeanSquaredError(name="m"),
    "the root of a mean": lambda: keras.metrics.RootMeanSquaredError(name="m"),
    "counts at thresholds": lambda: keras.metrics.AUC(name="m"),
    "two sums": lambda: keras.metrics.Precision(name="m"),
    "a square of sums": lambda: keras.metrics.R2Score(name="m"),
    "a maximum": lambda: Largest(name="m"),
    "a minimum": lambda: Smallest(name="m"),
}


class Largest(keras.metrics.Metric):
    """Begins at the least number."""

    limit, reduce = -np.inf, staticmethod(keras.ops.max)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = self.add_variable((), keras.initializers.Constant(self.limit), name="seen")

    def reset_state(self) -> None:
        self.seen.assign(self.limit)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        value = self.reduce(keras.ops.abs(y_true - y_pred))
        self.seen.assign(self.reduce(keras.ops.stack([self.seen.value, value])))

    def result(self) -> Any:
        return self.seen.value


class Smallest(Largest):
    limit, reduce = float(np.finfo(np.float32).max), staticmethod(keras.ops.min)


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("split", [(12,), (7, 5), (2, 9, 1)], ids=str)
def test_a_metric_of_all_ranks_is_that_of_all_their_records(kind: str, split: tuple[int, ...]) -> None:
    alone = BUILDERS[kind]()
    alone.update_state(TARGETS[:, None], OUTPUTS[:, None])
    ranks, first = [], 0
    for rows in split:
        metric = BUILDERS[kind]()
        if len(metric.variables) == 0 or kind == "a square of sums":
            metric.update_state(TARGETS[:1, None], OUTPUTS[:1, None])  # makes its variables
            metric.reset_state()
        figures = figures_of(metric)
        metric.update_state(TARGETS[first : first + rows, None], OUTPUTS[first : first + rows, None])
        ranks.append(figures)
        first += rows
    for found in results(ranks):
        assert found["m"] == pytest.approx(float(alone.result()), rel=1e-6)


def begun(kind: str) -> tuple[keras.metrics.Metric, Figures]:
    metric = BUILDERS[kind]()
    metric.update_state(TARGETS[:1, None], OUTPUTS[:1, None])  # makes its variables
    metric.reset_state()
    return metric, figures_of(metric)


def resumed(figures: Sequence[Figures], kind: str, size: int) -> list[tuple[keras.metrics.Metric, Figures]]:
    """Those of `size` other processes, which have restored what these have in a checkpoint."""
    root: Any = SimpleNamespace(to_root=lambda rows: rows, is_root=True)
    by_rank = np.concatenate([each.snapshot(root)[FIGURES_BY_RANK] for each in figures])
    ranks = [begun(kind) for _ in range(size)]
    for rank, (_, each) in enumerate(ranks):
        group: Any = SimpleNamespace(size=size, rank=rank, is_root=rank == 0, broadcast_object=lambda value: value)
        each.restore(group, by_rank)
    return ranks


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resume_continues_the_figures_at_any_number_of_ranks(kind: str, size: int) -> None:
    """Of two ranks: to the bit on as many, also after a line that a stop has written."""
    ranks, alone = [begun(kind) for _ in range(2)], BUILDERS[kind]()
    alone.update_state(TARGETS[:, None], OUTPUTS[:, None])
    for (metric, figures), rows in zip(ranks, (slice(0, 4), slice(4, 7)), strict=True):
        metric.update_state(TARGETS[rows, None], OUTPUTS[rows, None])
        figures.count(4)
    before = [figures for _, figures in ranks]
    at_stop = results(before, keep=True)
    assert at_stop == results([figures for _, figures in resumed(before, kind, 2)])
    continued = resumed(before, kind, size)
    for metric, rows in [(ranks[0][0], slice(7, 12)), (continued[0][0], slice(7, 12))]:
        metric.update_state(TARGETS[rows, None], OUTPUTS[rows, None])
    found, undisturbed = results([figures for _, figures in continued]), results(before)
    assert found[0]["m"] == pytest.approx(float(alone.result()), rel=1e-6)
    assert size != 2 or found == undisturbed != at_stop or kind in ("a maximum", "a minimum")
    assert not before[0].snapshot(cast(WorkerGroup, SimpleNamespace()))  # after a line there is nothing to save


def test_a_number_of_the_step_is_laid_out_otherwise_than_the_result_of_a_metric() -> None:
    metric, _ = begun("a mean")
    assert Figures({"m": Source(None, 0)}, [metric]).layout != Figures({"m": Source(metric, 0)}, [metric]).layout


def test_figures_that_were_moved_into_float64_are_resumed() -> None:
    metric, figures = begun("a mean")
    metric.update_state(TARGETS[:, None], OUTPUTS[:, None])
    figures.count(RECORDS_IN_FLOAT32)
    assert float(metric.variables[1]) == 0
    (continued,) = resumed([figures], "a mean", 1)
    assert results([continued[1]]) == results([figures])


SHAPES: dict[str, tuple[Any, Any]] = {
    "numbers": (TARGETS[:, None], OUTPUTS[:, None]),
    "one-hot": (np.eye(3, dtype=np.float32)[np.arange(12) % 3], RNG.uniform(size=(12, 3)).astype(np.float32)),
    "labels": (np.arange(12) % 3, RNG.uniform(size=(12, 3)).astype(np.float32)),
    "values": (TARGETS, None),
}
LABELLED = ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy")
OF_CLASSES = ("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "TopKCategoricalAccuracy")
OPTIONS: dict[str, dict[str, Any]] = {
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "BinaryIoU": {},
    "MeanIoU": {"num_classes": 2},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
}
KERAS_METRICS = sorted(
    name
    for name, kind in vars(keras.metrics).items()
    if isinstance(kind, type) and issubclass(kind, keras.metrics.Metric) and name != "Metric"
)


@pytest.mark.parametrize("name", KERAS_METRICS)
def test_states_of_every_metric_of_keras_are_sums(name: str) -> None:
    metric = getattr(keras.metrics, name)(**OPTIONS.get(name, {}))
    is_of_values = name in ("Mean", "Sum")
    is_of_classes = name.startswith("OneHot") or name in OF_CLASSES
    shape = "values" if is_of_values else "labels" if name in LABELLED else "one-hot" if is_of_classes else "numbers"
    given = [tf.constant(each) for each in SHAPES[shape] if each is not None]
    metric.update_state(*given)  # makes its variables
    traced = tf.function(metric.update_state, autograph=False).get_concrete_function(*given)
    figures = Figures({}, [metric], updates_in(traced))
    assert figures.averaged == []
    assert {*figures._kinds} == {"sum"}


def called(function: Callable[[Any], Any], x: Any) -> Any:
    return tf.function(function, autograph=False)(x)


UPDATES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "added": (lambda state, x: state.assign_add(x), "sum"),
    "a sum": (lambda state, x: state.assign(x + state), "sum"),
    "a difference": (lambda state, x: state.assign(state - x), "sum"),
    "a maximum from 0": (lambda state, x: state.assign(keras.ops.maximum(state, x)), "max"),
    "a minimum": (lambda state, x: state.assign(keras.ops.minimum(x, state)), "min"),
    "a moving average": (lambda state, x: state.assign(0.9 * state + 0.1 * x), "other"),
    "the last": (lambda state, x: state.assign(x), "other"),
    "added and multiplied": (lambda state, x: (state.assign_add(x), state.assign(2.0 * state)), "other"),
    "a running mean": (lambda state, x: state.assign(state + (x - state) / 3.0), "other"),
    "a running mean, added": (lambda state, x: state.value.assign_add((x - state) / 3.0), "other"),
    "doubled": (lambda state, x: state.assign(state + state), "other"),
    "doubled, read once": (lambda state, x: state.assign((lambda read: read + read)(tf.identity(state))), "other"),
    "taken from": (lambda state, x: state.assign(x - state), "other"),
    "added in a function": (lambda state, x: called(lambda y: state.assign_add(y), x), "sum"),
    "a maximum in a function": (lambda state, x: called(lambda y: state.assign(keras.ops.maximum(state, y)), x), "max"),
    "a running mean in a function": (lambda state, x: called(lambda y: state.assign_add(y), x - state), "other"),
    "added in a branch": (
        lambda state, x: tf.cond(x > 0, lambda: state.value.assign_add(x), lambda: state.value),
        "sum",
    ),
    "the last in a branch": (
        lambda state, x: tf.cond(x > 0, lambda: state.value.assign(x), lambda: state.value),
        "other",
    ),
    "the first": (lambda state, x: tf.cond(state > 0, lambda: state.value.assign_add(x), lambda: state.value), "other"),
    "added in a loop": (
        lambda state, x: tf.while_loop(lambda i: i < x, lambda i: (i + 0.0 * state.value.assign_add(i) + 1,), [0.0]),
        "other",
    ),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_state_is_combined_by_how_the_step_changes_it(name: str) -> None:
    update, kind = UPDATES[name]
    metric = keras.metrics.Sum(name="kept")
    (state,) = metric.variables
    traced = tf.function(lambda x: update(state, x), autograph=False).get_concrete_function(tf.TensorSpec(()))
    figures = Figures({}, [metric], updates_in(traced))
    assert figures._kinds == [kind]
    assert figures.averaged == ([state.path] if kind == "other" else [])


@pytest.mark.parametrize(
    ("aggregation", "initial", "values", "expected"),
    [
        ("sum", 0.0, (2.0, 5.0), 7.0),
        ("sum", 1.0, (2.0, 5.0), 6.0),  # each has added to what it began with
        ("mean", 0.0, (2.0, 5.0), 3.5),
        ("only_first_replica", 0.0, (2.0, 5.0), 2.0),
        ("none", -np.inf, (2.0, 5.0), 5.0),
        ("none", np.inf, (2.0, 5.0), 2.0),
        ("none", float(np.finfo(np.float32).min), (-7.0, -5.0), -5.0),
    ],
)
@pytest.mark.parametrize("records", [1, RECORDS_IN_FLOAT32])
def test_a_state_is_combined_by_what_it_is(
    aggregation: str, initial: float, values: tuple[float, ...], expected: float, records: int
) -> None:
    class Keeps(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="keeps")
            self.kept = self.add_variable(
                (), keras.initializers.Constant(initial), aggregation=aggregation, name="kept"
            )

        def reset_state(self) -> None:
            self.kept.assign(initial)

        def result(self) -> Any:
            return self.kept.value

    figures = []
    for value in values:
        metric = Keeps()
        figures.append(figures_of(metric))
        metric.kept.assign(value)
        figures[-1].count(records)
    assert [found["keeps"] for found in results(figures)] == [pytest.approx(expected)] * 2


def test_a_mean_over_more_than_2_24_records_stays_right() -> None:
    """A float32 count of 2^24 no longer grows by 1: without `count` between calls the mean would be one half of it."""
    mean = keras.metrics.Mean(name="mean")
    figures = figures_of(mean)
    limit = 2.0**24
    for total, count in ((limit, limit), (0.0, 1.0)):
        mean.total.assign_add(total)
        mean.count.assign_add(count)
    assert float(mean.count) == limit  # what is to be avoided
    assert limit > 2 * RECORDS_IN_FLOAT32  # a call may have as many records as may be there before it
    mean.reset_state()
    for value in (1.0, 3.0):
        for _ in range(20):
            mean.total.assign_add(value * RECORDS_IN_FLOAT32)
            mean.count.assign_add(RECORDS_IN_FLOAT32)
            figures.count(RECORDS_IN_FLOAT32)
            assert float(mean.count) == 0.0
    mean.total.assign_add(5.0)
    mean.count.assign_add(1.0)
    figures.count(1)
    assert float(mean.count) == 1.0
    (found,) = results([figures])
    records = 40 * RECORDS_IN_FLOAT32 + 1
    assert records > limit
    assert found["mean"] == pytest.approx((80 * RECORDS_IN_FLOAT32 + 5) / records, rel=1e-7)
    mean.update_state(7.0)  # after a result, the next one begins anew
    assert results([figures])[0]["mean"] == 7.0


@pytest.mark.parametrize(("records", "expected"), [((0, 0), {}), ((0, 3), {"mean": 4.0})])
def test_steps_without_a_record_on_any_rank_have_no_figures(
    records: tuple[int, int], expected: dict[str, float]
) -> None:
    """A loss of 0 would be the best."""
    metrics = [keras.metrics.Mean(name="mean") for _ in records]
    ranks = [figures_of(metric) for metric in metrics]
    for metric, figures, count in zip(metrics, ranks, records, strict=True):
        metric.update_state(4.0, sample_weight=count)
        figures.count(count)
    assert results(ranks) == [expected] * 2


def test_states_that_do_not_add_up_are_not_moved_and_sums_beside_them_are() -> None:
    largest, mean = Largest(name="m"), keras.metrics.Mean(name="mean")
    figures = Figures({"m": Source(largest, 0), "mean": Source(mean, 0)}, [largest, mean])
    largest.seen.assign(4.0)
    mean.update_state(3.0)
    figures.count(2 * RECORDS_IN_FLOAT32)
    assert float(mean.count) == 0.0
    found = results([figures])[0]
    assert (found["m"], found["mean"]) == (4.0, 3.0)


def test_numbers_of_a_step_are_means_over_records() -> None:
    ranks = [Figures({"own": Source(None, 0)}, []) for _ in range(2)]
    for figures, number, records in ((ranks[0], 2.0, 6.0), (ranks[0], 4.0, 1.0), (ranks[1], 8.0, 1.0)):
        figures.add({"own": tf.constant(number)}, records)
    ranks[1].add({"own": tf.constant(np.nan)}, 0.0)  # of a borrowed row
    expected = (12 + 4 + 8) / 8
    assert [found["own"] for found in results(ranks)] == [pytest.approx(expected)] * 2
    assert np.isnan(results(ranks[:1])[0]["own"])  # no record since


def test_an_evaluation_sets_the_metrics_of_training_aside_and_back() -> None:
    mean = keras.metrics.Mean(name="loss")
    training, evaluation = figures_of(mean), figures_of(mean)
    mean.update_state(3.0)
    with training.kept():
        evaluation.reset()
        mean.update_state(9.0)
        assert results([evaluation]) == [{"loss": 9.0}]
    mean.update_state(5.0)
    assert results([training])[0]["loss"] == 4.0


class Several(keras.metrics.Mean):
    """A dict with a vector."""

    def result(self) -> Any:
        mean = super().result()
        return {"first": mean, "second": keras.ops.stack([mean, 3 * mean])}


def test_metrics_that_return_dicts_and_vectors_show_their_parts() -> None:
    class Tested(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.several, self.plain = Several(), keras.metrics.Mean()
            self.held = {"more": [keras.metrics.Mean(name="more")]}

        def test_step(self, data: Any) -> Any:
            for metric in (self.several, self.plain):
                metric.update_state(data)
            numbers = {"own": tf.reduce_sum(data), "vector": data}
            return {"several": self.several.result(), "renamed": self.plain.result(), **numbers}

    model = Tested()
    assert metrics_in(model)[-1].name == "more"
    tried = try_step(model, "test_step", tf.TensorSpec((4,)), lambda data: data, "data.eval")
    assert set(tried.sources) == {"first", "second", "second_0", "second_1", "renamed", "own", "vector"}
    figures = Figures(tried.sources, metrics_in(model))
    logs = model.test_step(tf.constant([1.0, 2.0, 3.0, 6.0]))
    figures.add(logs, 4.0)
    assert results([figures])[0] == pytest.approx(
        {"first": 3.0, "second": 6.0, "second_0": 3.0, "second_1": 9.0, "renamed": 3.0, "own": 12.0, "vector": 3.0}
    )


RECORDS = (6.0, 2.0)
"""Of two ranks in a step."""


def variable(aggregation: str = "none", dtype: str = "float32", initial: Any = 1.0) -> keras.Variable:
    return keras.Variable(initial, dtype=dtype, trainable=False, aggregation=aggregation)


def combined(
    make: Callable[[], Any], changes: tuple[Any, Any], records: tuple[float, float] = RECORDS, **options: Any
) -> list[Any]:
    """Return a variable's value on both of two ranks after a step in which each has assigned its change."""
    sent: list[tf.Tensor] = []

    def run(rank: int, total: Callable[[tf.Tensor, str], tf.Tensor]) -> Any:
        group = SimpleNamespace(size=2, rank=rank, is_root=rank == 0, sum_in_step=total)
        kept, shares = make(), Shares(cast(WorkerGroup, group))
        state = ForwardState(cast(WorkerGroup, group), [kept], **options)

        @tf.function(autograph=False)
        def step() -> tf.Tensor:
            with shares.of_pass(tf.constant(2 * records[rank] / sum(records))):
                before = state.values()
                state.variables[0].assign(changes[rank])
                state.combine(before, shares)
                return state.variables[0].read_value()

        return step().numpy()

    def note(value: tf.Tensor, name: str) -> tf.Tensor:
        tf.numpy_function(lambda array: sent.append(array), [value], [])
        return value

    for rank in range(2):
        run(rank, note)
    total = np.sum(sent, axis=0) if sent else None
    return [run(rank, lambda value, name: tf.constant(total, value.dtype)) for rank in range(2)]


KINDS: dict[str, tuple[Callable[[], Any], tuple[Any, Any], Any]] = {
    "a float is the mean by shares": (variable, (3.0, 7.0), (6 * 3.0 + 2 * 7.0) / 8),
    "a half too": (lambda: variable(dtype="float16"), (3.0, 7.0), 4.0),
    "a count is rank 0's": (lambda: variable(dtype="int64", initial=1), (5, 9), 5),
    "a flag is rank 0's": (lambda: variable(dtype="bool", initial=False), (True, False), True),
    "a sum adds up what was added": (lambda: variable("sum", "int32", 1), (5, 9), 1 + 4 + 8),
    "a sum of floats": (lambda: variable("sum"), (5.0, 9.0), 13.0),
    "a mean": (lambda: variable("mean"), (3.0, 7.0), 4.0),
    "the first": (lambda: variable("only_first_replica"), (3.0, 7.0), 3.0),
    "one of TensorFlow's": (
        lambda: tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM, trainable=False),
        (5.0, 9.0),
        13.0,
    ),
    "one of TensorFlow's without": (lambda: tf.Variable(1.0, trainable=False), (3.0, 7.0), 4.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_one_value(kind: str) -> None:
    make, changes, expected = KINDS[kind]
    assert combined(make, changes) == [expected] * 2


def test_a_rank_without_records_has_no_part_in_it() -> None:
    """Even if its numbers are not finite."""
    assert combined(variable, (3.0, np.nan), (4.0, 0.0)) == [3.0] * 2
    assert combined(lambda: variable("sum"), (3.0, 7.0), (4.0, 0.0)) == [3.0] * 2


def test_a_state_that_is_combined_at_other_times_keeps_its_own_values() -> None:
    assert combined(variable, (3.0, 7.0), in_each_step=False) == [3.0, 7.0]


def test_what_others_do_to_metrics_between_calls_is_undone() -> None:
    """As a callback does that evaluates."""
    metric = BUILDERS["a mean"]()
    figures = figures_of(metric)
    metric.update_state(TARGETS, OUTPUTS)
    with figures.kept():
        metric.reset_state()
        metric.update_state(TARGETS, 9 * OUTPUTS)
    metric.update_state(TARGETS, OUTPUTS)
    (values,) = results([figures])
    assert values["m"] == pytest.approx(np.mean((TARGETS - OUTPUTS) ** 2))


def test_a_metric_that_makes_its_states_in_another_step_changes_nothing() -> None:
    """As one that the model's own train_step leaves alone, and an evaluation updates."""
    shown, late = keras.metrics.Mean(name="m"), keras.metrics.F1Score(name="late")
    figures = Figures({"m": Source(shown, 0)}, [shown, late])
    shown.update_state([1.0, 3.0])
    late.update_state(np.eye(3), np.eye(3))
    assert results([figures]) == [{"m": 2.0}]
