"""Horovod's callbacks for `model.fit`."""

from horovod_train.keras.callbacks.averages import BestModelCheckpoint, MetricAverageCallback
from horovod_train.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from horovod_train.keras.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
