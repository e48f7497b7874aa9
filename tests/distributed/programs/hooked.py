"""Runs with hooks of the user's own, all in one process on each rank: hooked.py OUT."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import keras
import user_callbacks
import user_hooks
from facts import leave
from small_run import config_of

from horovod_train import main
from horovod_train.distributed.launch import launcher

OUT = Path(sys.argv[1])
RANK = launcher.detect().rank
CONFIG = config_of(
    OUT,
    RANK == 0,
    num_records=40,
    train={"max_steps": 12},
    deterministic=True,
    log={"tensorboard": False, "progress": "plain", "every_steps": 4},
)

TRACKERS = ("csv", "user_trackers:Noted")


def run(name: str, *hooks: str, trackers: tuple[str, ...] = (), timeline: bool = False) -> dict[str, Any]:
    """What this rank saw of a run of 12 steps, and what its summary says. timeline: Horovod writes one in a process."""
    keras.utils.clear_session()  # names as in a process of its own
    user_hooks.called.clear()
    words = [f"log.trackers={json.dumps(trackers)}", f"horovod.timeline={json.dumps(timeline)}"]
    words += [f"hooks={json.dumps([f'user_hooks:{hook}' for hook in hooks])}", "--output-dir", str(OUT / name)]
    code = main.main(["--config", str(CONFIG), *words])
    summary = json.loads((OUT / name / "summary.json").read_text()) if RANK == 0 else {}
    told = {key: summary.get(key) for key in ("steps", "ended", "weights_sha256")}
    return {"code": code, "called": list(user_hooks.called), **told}


def tracked(run_dir: Path) -> dict[str, Any]:
    """What the trackers of a run have, on root."""
    if RANK:
        return {}
    found = [json.loads(line) for line in (run_dir / "calls.jsonl").read_text().splitlines()]
    steps = [line.split(",")[0] for line in (run_dir / "csv" / "train.csv").read_text().splitlines()]
    timelines = [json.loads(path.read_text()) for path in (run_dir / "timeline").iterdir()]
    return {"calls": found, "csv": steps, "timelines": timelines, "untracked": (OUT / "without" / "timeline").exists()}


EPOCHS = 4
PLATEAU = {"name": "ReduceLROnPlateau", "options": {"factor": 0.1, "patience": 1, "min_delta": 10.0}}


def called_back(name: str, callbacks: list[Any], *words: str) -> dict[str, Any]:
    """The same for Keras callbacks, in a run of 4 epochs of 5 steps with an evaluation after each."""
    user_callbacks.told.clear()
    keras.utils.clear_session()
    given = [f"callbacks={json.dumps(callbacks)}", f"data.eval={OUT / 'data'}", f"train.max_steps={5 * EPOCHS}", *words]
    code = main.main(["--config", str(CONFIG), *given, "--output-dir", str(OUT / name)])
    summary = json.loads((OUT / name / "summary.json").read_text()) if RANK == 0 and code in (0, 75) else {}
    told = {key: summary.get(key) for key in ("steps", "ended", "weights_sha256", "train", "eval")}
    return {"code": code, "told": list(user_callbacks.told), **told}


def resumed(name: str, callbacks: list[Any], *words: str, stop: str = "stop_at_12") -> dict[str, Any]:
    """Of a run that was stopped after 12 steps, in its third epoch, or where `stop` says."""
    words += (f'hooks=["user_hooks:{stop}"]',)
    first = called_back(name, callbacks, *words)
    return {"stopped": first["told"], **called_back(name, callbacks, *words)}


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
leave(
    RANK,
    {
        "without": run("without"),
        "noted": run("noted", "note", "note_every_5"),
        "stopped": run("stopped", "stop_at_6", "note", trackers=TRACKERS),
        "resumed": run("stopped", "stop_at_6", "note", trackers=TRACKERS, timeline=True),
        "tracked": tracked(OUT / "stopped"),
        "called back": called_back("called back", [PLATEAU, "user_callbacks:Recorder"]),
        "resumed, called back": resumed("resumed, called back", [PLATEAU, "user_callbacks:Recorder"]),
        "stopped by one": called_back("by one", [{"name": "user_callbacks:StopsRank1", "options": {"after": 7}}]),
        "averaged": called_back("averaged", SWAPPING, *AVERAGED, OPTIMIZER + "}}"),
        "averaged, resumed": resumed("averaged, resumed", SWAPPING, *AVERAGED, OPTIMIZER + "}}", stop="stop_at_10"),
        "overwritten": called_back("overwritten", [NOTES], *AVERAGED, OPTIMIZER + ", ema_overwrite_frequency: 3}}"),
        "mean": called_back("mean", MEAN, *CYCLICAL),
        "mean, resumed": resumed("mean, resumed", MEAN, *CYCLICAL),
        "runs": str(OUT),
        "apart": called_back("apart", ["user_callbacks:KnowsItsRank"]),
    },
)
