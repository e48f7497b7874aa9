"""Keras callbacks that a config names: loads them, says which are of no use here, and keeps their state.

Does not call them; see hooks.evaluate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from horovod_train.config.registry import call, choose_keras, is_users, load_function
from horovod_train.config.settings import Spec
from horovod_train.distributed.consistency import digest
from horovod_train.errors import RunError, UserError
from horovod_train.models import overridden
from horovod_train.training.state import Averages
from horovod_train.training.steps.optimizers import Optimizers
from horovod_train.training.stopping import StopReason

_INSTEAD = {
    "ModelCheckpoint": "the settings under checkpoint, with best",
    "OrbaxCheckpoint": "the settings under checkpoint",
    "BackupAndRestore": "checkpoint.resume: auto, which is the default",
    "TensorBoard": "log.tensorboard",
    "CSVLogger": "metrics.jsonl of the run, or log.writers",
    "RemoteMonitor": "log.writers",
    "ProgbarLogger": "log.progress",
    "History": "metrics.jsonl of the run",
    "TerminateOnNaN": "train.non_finite: stop, which is the default",
}
"""Callbacks of Keras that would write on each rank, or do what the trainer does: what to use instead."""
_STATE_NAMES: tuple[tuple[type[keras.callbacks.Callback], tuple[str, ...]], ...] = (
    (keras.callbacks.ReduceLROnPlateau, ("best", "wait", "cooldown_counter")),
    (keras.callbacks.EarlyStopping, ("best", "wait", "best_epoch", "stopped_epoch")),
)
"""Attributes of Keras' callbacks that are their state; others have it by get_state and set_state, or none."""
_BATCH = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_NEVER_CALLED = (
    *("on_test_batch_begin", "on_test_batch_end"),
    *("on_predict_begin", "on_predict_end", "on_predict_batch_begin", "on_predict_batch_end"),
)
_MONITORS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
"""In mode auto they look into the compiled metrics for what is better, but the trainer computes the metrics."""
_SWAPS = keras.callbacks.SwapEMAWeights
_SET_THE_RATE = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


@dataclass(frozen=True)
class Named:
    """A callback and the name in the config, numbered if it comes twice."""

    name: str
    callback: keras.callbacks.Callback

    def overrides(self, methods: Sequence[str]) -> list[str]:
        """Return those of some methods that it has of its own, by its class or, as a LambdaCallback, set on itself."""
        return overridden(self.callback, methods, keras.callbacks.Callback)

    def runs_users_code(self, *methods: str) -> bool:
        """Return whether one of some methods is a user's, not Keras' or ours: it may do anything."""
        inner = [method.replace("on_train_batch", "on_batch") for method in methods]  # which Keras' own calls
        bound = [getattr(self.callback, method) for method in {*methods, *inner}]
        return any(not str(each.__module__).startswith(("keras.", "horovod_train.")) for each in bound)

    def state(self) -> Any:
        """Return what it must have again after a resume, of values that JSON can hold; None: nothing.

        Raises RunError.
        """
        if hasattr(self.callback, "get_state"):
            try:
                return json.loads(json.dumps(self.callback.get_state(), default=_plain))
            except (TypeError, ValueError) as error:
                raise RunError(f"callbacks: {self.name}: get_state() must give what JSON can hold: {error}.") from error
        if not (names := self._state_names()):
            return None
        state = {name: getattr(self.callback, name) for name in names}
        return json.loads(json.dumps(state | {"of": self._watched()}, default=_plain))

    def restore(self, state: Any) -> None:
        """Give it a state that `state` returned, unless that is of another metric than it monitors now."""
        if hasattr(self.callback, "set_state"):
            self.callback.set_state(state)
        elif (names := self._state_names()) and state.get("of", self._watched()) == self._watched():
            for name in names:
                setattr(self.callback, name, state[name])

    @property
    def keeps_best_of(self) -> str | None:
        """The figure whose best value is part of its state; None if that is not known, or it keeps none."""
        is_known = self._state_names() and not hasattr(self.callback, "get_state")
        return self.callback.monitor if is_known else None

    def _watched(self) -> list[str]:
        return [self.callback.monitor, self.callback.mode]

    def _state_names(self) -> tuple[str, ...]:
        return next((names for kind, names in _STATE_NAMES if isinstance(self.callback, kind)), ())


