"""Runs with hooks of the user's own, all in one process on each rank: hooked.py OUT."""

from __future__ import annotations

import json
import signal
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


def called_back(name: str, callbacks: list[Any], *words: str) -> dict[str, Any]:
    """The same for Keras callbacks, in a run of 4 epochs of 5 steps with an evaluation after each."""
    user_callbacks.told.clear()
    keras.utils.clear_session()
    given = [f"callbacks={json.dumps(callbacks)}", f"data.eval={OUT / 'data'}", f"train.max_steps={5 * EPOCHS}", *words]
    code = main.main(["--config", str(CONFIG), *given, "--output-dir", str(OUT / name)])
    summary = json.loads((OUT / name / "summary.json").read_text()) if RANK == 0 and code in (0, 75) else {}
    told = {key: summary.get(key) for key in ("steps", "ended", "weights_sha256", "train", "eval")}
    return {"code": code, "told": list(user_callbacks.told), **told}


def resumed(name: str, callbacks: list[Any], *words: str) -> dict[str, Any]:
    """Of a run that is started twice, because something stops it."""
    first = called_back(name, callbacks, *words)
    return {"stopped": first["told"], "first_code": first["code"], **called_back(name, callbacks, *words)}


if __name__ == "__main__":
    facts = {
        "without": run("without"),
        "noted": run("noted", "note", "note_every_5"),
        "stopped": run("stopped", "stop_at_6", "note", trackers=TRACKERS),
        "resumed": run("stopped", "stop_at_6", "note", trackers=TRACKERS, timeline=True),
        "tracked": tracked(OUT / "stopped"),
    }
    signal.alarm(0)  # which ends a process that is still there some seconds after its run has failed
    leave(RANK, facts)
