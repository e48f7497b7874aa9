"""`import horovod_train.tensorflow.keras as hvd`: horovod_train.keras, by the second name that Horovod has for it."""

import sys

from horovod_train.keras import *  # noqa: F403  (for type checkers; at run time this module is the other one)

for _name in [_name for _name in sys.modules if f"{_name}.".startswith("horovod_train.keras.")]:
    sys.modules[_name.replace("horovod_train", "horovod_train.tensorflow", 1)] = sys.modules[_name]
