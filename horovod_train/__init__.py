"""horovod_train: data-parallel training of Keras 3 models with Horovod.

`train(config)` trains as a config says, `run(function, np=2)` calls a function on ranks. `import horovod_train.keras as
hvd`, for `model.fit`, or `import horovod_train.tensorflow as hvd`, for your own loops, have the names of Horovod.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_train import keras as keras
    from horovod_train import tensorflow as tensorflow
    from horovod_train.distributed.launch.run_function import run as run
    from horovod_train.train_function import Trained as Trained
    from horovod_train.train_function import train as train

__version__ = "0.1.0"

_PLACES = {
    "run": "horovod_train.distributed.launch.run_function",
    "train": "horovod_train.train_function",
    "Trained": "horovod_train.train_function",
}
"""Names that are loaded when they are asked for, because they load more than the command line needs."""
_MODULES = ("errors", "keras", "tensorflow")


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted([*_PLACES, *_MODULES, "__doc__", "__version__"])
