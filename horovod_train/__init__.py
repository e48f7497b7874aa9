"""horovod_train: data-parallel training of Keras 3 models with Horovod."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Serve `horovod_train.run` as `horovod.run`, loaded when it is asked for."""
    if name == "run":
        from horovod_train.distributed.launch.run_function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
