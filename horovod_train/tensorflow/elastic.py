"""Elastic training: ranks may be lost, and join, while a script trains. Served as `hvd.elastic`.

Horovod's launcher starts it:
`horovodrun -np 2 --min-np 2 --max-np 4 --host-discovery-script ./hosts.sh python train.py`.
Started in any other way the script trains too, with a number of ranks that stays the same.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.elastic import State, notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from horovod_train.distributed import objects, start
from horovod_train.distributed.group import as_tf_variable, is_connection_loss
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.layer_contents import finalize
from horovod_train.errors import RunError, UserError
from horovod_train.tensorflow import agreement
from horovod_train.tensorflow.broadcasting import broadcast_variables
from horovod_train.tensorflow.gradients import drop_accumulated_gradients

__all__ = ["State", "TensorFlowKerasState", "TensorFlowState", "run"]

TRIES_TO_MEET = 10
"""Hosts may be lost one by one while the others meet. A launcher that has gone will not come back."""

log = logging.getLogger(__name__)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate func(state, ...) so that it is called again, from the last commit, when ranks have been lost or join.

    Before each call the state of a rank that has trained is given to all ranks; before the first, root's. After a
    change the callbacks of state.register_reset_callbacks run before that; they must make the same exchanges as a
    script makes before its first call of func, because a rank that joins makes those.

    Returns what func returns. Any other error of func ends this rank alone, and the others train on without it.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UserError(
                f"hvd.elastic.run: the first argument must be a state, as hvd.elastic.TensorFlowKerasState(model); "
                f"received {type(state).__name__}."
            )
        train = functools.partial(func, state, *args, **kwargs)
        if not launcher.detect().is_elastic:
            state.sync()
            return train()
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return _train_through_changes(train, state)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _train_through_changes(train: Callable[[], Any], state: State) -> Any:
    reason, changed_at, failures = "", 0.0, 0
    while True:
        try:
            if reason:
                _reconnect(state)
            state.sync()
            agreement.reset_counts()
            if reason and hvd.rank() == getattr(state, "_root", 0):
                log.warning(
                    f"elastic: {reason}; {hvd.size()} ranks train, after {time.monotonic() - changed_at:.1f} s."
                )
            changed_at, failures = 0.0, 0
            return train()
        except HostsUpdatedInterrupt:
            # Nothing to restore: State.commit has saved the state, and check_host_updates alone leaves it as it is.
            reason, changed_at = "the hosts have changed", changed_at or time.monotonic()
        except Exception as error:
            if not isinstance(error, HorovodInternalError) and not is_connection_loss(error):
                raise
            failures += 1
            if failures > TRIES_TO_MEET:
                raise RunError(f"elastic: the ranks did not meet, in {TRIES_TO_MEET} tries: {error}") from error
            reason, changed_at = "ranks were lost, back to the last commit", changed_at or time.monotonic()
            state.restore()


def _reconnect(state: State) -> None:
    """Collective: learn from the launcher which ranks there are now, and connect to them."""
    start.disconnect()
    if isinstance(state, CommittedState):
        state.forget_host_updates()
    start.connect()
    agreement.reset_counts()  # also before the callbacks, which may exchange gradients
    drop_accumulated_gradients()
    state.on_reset()


class CommittedState(State):
    """Variables, and objects that are attributes: `state.epoch`. Subclasses say which variables.

    attributes: of the types that objects.dump takes, such as numbers, text, lists, arrays. They are copied at each
    commit, so one that is changed in place is restored too. Raises UserError for one of another type.
    """

    _root = 0
    """The rank whose state all ranks got last."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(bcast_object=None, get_rank=hvd.rank)  # check_host_updates does without
        if clashes := [name for name in attributes if hasattr(self, name)]:
            raise UserError(f"hvd.elastic: a state has {clashes[0]!r} already. Give what you keep another name.")
        self._names = list(attributes)
        self._hosts_changed = threading.Event()
        self._is_common = False  # whether it is that of all ranks, and not what this process began with
        for name, value in attributes.items():
            setattr(self, name, value)
        self.save()

    def live_variables(self) -> Sequence[Any]:
        """Return the variables, Keras' or TensorFlow's; the same on all ranks."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Derive anew what is derived from variables, which have been set."""

    def save(self) -> None:
        """Copy the variables and objects to this rank's memory."""
        values = [as_tf_variable(variable).numpy() for variable in self.live_variables()]
        self._saved_values, self._saved_objects = values, self._dump_objects()

    def restore(self) -> None:
        """Set the variables and objects to what was saved last."""
        for variable, value in zip(self.live_variables(), self._saved_values, strict=True):
            as_tf_variable(variable).assign(value)
        self.finalize()
        self._set_objects(self._saved_objects)

    def sync(self) -> None:
        """Collective: give all ranks the variables and objects of one of them, as they are, and save them.

        It is the first rank that has had those of all ranks; rank 0 may be a process that has just been started, on a
        host that had failed. If no rank has, it is rank 0.

        If a rank is lost before all have both, what each had saved stays as it was.

        Raises UserError on all ranks if they have different numbers of variables.
        """
        variables = self.live_variables()
        known = hvd.allgather(tf.constant([[len(variables), int(self._is_common)]]), name="elastic.variables").numpy()
        counts = known[:, 0].tolist()
        if len(set(counts)) > 1:
            raise UserError(
                f"hvd.elastic: all ranks must have the same variables; received {counts} variables, by rank. Create "
                "the variables of the model, and the optimizer's, before the state."
            )
        self._root = int(known[:, 1].argmax())
        broadcast_variables(variables, root_rank=self._root)
        self.finalize()
        self._set_objects(objects.broadcast(self._dump_objects(), "elastic.objects", self._root))
        self.save()
        self._is_common = True

    def _dump_objects(self) -> bytes:
        try:
            return objects.dump({name: getattr(self, name) for name in self._names})
        except TypeError as error:
            raise UserError(f"hvd.elastic: what the state keeps: {error}") from error

    def _set_objects(self, saved: bytes) -> None:
        for name, value in objects.load(saved).items():
            setattr(self, name, value)

    def check_host_updates(self) -> None:
        """Collective: raise HostsUpdatedInterrupt on all ranks if the launcher has told any of them of new hosts."""
        has_changed = int(self._hosts_changed.is_set())
        if hvd.allgather(tf.constant([has_changed]), name="elastic.hosts").numpy().any():
            raise HostsUpdatedInterrupt(skip_sync=False)

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Note that hosts have come or will go. Called in a thread of Horovod's, on any rank."""
        self._hosts_changed.set()

    def forget_host_updates(self) -> None:
        """Forget changes of hosts that the ranks are about to meet for anyway."""
        self._hosts_changed.clear()


