"""The cores that a rank is bound to, what it makes of them, and how it places its ops."""

from __future__ import annotations

import os

import tensorflow as tf
from facts import leave

from horovod_train.commands.doctor_checks import check_threads
from horovod_train.config.settings import DeviceConfig, HorovodConfig
from horovod_train.distributed.start import start

group = start(HorovodConfig(), DeviceConfig(soft_placement=False))
facts = {
    "bound": sorted(os.sched_getaffinity(0)),
    "threads": tf.config.threading.get_intra_op_parallelism_threads(),
    "found": group.devices[group.rank].host_summary,
    "soft_placement": tf.config.get_soft_device_placement(),
    "doctor": check_threads(group).level,
}
leave(group.rank, facts)
group.close()
