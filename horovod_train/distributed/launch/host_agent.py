"""Start the ranks of this host as the launch of another host orders, over ssh, and pass signals on to them.

python -m horovod_train.distributed.launch.host_agent

Reads an order, one line of JSON, from standard input, and then the number of a signal on each line; see hosts. If the
input ends, the launch or the connection to it is gone: the ranks are asked to save and to end. Its exit code is theirs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

from horovod_train.distributed.launch.launcher import STOP_SIGNALS
from horovod_train.distributed.launch.started_ranks import SAVE_WITHIN_S, SSH_LOST, Ended, StartedRanks, start_here
from horovod_train.errors import START_AGAIN, STOPPED, RanksDisagree, UserError
from horovod_train.output.console import to_stderr


def main() -> int:
    for number in STOP_SIGNALS:
        signal.signal(number, _let_launch_decide)
    order = json.loads(sys.stdin.readline())
    os.environ.update(order.get("environment", {}))
    try:
        ranks = start_here(order["meeting"], order["first"], order["ranks"], order["program"])
    except OSError as error:
        to_stderr(f"error: {order['program'][0]}: {error.strerror} on {socket.gethostname()}.")
        return UserError.exit_code
    threading.Thread(target=_pass_on, args=(ranks,), daemon=True).start()
    return exit_code_of(ranks.wait())


def _let_launch_decide(number: int, _: object) -> None:
    """Take a signal of the terminal or of sshd. If it were ignored, the ranks would inherit that."""


def _pass_on(ranks: StartedRanks) -> None:
    for line in sys.stdin:
        ranks.send(int(line))
    ranks.send(signal.SIGTERM)
    time.sleep(SAVE_WITHIN_S)
    ranks.send(signal.SIGKILL)


def exit_code_of(ended: Ended) -> int:
    """Return one exit code for all ranks: of the first that failed; else 76 or 75 if one was asked to stop; else 0.

    Codes that no other start would change come first. A rank's 255 becomes 1: ssh ends with 255 if it cannot reach a
    host.
    """
    codes = set(ended.codes.values())
    for code in (RanksDisagree.exit_code, UserError.exit_code):
        if code in codes:
            return code
    if ended.first:
        code = ended.codes.get(ended.first, 1)
        return 1 if code == SSH_LOST else code
    return next((code for code in (STOPPED, START_AGAIN) if code in codes), 0)


if __name__ == "__main__":
    sys.exit(main())
