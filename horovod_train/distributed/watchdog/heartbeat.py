"""What this rank is doing: its phase, its step, and a detail. Does not send it anywhere; see watch_thread.

Python does not run inside a compiled call. There a probe answers: it reads the TensorFlow variables in which the call
itself records its phase. TensorFlow is imported only where such a variable is made: commands plan with heartbeats.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from horovod_train.open_files import idle_descriptors
from horovod_train.output.logs import ANY_RANK, PHASE
from horovod_train.shown_text import listed

if TYPE_CHECKING:
    import tensorflow as tf

TRAIN = "train"
"""The phase of the compiled training call. The probe's phase is shown instead: input, compute, exchange."""

HOOK = "hook"
"""The phase in which a user's hook or a Keras callback is called between steps."""

FINE_PHASES = ("input", "compute", "exchange")
"""Phases that alternate within a step: too many for a log."""
_BETWEEN_HOOKS_S = 60.0
"""A callback may be called at every step: the log shows the phase of each callback no more often."""

IN_CALL = "in "
"""Begins the detail of an exchange that Python calls; which call follows: "in hvd.barrier"."""

LONG_PHASES = ("start", "compile")
"""Phases in which a rank may take watch.first_step_after_s. Before its first step it may in any phase."""

log = logging.getLogger(__name__)

Probe = Callable[[], tuple[int, str | None, str]]
"""() → (step, phase inside the compiled call or None, detail). Called about once a second, from a thread."""


@dataclass(frozen=True)
class Beat:
    """A rank's phase, step and detail, and for how long they have not changed."""

    phase: str
    step: int | None
    detail: str
    moves: int
    """how often the main thread has entered a phase: counts as progress, even if it returns to the same phase"""
    seconds: float
    has_stepped: bool = False
    """whether a training step is over, so that the next ones need no compiling"""

    def is_unchanged_from(self, other: Beat) -> bool:
        return dataclasses.replace(self, seconds=0.0) == dataclasses.replace(other, seconds=0.0)


class Heartbeat:
    """Written by the main thread, read by the watchdog. Setting a phase costs a microsecond.

    Logs each new coarse phase, and a probe that fails.
    """

    def __init__(self) -> None:
        self._probe: Probe | None = None
        self._logged_phase = "start"
        self._hooks_logged_at: dict[str, float] = {}
        """By detail, which names the callback."""
        self.has_stepped = False
        """Whether a step has been trained. Until then an error counts as found before training; from then on
        watch.stop_after_s applies outside LONG_PHASES. Set by what trains."""
        self._phase = ("start", "", 0)
        self._outer_phase = "start"
        self._beat = Beat("start", None, "", 0, 0.0)
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def set_probe(self, probe: Probe) -> None:
        """Read steps and the phases inside compiled calls from `probe` from now on."""
        self._probe = probe

    @contextmanager
    def probing(self, probe: Probe) -> Iterator[None]:
        """Read from `probe` inside the block."""
        before, self._probe = self._probe, probe
        yield
        self._probe = before

    def phase(self, name: str, detail: str = "") -> _Phase:
        """Enter a phase immediately. As a context manager it returns to the previous phase at the end.

        detail: a few words that end a sentence: "reading train-00031". A change of detail counts as progress.
        """
        before = self._phase[:2]
        self._outer_phase = before[0]
        self._enter(name, detail)
        return _Phase(lambda: self._enter(*before))

    @property
    def name(self) -> str:
        """The main thread's phase; the probe is not read."""
        return self._phase[0]

    @property
    def outer_phase(self) -> str:
        """The phase that the main thread was in when it entered the current one."""
        return self._outer_phase

    def read_probe(self) -> Beat:
        """Read the probe, which may take long if a device is stuck; return the current beat."""
        step, inner, detail = self._ask_probe()
        name, phase_detail, moves = self._phase
        now = time.monotonic()
        with self._lock:
            phase = inner if name == TRAIN and inner else name
            beat = Beat(phase, step, phase_detail or detail, moves, 0.0, self.has_stepped)
            if not beat.is_unchanged_from(self._beat):
                self._beat, self._since = beat, now
        return self.last()

    def last(self) -> Beat:
        """Return the last beat of `read_probe`, with the seconds since it changed."""
        with self._lock:
            return dataclasses.replace(self._beat, seconds=time.monotonic() - self._since)

    def _enter(self, name: str, detail: str) -> None:
        self._phase = (name, detail, self._phase[2] + 1)
        if name == HOOK and time.monotonic() - self._hooks_logged_at.get(detail, -math.inf) < _BETWEEN_HOOKS_S:
            return
        if name != self._logged_phase and name not in FINE_PHASES:
            self._logged_phase = name
            if name == HOOK:
                self._hooks_logged_at[detail] = time.monotonic()
            step = self.read_probe().step
            log.debug(name if step is None else f"{name} after step {step}", extra=PHASE)

    def _ask_probe(self) -> tuple[int | None, str | None, str]:
        probe = self._probe  # the main thread may set another at any moment
        if probe is None:
            return None, None, ""
        try:
            return probe()
        except Exception as error:
            with self._lock:
                is_current = self._probe is probe
                if is_current:
                    # Phases that the main thread enters still count as progress.
                    self._probe = None
            if is_current:
                log.warning(f"cannot read the step and its phases any more: {error}", extra=ANY_RANK)
            return None, None, ""


class _Phase:
    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # After a failure, keep the phase in which it happened, for the report.
        if error is None:
            self._leave()


def files_being_read() -> str:
    """Return the TFRecord files that this process is reading now, as "reading train-00031.tfrecord".

    For a probe: it asks the kernel (Linux; "" elsewhere), so it also sees the file that blocks a thread.
    """
    folder = Path("/proc/self/fd")
    names: set[str] = set()
    idle = idle_descriptors()
    for descriptor in os.listdir(folder) if folder.is_dir() else []:
        if int(descriptor) in idle:
            continue
        try:
            name = (folder / descriptor).readlink().name
        except OSError:  # closed in the meantime
            continue
        if name.endswith((".tfrecord", ".gz")):
            names.add(name)
    return f"reading {listed(sorted(names), 3, 'files')}" if names else ""


class PhaseVariable:
    """The probe of a Heartbeat for compiled training. step: the variable in which steps are counted."""

    def __init__(self, step: tf.Variable) -> None:
        import tensorflow as tf

        self._step = step
        # On the host, because a device that is stuck could not be read.
        with tf.device("CPU:0"):
            self._phase = tf.Variable(0, dtype=tf.int32, trainable=False)

    def enter(self, phase: str, after: Any = ()) -> tf.Operation:
        """Record inside the step that it is in `phase` ("input", "compute" or "exchange") from now on.

        after: tensors, in any structure, that must exist before. An operation that must run after this needs a control
        dependency on the returned operation: TensorFlow keeps no order between different resources.
        """
        import tensorflow as tf

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
        import tensorflow as tf

        self.step = 0
        with tf.device("CPU:0"):
            self._batches = tf.Variable(0, dtype=tf.int64, trainable=False)

    def count(self) -> None:
        """Count a batch, inside the compiled call."""
        self._batches.assign_add(1, read_value=False)

    def __call__(self) -> tuple[int, None, str]:
        return self.step, None, f"batch {int(self._batches)}"
