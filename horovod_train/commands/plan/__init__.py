"""The command `plan`: what a config means on N ranks, before anything starts.

python -m horovod_train.main plan --config configs/digits_convnet.yaml --np 64
python -m horovod_train.main plan --config … --np 64 --examples-per-s 20000 --time 04:00:00
python -m horovod_train.main plan --config … --fast                                       without TensorFlow

Checks every path, and builds the model and what it is trained with on the CPU. Starts no ranks, writes nothing but an
index.
"""

from horovod_train.commands.plan.command import add_arguments, run

__all__ = ["add_arguments", "run"]
