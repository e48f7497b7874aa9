"""horovod_train: data-parallel training of Keras 3 models with Horovod."""

__version__ = "0.1.0"
