"""Trackers of runs on several ranks: one run in each tracker, every step once, the same weights as without.

Those that are exhaustive use a real MLflow server on this host, and W&B offline; `make test-trackers` installs both.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import HANGS_AFTER_S, PROJECT, Finished, metrics_of, rank_environment, summary_of, train

from horovod_train.config.loader import as_dict, load

pytestmark = pytest.mark.long


CLIENTS = PROJECT / "build" / "trackers" / "clients"
"""Where the packages of the extras mlflow and wandb are."""
SERVER = PROJECT / "build" / "trackers" / "server" / "bin" / "mlflow"
SMALL = ["model=user_models:small", "log.every_steps=2", "log.tensorboard=false", "train.max_steps=16"]


def test_a_tracker_that_is_not_there_is_one_line_before_training(digits: Path, tmp_path: Path) -> None:
    finished = train([*words(digits, "user_trackers:Unreachable"), "--output-dir", tmp_path / "run"])
    assert finished.returncode == 2, finished.text
    (line,) = [line for line in finished.stderr.splitlines() if "tracker" in line]
    assert line.startswith(
        "error: log.trackers: user_trackers:Unreachable: cannot begin a run: ConnectionError: nobody"
    )
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_that_fails_tells_its_trackers(digits: Path, tmp_path: Path) -> None:
    arguments = words(digits, "user_trackers:Noted", "lr_schedule={base_lr: 1e30, warmup_epochs: 0}")
    finished = train([*arguments, "--output-dir", tmp_path / "run"])
    assert finished.returncode == 1, finished.text
    calls = [json.loads(line) for line in (tmp_path / "run" / "calls.jsonl").read_text().splitlines()]
    assert [call["ended"] for call in calls if call["call"] == "finish"] == ["failed"]
    prom = (tmp_path / "run" / "metrics.prom").read_text()
    (running,) = [line for line in prom.splitlines() if line.startswith("horovod_train_running{")]
    assert running.endswith(" 1.0")  # for an alert


def words(digits: Path, tracker: str, *more: str) -> list[str | Path]:
    data = [f"data.train={digits}/train", f"data.eval={digits}/eval"]
    config = ["--config", str(PROJECT / "configs" / "digits_convnet.yaml")]
    return [*config, *data, *SMALL, f"log.trackers=[{tracker}]", *more]


def with_clients(**more: str) -> dict[str, str]:
    environment = rank_environment()
    return environment | {"PYTHONPATH": f"{environment['PYTHONPATH']}:{CLIENTS}"} | more


class Server:
    """An MLflow server on this host, asked by its REST API."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.uri = f"http://127.0.0.1:{free.getsockname()[1]}"
        store = ["--backend-store-uri", f"sqlite:///{folder}/db", "--artifacts-destination", str(folder / "artifacts")]
        command = [str(SERVER), "server", "--host", "127.0.0.1", "--port", self.uri.rpartition(":")[2], *store]
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [*command, "--workers", "1"], cwd=folder, stdout=self._log, stderr=self._log, start_new_session=True
        )
        until = time.monotonic() + HANGS_AFTER_S
        while not self._answers():
            assert self.process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.25)

    def ask(self, path: str, body: Any = None, **query: str) -> Any:
        url = f"{self.uri}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=HANGS_AFTER_S) as answer:
            return json.load(answer)

    def runs(self, experiment: str) -> list[Any]:
        found = self.ask("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
        runs: list[Any] = self.ask("runs/search", {"experiment_ids": [found]}).get("runs", [])
        return runs

    def history(self, run: Any, name: str) -> list[tuple[int, float]]:
        found = self.ask("metrics/get-history", run_id=run["info"]["run_id"], metric_key=name, max_results="1000")
        return [(int(metric["step"]), metric["value"]) for metric in found["metrics"]]

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait(HANGS_AFTER_S)
        self._log.close()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if not SERVER.exists():
        pytest.skip("make test-trackers installs MLflow, and runs this")
    (tmp_path / "server").mkdir()
    started = Server(tmp_path / "server")
    yield started
    started.close()


def start(digits: Path, run_dir: Path, tracker: str, *more: str, np: int = 2, **variables: str) -> Finished:
    arguments = [*words(digits, tracker, *more), "--output-dir", run_dir]
    return train(arguments, launcher="horovodrun", np=np, environment=with_clients(**variables))


def flat(section: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(section, dict) or not section:
        return {prefix: section}
    return {key: found for name in section for key, found in flat(section[name], f"{prefix}.{name}".strip(".")).items()}


@pytest.mark.exhaustive
def test_mlflow_has_one_run_with_every_step_once_of_a_run_resumed_at_another_size(
    server: Server, digits: Path, tmp_path: Path
) -> None:
    run_dir, tracker = tmp_path / "run", f"{{name: mlflow, options: {{uri: '{server.uri}', experiment: e}}}}"
    stopped = start(digits, run_dir, tracker, "hooks=user_hooks:stop_at_6", "checkpoint.every_steps=4")
    assert stopped.returncode == 75 or "saved; to resume, start it again" in stopped.stdout, stopped.text
    (run,) = server.runs("e")
    assert run["info"]["status"] == "KILLED"
    assert [step for step, _ in server.history(run, "train/loss")] == [2, 4, 6]
    earlier = f"checkpoint.resume={run_dir}/checkpoints/step-000000004"
    resumed = start(digits, run_dir, tracker, "checkpoint.every_steps=4", earlier, np=3)
    assert resumed.returncode == 0, resumed.text
    (run,) = server.runs("e")
    assert (run["info"]["status"], run["info"]["run_name"]) == ("FINISHED", "run")
    for split, name in (("train", "loss"), ("train", "learning_rate"), ("eval", "accuracy")):
        logged = server.history(run, f"{split}/{name}")
        rows = [(row["step"], row[name]) for row in metrics_of(run_dir, split)]
        assert [step for step, _ in logged] == [step for step, _ in rows]
        # At step 6 it has what the first start has measured.
        assert dict(logged) | {6: 0} == pytest.approx(dict(rows) | {6: 0}, rel=1e-6)
    params = {param["key"]: param["value"] for param in run["data"]["params"]}
    config = flat(as_dict(load([str(run_dir / "config.yaml")])[0]))
    assert set(params) >= {key for key, value in config.items() if not isinstance(value, dict)}
    assert params["train.max_steps"] == "16"
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert tags["from step 4/hooks"] == "[]"
    files = server.ask("artifacts/list", run_id=run["info"]["run_id"])["files"]
    assert sorted(file["path"] for file in files) == ["config.yaml", "summary.json"]


@pytest.mark.exhaustive
def test_a_run_whose_mlflow_server_is_killed_trains_the_same(server: Server, digits: Path, tmp_path: Path) -> None:
    alone = train([*words(digits, "csv"), "--output-dir", tmp_path / "alone"], launcher="horovodrun", np=2)
    assert alone.returncode == 0, alone.text
    tracker, group = f"{{name: mlflow, options: {{uri: '{server.uri}'}}}}", str(server.process.pid)
    finished = start(digits, tmp_path / "run", tracker, "hooks=user_trackers:kill_group", GROUP_TO_KILL=group)
    assert finished.returncode == 0, finished.text
    assert server.process.wait(HANGS_AFTER_S) == -9
    about = [line for line in finished.stdout.splitlines() if "log.trackers: mlflow" in line]
    assert len(about) == 2, finished.text
    assert "cannot log step" in about[0]
    assert "Training continues, and it is tried again." in about[0]
    assert "rows of metrics, which metrics.jsonl has." in about[1]
    first, second = (summary_of(tmp_path / name)["weights_sha256"] for name in ("alone", "run"))
    assert first == second


@pytest.mark.exhaustive
def test_a_wrong_address_of_mlflow_is_one_line_before_training(server: Server, digits: Path, tmp_path: Path) -> None:
    server.close()
    for number, uri in enumerate([server.uri, "htp://nowhere"]):
        arguments = words(digits, f"{{name: mlflow, options: {{uri: '{uri}'}}}}")
        finished = train([*arguments, "--output-dir", tmp_path / str(number)], environment=with_clients())
        assert finished.returncode == 2, finished.text
        (line,) = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
        assert line.startswith("error: log.trackers: mlflow: cannot begin a run: ")
        assert uri in line
        assert not (tmp_path / str(number) / "metrics.jsonl").exists()


def _leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of W&B's offline file: a log in LevelDB's format, after 7 bytes of its own."""
    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


SHOW = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
for line in sys.stdin:
    record = Record.FromString(bytes.fromhex(line))
    if record.WhichOneof("record_type") == "history":
        items = [(item.key or "/".join(item.nested_key), json.loads(item.value_json)) for item in record.history.item]
        print(json.dumps(dict(items)))
    if record.WhichOneof("record_type") == "run":
        print(json.dumps({"run_id": record.run.run_id, "config": [item.key for item in record.run.config.update]}))
"""


def wandb_records(files: Sequence[Path]) -> list[dict[str, Any]]:
    told = "\n".join(record.hex() for file in files for record in _leveldb_records(file))
    command = [sys.executable, "-c", SHOW]
    shown = subprocess.run(command, input=told, env=with_clients(), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in shown.stdout.splitlines()]


@pytest.mark.exhaustive
def test_wandb_offline_has_one_run_with_every_step_once(digits: Path, tmp_path: Path) -> None:
    if not CLIENTS.exists():
        pytest.skip("make test-trackers installs W&B, and runs this")
    run_dir, tracker = tmp_path / "run", "{name: wandb, options: {project: p}}"
    stopped = start(digits, run_dir, tracker, "hooks=user_hooks:stop_at_6", WANDB_MODE="offline")
    assert "saved; to resume, start it again" in stopped.stdout, stopped.text
    resumed = start(digits, run_dir, tracker, np=3, WANDB_MODE="offline")
    assert resumed.returncode == 0, resumed.text
    records = wandb_records(sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")))
    (run_id,) = {record["run_id"] for record in records if "run_id" in record}
    assert run_id == json.loads((run_dir / "trackers" / "wandb.json").read_text())["run_id"]
    assert {"train", "data", "log"} <= {*next(record["config"] for record in records if "run_id" in record)}
    for split in ("train", "eval"):
        logged = [(each["step"], each[f"{split}/loss"]) for each in records if f"{split}/loss" in each]
        assert logged == [(row["step"], row["loss"]) for row in metrics_of(run_dir, split)]


@pytest.mark.exhaustive
def test_a_run_whose_wandb_process_is_killed_trains_the_same(digits: Path, tmp_path: Path) -> None:
    if not CLIENTS.exists():
        pytest.skip("make test-trackers installs W&B, and runs this")
    alone = train([*words(digits, "csv"), "--output-dir", tmp_path / "alone"], launcher="horovodrun", np=2)
    assert alone.returncode == 0, alone.text
    killed = start(
        digits, tmp_path / "run", "{name: wandb}", "hooks=user_trackers:kill_wandb_core", WANDB_MODE="offline"
    )
    assert killed.returncode == 0, killed.text
    about = [line for line in killed.stdout.splitlines() if "log.trackers: wandb" in line]
    assert len(about) == 2, killed.text
    assert "cannot log step" in about[0]
    assert "rows of metrics, which metrics.jsonl has." in about[1]
    first, second = (summary_of(tmp_path / name)["weights_sha256"] for name in ("alone", "run"))
    assert first == second
