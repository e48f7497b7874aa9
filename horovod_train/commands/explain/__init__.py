"""The command `explain`: what happened to a run, from the files that its ranks have left, and what to do next.

python -m horovod_train.main explain runs/digits_convnet

Exit code 0 if the run has finished, 1 if not, 2 for a folder that is no run directory. Reads the newest checkpoint byte
by byte, and if it is damaged the one before it: a run would resume from the checkpoint that is called good.
"""

from horovod_train.commands.explain.command import add_arguments, run

__all__ = ["add_arguments", "run"]
