"""Standard logging during a run: to root's console and to a file of each rank. Modules use logging.getLogger(__name__).

Adds handlers and removes them at the end. Those of a program that calls us stay, and print what they did before. Also
loads TensorFlow and Keras without what no rank needs: lines printed at every start, and two libraries.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from horovod_train.errors import UserError
from horovod_train.host import sees_gpu
from horovod_train.output.console import to_stderr, to_stdout, unfailing

ANY_RANK = {"any_rank": True}
"""`extra` of a line about the host or disk of one rank: ranks other than root show it too, on standard error."""
PHASE, SLOW = {"kind": "phase"}, {"kind": "slow"}
"""`extra` of lines that have these words, in place of their level, in a rank's file."""
SAY_AFTER_S = 5.0
_PACKAGE = logging.getLogger("horovod_train")
_FORMATTER = logging.Formatter()
_PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: ", logging.CRITICAL: "error: "}
_NOISE = "^(WARNING: All log messages before absl|I0000 |To enable the following instructions)"
_NO_DRIVER = "failed call to cuInit"
"""An error where there is a device file, and so a GPU."""
_SPARED = ("sklearn", "matplotlib")
"""Libraries that Keras imports if installed, only for wrappers and plots: a third of the start time of a rank."""


@contextmanager
def to_console(
    is_root: bool, *, users: Collection[str] = (), show: Callable[[str], None] = to_stdout
) -> Iterator[None]:
    """Show what is logged inside the block: on root, all; on other ranks, errors and lines for ANY_RANK.

    users: modules of the user. Root shows lines of their packages and of this one from level INFO, of others from
    WARNING.
    show: called with each line on root.
    """
    root_logger, tensorflow = logging.getLogger(), logging.getLogger("tensorflow")
    levels = {logger: logger.level for logger in (_PACKAGE, root_logger, tensorflow)}
    shown_packages = (_PACKAGE.name, *(name.partition(".")[0] for name in users))
    is_set_up = bool(root_logger.handlers)
    """The program around the run shows what others log, and has chosen from which level."""

    def write(record: logging.LogRecord) -> None:
        line = _PREFIXES.get(record.levelno, "") + _text(record)
        if not _is_of(record, _PACKAGE.name) and (is_set_up or _is_handled_below_root(record)):
            return
        if is_root and (record.levelno >= logging.WARNING or _is_of(record, *shown_packages)):
            show(line)
        if not is_root and (record.levelno >= logging.ERROR or hasattr(record, "any_rank")):
            to_stderr(line)

    _PACKAGE.setLevel(logging.DEBUG)
    if not is_set_up:
        root_logger.setLevel(logging.INFO)
        # TensorFlow's logger has a handler, which must not print more than before.
        tensorflow.setLevel(tensorflow.level or logging.WARNING)
    try:
        with _handled_by(write, logging.INFO):
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def to_file(write: Callable[[str, str], None]) -> AbstractContextManager[None]:
    """Call write(kind, text) for what is logged inside the block. kind: the level in small letters, or see PHASE."""
    return _handled_by(lambda record: write(getattr(record, "kind", record.levelname.lower()), _text(record)))


class _Handler(logging.Handler):
    def __init__(self, write: Callable[[logging.LogRecord], None], level: int) -> None:
        super().__init__(level)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(record)
        except Exception as error:  # as for a message whose arguments do not fit; no line may end a run
            where = f"{record.pathname}:{record.lineno}"
            to_stderr(f"warning: {where}: this line cannot be logged: {type(error).__name__}: {error}")


@contextmanager
def _handled_by(write: Callable[[logging.LogRecord], None], level: int = logging.DEBUG) -> Iterator[None]:
    handler, root_logger, propagated = _Handler(write, level), logging.getLogger(), _PACKAGE.propagate
    # This package's records do not go to the root logger: a caller's handlers would show them again.
    _PACKAGE.propagate = False
    _PACKAGE.addHandler(handler)
    root_logger.addHandler(handler)
    try:
        yield
    finally:
        _PACKAGE.removeHandler(handler)
        root_logger.removeHandler(handler)
        _PACKAGE.propagate = propagated


def _text(record: logging.LogRecord) -> str:
    """Return the message and, if there is one, the traceback; for a logger of another package, after its name."""
    text = _FORMATTER.format(record)
    return text if _is_of(record, _PACKAGE.name) else f"{record.name}: {text}"


def _is_of(record: logging.LogRecord, *packages: str) -> bool:
    return any(f"{record.name}.".startswith(f"{package}.") for package in packages)


def _is_handled_below_root(record: logging.LogRecord) -> bool:
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger.parent is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent
    return False


@contextmanager
def said_if_slow(line: str) -> Iterator[None]:
    """Log a line if the block has not ended after some seconds, so that nobody takes silence for a stall."""
    timer = threading.Timer(SAY_AFTER_S, _PACKAGE.info, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def choose_backend() -> None:
    """Make TensorFlow Keras' backend, whatever keras.json says: before a user's code may import Keras.

    Raises UserError if the environment chooses another one.
    """
    if os.environ.setdefault("KERAS_BACKEND", "tensorflow") != "tensorflow":
        raise UserError(f"KERAS_BACKEND must be tensorflow; received {os.environ['KERAS_BACKEND']}. Unset it.")


def load_tensorflow(*, on_cpu: bool = False) -> None:
    """Import TensorFlow and Keras and let TensorFlow look for GPUs, which is when it prints.

    on_cpu: hide them then. Its first operation would take nearly all memory of each, beside ranks that train there.

    Raises UserError if the environment chooses another backend of Keras.
    """
    choose_backend()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with _without_noise(), _without(_SPARED), _without_collecting_garbage():
        import tensorflow as tf

        importlib.import_module("keras")
        gpus = tf.config.list_physical_devices("GPU")
    if on_cpu and gpus:
        with suppress(RuntimeError):  # it has begun to compute in this process, and keeps what it has
            tf.config.set_visible_devices([], "GPU")


@contextmanager
def _without(names: Iterable[str]) -> Iterator[None]:
    """Make these modules unimportable inside the block."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: an import of it fails
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextmanager
def _without_collecting_garbage() -> Iterator[None]:
    """Disable garbage collection inside the block: searching imported objects takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _without_noise() -> Iterator[None]:
    """Leave noise out of what C++ writes to file descriptor 2. Another process does it: this one may abort inside."""
    noise = [_NOISE] if sees_gpu() else [_NOISE, _NO_DRIVER]
    unfailing(sys.stderr).flush()
    stderr_copy = os.dup(2)
    # A session of its own, so that Ctrl-C leaves it what was written before.
    command = ["grep", "--line-buffered", "-avE", *(word for pattern in noise for word in ("-e", pattern))]
    try:
        grep = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stderr_copy, start_new_session=True)
    except OSError:  # then all is shown
        os.close(stderr_copy)
        yield
        return
    assert grep.stdin is not None
    os.dup2(grep.stdin.fileno(), 2)
    grep.stdin.close()
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        with suppress(subprocess.TimeoutExpired):  # a process that was started inside may keep its input open
            grep.wait(1.0)
