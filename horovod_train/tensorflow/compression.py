"""Compression: the formats in which gradients can be sent."""

from __future__ import annotations

import horovod.tensorflow as hvd


class Compression(hvd.Compression):
    """none, fp16, and bf16: as wide in range as float32, added as float32, and sent as 16 bits."""

    bf16 = "bf16"
    """Only for gradients: of DistributedOptimizer and DistributedGradientTape."""
