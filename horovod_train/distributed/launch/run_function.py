"""Call a function on several ranks from a Python program: Horovod's `horovod.run`, which needs nothing of ours."""

from horovod.runner import run

__all__ = ["run"]
