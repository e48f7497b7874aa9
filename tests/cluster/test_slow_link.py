"""A run over a slow link says that the exchange limits it, and no rank."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import summary_of
from jobs import TRAIN, asked_for, launch, submit
from virtual_cluster import VirtualCluster

pytestmark = pytest.mark.exhaustive

CONFIG = """
data: {train: TRAIN, batch_size_per_rank: 16}
model: {name: "user_slow:digits", options: {seconds: 0.1}}
loss: {name: sparse_categorical_crossentropy, options: {from_logits: true}}
train: {max_steps: 60, steps_per_call: 2}
checkpoint: {every_epochs: null}
log: {every_steps: 20, tensorboard: false, progress: plain}
"""


@pytest.mark.parametrize(("rate", "verdict"), [("3mbit", "exchange-bound"), (None, "compute-bound")])
def test_a_slow_link_is_told_from_a_slow_rank(
    cluster: VirtualCluster, digits: Path, tmp_path: Path, rate: str | None, verdict: str
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG.replace("TRAIN", str(digits / "train")))
    words = [*TRAIN, "--config", str(tmp_path / "c.yaml"), "--output-dir", str(tmp_path / "run")]
    layout = (1, 1, 1)
    with cluster.slow("n2", rate) if rate else nullcontext():
        script = f"{launch('srun', layout)} {shlex.join(words)}"
        job = submit(cluster, asked_for(layout), tmp_path / "out", script=script)
        assert job.wait(300) == ("COMPLETED", 0), job.said()
    assert summary_of(tmp_path / "run")["steps"] == 60
    times = [json.loads(line) for line in (tmp_path / "run" / "times.jsonl").read_text().splitlines()]
    assert Counter(row["verdict"] for row in times).most_common(1)[0][0] == verdict, times