class SwapAverages(keras.callbacks.Callback):
    """Does what Keras' SwapEMAWeights does: evaluations, and with swap_on_epoch the ends of epochs, see the averages.

    Keras swaps by adding and subtracting, which rounds the weights each time; a run that resumes before an evaluation
    which has been interrupted would not continue bit for bit.
    """

    def __init__(self, swap_on_epoch: bool) -> None:
        super().__init__()
        self.swap_on_epoch = swap_on_epoch
        self.averages: Averages
        """Set before training begins."""

    def on_test_begin(self, logs: Any = None) -> None:
        self.averages.put_in()

    def on_test_end(self, logs: Any = None) -> None:
        self.averages.put_back()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.averages.put_back()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.swap_on_epoch:
            self.averages.put_in()


class Callbacks:
    """The callbacks of a run on this rank, in the order of the config.

    epoch_ended_at: the step after which on_epoch_end was called last; train_ended_at: on_train_end. epoch_begun: the
    epoch for which on_epoch_begin was called last. batch_begun_at: the step before which on_train_batch_begin was.
    have_stopped: whether one has ended the run. hooks_left_at: the step whose evaluation was interrupted, so that the
    hooks of users are to be called there when the run resumes; -1: none. hook_ended: why one of them has ended the run.
    """

    def __init__(self, named: Sequence[Named]) -> None:
        self.named = list(named)
        self.epoch_ended_at, self.train_ended_at, self.epoch_begun, self.batch_begun_at = 0, -1, -1, -1
        self.have_stopped, self.hooks_left_at = False, -1
        self.hook_ended: str | None = None

    def __bool__(self) -> bool:
        return bool(self.named)

    def run_users_code(self, *methods: str) -> bool:
        """Return whether one of some methods of one of them is a user's."""
        return any(named.runs_users_code(*methods) for named in self.named)

    @property
    def see_batches(self) -> bool:
        """Whether one of them wants to be called at every step."""
        return any(named.overrides(_BATCH) for named in self.named)

    def attach(
        self, model: keras.Model, optimizers: Optimizers, averages: Averages, *, epochs: int, steps_per_epoch: int
    ) -> None:
        """Give them the model as `fit` does. Raises UserError for one that cannot work with it."""
        for named in self.named:
            if isinstance(named.callback, _SET_THE_RATE):
                _check_rate_is_free(named.name, model, optimizers)
            if isinstance(named.callback, SwapAverages):
                _check_there_are_averages(named.name, averages)
                named.callback.averages = averages
            named.callback.set_params({"verbose": 0, "epochs": epochs, "steps": steps_per_epoch})
            named.callback.set_model(model)

    @property
    def evaluate_averages(self) -> bool:
        """Whether one of them has evaluations see the averages of the optimizer."""
        return any(isinstance(named.callback, SwapAverages) for named in self.named)

    def check_monitors(self, names: Sequence[str]) -> None:
        """Raise UserError for a callback that monitors something that is not there. names: of what they get.

        A user's callback may add figures for those after it.
        """
        for number, named in enumerate(self.named):
            monitor = getattr(named.callback, "monitor", None)
            adds = any(earlier.runs_users_code("on_epoch_end") for earlier in self.named[:number])
            if isinstance(monitor, str) and monitor not in names and not adds:
                raise UserError(f"callbacks: {named.name} monitors {monitor!r}; there are {', '.join(names)}.")
            is_auto = getattr(named.callback, "mode", None) == "auto" and isinstance(named.callback, _MONITORS)
            if is_auto and monitor not in ("loss", "val_loss"):
                raise UserError(f"callbacks: {named.name} monitors {monitor!r}: give its option mode, max or min.")

    def state(self, *methods: str) -> dict[str, Any]:
        """Return for a checkpoint what a resume needs; without callbacks only what concerns users' hooks.

        methods: with the states of those only that have one of them by a user's code; default: of all. Raises RunError.
        """
        ended_at = self.train_ended_at
        of_hooks = {"ended_at": ended_at, "hooks_left_at": self.hooks_left_at, "hook_ended": self.hook_ended}
        if not self:
            return of_hooks
        return {
            **of_hooks,
            "told": self.epoch_ended_at,
            "begun": self.epoch_begun,
            "batch_begun_at": self.batch_begun_at,
            "have_stopped": self.have_stopped,
            "states": {
                named.name: state
                for named in self.named
                if (not methods or named.runs_users_code(*methods)) and (state := named.state()) is not None
            },
        }

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Take what `state` returned at the checkpoint of a step; a run without callbacks left less of it."""
        self.epoch_ended_at, self.train_ended_at = state.get("told", step), state.get("ended_at", -1)
        self.epoch_begun, self.batch_begun_at = state.get("begun", -1), state.get("batch_begun_at", -1)
        self.have_stopped, self.hooks_left_at = state.get("have_stopped", False), state.get("hooks_left_at", -1)
        self.hook_ended = state.get("hook_ended")
        for named in self.named:
            if named.name in state.get("states", {}):
                named.restore(state["states"][named.name])

    def digests(self) -> dict[str, str]:
        """Return what must be equal on all ranks: a digest of each state, by name. Raises RunError."""
        states = self.state().get("states", {})
        digests = {
            f"the state of callback {name}": digest(json.dumps(state).encode()) for name, state in states.items()
        }
        return digests | {"whether a callback has ended the run": str(self.have_stopped)}

    def ended(self) -> StopReason | None:
        """Return why the run ends if a callback or a user's hook has ended it, in this start or before."""
        if self.have_stopped:
            return StopReason("a callback has set model.stop_training")
        return None if self.hook_ended is None else StopReason(self.hook_ended)


