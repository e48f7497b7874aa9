"""Stands where `python PROGRAM …` would, which runs in a fork of warm.py: python -IS warm_start.py SOCKET PROGRAM ….

The program has this process's environment, folder, cores and streams, gets its signals and dies with it; this process
ends as the program does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def pass_on(number: int, _: Any) -> None:
    with suppress(OSError):  # the program has just ended, and its keeper with it
        connection.send(bytes([number]))


connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
request = {
    "words": sys.argv[2:],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "cores": sorted(os.sched_getaffinity(0)),
}
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
for number in PASSED_ON:
    signal.signal(number, pass_on)
answer = connection.recv(4)
if not answer:
    sys.exit("warm.py is gone")
code = os.waitstatus_to_exitcode(int.from_bytes(answer, "little"))
if code < 0:
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
