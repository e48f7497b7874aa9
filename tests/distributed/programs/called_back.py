"""Runs with Keras callbacks, all in one process on each rank: called_back.py OUT."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

from facts import leave
from hooked import OUT, RANK, called_back, resumed, run

PLATEAU = {"name": "ReduceLROnPlateau", "options": {"factor": 0.1, "patience": 1, "min_delta": 10.0}}
STOPPED = 'hooks=["user_hooks:stop_at_12"]'
"""After 12 steps, in the third epoch."""

LOCAL = ("train.synchronization=local", "train.average_every_steps=3")
AVERAGED = ("data.shuffle=false", "model=user_models:vector", "lr_schedule.base_lr=0.3")
OPTIMIZER = "optimizer={name: sgd, options: {momentum: 0.9, use_ema: true, ema_momentum: 0.8"
NOTES = "user_callbacks:NotesWeights"
SWAPPING = [{"name": "keras.callbacks:SwapEMAWeights", "options": {"swap_on_epoch": True}}, NOTES]
MEAN = [NOTES, {"name": "documented:StochasticAverage", "options": {"first": 2}}]
CYCLICAL = (*AVERAGED, "optimizer=sgd", "lr_schedule.decay=documented:cyclical")


def write_documented(folder: Path) -> None:
    """Make a module `documented` of what docs/models.md shows for SWA."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    (shown,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "StochasticAverage" in block]
    folder.mkdir()
    (folder / "documented.py").write_text(f"import keras\nimport numpy as np\n\n\n{shown}")
    sys.path.insert(0, str(folder))


write_documented(OUT / f"documented-{RANK}")
facts = {
    "called back": called_back("called back", [PLATEAU, "user_callbacks:Recorder"]),
    "resumed, called back": resumed("resumed, called back", [PLATEAU, "user_callbacks:Recorder"], STOPPED),
    "stopped by one": called_back("by one", [{"name": "user_callbacks:StopsRank1", "options": {"after": 7}}]),
    "averaged": called_back("averaged", SWAPPING, *AVERAGED, OPTIMIZER + "}}"),
    "averaged, resumed": resumed(
        "averaged, resumed", SWAPPING, *AVERAGED, OPTIMIZER + "}}", 'hooks=["user_hooks:stop_at_10"]'
    ),
    "overwritten": called_back("overwritten", [NOTES], *AVERAGED, OPTIMIZER + ", ema_overwrite_frequency: 3}}"),
    "mean": called_back("mean", MEAN, *CYCLICAL),
    "mean, resumed": resumed("mean, resumed", MEAN, *CYCLICAL, STOPPED),
    "mean, local": called_back("mean, local", MEAN, *CYCLICAL, *LOCAL, "data.eval=[]"),
    "local": called_back("local", [], *LOCAL),
    "local, resumed": resumed("local, resumed", [], *LOCAL, 'hooks=["user_hooks:stop_at_17"]'),
    "ended": run("ended", "enough_at_6", "note"),
    "ended before": run("ended", "enough_at_6", "note"),
    "runs": str(OUT),
    "apart": called_back("apart", ["user_callbacks:KnowsItsRank"]),
}
signal.alarm(0)  # see hooked
leave(RANK, facts)
