"""Training on records in an S3 server on this machine: late, failing now and then, gone for a while, gone for ever."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import Finished, metrics_of, rank_environment, summary_of, train
from made_stores import write_hdf5

pytest.importorskip("moto")
pytest.importorskip("s3fs")

from s3_server import SECRET, S3Server, serving

pytestmark = pytest.mark.exhaustive

CONFIG = """
data: {batch_size_per_rank: 64, shuffle_window: 4096, audit: true}
model: mlp
loss: {name: binary_crossentropy, options: {from_logits: true}}
metrics: [{name: binary_accuracy, options: {name: accuracy, threshold: 0.0}}]
lr_schedule: {base_lr: 0.01}
train: {epochs: 2}
eval: {every_epochs: 2}
log: {every_steps: 50, tensorboard: false}
"""
"""On far more records than are read ahead, so that each epoch reads them again."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "samples"
    finished = train(["prepare", "mlp-samples", "--out", folder, "--records", "40000", "--seed", "7"])
    assert finished.returncode == 0, finished.text
    (folder.parent / "c.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def server(samples: Path) -> Iterator[S3Server]:
    with serving(samples, delay_s=0.05, fail_every=20) as running:
        yield running


def run(samples: Path, run_dir: Path, data: str, *words: str, server: S3Server | None = None) -> Finished:
    """Trains on two ranks, with an index that no other run has made."""
    environment = rank_environment()
    if server is not None:
        own = server.environment()
        environment["PYTHONPATH"] += f":{own.pop('S3FS_FOLDER')}"
        environment |= own
    given = [f"data.train={data}/train", f"data.eval={data}/eval", f"data.index_dir={run_dir}-index"]
    arguments = ["--config", samples.parent / "c.yaml", "--output-dir", run_dir, *given, *words]
    return train(arguments, launcher="mpirun", np=2, environment=environment)


def when(is_so: Callable[[], bool], job: Future[Finished]) -> None:
    """Wait until something is so; fail if the job ends before."""
    while not is_so():
        assert not job.done(), job.result().text
        time.sleep(0.05)


def has_logged(run_dir: Path, steps: int) -> bool:
    return (run_dir / "metrics.jsonl").exists() and len(metrics_of(run_dir, "train")) >= steps // 50


def has_said(run_dir: Path, words: str) -> bool:
    return any(words in log.read_text() for log in (run_dir / "logs").glob("rank-*.log"))


def test_late_and_failing_now_and_then_the_weights_are_those_from_disk(
    samples: Path, server: S3Server, tmp_path: Path
) -> None:
    on_disk = run(samples, tmp_path / "disk", str(samples))
    assert on_disk.returncode == 0, on_disk.text
    remote = run(samples, tmp_path / "s3", "s3://bucket/samples", server=server)
    assert remote.returncode == 0, remote.text
    assert server.failed > 5
    assert server.most_at_once > 2 * 10, "more than botocore's ten connections of each rank"
    found, expected = summary_of(tmp_path / "s3"), summary_of(tmp_path / "disk")
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["eval"] == expected["eval"]
    texts = [path.read_bytes() for path in (tmp_path / "s3").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in [*texts, remote.text.encode()])
    resumed = run(samples, tmp_path / "s3", str(samples), "train.epochs=3")  # the records are the same ones
    assert resumed.returncode == 0, resumed.text
    assert "the training data are not those of" not in resumed.text


def test_an_hdf5_file_gives_the_weights_that_it_gives_from_disk(
    samples: Path, server: S3Server, tmp_path: Path
) -> None:
    """Its library seeks and reads in it; late, and failing now and then."""
    random = np.random.default_rng(3)
    arrays = {"sample": random.integers(0, 9, (6000, 5)), "label": random.integers(0, 2, 6000)}
    path = write_hdf5(samples, arrays)
    server.put(samples, "a.h5")
    words = ["data.features={sample: {cast: float32}, label: {cast: float32}}", "data.targets=label"]
    found = {}
    for name, data, where in [("disk", str(path), None), ("s3", "s3://bucket/samples/a.h5", server)]:
        given = [*words, f"data.train={data}", f"data.eval={data}"]
        finished = run(samples, tmp_path / name, "unused", *given, server=where)
        assert finished.returncode == 0, finished.text
        found[name] = summary_of(tmp_path / name)
    assert server.failed > 0
    assert found["s3"]["weights_sha256"] == found["disk"]["weights_sha256"]
    assert found["s3"]["eval"] == found["disk"]["eval"]


def test_gone_for_a_while_the_run_continues(samples: Path, server: S3Server, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(run, samples, tmp_path / "s3", "s3://bucket/samples", "train.epochs=12", server=server)
        when(lambda: has_logged(tmp_path / "s3", 400), job)
        server.stop()
        when(lambda: has_said(tmp_path / "s3", "Trying again"), job)
        server.start()
        finished = job.result()
    assert finished.returncode == 0, finished.text
    assert summary_of(tmp_path / "s3")["epochs"] == 12
    said = r"s3://bucket/samples/(train|eval)/\S+: .*Trying again for up to 120 s\."
    assert re.search(said, finished.text), finished.text
    assert "can be read again" in finished.text


def test_gone_for_ever_one_line_says_so_and_the_checkpoint_stays(
    samples: Path, server: S3Server, tmp_path: Path
) -> None:
    words = ["train.epochs=1000", "checkpoint.every_steps=200", "data.retry_s=15"]
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(run, samples, tmp_path / "s3", "s3://bucket/samples", *words, server=server)
        when(lambda: has_logged(tmp_path / "s3", 400), job)
        server.stop()
        finished = job.result()
    server.start()  # for the fixture to stop
    assert finished.returncode == 1, finished.text  # not 2: launch starts it again
    errors = [line for line in finished.stderr.splitlines() if "tried for 15 s" in line]
    assert 1 <= len(errors) <= 2, finished.text  # ranks may both find out
    said = r"s3://bucket/samples/(train|eval)/\S+: cannot be read any more: .*tried for 15 s \(data\.retry_s\)\.$"
    assert re.search(said, errors[0]), finished.text
    assert "Traceback" not in finished.text
    assert os.listdir(tmp_path / "s3" / "checkpoints")
    steps = f"train.max_steps={metrics_of(tmp_path / 's3', 'train')[-1]['step'] + 50}"
    resumed = run(samples, tmp_path / "s3", "s3://bucket/samples", steps, "train.epochs=1000", server=server)
    assert resumed.returncode == 0, resumed.text
    assert "resumed from" in resumed.text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("s3://bucket/nothing", r"data\.train: s3://bucket/nothing/train does not exist; s3://bucket does\."),
        ("s3://no-such-bucket/a", r"data\.train: s3://no-such-bucket/a/train does not exist\."),
    ],
)
def test_what_is_not_there_is_said_before_training(
    samples: Path, server: S3Server, tmp_path: Path, data: str, said: str
) -> None:
    finished = run(samples, tmp_path / "s3", data, server=server)
    assert finished.returncode == 2, finished.text
    assert re.search(said, finished.stderr), finished.text
    assert "Traceback" not in finished.text
