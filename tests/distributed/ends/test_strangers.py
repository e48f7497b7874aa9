"""A run whose ports strangers besiege, from before its ranks meet until its end, trains as if it were alone.

`make test` has the quick part, on the same servers in one process: test_transport.py and test_rendezvous.py in
tests/unit/distributed/.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import PROJECT, launcher_command, rank_environment, summary_of, train
from strangers import Siege
from test_misstarts import job_with_free_ports

MESSAGES, IDLE = 10_000, 500
CONFIG = """
data: {{train: {data}/train, global_batch_size: 96}}
model: image_mlp
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
optimizer: sgd
train: {{max_steps: {steps}, steps_per_call: 5}}
log: {{tensorboard: false}}
checkpoint: {{every_epochs: null}}
"""


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 240) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until or process.poll() is not None:
            process.kill()
            pytest.fail(f"not so within {timeout_s} s, or ended before:\n{process.communicate()[1][-3000:]}")
        time.sleep(0.05)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def rows_of(run_dir: Path) -> int:
    """How many lines of metrics a run has written."""
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["srun", "torchrun"])
def test_a_besieged_run_trains_as_if_it_were_alone(digits: Path, tmp_path: Path, way: str) -> None:
    """Both servers of ours are up, one until the ranks have met, one from then on."""
    config, run_dir = tmp_path / "config.yaml", tmp_path / "besieged"
    config.write_text(CONFIG.format(data=digits, steps=10_000_000))
    job, port, _ = job_with_free_ports()
    environment = rank_environment() | {"SLURM_JOB_ID": job, "HOROVOD_TRAIN_TOKEN": "a secret of these ranks"}
    program = [sys.executable, "-m", "horovod_train.main", "--config", str(config), "--output-dir", str(run_dir)]
    as_srun = launcher_command("srun", 2)[:-1]
    if way == "torchrun":
        environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with ExitStack() as stack:

        def start(rank: int) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*as_srun, str(rank), "--", *program] if way == "srun" else program,
                cwd=PROJECT,
                env=environment if way == "srun" else {**environment, "RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.terminate)
            return process

        root = start(0)
        wait_until(lambda: answers(port), root)
        rendezvous = stack.enter_context(Siege("127.0.0.1", port, IDLE))
        rendezvous.send(MESSAGES)
        other = start(1)

        wait_until(lambda: rows_of(run_dir) > 0, root)
        listens = re.search(r" watch listens at ([\d.]+):(\d+)", (run_dir / "logs" / "rank-0.log").read_text())
        assert listens is not None
        watch = stack.enter_context(Siege(listens[1], int(listens[2]), IDLE))
        watch.send(MESSAGES)
        before = rows_of(run_dir)
        wait_until(lambda: rows_of(run_dir) > before, root)
        (run_dir / "STOP").touch()
        said = [process.communicate(timeout=120)[1] for process in (root, other)]
        assert [root.returncode, other.returncode] == [76, 76], said
    assert "warning" not in "".join(said)
    assert "Traceback" not in "".join(said)

    besieged = summary_of(run_dir)
    config.write_text(CONFIG.format(data=digits, steps=besieged["steps"]))
    finished = train(
        ["--config", config, "--output-dir", tmp_path / "alone"], launcher="horovodrun", np=2, timeout_s=400
    )
    assert finished.returncode == 0, finished.text
    print(json.dumps({"steps": besieged["steps"], "rendezvous": rendezvous.counts, "watch": watch.counts}))
    for siege in (rendezvous, watch):
        assert siege.counts["quick"] + siege.counts["slow"] == MESSAGES
    assert besieged["weights_sha256"] == summary_of(tmp_path / "alone")["weights_sha256"]
