"""Compression: the formats in which gradients can be sent."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
from horovod.tensorflow.compression import Compressor

from horovod_train.errors import UserError


class _Bf16(Compressor):
    """Stands for bfloat16, which Horovod cannot add up: GradientExchange sends and adds it."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        raise UserError(
            "hvd.Compression.bf16 is for gradients: of DistributedOptimizer and DistributedGradientTape. Use fp16 here."
        )


class Compression(hvd.Compression):
    """none, fp16, and bf16: as wide in range as float32, added as float32, and sent as 16 bits."""

    bf16 = _Bf16
