"""The command `watch`: a run while it trains, from the files in its directory, on any host that sees them.

python -m horovod_train.main watch runs/digits_convnet

In a terminal one screen that is drawn again, elsewhere a line for each thing that is new. Ends with the run. Exit code
0 if the run has finished or still trains, 1 if it has ended otherwise, 2 for a folder that is no run directory.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from horovod_train.commands.explain.command import explain
from horovod_train.commands.tables import open_screen
from horovod_train.commands.watch.follow import Follower
from horovod_train.commands.watch.screen import draw, news
from horovod_train.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the output_dir of a run")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="pause between looks; default: 2")
    parser.add_argument("--once", action="store_true", help="look once, and end")


def run(arguments: argparse.Namespace) -> int:
    if not 0.1 <= arguments.every <= 3600:
        raise UserError(f"--every: expected 0.1 to 3600 seconds; received {arguments.every:g}.")
    follower, screen = Follower(Path(arguments.run_dir)), open_screen()
    try:
        if arguments.once:
            screen.print(draw(follower.look()))
        elif screen.is_terminal:
            _redraw(follower, screen, arguments.every)
        else:
            _append(follower, screen, arguments.every)
    except KeyboardInterrupt:  # how one stops looking
        return 0
    if not follower.last.is_over:
        return 0
    explanation = explain(Path(arguments.run_dir), watch_s=0.0)
    screen.print(*explanation.lines(), sep="\n", markup=False)
    return 0 if explanation.state == "finished" else 1


def _redraw(follower: Follower, screen: Console, every_s: float) -> None:
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            live.update(draw(follower.look()), refresh=True)
            if follower.last.is_over:
                return
            time.sleep(every_s)


def _append(follower: Follower, screen: Console, every_s: float) -> None:
    before = None
    while True:
        now = follower.look()
        for line in news(before, now):
            screen.print(line, markup=False)
        if now.is_over:
            return
        before = now
        time.sleep(every_s)
