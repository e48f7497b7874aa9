"""Runs that launch starts again when a rank is lost; ranks that meet by the variables of launchers like torchrun."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from conftest import (
    HANGS_AFTER_S,
    PROJECT,
    launcher_command,
    rank_environment,
    run_process,
    started,
    summary_of,
    without_tensorflow,
)

from horovod_train.checkpoint.layout import CHECKPOINTS, steps_in
from horovod_train.data.audit import audit

CONFIG = """
data: {{train: {data}/train, global_batch_size: 96, audit: true}}
model: user_models:long_run
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
optimizer: adam
lr_schedule: {{base_lr: 0.01, decay: {{name: cosine}}}}
train: {{epochs: {epochs}, steps_per_call: 5}}
log: {{every_steps: 15, tensorboard: false}}
eval: {{every_epochs: null}}
checkpoint: {{every_steps: 20, every_epochs: null}}
"""


@pytest.fixture(scope="session")
def config(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "launched.yaml"
    path.write_text(CONFIG.format(data=digits, epochs=20))
    return path


def launch_command(way: str, config: Path, out: Path) -> list[str]:
    words = ["-np", "2", "--over", way, "--", "--config", str(config), "--output-dir", str(out)]
    return [sys.executable, "-m", "horovod_train.main", "launch", *words]


@pytest.fixture(scope="session")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finished = run_process(launch_command("gloo", config, out))
    assert finished.returncode == 0, finished.text
    assert finished.stderr.count("launch: start ") == 1
    return str(summary_of(out)["weights_sha256"])


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + HANGS_AFTER_S
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)


def is_past(out: Path, step: int) -> bool:
    return any(saved >= step for saved in steps_in(out / CHECKPOINTS))


def assert_they_end(ranks: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(ranks, timeout=HANGS_AFTER_S)
    for rank in alive:
        rank.kill()
    assert not alive


def process_of(out: Path, rank: int) -> psutil.Process:
    log = (out / "logs" / f"rank-{rank}.log").read_text()
    return psutil.Process(int(re.findall(r", process (\d+) on ", log)[-1]))


@pytest.mark.long
@pytest.mark.parametrize(("way", "rank"), [("gloo", 1), pytest.param("mpi", 0, marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_costs_no_bit_of_the_result(
    config: Path, undisturbed: str, tmp_path: Path, way: str, rank: int
) -> None:
    out = tmp_path / "run"
    command = launch_command(way, config, out)
    with started(command, stderr=subprocess.PIPE) as process:
        wait_until(lambda: is_past(out, 80), process)
        process_of(out, rank).kill()
        _, errors = process.communicate(timeout=HANGS_AFTER_S)
    assert process.returncode == 0, errors
    assert re.search(rf"launch: {'rank 1' if way == 'gloo' else 'a rank'} was killed by SIGKILL, after \d+ s\n", errors)
    assert re.search(r"launch: start 2 of at most 11: 2 rank\(s\); newest checkpoint: step \d+0\n", errors)
    assert errors.count("launch: start ") == 2
    assert summary_of(out)["weights_sha256"] == undisturbed
    assert [(each.is_whole, each.missing, each.twice) for each in audit(str(out))] == [(True, [], [])] * 20


def start_command(start: str, config: Path, out: Path) -> list[str]:
    if start == "launch":
        return launch_command("gloo", config, out)
    program = [sys.executable, "-m", "horovod_train.main", "--config", str(config), "--output-dir", str(out)]
    return [*launcher_command(start, 2), *program]


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", ["srun", "launch", "horovodrun"])
def test_a_launcher_that_is_killed_leaves_a_saved_run(
    config: Path, undisturbed: str, tmp_path: Path, start: str
) -> None:
    out = tmp_path / "run"
    command = start_command(start, config, out)
    with started(command, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: is_past(out, 40), process)
        ranks = [process_of(out, rank) for rank in (0, 1)]
        process.kill()
        process.wait()  # or the end of the block, which kills what still runs, would take the ranks too
    assert_they_end(ranks)
    assert json.loads((out / "logs" / "rank-0.end.json").read_text())["exit_code"] == 75
    assert ("the launcher of this rank has ended" in (out / "logs" / "rank-0.log").read_text()) == (start == "srun")
    finished = run_process(command)
    assert finished.returncode == 0, finished.text
    assert summary_of(out)["weights_sha256"] == undisturbed


ENDLESS = """
import os, sys, time
import horovod_train.keras as hvd
import tensorflow as tf
hvd.init()
hvd.broadcast_variables([tf.Variable(1.0)], root_rank=0)
print(os.getpid(), flush=True)
while True:
    hvd.allreduce(tf.ones(1), name="again")
    time.sleep(0.01)
