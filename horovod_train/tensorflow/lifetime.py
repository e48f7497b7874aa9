"""init: start Horovod as its launcher requires, pin this process to its device, switch the guards; and shutdown."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_train.config.settings import DeviceConfig, WatchConfig
from horovod_train.distributed.device import Device
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.start import StartedProcess, start_process
from horovod_train.distributed.watchdog.watchdog import stall_environment
from horovod_train.errors import UserError
from horovod_train.tensorflow import agreement, names, watch

log = logging.getLogger(__name__)


def init(
    comm: Any = None,
    process_sets: Sequence[hvd.ProcessSet] | str | None = None,
    *,
    pin_device: bool = True,
    watch_ranks: bool | WatchConfig = True,
    check_weights: bool = True,
    files_on_root_only: bool = True,
    end_epochs_together: bool = True,
) -> None:
    """Collective: start Horovod in this process. A second call does nothing.

    comm: must be None; give the ranks of a part of the job as `process_sets`.
    process_sets: sets of ranks that will exchange among themselves; "dynamic" allows add_process_set later.
    pin_device: make the GPU with this process's local rank the only one it uses, and share the host's cores among its
        ranks, unless the script has chosen GPUs before. What the script sets afterwards wins.
    watch_ranks: from the first broadcast of variables on, name ranks that are waited for or have gone, end the others;
        a WatchConfig sets the limits. Its default stops a script that makes no step for half an hour. Elastic ranks are
        not watched.
    check_weights: see that all ranks hold the same weights at the tenth exchange of gradients, and, by the broadcast
        callback, after each epoch.
    files_on_root_only: with the broadcast callback, run Keras' callbacks that write files, and the progress bar, on
        root only.
    end_epochs_together: with the broadcast callback, end an epoch of `fit` on all ranks when the rank with the fewest
        batches has had them, and say so; otherwise ranks that have different numbers of batches are an error.

    Raises UserError if the processes would not find each other, or have too few GPUs.
    """
    if comm is not None:
        raise UserError(
            "hvd.init: comm is not served. Give process_sets=[hvd.ProcessSet([0, 1])] for a part of the ranks."
        )
    if hvd.is_initialized():
        return
    is_elastic = launcher.detect().is_elastic
    if is_elastic and (process_sets or isinstance(watch_ranks, WatchConfig)):
        raise UserError(
            "hvd.init: process_sets and limits of the watch are for ranks that stay; horovodrun --min-np started an "
            "elastic script. Leave them out."
        )
    limits = watch_ranks if isinstance(watch_ranks, WatchConfig) else watch.LIMITS
    agreement.switch(agreement.Guards(check_weights, files_on_root_only, end_epochs_together))
    environment = stall_environment(limits) if watch_ranks and not is_elastic else None
    started = start_process(environment=environment, process_sets=process_sets)
    device = _pin(started) if pin_device else _UNPINNED
    watch.prepare(started, device, limits if watch_ranks else None)


def shutdown() -> None:
    """Shut Horovod down in this process. It cannot exchange with the others any more, whose watch expects that."""
    watch.end()
    hvd.shutdown()


def add_process_set(process_set: hvd.ProcessSet | Sequence[int]) -> hvd.ProcessSet:
    """Collective: add a set of ranks that exchange among themselves; needs init(process_sets="dynamic").

    Raises UserError in an elastic script, whose ranks may change.
    """
    if launcher.detect().is_elastic:
        raise UserError("hvd.add_process_set: horovodrun --min-np started an elastic script, which has no such sets.")
    return hvd.add_process_set(process_set)


def remove_process_set(process_set: hvd.ProcessSet) -> bool:
    """Collective: remove a set of ranks; return whether there was one. Needs init(process_sets="dynamic")."""
    process_set_id = process_set.process_set_id
    is_removed = bool(hvd.remove_process_set(process_set))
    if is_removed and process_set_id is not None:
        agreement.forget_process_set(process_set_id)
        names.forget_process_set(process_set_id)
    return is_removed


def barrier(process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
    """Collective: return when every rank of the process set has called it."""
    with watch.exchanging("hvd.barrier"):
        hvd.allreduce(tf.zeros(1), op=hvd.Sum, name="barrier", process_set=process_set)


_UNPINNED = Device("as the script chose", "", (), ())


def _pin(started: StartedProcess) -> Device:
    """Pin this process to its device, unless the script has chosen one or has started TensorFlow already."""
    if len(tf.config.get_visible_devices("GPU")) < len(tf.config.list_physical_devices("GPU")):
        return _UNPINNED
    try:
        return started.pin(DeviceConfig())
    except RuntimeError as error:  # TensorFlow has started, and keeps what it has
        log.warning(f"hvd.init could not pin this process to a device: {error}. Call it before the first operation.")
        return _UNPINNED
    except UserError:
        started.rendezvous.close()
        raise
