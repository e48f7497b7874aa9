"""The figures of one split over all ranks, and the weights that the forward pass assigns: each rank computes its own.

Figures are results of Keras metrics and numbers that a step returns, combined when they are read. Weights that are not
trained, such as averages, scales and counters, are combined in each step; under local SGD at its exchanges, see
sync.Local. Runs no step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.distributed.layer_contents import layers_inside, parts_in
from horovod_train.keras_seams import results_noted
from horovod_train.training.steps.shares import Shares

FIGURES_BY_RANK = "ranks/figures"
"""The name in a checkpoint of what each rank has added to the figures of training."""
RECORDS_IN_FLOAT32 = 1 << 20
"""Records after which sums are moved into float64: a float32 count of 2^24 no longer grows by 1."""


class Source(NamedTuple):
    """Where a figure is from: the result of a metric, or a number of the step."""

    metric: keras.metrics.Metric | None
    """None: a number of the step, whose mean over steps and ranks is shown."""
    part: int
    """Of a metric's result, flattened, the part that is shown."""
    entry: int | None = None
    """Of a part that is a vector, the entry that is shown; None: the mean."""


class Figures:
    """The figures of one split since the last `result`.

    The states of metrics are combined over the ranks, and then give their result: sums are added up, which is exact for
    every metric of Keras; for other states see `_kind`. A number that is no metric's result becomes that of a mean over
    records, in float64.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        metrics: Sequence[keras.metrics.Metric],
        updates: Mapping[int, str] | None = None,
    ) -> None:
        """metrics: all of the model's; they are reset with each `result`. sources: by the name that is shown.

        updates: how the step changes their states, by the id of their handle; see trial.updates_in.
        """
        numbers = [name for name, source in sources.items() if source.metric is None]
        self._means = {name: keras.metrics.Mean(name, "float64") for name in numbers}
        self._sources = {name: (source.metric or self._means[name], source) for name, source in sources.items()}
        self._metrics = [*metrics, *self._means.values()]
        # Not those that a metric makes later: it does so in another step, as in that of an evaluation.
        states = [variable for metric in self._metrics for variable in metric.variables]
        self._states = list({id(variable): variable for variable in states}.values())
        made = [variable.numpy() for variable in self.variables]  # Keras' own reset_state sets all of them to 0
        self._moved: list[np.ndarray] | None = None
        self._records = 0
        self._has_steps = False
        self.reset()
        self._initial = [variable.numpy() for variable in self.variables]
        changed = [(updates or {}).get(id(variable.handle), "sum") for variable in self.variables]
        self._kinds = [_kind(*each) for each in zip(self._states, changed, self._initial, made, strict=True)]

    @property
    def names(self) -> list[str]:
        """What `result` returns."""
        return list(self._sources)

    @property
    def variables(self) -> list[tf.Variable]:
        """The states: all splits share those of the model's metrics."""
        return [as_tf_variable(variable) for variable in self._states]

    @property
    def averaged(self) -> list[str]:
        """The paths of states that are neither sums nor extremes: they are averaged over the ranks."""
        return [state.path for state, kind in zip(self._states, self._kinds, strict=True) if kind == "other"]

    @property
    def floating(self) -> list[tf.Variable]:
        """Those of the states that a non-finite pass must not poison."""
        return [variable for variable in self.variables if variable.dtype.is_floating]

    def add(self, logs: Mapping[str, Any], weight: tf.Tensor | float) -> None:
        """In the compiled step: add what the step returned; its metrics have been updated already.

        weight: of its numbers: the records.
        """
        numbers = flat_logs(logs) if self._means else {}
        for name, mean in self._means.items():
            number = tf.reduce_mean(tf.cast(numbers[name], tf.float64))
            mean.update_state(tf.where(weight > 0, number, 0.0), weight)  # a row that does not count may give NaN

    def count(self, records: int) -> None:
        """Between compiled calls: note that so many more records are in the states; move sums into float64 in time."""
        self._has_steps = True
        self._records += records
        if self._records < RECORDS_IN_FLOAT32:
            return
        moved = self._moved or [np.zeros(initial.shape) for initial in self._initial]
        states = zip(self.variables, self._initial, self._kinds, strict=True)
        for number, (variable, initial, kind) in enumerate(states):
            if kind == "sum":  # others do not grow
                moved[number] = moved[number] + (variable.numpy().astype(np.float64) - initial)
                variable.assign(initial)
        self._moved, self._records = moved, 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Between compiled calls: put the states of metrics back after the block, in which others may use them."""
        kept = [(variable, variable.read_value()) for variable in self.variables]
        yield
        for variable, value in kept:
            variable.assign(value)

    def result(self, group: WorkerGroup, *, keep: bool = False) -> dict[str, float]:
        """Collective: return the figures over the steps of all ranks since the last call; then reset, unless `keep`.

        {} after steps in which no rank had a record: Keras' metrics of nothing are 0, which could count as the best.
        """
        kept = self._added() if keep else None
        has_records = self._combine(group)
        values = {name: _part(metric.result(), source) for name, (metric, source) in self._sources.items()}
        unseen = [name for name, mean in self._means.items() if not mean.count.numpy()]
        values |= dict.fromkeys(unseen, math.nan)  # Keras' 0 could count as the best
        self.reset()
        if kept is not None:
            self._take(kept)
        return values if has_records else {}

    @property
    def layout(self) -> dict[str, Any]:
        """What the numbers of `snapshot` are, as JSON gives it back."""
        shapes = [variable.shape.as_list() for variable in self.variables]
        return {"names": self.names, "kinds": self._kinds, "shapes": shapes}

    def checkpoint_bytes(self, ranks: int) -> int:
        """Return the most bytes of `snapshot` for so many ranks."""
        return 8 * ranks * sum(value.size for value in self._added())

    def snapshot(self, group: WorkerGroup) -> dict[str, np.ndarray]:
        """Collective: return on root, by its name in a checkpoint, what each rank has added since the last `result`.

        float64 [ranks, numbers], which holds those of all of Keras' metrics exactly. Elsewhere, and if there was no
        step since then, {}.
        """
        if not self._has_steps:
            return {}
        by_rank = group.to_root(np.concatenate([value.ravel() for value in self._added()])[np.newaxis])
        return {FIGURES_BY_RANK: by_rank} if group.is_root else {}

    def restore(self, group: WorkerGroup, by_rank: np.ndarray | None) -> None:
        """Collective: continue from root's `snapshot`, of the same layout; None: from nothing.

        At another number of ranks rank 0 gets the sums of all, and each rank the mean or the extreme of other states.
        """
        by_rank = group.broadcast_object(by_rank)
        if by_rank is None:
            return
        shapes = [value.shape for value in self._added()]
        parts = np.split(by_rank, np.cumsum([math.prod(shape) for shape in shapes])[:-1], axis=1)
        tables = [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
        is_same = len(by_rank) == group.size
        self._take([table[group.rank] for table in tables] if is_same else self._joined(tables, is_root=group.is_root))

    def _added(self) -> list[np.ndarray]:
        """Return all that steps have added to, as float64: states, what of each was moved, the records."""
        moved = self._moved or [np.zeros(initial.shape) for initial in self._initial]
        values = (*(variable.numpy() for variable in self.variables), *moved, self._records)
        return [np.asarray(value, np.float64) for value in values]

    def _take(self, added: Sequence[np.ndarray]) -> None:
        """Set everything to what `_added` has returned."""
        count = len(self._states)
        for variable, value in zip(self.variables, added[:count], strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        moved = list(added[count:-1])
        self._moved = moved if any(map(np.any, moved)) else None
        self._records, self._has_steps = int(added[-1]), True

    def _joined(self, tables: Sequence[np.ndarray], *, is_root: bool) -> list[np.ndarray]:
        """Return what `_take` takes on one rank, given what each of some other number of ranks had, [ranks, …]."""
        states, gained = [], []
        for table, initial, kind in zip(tables, self._initial, self._kinds, strict=False):
            is_sum = kind == "sum"
            states.append(initial if is_sum else _OVER_RANKS[kind](table))
            gained.append((table - initial).sum(axis=0) if is_sum else np.zeros(initial.shape))
        *moved, records = [table.sum(axis=0) for table in tables[len(states) :]]
        rest = [*(a + b for a, b in zip(gained, moved, strict=True)), records]
        return [*states, *(rest if is_root else map(np.zeros_like, rest))]

    def _combine(self, group: WorkerGroup) -> bool:
        """Collective: set the states to those of all ranks together. Returns whether any rank has counted a record."""
        has_records = not self._has_steps or self._records > 0 or self._moved is not None
        variables = self.variables
        states = [variable.numpy().astype(np.float64) for variable in variables]
        if self._moved is not None:
            states = [a + b for a, b in zip(self._moved, states, strict=True)]
        sent = []
        for state, initial, kind in zip(states, self._initial, self._kinds, strict=True):
            if kind == "sum":
                sent.append(state - initial)
            else:  # a row for each rank
                table = np.zeros((group.size, *state.shape))
                table[group.rank] = state
                sent.append(table)
        *received, with_records = group.sum([*sent, np.asarray(float(has_records))])
        for variable, total, initial, kind in zip(variables, received, self._initial, self._kinds, strict=True):
            value = initial + total if kind == "sum" else _OVER_RANKS[kind](total)
            variable.assign(tf.cast(value, variable.dtype))
        return bool(with_records)

    def reset(self) -> None:
        """Forget all steps."""
        for metric in self._metrics:
            metric.reset_state()
        self._moved, self._records, self._has_steps = None, 0, False


_OVER_RANKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda rows: rows.mean(axis=0),
    "other": lambda rows: rows.mean(axis=0),
    "first": lambda rows: rows[0],
    "max": lambda rows: rows.max(axis=0),
    "min": lambda rows: rows.min(axis=0),
}
"""How the states of ranks, [ranks, …], become one; besides "sum"."""


def _kind(variable: Any, change: str, *initial: np.ndarray) -> str:
    """Return how a state of a metric is combined over ranks: by its `aggregation`, and by how the step changes it.

    A state that begins at −∞, or at the least number of its dtype, is a maximum; one at ∞ a minimum. change: "sum",
    "max", "min" or "other". initial: what it begins with after a reset, and what it was made with.
    """
    named = {"mean": "mean", "only_first_replica": "first"}
    if (aggregation := _aggregation_of(variable)) in named:
        return named[aggregation]
    for value in initial:
        if value.size and np.issubdtype(value.dtype, np.floating):
            limits = np.finfo(value.dtype)
            if (value <= limits.min).all():
                return "max"
            if (value >= limits.max).all():
                return "min"
    return change


def metrics_in(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics of a model: those it lists, and those that it and its layers hold."""
    inside_layers = [part for layer in layers_inside(model) for part in parts_in(vars(layer), keras.metrics.Metric)]
    return list({id(metric): metric for metric in [*model.metrics, *inside_layers]}.values())


