"""The command launch over virtual hosts: lost ranks and hosts, pods of a Kubernetes manifest, other conventions.

KILLS=20 sets the number of kills of the campaign.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from conftest import BIN, PROJECT, run_process, summary_of
from jobs import TRAIN, Table, job_environment
from virtual_cluster import HEAD, VirtualCluster

from horovod_train.checkpoint.layout import CHECKPOINTS, steps_in
from horovod_train.data.audit import audit

pytestmark = pytest.mark.cluster

KILLS = int(os.environ.get("KILLS", "6"))
SAVED_EVERY = 50
CONFIG = """
data: {{train: {data}/train, global_batch_size: 96, audit: true}}
model: {{name: user_models:long_run, options: {{seconds: 0}}}}
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
optimizer: adam
lr_schedule: {{base_lr: 0.01, decay: {{name: cosine}}}}
deterministic: true
device: {{intra_op_threads: 1, inter_op_threads: 1}}
train: {{max_steps: {steps}}}
eval: {{every_epochs: null}}
checkpoint: {{every_steps: 50, every_epochs: null}}
log: {{every_steps: 10, tensorboard: false}}
"""


@pytest.fixture(scope="session")
def config(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "hosts.yaml"
    path.write_text(CONFIG.format(data=digits, steps=300))
    return path


class Running:
    """A program on a host, which says what it does in a file."""

    def __init__(
        self, cluster: VirtualCluster, host: str, words: Sequence[str], said: Path, environment: dict[str, str]
    ) -> None:
        self._said = said
        with said.open("ab") as out:
            self.process = subprocess.Popen(
                cluster.command(host, words, PROJECT),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def has_said(self, pattern: str, seen: int = 0) -> bool:
        """Whether there is such a line after the first `seen` characters."""
        return re.search(pattern, self.said()[seen:]) is not None

    def wait(self, timeout_s: float = 240) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not ended within {timeout_s} s:\n{self.said()[-6000:]}")

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 120) -> float:
        """Returns the seconds that it took."""
        began = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() > began + timeout_s:
                pytest.fail(f"{what}: exit code {self.process.poll()}\n{self.said()[-6000:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self) -> None:
        """With whatever it has started on its host."""
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid)
            for process in [*tree.children(recursive=True), tree]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


@contextlib.contextmanager
def launched(cluster: VirtualCluster, tmp_path: Path, *words: str) -> Iterator[Running]:
    """A launch on the head of the cluster."""
    running = Running(cluster, HEAD, [*TRAIN, "launch", *words], tmp_path / "said", job_environment())
    try:
        yield running
    finally:
        running.end()
        for host in cluster.hosts:
            cluster.mend(host)
            for rank in cluster.ranks(host):
                rank.kill()


def training(config: Path, out: Path) -> list[str]:
    return ["--", "--config", str(config), "--output-dir", str(out)]


def newest(out: Path) -> int:
    return next(iter(steps_in(out / CHECKPOINTS)), 0)


def step_of(out: Path) -> int:
    """The last step in the metrics of a run, 0 before there is one."""
    rows = (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []
    return max((int(json.loads(row)["step"]) for row in rows[-1:] if row.endswith("}")), default=0)


def is_past(out: Path, step: int) -> bool:
    return step_of(out) >= step


def is_whole(out: Path) -> bool:
    return all((each.is_whole, each.missing, each.twice) == (True, [], []) for each in audit(str(out)))


@pytest.fixture(scope="session")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """np → weights_sha256 of a run of so many ranks on this host."""

    @functools.cache
    def train(np: int) -> str:
        out = tmp_path_factory.mktemp("undisturbed") / "run"
        finished = run_process([*TRAIN, "launch", "-np", str(np), "--over", "gloo", *training(config, out)])
        assert finished.returncode == 0, finished.text
        return str(summary_of(out)["weights_sha256"])

    return train


def test_a_lost_rank_and_a_lost_host_cost_no_bit(
    cluster: VirtualCluster, config: Path, undisturbed: Callable[[int], str], tmp_path: Path
) -> None:
    """The lost host's place is taken by another one that the discovery script names."""
    out, hosts = tmp_path / "run", tmp_path / "hosts"
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {shlex.quote(str(hosts))}\n")
    script.chmod(0o755)
    hosts.write_text("n1:1\nn2:1\n")
    words = ["-np", "2", "--host-discovery", str(script)]
    with launched(cluster, tmp_path, *words, *training(config, out)) as running:
        running.wait_until(lambda: newest(out) >= 100, "checkpoint of step 100")
        cluster.ranks("n2")[-1].kill()
        running.wait_until(lambda: "start 2 of" in running.said(), "second start")
        assert "launch: a rank on n2 was killed by SIGKILL" in running.said()
        running.wait_until(lambda: newest(out) >= 200, "checkpoint of step 200")
        hosts.write_text("n1:1\nn2:1\nn3:1\n")
        cluster.cut("n2")
        assert running.wait() == 0, running.said()
        lost = "launch: (n2 is lost: ssh does not reach it any more|a rank on n1 ended with exit code 87)"
        assert running.has_said(lost)  # whichever is noticed first
        assert "launch: n2 is left out, because it does not answer: " in running.said()
    assert summary_of(out)["weights_sha256"] == undisturbed(2)
    assert is_whole(out)


