"""TrainState: the whole state of a training run, all in variables; with it moving averages of weights, and copies.

Neither saves nor exchanges it. Averages are those of `train.ema_decay`, or those that a Keras optimizer with `use_ema`
keeps; when they are put into the model is decided in hooks.evaluate.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import xxhash

from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.distributed.layer_contents import by_unique_name, layers_inside, parts_in
from horovod_train.errors import DivergedError
from horovod_train.models.model_parallel import variable_beside
from horovod_train.training.nonfinite import Failure, nonfinite_names
from horovod_train.training.steps.optimizers import Optimizers
from horovod_train.training.sync import SyncStrategy, by_path

LOSS_AVERAGE_DECAY = 0.9
"""Decay of the moving average of the training loss."""
_LOSS_AVERAGE = "progress/loss_averages"
LOSS_AVERAGE_BY_RANK = f"ranks/{_LOSS_AVERAGE}"
"""The names in a checkpoint of the mean over ranks, and of each rank's own."""


class TrainState:
    """A model, the optimizers that its step applies, and the place of the run in the data.

    step: updates tried so far (int64). With a LossScaleOptimizer `optimizer.iterations` counts those applied. A step
    without any record counts, and is no update.
    epoch: complete passes; records: records used in the current epoch over all ranks (int64).
    tracked: other variables to keep across a resume, by name, such as the best value so far.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Optimizers,
        tracked: Mapping[str, tf.Variable] | None = None,
        *,
        averages: Averages | None = None,
        synchronization: SyncStrategy | None = None,
        knows_loss: bool = True,
    ) -> None:
        """optimizer: built, since slots must exist before the broadcast, or each rank makes its own in its first step.

        averages: of the weights, if any are kept. synchronization: how ranks exchange; default: at every step.
        knows_loss: whether `note_loss` is called.
        """
        self.model, self.optimizer = model, optimizer
        self.tracked = dict(tracked or {})
        self.averages = averages or Averages([])
        self.synchronization = synchronization or SyncStrategy()
        # On the host: the watchdog reads them, and a device that is stuck could not be read.
        with tf.device("CPU:0"):
            self.step, self.epoch, self.records = (
                tf.Variable(0, dtype=tf.int64, trainable=False, name=name) for name in ("step", "epoch", "records")
            )
        self.knows_loss = knows_loss
        self.loss_average = tf.Variable(tf.zeros(1), trainable=False, name="loss_average")
        """float32 [1]: the moving average of this rank's part of the mean loss times the number of ranks.

        The only variable that each rank computes for itself: all others are equal once settled.
        """
        self.built_rates = {name: float(rate) for name, rate in self.rates.items()}
        """What the config or the model says that `rates` are; callbacks may change them later."""
        self.seeds = find_seeds(model)
        self.failure = Failure(knows_loss)
        # Variables that are non-finite now, such as a mask kept by a layer, are so by design.
        self._must_stay_finite = self._numbers().keys() - nonfinite_names(self._numbers())

    def variables(self) -> dict[str, tf.Variable]:
        """Return all variables that ranks must agree on and a checkpoint must contain, by unique and stable names."""
        averages = {variable.ref() for variable in self.averages.variables.values()}
        slots = [slot for slot in self.optimizer.variables if as_tf_variable(slot).ref() not in averages]
        named = [
            *((f"optimizer/{slot.path}", slot) for slot in slots),
            *((f"ema/{name}", variable) for name, variable in self.averages.variables.items()),
            *((f"progress/{name}", getattr(self, name)) for name in ("step", "epoch", "records")),
            *(((_LOSS_AVERAGE, self.loss_average),) if self.knows_loss else ()),
            *((f"progress/{name}", variable) for name, variable in self.tracked.items()),
            *((f"exchange/{name}", variable) for name, variable in self.synchronization.variables.items()),
        ]
        others = by_unique_name((name, as_tf_variable(variable)) for name, variable in named)
        return weights_by_name(self.model.weights, "model") | others

    def finite(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """Return those of some variables that must stay finite."""
        must = {variable.ref() for name, variable in self._numbers().items() if name in self._must_stay_finite}
        return [variable for variable in variables if variable.ref() in must]

    @property
    def rates(self) -> dict[str, tf.Variable]:
        """The learning rates that are variables, because they follow no schedule, by their names in a checkpoint."""
        variables = (item for item in self.variables().items() if item[0].startswith("optimizer/"))
        return {name: variable for name, variable in variables if name.rpartition("/")[2] == "learning_rate"}

    def settle(self, group: WorkerGroup) -> TrainState:
        """Collective: make variables equal that may differ between exchanges; often there are none.

        Returns the state, ready to be compared and saved. Raises DivergedError, on all ranks, as `check_finite` does.
        """
        self.check_finite(group)  # before an exchange spreads non-finite numbers to all ranks
        with group.heartbeat.phase("exchange"):
            has_exchanged = self.synchronization.settle(int(self.step))
        if has_exchanged:
            self.check_finite(group, is_own=False)
        return self

    def check_finite(self, group: WorkerGroup, *, is_own: bool = True) -> None:
        """Collective: raise DivergedError, on all ranks, if numbers on any rank are no longer finite.

        is_own: whether each rank still has its own numbers; False directly after ranks have combined them.
        """
        self._note_variables(is_own=is_own)
        (failed,) = group.sum([int(self.failure.step) > 0])
        if failed:
            raise self.failure.divergence(group)

    def divergence(self, group: WorkerGroup) -> DivergedError:
        """Collective: return the error after a step at which all ranks stopped, with the rank of its cause."""
        (failed,) = group.sum([int(self.failure.step) > 0])
        if not failed:  # it was seen in the weights, not in a step
            self._note_variables(is_own=True)
        return self.failure.divergence(group)

    def _note_variables(self, *, is_own: bool) -> None:
        checked = {
            name.replace("exchange/pending/", "the gradient of "): variable
            for name, variable in self._numbers().items()
            if name in self._must_stay_finite
        }
        self.failure.note_variables(int(self.step), checked, is_cause=is_own)

    def _numbers(self) -> dict[str, tf.Variable]:
        """Return what must be finite for a run to continue: weights, their averages, losses, pending gradients."""
        pending = {variable.ref() for variable in self.synchronization.must_be_finite}
        refs = {as_tf_variable(weight).ref() for weight in self.model.weights} | pending
        refs |= {variable.ref() for variable in [*self.averages.variables.values(), self.loss_average]}
        named = self.variables().items()
        return {name: variable for name, variable in named if variable.ref() in refs and variable.dtype.is_floating}

    def note_loss(self, scaled_loss: tf.Tensor, is_left_out: tf.Tensor | None = None) -> None:
        """In the compiled step: add this rank's part of the mean, times the number of ranks, to its moving average.

        The average is linear, so its mean over ranks is that of the global loss, though no rank knows that loss.
        is_left_out: whether the average remains as it is, bool scalar; None: it does not.
        """
        moved = LOSS_AVERAGE_DECAY * self.loss_average + (1 - LOSS_AVERAGE_DECAY) * scaled_loss
        self.loss_average.assign(moved if is_left_out is None else tf.where(is_left_out, self.loss_average, moved))

    def average_loss(self, group: WorkerGroup) -> dict[str, float]:
        """Collective: return the moving average of the global loss, corrected for the start at zero, by its name."""
        if not self.knows_loss:
            return {}
        (mean,) = group.average([self.loss_average.numpy()])
        return {"loss_average": float(mean[0]) / (1 - LOSS_AVERAGE_DECAY ** max(1, int(self.step)))}

    def restore_loss_average(self, group: WorkerGroup, by_rank: np.ndarray | None) -> None:
        """Collective: give each rank its own, if root's by_rank, float32 [ranks, 1], is of as many ranks."""
        by_rank = group.broadcast_object(by_rank)
        if by_rank is not None and len(by_rank) == group.size:
            self.loss_average.assign(by_rank[group.rank])

    def checkpoint_bytes(self, ranks: int) -> int:
        """Return the bytes of the arrays of a snapshot at so many ranks, each of which has its loss average there."""
        kept = [*self.variables().values(), *[self.loss_average] * ranks]
        return sum(variable.shape.num_elements() * variable.dtype.size for variable in kept)

    def weights_sha256(self) -> str:
        """Return one SHA-256 over the bytes of all weights of the model, in its order."""
        total = hashlib.sha256()
        for weight in self.model.weights:
            total.update(bytes_of(as_tf_variable(weight)))
        return total.hexdigest()

    def digests(self) -> dict[str, str]:
        """Map the name of each variable that must be equal on all ranks at every step to a digest of its bytes.

        XXH3 is some 20 times as fast as SHA-256, and ranks that compute are no attackers.
        """
        compared = {name: each for name, each in self.variables().items() if name != _LOSS_AVERAGE}
        return {name: xxhash.xxh3_128_hexdigest(bytes_of(variable)) for name, variable in compared.items()}

    def snapshot(self, group: WorkerGroup, copies: Copies) -> dict[str, np.ndarray]:
        """Collective: return copies of all variables, with the mean of the loss averages, and those by rank.

        With the latter, a resume at the same number of ranks continues bit for bit; at another number it uses the mean.
        Only root saves; other ranks copy nothing and return an empty dict. The next snapshot overwrites `copies`.
        """
        arrays = copies.take(self.variables()) if group.is_root else {}
        by_rank = group.to_root(self.loss_average.numpy()[np.newaxis])
        if group.is_root and self.knows_loss:
            arrays |= {_LOSS_AVERAGE: by_rank.mean(axis=0), LOSS_AVERAGE_BY_RANK: by_rank}
        return arrays


