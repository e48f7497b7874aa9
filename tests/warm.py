"""Runs programs in forks of this process, which has loaded TensorFlow: warm.py SOCKET, and warm_start.py asks for one.

Loading TensorFlow takes each process seconds of CPU time; a fork has it from the start. This process has imported
TensorFlow, Keras and Horovod but started no thread of theirs, so a fork is what a process is that has just imported
them. What forks have in common and processes have not: the seed of Python's hashes, the limits of this process.

SOCKET: the file descriptor of a listening socket. Ends with its standard input, and removes the socket's folder.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

import numpy as np

from horovod_train.output import logs

_OWN_PATHS = {os.path.dirname(__file__), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
_INSTALLED = [path for path in sys.path if path not in _OWN_PATHS]


def serve(listening: socket.socket) -> None:
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:  # the tests have ended
            return
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            keep(connection)
        connection.close()


def keep(connection: socket.socket) -> NoReturn:
    """Start one program and stay with it: pass signals on, kill it when its starter is gone, say how it ended."""
    request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    child = os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (connection, woken, wakes):
            one.close()
        become(streams, **json.loads(request))
    for stream in streams:
        os.close(stream)
    while True:
        ready, _, _ = select.select([woken, connection], [], [])
        if connection in ready:
            numbers = connection.recv(1)
            os.kill(child, numbers[0] if numbers else signal.SIGKILL)
            if not numbers:
                os.waitpid(child, 0)
                os._exit(0)
        if woken in ready:
            woken.recv(1)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with suppress(OSError):
                    connection.send(status.to_bytes(4, "little"))
                os._exit(0)


def become(
    streams: list[int], words: list[str], environment: dict[str, str], folder: str, cores: list[int]
) -> NoReturn:
    """Be the process that `python *words` would be: words are a script or `-m MODULE`, and arguments."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w", 1 if os.isatty(1) or "PYTHONUNBUFFERED" in environment else -1)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace")
    np.random.seed()  # Python's own generator draws a new seed in a fork; NumPy's does not
    more = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.path[:] = [folder, *more, *_INSTALLED]
        module = importlib.import_module(words[1])
        sys.argv = [str(module.__file__), *words[2:]]
        sys.exit(module.entry())
    sys.path[:] = [os.path.dirname(words[0]), *more, *_INSTALLED]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    logs.load_tensorflow()
    importlib.import_module("horovod.tensorflow.keras")
    importlib.import_module("horovod_train.training.run")
    importlib.import_module("horovod_train.inference.run")
    gc.freeze()  # forks need not look through all that has been imported
    asked = socket.socket(fileno=int(sys.argv[1]))
    serve(asked)
    shutil.rmtree(os.path.dirname(asked.getsockname()))