@pytest.mark.exhaustive
def test_a_signal_to_launch_saves_on_all_hosts(
    cluster: VirtualCluster, config: Path, undisturbed: Callable[[int], str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["-H", "n1:2,n2:2", *training(config, out)]
    with launched(cluster, tmp_path, *words) as running:
        running.wait_until(lambda: newest(out) >= 50, "checkpoint of step 50")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 75, running.said()
        assert "launch: stopped: asked by SIGTERM; the ranks have saved" in running.said()
        assert not [rank for host in cluster.hosts for rank in cluster.ranks(host)]
    with launched(cluster, tmp_path, *words) as running:
        assert running.wait() == 0, running.said()
    assert summary_of(out)["weights_sha256"] == undisturbed(4)


def test_a_host_that_never_answers_is_named_before_anything_starts(cluster: VirtualCluster, tmp_path: Path) -> None:
    cluster.cut("n3")
    with launched(cluster, tmp_path, "-H", "n1:1,n3:1", "--", "true") as running:
        assert running.wait() == 2
        assert "launch: n3 is left out, because it does not answer: ssh: connect to host n3" in running.said()
        assert "error: launch: the hosts that answer have room for 1 rank(s), and at least 2" in running.said()


def manifest(config: Path, out: Path, nodes: int, slots: int) -> list[dict[str, Any]]:
    words = ["kubernetes", "--config", str(config), "--output-dir", str(out), "--image", "tests", "--name", "pods"]
    words += ["--nodes", str(nodes), "--slots", str(slots), "--volume", f"claim:{out.parent}"]
    finished = run_process([*TRAIN, *words])
    assert finished.returncode == 0, finished.text
    return list(yaml.safe_load_all(finished.stdout))


def start_pod(cluster: VirtualCluster, manifests: list[dict[str, Any]], index: int, said: Path) -> Running:
    """Pod `index` on the host of this index, with the command, environment and files that the manifest gives it."""
    secret, config_map, service, job = manifests
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    environment = {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "PYTHONPATH": job_environment()["PYTHONPATH"],  # models of the tests, which an image would have
        "HOSTNAME": f"{job['metadata']['name']}-{index}",
        "JOB_COMPLETION_INDEX": str(index),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    for variable in container["env"]:
        reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
        environment[variable["name"]] = variable["value"] if not reference else secret["stringData"][reference["key"]]
    names = cluster.folder / "etc" / "hosts"
    name = f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert spec["subdomain"] == service["metadata"]["name"]
    if name not in names.read_text():
        with names.open("a") as file:
            file.write(f"10.77.0.1 {name}\n")
    (mount,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "config"]
    files = "".join(
        f"printf %s {shlex.quote(text)} > {shlex.quote(f'{mount}/{key}')}\n" for key, text in config_map["data"].items()
    )
    script = f'mount -t tmpfs none /mnt\nmkdir -p {mount}\n{files}cd {container["workingDir"]}\nexec "$@"'
    words = ["unshare", "-m", "sh", "-ec", script, "pod", *container["command"]]
    return Running(cluster, cluster.hosts[index], words, said, environment)


def test_pods_of_a_manifest_train_and_a_killed_one_is_replaced(
    cluster: VirtualCluster, config: Path, undisturbed: Callable[[int], str], tmp_path: Path
) -> None:
    """Two pods with two ranks each; the pod of rank 0 is killed, and Kubernetes would start another one."""
    out = tmp_path / "run"
    manifests = manifest(config, out, nodes=2, slots=2)
    pods = [start_pod(cluster, manifests, index, tmp_path / f"pod-{index}") for index in (0, 1)]
    try:
        pods[0].wait_until(lambda: newest(out) >= 100, "checkpoint of step 100")
        assert "indexed-job has started 2 of it; 2 of 4 ranks are here" in pods[1].said()
        pods[0].end()
        pods[1].wait_until(lambda: "start 2 of" in pods[1].said(), "second start in the pod that is left")
        pods[0] = start_pod(cluster, manifests, 0, tmp_path / "pod-0-again")
        assert [pod.wait() for pod in pods] == [0, 0], pods[0].said() + pods[1].said()
    finally:
        for pod in pods:
            pod.end()
    assert summary_of(out)["weights_sha256"] == undisturbed(4)
    assert is_whole(out)


def torchrun(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2),
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def tf_config(rank: int) -> dict[str, str]:
    workers = ["n1:23000", "n1:23001", "n2:23000", "n2:23001"]
    task = {"type": "worker", "index": rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def jsrun(rank: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
    named = {f"JSM_NAMESPACE_{name}": str(number) for name, number in numbers.items()}
    return {**named, "LSB_JOBID": "12", "HOROVOD_TRAIN_ROOT": "n1"}


def flux(rank: int) -> dict[str, str]:
    numbers = {"FLUX_TASK_RANK": rank, "FLUX_JOB_SIZE": 4, "FLUX_TASK_LOCAL_ID": rank % 2, "FLUX_JOB_NNODES": 2}
    named = {name: str(number) for name, number in numbers.items()}
    return {**named, "FLUX_JOB_ID": "ƒ12", "HOROVOD_TRAIN_ROOT": "n1"}


def pals(rank: int) -> dict[str, str]:
    numbers = {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank % 2, "PALS_LOCAL_SIZE": 2, "HOROVOD_TRAIN_SIZE": 4}
    named = {name: str(number) for name, number in numbers.items()}
    return {**named, "PALS_APID": "12", "HOROVOD_TRAIN_ROOT": "n1"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "convention",
    [torchrun, tf_config, jsrun, flux, pals],
    ids=lambda convention: convention.__name__,
)
def test_ranks_of_two_hosts_meet_by_each_convention(
    cluster: VirtualCluster,
    config: Path,
    undisturbed: Callable[[int], str],
    tmp_path: Path,
    convention: Callable[[int], dict[str, str]],
) -> None:
    """Four ranks on two hosts train, one is killed and all end; started again they go on to the same weights."""
    out = tmp_path / "run"
    words = [*TRAIN, *training(config, out)[1:]]

    def start_ranks(name: str) -> list[Running]:
        secret = {"HOROVOD_TRAIN_TOKEN": name}
        return [
            Running(
                cluster,
                cluster.hosts[rank // 2],
                words,
                tmp_path / f"{name}-{rank}",
                job_environment() | secret | convention(rank),
            )
            for rank in range(4)
        ]

    ranks = start_ranks("first")
    try:
        ranks[0].wait_until(lambda: newest(out) >= 100, "checkpoint of step 100")
        assert "4 rank(s) on 2 host(s)" in ranks[0].said()
        ranks[3].end()
        assert all(rank.wait() for rank in ranks)
        said = [rank.said() for rank in ranks]
        assert any("rank 3 (n2) disappeared" in text for text in said), said
        ranks = start_ranks("second")
        assert [rank.wait() for rank in ranks] == [0] * 4, ranks[0].said()
    finally:
        for rank in ranks:
            rank.end()
    assert "resumed from " in ranks[0].said()
    assert summary_of(out)["weights_sha256"] == undisturbed(4)


@pytest.fixture(scope="session")
def kills(cluster_tables: list[object]) -> Iterator[Table]:
    columns = ["kill", "at step", "new start after, s", "next step after, s", "steps done twice"]
    table = Table("launch over two hosts: kills at random moments", columns)
    yield table
    cluster_tables.append(table)


@pytest.mark.exhaustive
def test_killed_at_random_moments_the_weights_are_those_of_an_undisturbed_run(
    cluster: VirtualCluster, digits: Path, tmp_path: Path, kills: Table
) -> None:
    """Ranks, the launch itself, which its service manager starts again, and the network of a host."""
    steps = 405 * KILLS  # whole epochs, of 15 steps
    config = tmp_path / "campaign.yaml"
    config.write_text(CONFIG.format(data=digits, steps=steps))
    whole = tmp_path / "whole"
    finished = run_process([*TRAIN, "launch", "-np", "2", "--over", "gloo", *training(config, whole)], timeout_s=900)
    assert finished.returncode == 0, finished.text
    out = tmp_path / "run"
    words = ["-H", "n1:1,n2:1", "--max-restarts", "100", *training(config, out)]
    chosen = random.Random(1)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(launched(cluster, tmp_path, *words))
        for number in range(KILLS):
            at = newest(out) + SAVED_EVERY + chosen.randrange(2 * SAVED_EVERY)
            running.wait_until(functools.partial(is_past, out, at), f"step {at}")
            kind, host = chosen.choice(["rank", "launch", "host"]), chosen.choice(["n1", "n2"])
            at, began, seen = step_of(out), time.monotonic(), len(running.said())
            if kind == "rank":
                cluster.ranks(host)[-1].kill()
            elif kind == "host":
                cluster.cut(host)
                running.wait_until(functools.partial(running.has_said, f"{host} is left out", seen), "host left out")
                cluster.mend(host)
            else:
                running.process.kill()
                running.process.wait()
                running = stack.enter_context(launched(cluster, tmp_path, *words))
            running.wait_until(
                functools.partial(running.has_said, r"resumed from .* at step \d+", seen), "resumed", 240
            )
            resumed_s = time.monotonic() - began
            resumed_at = int(re.findall(r"resumed from .* at step (\d+)", running.said()[seen:])[-1])
            running.wait_until(functools.partial(is_past, out, resumed_at + 1), "next step")
            name = kind if kind == "launch" else f"{kind} {host}"
            kills.add(f"{number + 1}: {name}", at, resumed_s, time.monotonic() - began, max(0, at - resumed_at))
            assert at - resumed_at <= 2 * SAVED_EVERY
        assert running.wait(600) == 0, running.said()
    assert summary_of(out)["weights_sha256"] == summary_of(whole)["weights_sha256"]
    assert is_whole(out)
