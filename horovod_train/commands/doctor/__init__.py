"""The command `doctor`: checks whether this machine, or this job, is fit to train on. One line per check.

python -m horovod_train.main doctor                                   this machine
horovodrun -np 4 python -m horovod_train.main doctor                  the job, as it would be started to train
"""

from horovod_train.commands.doctor.command import add_arguments, run

__all__ = ["add_arguments", "run"]