def load_callbacks(specs: Sequence[Spec]) -> Callbacks:
    """Build the callbacks that a config names: Keras' by name, or package.module:Class. Raises UserError."""
    named: list[Named] = []
    for number, spec in enumerate(specs):
        where = f"callbacks[{number}]"
        factory = choose_keras(keras.callbacks, keras.callbacks.Callback, spec.name, where)
        _check_is_of_use(factory, spec, where)
        callback = call(factory, _with_functions(factory, spec, where), where)
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(f"{where}: {spec.name} must make a Keras callback; it made {type(callback).__name__}.")
        _check_is_of_use(type(callback), spec, where)
        if getattr(callback, "restore_best_weights", False):
            raise UserError(
                f"{where}: {spec.name} has restore_best_weights, which a resume would lose; leave it out, and use "
                "checkpoint.best."
            )
        if isinstance(callback, _SWAPS):
            if type(callback) is not _SWAPS:
                raise UserError(
                    f"{where}: {spec.name} is derived from SwapEMAWeights, which is replaced here; name that one."
                )
            callback = SwapAverages(callback.swap_on_epoch)
        before = sum(earlier.name.split("#")[0] == spec.name for earlier in named)
        named.append(Named(f"{spec.name}#{before + 1}" if before else spec.name, callback))
        if methods := named[-1].overrides(_NEVER_CALLED):
            raise UserError(f"{where}: {spec.name} has {', '.join(methods)}, which a training run never calls.")
        if hasattr(callback, "get_state") != hasattr(callback, "set_state"):
            raise UserError(f"{where}: {spec.name} needs both get_state() and set_state(state), or neither.")
    return Callbacks(named)


def _with_functions(factory: Any, spec: Spec, where: str) -> Spec:
    """Return a callback of Keras with the functions that its options name, as `schedule: package.module:function`.

    Raises UserError for one that cannot be imported, and for an option that must be a function and is not. The options
    of a user's own callback are left as they are.
    """
    if not str(factory.__module__).startswith("keras."):
        return spec
    options = dict(spec.options)
    for name, value in options.items():
        key = f"{where}.options.{name}"
        if isinstance(value, str) and is_users(value):
            options[name] = load_function(value, key)
        takes_function = name == "schedule" or (name.startswith("on_") and value is not None)
        if takes_function and not callable(options[name]):
            raise UserError(f"{key}: expected a function, as package.module:function; received {value!r}.")
    return replace(spec, options=options)


def _check_is_of_use(kind: Any, spec: Spec, where: str) -> None:
    for base in kind.__mro__ if isinstance(kind, type) else ():
        if base.__name__ in _INSTEAD and base is getattr(keras.callbacks, base.__name__, None):
            raise UserError(f"{where}: {spec.name} has no use here; use {_INSTEAD[base.__name__]}.")


def _check_there_are_averages(name: str, averages: Averages) -> None:
    if averages.are_of_optimizer:
        return
    instead = "Those of train.ema_decay are evaluated without it. " if averages.variables else ""
    raise UserError(
        f"callbacks: {name} needs an optimizer that keeps averages: optimizer.options.use_ema: true. {instead}"
        "Give that, or leave the callback out."
    )


def _check_rate_is_free(name: str, model: keras.Model, optimizers: Optimizers) -> None:
    models_optimizer: Any = getattr(model, "optimizer", None)
    if models_optimizer not in optimizers.by_path.values():
        raise UserError(f"callbacks: {name} sets the rate of model.optimizer, which the model's step does not apply.")
    try:
        models_optimizer.learning_rate = float(models_optimizer.learning_rate)
    except TypeError as error:
        raise UserError(
            f"callbacks: {name} sets the learning rate, which follows a schedule here. Leave out lr_schedule.decay and "
            "warmup_epochs, or the callback."
        ) from error
    except AttributeError as error:  # of a MultiOptimizer, or a function
        text = f"callbacks: {name} sets the learning rate, and that of model.optimizer cannot be set."
        raise UserError(text) from error


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else float(value)
