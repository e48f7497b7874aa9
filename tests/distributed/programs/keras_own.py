"""Keras' own tests of trainers, optimizers and callbacks, which its wheel contains, with what they compile distributed.

On one rank nothing is changed: what passes there is to pass on several. The ranks run the same tests in the same order.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import pytest
from facts import leave

import horovod_train.keras as hvd

hvd.init()
OTHERS = ["jax", "jax.experimental", "jax.experimental.sparse", "grain", "torch"]
"""Frameworks that a test's module imports at its top, whatever runs it; what then needs them fails on one rank too."""
for name in OTHERS:
    sys.modules.setdefault(name, ModuleType(name))
Trainer = next(base for base in keras.Model.__mro__ if "compile" in vars(base))
compile_of_keras = Trainer.compile
distributed: list[str] = []


def compile_distributed(self: keras.Model, optimizer: Any = "rmsprop", *others: Any, **arguments: Any) -> None:
    """With the compiled optimizer distributed; XLA, which cannot compile an exchange, is off."""
    optimizer = optimizer and keras.optimizers.get(optimizer)
    is_scaled = self.dtype_policy.name == "mixed_float16" and arguments.get("auto_scale_loss", True)
    if is_scaled and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)  # or compile would put one over ours: refused
    if optimizer and not type(optimizer).__name__.startswith("Distributed"):  # one that is compiled again
        optimizer = hvd.DistributedOptimizer(optimizer)
        distributed.append(type(optimizer).__name__)
    compile_of_keras(self, optimizer, *others, **arguments | {"jit_compile": False})


class Outcomes:
    """What became of each test. Each begins with one seed, since none broadcasts, and ranks must hold one model."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    def pytest_runtest_setup(self) -> None:
        keras.utils.set_random_seed(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)[-1000:]
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


if hvd.size() > 1:
    Trainer.compile = compile_distributed
outcomes = Outcomes()
packages = [f"keras.src.{package}" for package in ("trainers", "optimizers", "callbacks")]
options = ["-q", "-c", "/dev/null", "--rootdir", sys.argv[1], "-o", "python_files=*_test.py", "-p", "no:cacheprovider"]
left_out = ("data_adapters", "orbax", "remote_monitor")  # which compile nothing, or need what is not installed
others = [f"--ignore-glob={Path(keras.__file__).parent}/*{name}*" for name in left_out]
pytest.main([*options, *others, "--pyargs", *packages], plugins=[outcomes])
leave(hvd.rank(), {"passed": outcomes.passed, "failed": outcomes.failed, "distributed": len(distributed)})
hvd.shutdown()
