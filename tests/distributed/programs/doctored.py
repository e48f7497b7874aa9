"""Doctor's checks on real ranks where something is wrong: nothing is averaged, folders and configs are apart."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import horovod.tensorflow.keras as stock
import pytest
from facts import leave

from horovod_train.commands.doctor import machine, ranks
from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig
from horovod_train.distributed.start import start

group = start(HorovodConfig(), DeviceConfig())
own_folder = Path(sys.argv[1]) / f"own-{group.rank}"
own_folder.mkdir()
machine.VISIBLE_WITHIN_S = 2.0

found = {
    "right": ranks.check_averaging(group),
    "shared": machine.check_file_system(group, Path(sys.argv[1])),
    "apart": machine.check_file_system(group, own_folder),
    "nowhere": machine.check_file_system(group, Path("/nowhere")),
    "clocks": machine.check_clocks(group),
    "config": machine.check_versions(group, Config(seed=group.rank))[-1],
    "threads": ranks.check_threads(group),
}
pytest.MonkeyPatch().setattr(ranks, "DistributedOptimizer", stock.DistributedOptimizer)
found["stock"] = ranks.check_averaging(group)
shown = {name: [finding.level, finding.text] for name, finding in found.items()}
left = sorted(path.name for path in Path(sys.argv[1]).glob(".doctor*"))
settings = {setting.name: [setting.value, os.environ[setting.name]] for setting in group.settings}
leave(group.rank, {"found": shown, "left": left, "settings": settings})
group.close()
