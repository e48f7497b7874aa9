"""Trains in one process by `train`, trains on from there, starts the end again, and evaluates.

trained_twice.py OUT CONFIG
"""

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
files = [Path(out, "run", name) for name in ("config.yaml", "summary.json")]
written = [file.read_bytes() for file in files]
horovod_train.train(config, "train.epochs=2", "train.l2=0.1")
kept = [file.name for file, content in zip(files, written, strict=True) if file.read_bytes() == content]
changed = {*before.items()} ^ {*os.environ.items()}
left = sorted(name for name, _ in changed if name.startswith("HOROVOD"))
evaluated = main(["evaluate", f"{out}/run"])
Path(out, "found.json").write_text(json.dumps({"runs": found, "left": left, "kept": kept, "evaluated": evaluated}))