@contextmanager
def noting_results(metrics: Sequence[keras.metrics.Metric]) -> Iterator[Callable[[Any], Source]]:
    """Inside the block: note what the metrics' `result` returns. Yields a function (value → its Source)."""
    noted: dict[int, tuple[Any, Source]] = {}

    def note(metric: keras.metrics.Metric, value: Any) -> None:
        for part, tensor in enumerate(keras.tree.flatten(value)):
            noted.setdefault(id(tensor), (tensor, Source(metric, part)))  # kept, so that no other has its id

    with results_noted(metrics, "result", note):
        yield lambda value: noted[id(value)][1] if id(value) in noted else Source(None, 0)


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a step returned, by name; of a metric that returns a dict by the names in it, as `fit` does."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= flat_logs(value) if isinstance(value, Mapping) else {name: value}
    return flat


def sources_of(logs: Mapping[str, Any], source_of: Callable[[Any], Source]) -> dict[str, Source]:
    """Return where each figure is from. A vector is shown as its mean, and entry by entry as `name_0`, `name_1`, …"""
    sources: dict[str, Source] = {}
    for name, value in flat_logs(logs).items():
        sources[name] = source = source_of(value)
        shape: Sequence[int] = tuple(getattr(value, "shape", ()))
        if len(shape) == 1 and source.metric is not None and shape[0]:
            sources |= {f"{name}_{entry}": source._replace(entry=entry) for entry in range(shape[0])}
    return sources


