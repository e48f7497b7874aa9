"""Call a function on several ranks from a Python program: Horovod's `horovod.run`, in any script or notebook."""

from __future__ import annotations

import functools
import sys
from typing import Any

from horovod import runner

from horovod_train.errors import UserError


class _Options(runner._HorovodArgs):
    """What Horovod gives its launcher. In 0.28.1 two that are not chosen are (None,), and ranks get that text."""

    def __init__(self) -> None:
        super().__init__()
        self.cycle_time_ms = self.cache_capacity = None


runner._HorovodArgs = _Options


@functools.wraps(runner.run)
def run(*arguments: Any, **options: Any) -> Any:
    # Horovod's own processes import the script again, under this name.
    if sys._getframe(1).f_globals.get("__name__") == "__mp_main__":
        raise UserError(
            "horovod_train.run: the processes that start ranks import the script, which would start ranks again. Put "
            'the call below a line: if __name__ == "__main__":'
        )
    return runner.run(*arguments, **options)


__all__ = ["run"]
