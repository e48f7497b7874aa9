"""Trains in one process by `train`, trains on from there, and evaluates: trained_twice.py OUT CONFIG."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import yaml

import horovod_train
from horovod_train.main import main

out, path = sys.argv[1:]
before = dict(os.environ)
config = yaml.safe_load(Path(path).read_text()) | {"output_dir": f"{out}/run"}
found = []
for epochs in (1, 2):
    summary, model = horovod_train.train(config, f"train.epochs={epochs}")
    assert model is not None
    found.append({"steps": summary["steps"], "weights": float(sum(abs(w.numpy()).sum() for w in model.weights))})
changed = {*before.items()} ^ {*os.environ.items()}
left = sorted(name for name, _ in changed if name.startswith("HOROVOD"))
evaluated = main(["evaluate", f"{out}/run"])
Path(out, "found.json").write_text(json.dumps({"runs": found, "left": left, "evaluated": evaluated}))
