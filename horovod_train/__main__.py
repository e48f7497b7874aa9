"""Runs the command line: `python -m horovod_train` is `python -m horovod_train.main`."""

from horovod_train.main import entry

entry()
