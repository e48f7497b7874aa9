"""Records where a compiled call is in variables that the watchdog reads while the call runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_train.distributed.watchdog.heartbeat import FINE_PHASES, files_being_read


class PhaseVariable:
    """The probe of a Heartbeat for compiled training. step: the variable in which steps are counted."""

    def __init__(self, step: tf.Variable) -> None:
        self._step = step
        # On the host, because a device that is stuck could not be read.
        with tf.device("CPU:0"):
            self._phase = tf.Variable(0, dtype=tf.int32, trainable=False)

    def enter(self, phase: str, after: Any = ()) -> tf.Operation:
        """Record inside the step that it is in `phase` ("input", "compute" or "exchange") from now on.

        after: tensors, in any structure, that must exist before. An operation that must run after this needs a control
        dependency on the returned operation: TensorFlow keeps no order between different resources.
        """
        tensors = [tensor for tensor in tf.nest.flatten(after, expand_composites=True) if tensor is not None]
        with tf.name_scope("watch"), tf.control_dependencies(tensors):
            return self._phase.assign(FINE_PHASES.index(phase), read_value=False)

    def phase(self) -> str:
        """Return the phase that the step has entered last; may be called from any thread."""
        return FINE_PHASES[int(self._phase)]

    def __call__(self) -> tuple[int, str, str]:
        phase = self.phase()
        return int(self._step), phase, files_being_read() if phase == "input" else ""


class BatchCounter:
    """The probe of a Heartbeat for compiled evaluation. step: the training steps before it."""

    def __init__(self) -> None:
        self.step = 0
        with tf.device("CPU:0"):
            self._batches = tf.Variable(0, dtype=tf.int64, trainable=False)

    def count(self) -> None:
        """Count a batch, inside the compiled call."""
        self._batches.assign_add(1, read_value=False)

    def __call__(self) -> tuple[int, None, str]:
        return self.step, None, f"batch {int(self._batches)}"
