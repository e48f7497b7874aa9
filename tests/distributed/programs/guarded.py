"""One rank that nobody launched, under watch, without Horovod: guarded.py OUT RANK SIZE WARN_S STOP_S.

Its main thread makes progress until there is a file `stand-still` in OUT; then it waits, as in an exchange. The ranks
find each other through a file in OUT.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.watchdog.heartbeat import Heartbeat
from horovod_train.distributed.watchdog.transport import Address, Server, connect
from horovod_train.distributed.watchdog.watch_thread import Coordinator, Watch, WatchThread, Worker
from horovod_train.output import logs, rank_log
from horovod_train.output.console import to_stderr


@dataclass(frozen=True)
class Group:
    """What the watch asks of a WorkerGroup."""

    rank: int
    size: int
    launcher: str = "none"
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def hosts(self) -> list[str]:
        return ["here"] * self.size

    def name(self, rank: int) -> str:
        return f"rank {rank} (here)"


out, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
limits = WatchConfig(
    warn_after_s=float(sys.argv[4]), stop_after_s=float(sys.argv[5]), first_step_after_s=float(sys.argv[5])
)
group: Any = Group(rank, size)
meeting_point = out / "address"
watch: Watch

if rank == 0:
    rank_log.make_folder(out)
    server = Server("127.0.0.1", size)
    log = rank_log.open_rank_log(out, rank, "here", start_text=rank_log.introduction(rank, size, "none", "here"))
    watch = Coordinator(group, log, limits, server)
    meeting_point.with_suffix(".new").write_text(" ".join(map(str, server.address)))
    meeting_point.with_suffix(".new").rename(meeting_point)
else:
    while not meeting_point.exists():
        time.sleep(0.05)
    host, port, token = meeting_point.read_text().split()
    connection = connect(Address(host, int(port), token), rank, 300.0)
    log = rank_log.open_rank_log(out, rank, "here", start_text=rank_log.introduction(rank, size, "none", "here"))
    watch = Worker(group, log, limits, connection)
with logs.to_console(rank == 0, show=to_stderr), logs.to_file(log.write):
    WatchThread(watch).start()
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    while not (out / "stand-still").exists():
        group.heartbeat.phase("exchange")
        time.sleep(0.02)
    time.sleep(600)