def find_seeds(model: keras.Model) -> list[tf.Variable]:
    """Return the states of the model's random generators, such as dropout's, in its order; each rank sets its own."""
    weights = {id(weight) for weight in model.weights}
    seeds = [variable for variable in model.variables if id(variable) not in weights]
    # Whatever the keys of a dictionary are: a compiled model has layers as keys.
    generators = [one for layer in layers_inside(model) for one in parts_in(vars(layer), keras.random.SeedGenerator)]
    states = {id(generator.state) for generator in generators}
    # A missed seed would silently draw equal masks on all ranks.
    assert {id(seed) for seed in seeds} <= states, "model.variables has more than weights and seeds"
    assert seeds or not states, "model.variables does not have the seeds"
    return [as_tf_variable(seed) for seed in seeds]


def weights_by_name(weights: Iterable[Any], prefix: str) -> dict[str, tf.Variable]:
    """Name weights as in a checkpoint: `model/` and the path, or `ema/` for their moving averages."""
    return {f"{prefix}/{path}": variable for path, variable in by_path(weights).items()}


class Copies:
    """Copies of variables, in memory that each save uses again.

    A process gets new memory page by page, when it first writes there, which takes longer than the copying itself.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._reserves: threading.Thread | None = None

    def reserve(self, variables: Mapping[str, tf.Variable]) -> None:
        """Get the memory in the background, so that the first save does not have to wait for it."""
        specs = {name: (variable.shape, variable.dtype.as_numpy_dtype) for name, variable in variables.items()}

        def fill() -> None:
            for name, (shape, dtype) in specs.items():
                self._arrays[name] = np.empty(shape, dtype)
                self._arrays[name].fill(0)

        self._reserves = threading.Thread(target=fill, name="copies", daemon=True)
        self._reserves.start()

    def take(self, variables: Mapping[str, tf.Variable]) -> dict[str, np.ndarray]:
        """Return copies of these variables, which the next call overwrites."""
        if self._reserves is not None:
            self._reserves.join()
        for name, variable in variables.items():
            if name not in self._arrays:
                self._arrays[name] = np.empty(variable.shape, variable.dtype.as_numpy_dtype)
            self._arrays[name].reshape(-1).view(np.uint8)[:] = bytes_of(variable)
        return {name: self._arrays[name] for name in variables}


def bytes_of(variable: tf.Variable) -> memoryview:
    """Return the bytes, on the host without a copy, where `numpy` would make one."""
    return np.asarray(memoryview(variable.value())).reshape(-1).view(np.uint8).data


class Averages:
    """Moving averages of weights, which can take the place of the weights in the model.

    variables: the averages, by the paths of their weights. decay: of those that `update` moves; None: it moves none.
    are_of_optimizer: whether a Keras optimizer with `use_ema` updates them; such averages are evaluated only if a
    callback asks for it.
    """

    def __init__(
        self, averaged: Sequence[tuple[Any, Any]], *, decay: float | None = None, are_of_optimizer: bool = False
    ) -> None:
        """averaged: weights, Keras' or TensorFlow's, each with its average."""
        self.decay, self.are_of_optimizer = decay, are_of_optimizer
        self._weights = [as_tf_variable(weight) for weight, _ in averaged]
        self.variables = by_unique_name((weight.path, as_tf_variable(average)) for weight, average in averaged)
        self._trained: list[tf.Tensor] = []

    def restart(self) -> None:
        """Set the averages to the weights that the model has, as at the start."""
        for weight, average in zip(self._weights, self.variables.values(), strict=True):
            average.assign(weight)

    def put_in(self) -> None:
        """Give the model the averages, unless it has them."""
        if not self._trained:
            self._trained = [tf.identity(weight) for weight in self._weights]
            for weight, average in zip(self._weights, self.variables.values(), strict=True):
                weight.assign(average)

    def put_back(self) -> None:
        """Give the model its own weights again, bit for bit, if it has the averages."""
        for weight, value in zip(self._weights, self._trained, strict=False):
            weight.assign(value)
        self._trained = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages inside the block."""
        self.put_in()
        try:
            yield
        finally:
            self.put_back()

    def update(self, step: tf.Tensor) -> None:
        """In the compiled step, after an update. step: int64 scalar, updates so far.

        average ← d · average + (1 − d) · weight, d = min(decay, (1 + step) / (10 + step)): young averages follow
        quickly (num_updates of tf.train.ExponentialMovingAverage).
        """
        with tf.name_scope("moving_average"):
            updates = tf.cast(step, tf.float32)
            decay = tf.minimum(self.decay, (1 + updates) / (10 + updates))
            for weight, average in zip(self._weights, self.variables.values(), strict=True):
                average.assign_sub(tf.cast(1 - decay, average.dtype) * (average - weight))


def moving_averages(model: keras.Model, decay: float) -> Averages:
    """Return exponential moving averages of the trainable weights."""
    weights = model.trainable_variables
    return Averages([(weight, variable_beside(weight, as_tf_variable(weight))) for weight in weights], decay=decay)
