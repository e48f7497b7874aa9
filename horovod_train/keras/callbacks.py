"""Horovod's callbacks for `model.fit`.

They keep the ranks alike: equal weights, equal steps, equal means, files by one rank. Those of learning_rate are here
too, because scripts say hvd.callbacks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from threading import Thread
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed import consistency, objects
from horovod_train.distributed.group import key_of, name_of
from horovod_train.distributed.layer_contents import (
    contents,
    deriving_layers,
    finalize,
    layers_inside,
    options_of_weightless_layers,
    parts_in,
)
from horovod_train.distributed.objects import HOST
from horovod_train.distributed.optimizer import require_tensorflow
from horovod_train.errors import UserError
from horovod_train.keras.backup import check_not_elastic, restore_from_root
from horovod_train.keras.fit import (
    EndEpoch,
    batches_of_epoch,
    callbacks_of_fit,
    optimizer_of,
    steps_of_epoch,
    switch_off_xla,
)
from horovod_train.keras.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from horovod_train.keras_seams import weights_of_slots
from horovod_train.shown_text import listed
from horovod_train.tensorflow.agreement import check_equal, digest, guards, members_of
from horovod_train.tensorflow.broadcasting import broadcast_variables
from horovod_train.tensorflow.lifetime import begin_watch, exchanging, note_progress

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

_UNKNOWN, _STOPS = -1, -2
"""Values in place of the number of batches in an epoch."""
_STOPPED_WITHIN_S = 30.0
"""Ranks that stop in the same batch reach the end of their epoch within one step of each other."""

_ADVICE = (
    "Train with hvd.DistributedOptimizer(optimizer), and give this callback local_variables= for those that each rank "
    "keeps"
)
_FILE_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("ModelCheckpoint", "OrbaxCheckpoint", "TensorBoard", "CSVLogger", "ProgbarLogger")
    if hasattr(keras.callbacks, name)  # Keras 3.12, the last for Python 3.10, has no OrbaxCheckpoint
)
_COLLECTIVES = {
    *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "alltoall", "reducescatter", "broadcast"),
    *("grouped_reducescatter", "broadcast_object", "allgather_object", "broadcast_variables", "broadcast_model"),
    "barrier",
}
"""What all ranks must call together. Without `join`, which texts have too."""
_DECIDERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
log = logging.getLogger(__name__)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcast root's weights and optimizer state before the first step, and keep the ranks at the same step.

    The optimizer's slots are built first, so that they are broadcast too. A model that has no variables before its
    first batch gets them after it. Seeds of dropout are not broadcast, because masks must differ by rank. After each
    epoch all ranks compare their trainable weights, and raise RanksDisagree if they differ. All ranks must call `fit`
    with it, equally often, also those outside the optimizer's process set.

    XLA cannot compile the exchange. A model compiled with jit_compile, which is Keras' default if there is a GPU, is
    trained without it, and root reports this.

    Ranks that take different numbers of steps would wait for each other forever. So all end each epoch after as many
    batches as the rank with the fewest has, and root says so once; `hvd.shard` leaves nothing out. A rank whose data
    alone ends earlier than Keras knew raises UserError, and so do all if one stops training at another epoch. The
    number of batches in an epoch must be known: for a stream of unknown length give `fit` its steps_per_epoch.

    In a loop of your own, by keras.callbacks.CallbackList, it broadcasts and compares the same; the number of batches
    is then yours to keep equal. Of a model that is not compiled it knows the optimizers in attributes only:
    hvd.broadcast_model(model, optimizer) also sends the state of another.

    Other callbacks of the same `fit`: ModelCheckpoint, OrbaxCheckpoint, TensorBoard, CSVLogger and the progress bar run
    on root only, or on the first rank that has one; so do classes derived from them that call no collective.
    EarlyStopping, ReduceLROnPlateau and, at the end of an epoch, checkpoints with save_best_only decide on means over
    the ranks, with or without MetricAverageCallback; TerminateOnNaN stops all ranks after the batch in which one has
    such a loss; of BackupAndRestore, which comes after this callback, root writes, and all ranks continue from what
    root has. It is refused in an elastic script.

    root_rank: whose values. device: TensorFlow device of the broadcast. local_variables: a variable, or several, of
    which each rank keeps its own value and optimizer state, as of those that an optimizer's register_local_var names.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        require_tensorflow(type(self).__name__)
        super().__init__()
        self.root_rank, self._device = root_rank, device
        self._local_keys = {
            key_of(variable) for variable in keras.tree.flatten(local_variables) if variable is not None
        }
        self._epoch, self._batches_done, self._has_broadcast = 0, 0, False
        self._averages: MetricAverageCallback | None = None
        self._callbacks: list[keras.callbacks.Callback] = []
        self._compares_losses = False
        self._nan_callbacks: list[Any] = []
        self._optimizers: list[Any] = []
        """The one that `compile` was given, and those that the model keeps in attributes."""
        self._planned_batches: int | None = None
        """Number of batches in the current epoch."""

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep its own value of this variable."""
        self._local_keys.add(key_of(var))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        check_not_elastic(callbacks_of_fit())
        begin_watch()  # before any exchange here: a rank that makes others is then named
        self._has_broadcast = False
        parts = [optimizer_of(self.model), *parts_in(vars(self.model), keras.optimizers.Optimizer)]
        self._optimizers = list({id(part): part for part in parts if part is not None}.values())
        switch_off_xla(self.model, self.root_rank)
        self._callbacks = callbacks = callbacks_of_fit()
        for left in [callback for callback in callbacks if isinstance(callback, EndEpoch)]:  # of a `fit` that raised
            left.give_back()
        self._end_epoch, self._has_warned = EndEpoch(callbacks), False
        for callback in callbacks:
            if isinstance(callback, BestModelCheckpoint):
                callback.root_rank = self.root_rank
        is_shared = guards.files_on_root_only
        if is_shared:
            _keep_to_one_rank(callbacks, self.root_rank)
        needs_averages, all_decide, self._compares_losses = _find_needs(callbacks, self, shares_backup=is_shared)
        self._averages = MetricAverageCallback(self._device) if needs_averages else None
        if self._averages and not all_decide:
            self._averages.needs_all = False
        self._nan_callbacks = _take_out(callbacks, keras.callbacks.TerminateOnNaN)
        if is_shared:
            restore_from_root(callbacks, self.model, self.root_rank)
        # Root may have loaded weights that others lack so far.
        (is_missing,) = _on_any_rank("built", not all(layer.built for layer in layers_inside(self.model)))
        guards.awaits_broadcast = is_missing  # the first batches are one compiled call, of ten exchanges or more
        if not is_missing:
            self._broadcast()
        else:
            self._broadcast_what_there_is()

    def _broadcast_what_there_is(self) -> None:
        """Collective: let the first batches be computed with root's weights, as far as all ranks have the same.

        A layer that is not built may have no weights at all, as a lookup, or those of a branch that is not taken yet.
        """
        weights = self.model.weights
        with exchanging("the start of model.fit"):
            first, *others = objects.gather([f"{list(each.shape)} {each.dtype}" for each in weights], "fit.weights")
        if not weights or any(other != first for other in others):
            return
        with tf.device(self._device):
            broadcast_variables([weight for weight in weights if not self._is_local(weight)], self.root_rank)
        self._derive_anew()

    def _broadcast(self) -> None:
        self._has_broadcast = True
        guards.awaits_broadcast = False
        model, weights, optimizer = self.model, self.model.weights, optimizer_of(self.model)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        slots = [slot for optimizer in self._optimizers for slot in optimizer.variables]
        pairs = [*((weight, weight) for weight in weights), *weights_of_slots(slots, weights)]
        shared = [variable for variable, weight in pairs if weight is None or not self._is_local(weight)]
        with tf.device(self._device):
            broadcast_variables(shared, self.root_rank)
        self._derive_anew()
        if guards.check_weights:
            _check_contents(model, self.root_rank)

    def _derive_anew(self) -> None:
        """Collective: let layers compute what they derive from weights; if that changed on a rank, all compile again.

        A compiled step keeps, as a constant, what a Normalization had when it was traced.
        """
        model = self.model
        if not deriving_layers(model):
            return
        before = contents(model, of_keras_only=True)
        finalize(model)
        (has_changed,) = _on_any_rank("derived", contents(model, of_keras_only=True) != before)
        if has_changed:
            model.make_train_function(force=True)
            model.test_function = model.predict_function = None

    def _is_local(self, variable: Any) -> bool:
        """Return whether each rank keeps its own value of a weight, by this callback or by an optimizer."""
        combiners = [getattr(optimizer, "gradient_combiner", None) for optimizer in self._optimizers]
        is_named = key_of(variable) in self._local_keys
        return is_named or any(combiner.is_local(variable) for combiner in combiners if combiner)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._batches_done, self._has_met = epoch + 1, 0, False
        self._planned_batches = batches_of_epoch(steps_of_epoch(self), self._callbacks)
        plans = _gather_plans(self._epoch, _UNKNOWN if self._planned_batches is None else self._planned_batches)
        if len(set(plans)) > 1:
            self._end_together(plans)
        is_in_fit = "steps" in (self.params or {})
        if self._planned_batches is None and hvd.size() > 1 and is_in_fit:
            raise UserError(
                f"model.fit: the number of batches in an epoch must be known, so that {hvd.size()} ranks can compare "
                "theirs; received data of unknown length. Give fit(steps_per_epoch=...), and data.repeat()."
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches_done = batch + 1
        if not self._has_broadcast:
            self._broadcast()
        if self._compares_losses:
            self._end_if_not_finite(batch, (logs or {}).get("loss"))

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._check_epoch_is_complete()  # now: the other ranks do not wait for the evaluation

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        note_progress()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._check_epoch_is_complete()
        self._check_agreement()
        if self._averages:
            self._averages.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._planned_batches = None
        plans = _gather_plans(self._epoch, _STOPS)
        if len(set(plans)) > 1:
            raise _plans_differ(plans)

    def _end_together(self, plans: list[tuple[int, int]]) -> None:
        """End this epoch after the fewest batches that a rank has; raise UserError if that cannot be."""
        epochs, batches = {epoch for epoch, _ in plans}, min(batches for _, batches in plans)
        if not guards.end_epochs_together or len(epochs) > 1 or batches < 1:
            raise _plans_differ(plans)
        per_call = self.model.steps_per_execution
        if batches < per_call:
            ranks = _ranks_text([rank for rank, (_, count) in enumerate(plans) if count == batches])
            raise UserError(
                f"model.fit: steps_per_execution={per_call} is more than the {batches} batches of {ranks}, and ranks "
                "with different numbers of batches end an epoch after a compiled call. Make it smaller."
            )
        batches -= batches % per_call  # a compiled call is not cut
        self._end_epoch.batches = self._planned_batches = batches
        if not self._has_warned and hvd.rank() == self.root_rank:
            self._has_warned = True
            log.warning(
                f"model.fit: ranks have different numbers of batches ({_plans_text(plans)}); all end each epoch "
                f"after {batches}, and what is left is not trained on. hvd.shard(x, y) gives each rank as many rows."
            )

    def _end_if_not_finite(self, batch: int, loss: Any) -> None:
        """Collective: do on all ranks what TerminateOnNaN does on one, if the loss of any is not finite.

        Without this, one rank would stop a batch before the others, whose weights its gradients have spoilt.
        """
        is_finite = loss is None or bool(np.isfinite(float(loss)))
        with exchanging("TerminateOnNaN"), tf.device(HOST):
            all_finite = hvd.allgather(tf.constant([int(is_finite)]), name="fit.finite").numpy()
        if all_finite.all():
            return
        if hvd.rank() == self.root_rank:
            ranks = _ranks_text(np.flatnonzero(all_finite == 0).tolist())
            log.warning(f"model.fit: the loss of {ranks} is not finite after batch {batch + 1}; all ranks stop there.")
        self.model.stop_training = True
        for callback in self._nan_callbacks:
            if hvd.rank() == self.root_rank or getattr(callback, "raise_error", False):
                callback.on_batch_end(batch, {"loss": math.nan})

    def _check_agreement(self) -> None:
        """Collective: raise RanksDisagree, on all ranks that train one model, if trainable weights differ."""
        combiner = getattr(optimizer_of(self.model), "gradient_combiner", None)
        ranks = combiner.process_set if combiner else hvd.global_process_set
        if not guards.check_weights or not ranks.included():
            return
        variables = [variable for variable in self.model.trainable_variables if not self._is_local(variable)]
        rank_digests = tf.stack([digest(variable) for variable in variables] or [tf.constant(0, tf.int64)])
        with exchanging("the end of an epoch of model.fit"):
            digests = hvd.allgather(rank_digests[tf.newaxis], name="fit.agreement", process_set=ranks).numpy()
        check_equal(digests, [name_of(variable) for variable in variables] or ["nothing"], members_of(ranks), _ADVICE)

    def _check_epoch_is_complete(self) -> None:
        """Raise UserError if this rank ends its epoch while the others wait for it in the next exchange."""
        done, planned = self._batches_done, self._planned_batches
        if hvd.size() == 1 or planned is None or done >= planned or self._has_met:
            return
        progress = f"model.fit: rank {hvd.rank()} has taken {done} of {planned} batches in epoch {self._epoch}"
        # A callback may have stopped all ranks at the same batch, or the data of all may have ended there.
        if not _all_ranks_meet_within(_STOPPED_WITHIN_S):
            if not self.model.stop_training:
                raise UserError(f"{progress}: its data ended, and the other ranks wait for it. Give it data.repeat().")
            raise UserError(f"{progress}: a callback stopped it, and not the other ranks. Stop all at the same batch.")
        self._has_met = True  # once: some ranks may evaluate between here and the end of the epoch, and others not


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace each logged number, or array of numbers, at the end of an epoch by its mean over ranks.

    The result is a mean of means: exact if every rank has seen the same number of records. Put this callback before
    those that read the logs, so that all ranks decide alike. device: TensorFlow device of the exchange.

    Raises UserError if a rank logs what another does not.
    """

    needs_all = True
    """Otherwise what some ranks lack is left as it is, such as figures of an evaluation on root alone."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        arrays = {name: _as_numbers(value) for name, value in sorted((logs or {}).items())}
        values = {name: array for name, array in arrays.items() if array is not None}
        with exchanging("MetricAverageCallback"):
            names = objects.gather(list(values), "MetricAverageCallback.names")
        differing = [rank for rank, rank_names in enumerate(names) if rank_names != names[0]]
        if differing and self.needs_all:
            raise UserError(
                f"model.fit: all ranks must log the same metrics; rank 0 logs {', '.join(names[0])}, rank "
                f"{differing[0]} logs {', '.join(names[differing[0]])}. Give validation_data to all ranks or to none."
            )
        values = {name: value for name, value in values.items() if all(name in rank_names for rank_names in names)}
        if logs and values:
            packed = tf.constant(np.concatenate([value.ravel() for value in values.values()]))
            with exchanging("MetricAverageCallback"), tf.device(self._device):
                means = hvd.allreduce(packed, op=hvd.Average, name="MetricAverageCallback").numpy()
            ends = np.cumsum([value.size for value in values.values()])
            for (name, value), mean in zip(values.items(), np.split(means, ends[:-1]), strict=True):
                logs[name] = mean.reshape(value.shape) if value.ndim else float(mean[0])


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint with save_best_only, which writes on one rank only.

    filepath: default best.keras, or best.weights.h5 with save_weights_only; Horovod's has none.

    The other arguments are Keras'. Put it after MetricAverageCallback.
    """

    root_rank = 0
    """The rank that writes; beside the broadcast callback its root."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        super().__init__(
            filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if hvd.rank() == self.root_rank:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if hvd.rank() == self.root_rank:
            super().on_epoch_end(epoch, logs)


def _as_numbers(value: Any) -> np.ndarray | None:
    """Return a logged value as float64; None for what is no number, such as a text or a dict."""
    if value is None or isinstance(value, str | bytes):  # NumPy takes them for NaN and for what the text says
        return None
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None


def _check_contents(model: keras.Model, root_rank: int) -> None:
    """Collective: raise UserError on all ranks if layers of Keras hold something else on one, or have other options.

    By position, because Keras numbers the names of layers in each process.
    """
    held = contents(model, of_keras_only=True) | options_of_weightless_layers(model)
    with exchanging("the start of model.fit"):
        # A digest first: with hundreds of ranks the names of all layers are megabytes.
        digests = objects.gather(consistency.digest(repr([*held.values()]).encode()), "fit.contents.digest")
        if len(set(digests)) == 1:
            return
        given = objects.gather([list(held), list(held.values())], "fit.contents")
    names, of_root = given[root_rank]
    for rank, (_, values) in enumerate(given):
        if len(values) == len(of_root) and values != of_root:
            name = next(name for name, *both in zip(names, values, of_root, strict=True) if both[0] != both[1])
            raise UserError(
                f"model.fit: ranks {root_rank} and {rank} differ in {name}, so that they compute something else of the "
                "same record. Give the layer the same options on all ranks, and adapt it on the same records."
            )


def _keep_to_one_rank(callbacks: list[keras.callbacks.Callback], root_rank: int) -> None:
    """Collective: replace callbacks that write files or show progress by one that does nothing, on all ranks but one.

    That is root_rank, or the first that has one of the class. A class of the user's that exchanges with other ranks
    stays on those that have it: they would wait for it.
    """
    kinds = {
        number: type(callback).__name__
        for number, callback in enumerate(callbacks)
        if isinstance(callback, _FILE_WRITERS) and not _calls_collectives(type(callback))
    }
    with exchanging("the start of model.fit"):
        by_rank = objects.gather(sorted(set(kinds.values())), "fit.writers")
    having = {kind: [rank for rank, there in enumerate(by_rank) if kind in there] for kind in kinds.values()}
    writers = {kind: root_rank if root_rank in ranks else ranks[0] for kind, ranks in having.items()}
    for number, kind in kinds.items():
        callback = callbacks[number]
        if isinstance(callback, BestModelCheckpoint):
            callback.root_rank = writers[kind]
        if writers[kind] != hvd.rank():
            callbacks[number] = keras.callbacks.Callback()  # in its place, because Keras may be going through the list
    for writer in sorted(set(writers.values())):
        of_writer = [kind for kind in writers if writers[kind] == writer]
        others = [rank for kind in of_writer for rank in having[kind] if rank != writer]
        shown = [kind for kind in of_writer if kind != keras.callbacks.ProgbarLogger.__name__]
        if shown and others and hvd.rank() == min(others):
            _say_who_writes(", ".join(shown), "runs" if len(shown) == 1 else "run", writer)


def _calls_collectives(kind: type) -> bool:
    """Return whether methods that a user has written for a class of callbacks name a collective of Horovod's."""
    of_users = [parent for parent in kind.__mro__ if not parent.__module__.startswith(("keras.", "builtins"))]
    codes = [method.__code__ for parent in of_users for method in vars(parent).values() if inspect.isfunction(method)]
    for code in codes:  # grows by what is defined inside
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return any(not _COLLECTIVES.isdisjoint(code.co_names) for code in codes)


@functools.cache
def _say_who_writes(names: str, verb: str, rank: int) -> None:
    """Say it the first time; a script may call `fit` often."""
    log.warning(
        f"{names} {verb} on rank {rank} only, so that no file is written by several ranks; "
        "hvd.init(files_on_root_only=False) lets all ranks write."
    )


def _find_needs(
    callbacks: list[keras.callbacks.Callback], broadcaster: keras.callbacks.Callback, *, shares_backup: bool
) -> tuple[bool, bool, bool]:
    """Collective: return what `broadcaster` must do for the other callbacks, True on all ranks if on any.

    First, whether to average the logs of an epoch, because a callback decides by them. Second, whether such a callback
    changes training, not only which model is kept: then all ranks must log the same. Third, whether to compare after
    each batch if losses are finite, because TerminateOnNaN would stop one rank first. A script may give such a callback
    to one rank only. shares_backup: whether root's BackupAndRestore is for all ranks.

    Raises UserError on all ranks if on one of them a callback comes before `broadcaster` that needs it.
    """
    before = callbacks[: callbacks.index(broadcaster)] if broadcaster in callbacks else []
    deciding = [each for each in callbacks if isinstance(each, _DECIDERS) or (_keeps_best(each) and each not in before)]
    earlier = callbacks[: callbacks.index(deciding[0])] if deciding else []
    needs_averages = bool(deciding) and not any(isinstance(callback, MetricAverageCallback) for callback in earlier)
    all_decide = needs_averages and any(isinstance(callback, _DECIDERS) for callback in deciding)
    dependent = [
        *(deciding if needs_averages else []),
        *(each for each in callbacks if shares_backup and isinstance(each, keras.callbacks.BackupAndRestore)),
    ]
    too_early = [type(callback).__name__ for callback in before if callback in dependent]
    alone = [type(each).__name__ for each in before if _keeps_best(each)]
    if alone and hvd.size() > 1 and hvd.rank() == 0:
        log.warning(
            f"model.fit: {listed(alone)} keeps the best by root's own figures; put it after "
            f"{type(broadcaster).__name__} in callbacks, for the means over the ranks"
        )
    needs_losses = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks)
    any_averages, any_decide, any_losses, any_early = _on_any_rank(
        "needs", needs_averages, all_decide, needs_losses, bool(too_early)
    )
    if any_early:
        names = ", ".join(too_early) or "a callback of another rank"
        raise UserError(
            f"model.fit: {names} must come after {type(broadcaster).__name__} in callbacks, so that all ranks "
            "decide on the same means and restore what root has saved."
        )
    return any_averages, any_decide, any_losses


