"""Elastic training: ranks may be lost, and join, while a script trains. Served as `hvd.elastic`.

Horovod's launcher starts it: `horovodrun --min-np 2 --max-np 4 --host-discovery-script hosts.sh python train.py`.
Started in any other way the script trains too, with a number of ranks that stays the same.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
from horovod.common.elastic import State, notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from horovod_train.distributed.group import is_connection_loss
from horovod_train.distributed.launch import launcher, reconnect
from horovod_train.errors import RunError, UserError
from horovod_train.tensorflow import agreement
from horovod_train.tensorflow.committed_state import CommittedState, TensorFlowKerasState, TensorFlowState
from horovod_train.tensorflow.optimizer import drop_accumulated_gradients

__all__ = ["State", "TensorFlowKerasState", "TensorFlowState", "run"]

TRIES_TO_MEET = 10
"""Hosts may be lost one by one while the others meet. A launcher that has gone will not come back."""

log = logging.getLogger(__name__)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate func(state, ...) so that it is called again, from the last commit, when ranks have been lost or join.

    Before each call root's state is given to all ranks. After a change the callbacks of state.register_reset_callbacks
    run before that; they must make the same exchanges as a script makes before its first call of func, because a rank
    that joins makes those.

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
            if reason and hvd.rank() == 0:
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
    reconnect.disconnect()
    if isinstance(state, CommittedState):
        state.forget_host_updates()
    reconnect.connect()
    agreement.reset_counts()  # also before the callbacks, which may exchange gradients
    drop_accumulated_gradients()
    state.on_reset()
