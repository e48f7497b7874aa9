"""`import horovod_train.tensorflow.keras as hvd`: horovod_train.keras, by the second name that Horovod has for it."""

import sys

from horovod_train.keras import *  # noqa: F403  (for type checkers; at run time this module is the other one)

for _part in ("", ".callbacks", ".elastic"):
    sys.modules[__name__ + _part] = sys.modules[f"horovod_train.keras{_part}"]