def _keeps_best(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, _FILE_WRITERS) and bool(getattr(callback, "save_best_only", False))


def _on_any_rank(name: str, *flags: bool) -> list[bool]:
    """Collective, at the start of `fit`: return for each flag whether it is true on any rank."""
    with exchanging("the start of model.fit"):
        counts = hvd.allreduce(tf.constant(flags, tf.float32), op=hvd.Sum, name=f"fit.{name}").numpy()
    return (counts > 0).tolist()


def _take_out(callbacks: list[keras.callbacks.Callback], kind: type | tuple[type, ...]) -> list[Any]:
    """Replace the callbacks of a kind, or of several, by one that does nothing; return them."""
    taken = []
    for index, callback in enumerate(callbacks):
        if isinstance(callback, kind):
            callbacks[index] = keras.callbacks.Callback()  # in its place, because Keras may be going through the list
            taken.append(callback)
    return taken


def _gather_plans(epoch: int, batches: int) -> list[tuple[int, int]]:
    """Collective: return the arguments of all ranks. batches: a number, _UNKNOWN or _STOPS."""
    call = "the end of model.fit" if batches == _STOPS else "the start of an epoch of model.fit"
    with exchanging(call):
        plans = hvd.allgather(tf.constant([[epoch, batches]], tf.int64), name="fit.plan").numpy().tolist()
    return [(epoch, batches) for epoch, batches in plans]


