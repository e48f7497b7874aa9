"""The command `slurm`: prints a batch script for a config, ready for sbatch, and says what it chose. No TensorFlow.

python -m horovod_train.main slurm --config A.yaml --nodes 4 --gpus-per-node 8 --time 04:00:00 > a.sbatch
sbatch a.sbatch
"""

from horovod_train.commands.slurm.command import add_arguments, run

__all__ = ["add_arguments", "run"]
