"""The command `doctor`: is this machine, or this job, fit to train on? One line a check, and what to do.

python -m horovod_train.main doctor                                   this machine
horovodrun -np 4 python -m horovod_train.main doctor                  the job, as it would be started to train
"""

from horovod_train.commands.doctor.command import add_arguments, run

__all__ = ["add_arguments", "run"]