def _plans_differ(plans: list[tuple[int, int]]) -> UserError:
    return UserError(
        f"model.fit: all ranks must take the same steps; received {_plans_text(plans)}. hvd.shard(x, y) gives each "
        "rank as many rows; callbacks that stop training must decide alike, after MetricAverageCallback()."
    )


def _plans_text(plans: list[tuple[int, int]]) -> str:
    ranks_by_plan: dict[str, list[int]] = {}
    for rank, (epoch, batches) in enumerate(plans):
        plan = f"epoch {epoch} of {'an unknown number of' if batches == _UNKNOWN else batches} batches"
        if batches == _STOPS:
            plan = f"stops after epoch {epoch}"
        ranks_by_plan.setdefault(plan, []).append(rank)
    return "; ".join(f"{_ranks_text(ranks)}: {plan}" for plan, ranks in ranks_by_plan.items())


def _ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, 4)}"


def _all_ranks_meet_within(seconds: float) -> bool:
    """Collective: return whether all ranks call this within that time."""
    failures: list[Exception] = []

    def meet() -> None:
        try:
            hvd.allreduce(tf.zeros(1), name="fit.stopped")
        except Exception as error:
            failures.append(error)

    meeting = Thread(target=meet, daemon=True)
    meeting.start()
    meeting.join(seconds)
    have_met = not meeting.is_alive()
    if failures:
        raise failures[0]
    return have_met