def _part(result: Any, source: Source) -> float:
    part = keras.ops.convert_to_numpy(keras.tree.flatten(result)[source.part])
    return float(np.mean(part) if source.entry is None else part[source.entry])


class ForwardState:
    """Makes the weights that the forward pass assigns equal on all ranks after it.

    Floating-point ones become their mean by the ranks' shares; others are rank 0's. Keras' `aggregation` of a variable
    decides where it is set: "sum" adds up what the ranks have added, "only_first_replica" is rank 0's.
    """

    def __init__(self, group: WorkerGroup, variables: Sequence[Any], *, in_each_step: bool = True) -> None:
        """variables: Keras' or TensorFlow's, in the same order on all ranks. in_each_step: whether `combine` acts."""
        self._group, self._variables, self.in_each_step = group, list(variables), in_each_step
        # Not a constant: other ranks would send constants, and TensorFlow would move their exchange out of the loop
        # over steps, there alone.
        self._is_root = tf.Variable(group.is_root, trainable=False)

    @property
    def variables(self) -> list[tf.Variable]:
        return [as_tf_variable(variable) for variable in self._variables]

    @property
    def floating(self) -> list[tf.Variable]:
        return [variable for variable in self.variables if variable.dtype.is_floating]

    @property
    def of_records(self) -> list[tf.Variable]:
        """Those that a row which is no record must not change: not the integers that count passes."""
        return [*self.floating, *(variable for variable in self.of_kind("sum") if not variable.dtype.is_floating)]

    def of_kind(self, kind: str) -> list[tf.Variable]:
        """Return those that become their "mean", the "sum" of what ranks have added, or those of the "first" rank."""
        return [as_tf_variable(variable) for variable in self._variables if _kind_of_update(variable) == kind]

    def values(self) -> list[tf.Tensor]:
        """In the compiled step, before the pass: return what `combine` needs."""
        return [variable.read_value() for variable in self.variables]

    def combine(self, before: Sequence[tf.Tensor], shares: Shares) -> None:
        """Collective, in the compiled step, after the pass: one exchange for each dtype. before: from `values`."""
        if self._group.size == 1 or not self.in_each_step:
            return
        by_dtype: dict[tf.DType, list[tuple[tf.Variable, tf.Tensor, str]]] = {}
        for keras_variable, variable, old in zip(self._variables, self.variables, before, strict=True):
            sent = variable.dtype if variable.dtype.is_floating else tf.int64  # Horovod adds up no others, nor booleans
            by_dtype.setdefault(sent, []).append((variable, old, _kind_of_update(keras_variable)))
        for dtype, entries in by_dtype.items():
            parts = [self._part(variable, old, kind, dtype, shares) for variable, old, kind in entries]
            flat = tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)
            total = self._group.sum_in_step(flat, f"forward_state.{dtype.name}")
            sums = tf.split(total, [variable.shape.num_elements() for variable, _, _ in entries])
            for (variable, old, kind), value in zip(entries, sums, strict=True):
                value = tf.reshape(value, variable.shape)
                if kind == "mean":
                    value *= tf.constant(1 / self._group.size, value.dtype)  # see allreduce.over_ranks
                elif kind == "sum":
                    value += tf.cast(old, dtype)
                variable.assign(tf.cast(value, variable.dtype))

    def _part(self, variable: tf.Variable, old: tf.Tensor, kind: str, dtype: tf.DType, shares: Shares) -> tf.Tensor:
        """Return this rank's part of the sum that the exchange makes, in the dtype in which it is sent."""
        value, old = (tf.cast(each, dtype) for each in (variable.read_value(), old))
        if kind == "mean":
            return shares.scaled(value)
        if kind == "sum":
            return value - old if shares.share is None else (value - old) * tf.cast(shares.share > 0, value.dtype)
        return tf.where(self._is_root, value, tf.zeros_like(value))


def _kind_of_update(variable: Any) -> str:
    mean = "mean" if as_tf_variable(variable).dtype.is_floating else "first"  # integers have no mean
    named = {"mean": mean, "sum": "sum", "only_first_replica": "first"}
    return named.get(_aggregation_of(variable), mean)


def _aggregation_of(variable: Any) -> str:
    aggregation = getattr(variable, "aggregation", None)
    return str(getattr(aggregation, "name", aggregation)).lower()  # of a tf.Variable it is an enum