class TensorFlowState(CommittedState):
    """The state of a script with variables of its own.

    variables: Keras' or TensorFlow's, as `[*model.weights, *optimizer.variables]`. attributes: see CommittedState.

    Raises UserError for session, which is for TensorFlow 1, and without variables.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **attributes: Any) -> None:
        if session is not None or not variables:
            raise UserError(
                "hvd.elastic.TensorFlowState: expected the variables to keep, and no session; TensorFlow 2 has no "
                "global variables. Give it [*model.weights, *optimizer.variables]."
            )
        self._variables = list(variables)
        super().__init__(**attributes)

    def live_variables(self) -> Sequence[Any]:
        return self._variables


class TensorFlowKerasState(CommittedState):
    """The state of a Keras model and its optimizer: weights, and slots, which are created first.

    All ranks get the values of one, of local variables too. Gradients that were added up over backward_passes_per_step
    but not applied are dropped when ranks change, so commit after so many batches.

    optimizer: default the one that the model is compiled with. attributes: see CommittedState.

    Raises UserError for a model that has no variables yet or no optimizer, and for backend, which is for TensorFlow 1.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: Any = None,
        **attributes: Any,
    ) -> None:
        if backend is not None:
            raise UserError("hvd.elastic: backend is for TensorFlow 1. Leave it out.")
        if not isinstance(model, keras.Model):
            raise UserError(f"hvd.elastic: expected a Keras model; received {type(model).__name__}.")
        if not model.weights:
            raise UserError("hvd.elastic: the model has no variables yet. Build it, or call it once, before the state.")
        self.model, self._optimizer = model, optimizer
        super().__init__(**attributes)

    @property
    def optimizer(self) -> Any:
        """The optimizer that was given, or the one that the model is compiled with now."""
        optimizer = self._optimizer if self._optimizer is not None else getattr(self.model, "optimizer", None)
        if optimizer is None:
            raise UserError("hvd.elastic: the model has no optimizer. Compile it before the state, or give optimizer=.")
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        return optimizer

    def live_variables(self) -> Sequence[Any]:
        return [*self.model.weights, *self.optimizer.variables]

    def finalize(self) -> None:
        finalize(self.model)
