"""What a rank of plain srun finds when all have met, and what stays of it afterwards."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from facts import leave

from horovod_train.distributed.launch import launcher, rendezvous
from horovod_train.errors import RunError

place = launcher.detect()
assert place.step is not None
facts: dict[str, object] = {}
try:
    with rendezvous.open_rendezvous(place.step):
        facts["inside"] = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
        if place.rank == 0:  # its server stays until the others have seen that all are here
            others = [Path(sys.argv[1]) / f"rank-{rank}.json" for rank in range(1, place.size)]
            while not all(path.exists() for path in others):
                time.sleep(0.01)
    facts["launcher_after"] = launcher.read_launch(os.environ).launcher
except RunError as error:
    facts["error"], facts["exit_code"] = str(error), error.exit_code
leave(place.rank, facts)
