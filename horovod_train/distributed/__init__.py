"""Ranks, exchanges between them, their launchers and the watchdog. Imports horovod and mpi4py.

Scripts get horovod_train.tensorflow and horovod_train.keras.
"""
