"""Where the connections of a rank are, once it has exchanged something."""

from __future__ import annotations

import psutil
import tensorflow as tf
from facts import leave

import horovod_train.tensorflow as hvd

hvd.init()
total = hvd.allreduce(tf.constant([float(hvd.rank() + 1)]), op=hvd.Sum)
connections = psutil.Process().net_connections(kind="tcp")
local = sorted({found.laddr.ip for found in connections if found.status == psutil.CONN_ESTABLISHED})
leave(hvd.rank(), {"size": hvd.size(), "total": float(total[0]), "addresses": local})
