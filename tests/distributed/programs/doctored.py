"""Doctor's checks on real ranks where something is wrong: nothing is averaged, folders and configs are apart."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import horovod.tensorflow.keras as stock
import pytest
from facts import leave

from horovod_train.commands import doctor_checks
from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig
from horovod_train.distributed.horovod_info import clock_offsets_s
from horovod_train.distributed.start import start

group = start(HorovodConfig(), DeviceConfig())
own_folder = Path(sys.argv[1]) / f"own-{group.rank}"
own_folder.mkdir()
doctor_checks.VISIBLE_WITHIN_S = 2.0

found = {
    "right": doctor_checks.check_averaging(group),
    "shared": doctor_checks.check_file_system(group, Path(sys.argv[1])),
    "apart": doctor_checks.check_file_system(group, own_folder),
    "nowhere": doctor_checks.check_file_system(group, Path("/nowhere")),
    "clocks": doctor_checks.judge_clocks(clock_offsets_s(group), group.hosts),
    "config": doctor_checks.check_same(group, Config(seed=group.rank)),
    "threads": doctor_checks.check_threads(group),
}
pytest.MonkeyPatch().setattr(doctor_checks, "_distributed", stock.DistributedOptimizer)
found["stock"] = doctor_checks.check_averaging(group)
shown = {name: [finding.level, finding.text] for name, finding in found.items()}
left = sorted(path.name for path in Path(sys.argv[1]).glob(".doctor*"))
settings = {setting.name: [setting.value, os.environ[setting.name]] for setting in group.settings}
leave(group.rank, {"found": shown, "left": left, "settings": settings})
group.close()