"""


@pytest.mark.exhaustive
def test_a_script_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    command = [*launcher_command("srun", 2), sys.executable, str(script)]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
        process.wait()  # or the end of the block, which kills what still runs, would take the ranks too
    assert_they_end(ranks)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def tf_config(rank: int, port: int) -> dict[str, str]:
    cluster = {"chief": [f"localhost:{port}"], "worker": [f"localhost:{port + 1}"]}
    task = {"type": "worker" if rank else "chief", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def torchrun(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def indexed_job(rank: int, port: int) -> dict[str, str]:
    """Two pods on this host, which has one address."""
    return {
        "JOB_COMPLETION_INDEX": str(rank),
        "HOROVOD_TRAIN_SIZE": "2",
        "HOROVOD_TRAIN_ROOT": socket.gethostname(),
        "HOROVOD_TRAIN_PORT": str(port),
        "HOROVOD_TRAIN_TOKEN": "a secret of these pods",
    }


Convention = Callable[[int, int], Mapping[str, str]]


def end_of_ranks(convention: Convention, words: list[str], environment: Mapping[str, str]) -> list[tuple[int, str]]:
    """Exit code and output of two ranks."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "horovod_train.main", *words],
            cwd=PROJECT,
            env={**environment, **convention(rank, port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=HANGS_AFTER_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize(
    ("convention", "launcher"),
    [
        pytest.param(torchrun, "torchrun", id="torchrun", marks=pytest.mark.long),
        pytest.param(tf_config, "tf-config", id="tf-config", marks=pytest.mark.exhaustive),
        pytest.param(indexed_job, "indexed-job", id="indexed-job", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_train_together_under_other_launchers(
    digits: Path, tmp_path: Path, convention: Convention, launcher: str
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG.format(data=digits, epochs=1))
    words = ["--config", str(tmp_path / "c.yaml"), "--output-dir", str(tmp_path / "run")]
    ends = end_of_ranks(convention, words, rank_environment())
    assert [code for code, _ in ends] == [0, 0], ends
    assert f"2 rank(s) on 1 host(s), launcher {launcher}, exchange over gloo" in ends[0][1]


@pytest.mark.long
def test_ranks_with_different_secrets_do_not_meet(digits: Path, tmp_path: Path) -> None:
    def secrets(rank: int, port: int) -> dict[str, str]:
        words = {"HOROVOD_TRAIN_TOKEN": f"secret {rank}", "HOROVOD_START_TIMEOUT": "2"}
        return {**indexed_job(rank, port), **words}

    (tmp_path / "c.yaml").write_text(CONFIG.format(data=digits, epochs=1))
    words = ["--config", str(tmp_path / "c.yaml"), "--output-dir", str(tmp_path / "run")]
    (root_code, root_says), (code, says) = end_of_ranks(secrets, words, rank_environment())
    assert root_code
    assert code
    assert "1 of 2 ranks have not reached" in root_says
    assert "whether HOROVOD_TRAIN_TOKEN is the same for all ranks" in says
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.long
def test_evaluators_and_ranks_without_a_secret_are_refused_in_one_line(tmp_path: Path) -> None:
    def evaluator(rank: int, port: int) -> dict[str, str]:
        cluster = {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]}
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})}

    def without(rank: int, port: int) -> dict[str, str]:
        return {**indexed_job(rank, port), "HOROVOD_TRAIN_TOKEN": ""}

    words = ["--config", "configs/digits_convnet.yaml", "--output-dir", str(tmp_path / "run")]
    for convention, message in ((evaluator, "a task of type evaluator"), (without, "need a secret to know each other")):
        for code, output in end_of_ranks(convention, words, without_tensorflow(tmp_path)):
            (line,) = output.splitlines()
            assert (code, message in line) == (2, True), output


CLONES = """
import json, os, sys
from horovod_train import host
rank = int(os.environ["HOROVOD_TRAIN_RANK"])
del os.environ["HOROVOD_TRAIN_LOCAL_RANK"]
host.boot_id = lambda: f"boot {rank // 2}"  # before others import it
from horovod_train.distributed.start import start
import horovod.tensorflow as hvd
import tensorflow as tf
group = start()
facts = {
    "hosts": group.hosts,
    "place": [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
    "sum": float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="sum")),
}
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(facts, file)
"""


@pytest.mark.exhaustive
def test_ranks_of_hosts_with_one_name_meet(tmp_path: Path) -> None:
    """Cloned machines: ranks of one would take those of the other for their own."""
    (tmp_path / "clones.py").write_text(CLONES)
    words = [
        "-np",
        "4",
        "--over",
        "gloo",
        "--max-restarts",
        "0",
        "--",
        sys.executable,
        tmp_path / "clones.py",
        tmp_path,
    ]
    environment = rank_environment() | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
    command = [sys.executable, "-m", "horovod_train.main", "launch", *map(str, words)]
    finished = run_process(command, environment=environment)
    assert finished.returncode == 0, finished.text
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    name = socket.gethostname()
    assert all(each["hosts"] == [f"{name}-1"] * 2 + [f"{name}-2"] * 2 for each in facts)
    assert [each["place"] for each in facts] == [[0, 2, 0, 2], [1, 2, 0, 2], [0, 2, 1, 2], [1, 2, 1, 2]]
    assert [each["sum"] for each in facts] == [4.0] * 4


AGAIN = """
import json, os, sys
import keras
import horovod_train.tensorflow as hvd
import tensorflow as tf
sums, said = [], []
for times in range(3):
    some = hvd.ProcessSet([times, (times + 1) % 3])
    is_static = sys.argv[2] == "static"
    hvd.init(process_sets=[some] if is_static else "dynamic")
    if not is_static:
        hvd.add_process_set(some)
    if times:
        try:
            hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=before)
        except Exception as error:
            said.append(str(error))
    variable = tf.Variable(1.0)

    @tf.function
    def gradient():
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, process_set=some) as tape:
            loss = variable * (1.0 + hvd.rank())
        return tape.gradient(loss, variable)

    sums.append([float(gradient()), float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="sum"))])
    hvd.shutdown()
    before = some
with open(f"{sys.argv[1]}/{os.environ['HOROVOD_TRAIN_RANK']}.json", "w") as file:
    json.dump([sums, said], file)
"""


@pytest.mark.long
@pytest.mark.parametrize("sets", ["static", pytest.param("dynamic", marks=pytest.mark.exhaustive)])
def test_ranks_that_shut_horovod_down_meet_again_in_other_process_sets(tmp_path: Path, sets: str) -> None:
    """All sets have the same id in turn, and a rank that was in none before has numbered nothing."""
    (tmp_path / "again.py").write_text(AGAIN)
    words = ["-np", "3", "--over", "gloo", "--max-restarts", "0", "--", sys.executable, tmp_path / "again.py", tmp_path]
    environment = rank_environment() | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
    command = [sys.executable, "-m", "horovod_train.main", "launch", *map(str, words), sets]
    finished = run_process(command, environment=environment)
    assert finished.returncode == 0, finished.text
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    gradients = [[3.0, 1.0, 4.0], [3.0, 5.0, 2.0], [3.0, 5.0, 4.0]]
    assert [[total for total, _ in sums] for sums, _ in found] == gradients
    assert all(everywhere == 3.0 for sums, _ in found for _, everywhere in sums)
    unknown = "DistributedOptimizer: Horovod does not know this process set. Give hvd.init(process_sets=[...]) it."
    assert [said for _, said in found] == [[unknown] * 2] * 3
