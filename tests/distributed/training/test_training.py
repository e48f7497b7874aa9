"""Whole runs of the command line, on real ranks: they are equal, resume, and leave one set of files."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import (
    Finished,
    metrics_of,
    run_process,
    split_records,
    summary_of,
    train,
    warm_python,
)

EPOCHS, STEPS = 3, 45
BASE = """
data: {{train: {data}/train, eval: {data}/eval, global_batch_size: 96}}
model: user_models:small
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
metrics: [{{name: sparse_categorical_accuracy, options: {{name: accuracy}}}}]
optimizer: {{name: sgd, options: {{momentum: 0.9}}}}
lr_schedule: {{base_lr: 0.1, decay: {{name: exponential, options: {{rate: 0.5}}}}}}
log: {{every_steps: 1, tensorboard: false}}
eval: {{every_epochs: null}}
"""


@pytest.fixture(scope="session")
def base_config(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "base.yaml"
    path.write_text(BASE.format(data=digits))
    return path


@pytest.fixture(scope="session")
def plain_keras_losses(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of each step of `model.fit` in one process, without anything of ours but the model."""
    script = f"""
import json, keras, tensorflow as tf, user_models
keras.utils.set_random_seed(1)
model = user_models.small()
schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 15, 0.5, staircase=True)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(schedule, momentum=0.9), loss)
features = {{"image_raw": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}}
def parse(rows):
    found = tf.io.parse_example(rows, features)
    pixels = tf.cast(tf.io.decode_raw(found["image_raw"], tf.uint8), tf.float32)
    return tf.reshape(pixels / 255 - 0.5, [-1, 28, 28, 1]), found["label"]
files = sorted(tf.io.gfile.glob({str(digits / "train")!r} + "/*.tfrecord"))
data = tf.data.TFRecordDataset(files).batch(96).map(parse).repeat()
history = model.fit(data, epochs={STEPS}, steps_per_epoch=1, verbose=0)
print(json.dumps(history.history["loss"]))
"""
    path = tmp_path_factory.mktemp("plain") / "plain.py"
    path.write_text(script)
    finished = run_process([*warm_python(), str(path)])
    assert finished.returncode == 0, finished.text
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def run_at(base_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Finished, Path]]:
    """(launcher, np) → a run of some epochs on fresh processes, and its directory, in a folder of its own."""

    @functools.cache
    def run(launcher: str, np: int) -> tuple[Finished, Path]:
        run_dir = tmp_path_factory.mktemp("of") / "run"
        words = ["data.shuffle=false", f"train.epochs={EPOCHS}", "log.tensorboard=true", "--output-dir", run_dir]
        return train(["--config", base_config, *words], launcher=launcher, np=np, fresh=True), run_dir

    return run


@pytest.mark.parametrize(
    ("launcher", "np"),
    [
        pytest.param("none", 1, marks=pytest.mark.long),
        ("horovodrun", 2),
        pytest.param("horovodrun-default", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_n_ranks_train_like_one_and_like_plain_keras(
    run_at: Callable[[str, int], tuple[Finished, Path]], plain_keras_losses: list[float], launcher: str, np: int
) -> None:
    finished, run_dir = run_at(launcher, np)
    assert finished.returncode == 0, finished.text
    losses = [row["loss"] for row in metrics_of(run_dir, "train")]
    assert len(losses) == STEPS
    assert losses == pytest.approx(plain_keras_losses, rel=2e-4)
    assert losses[-1] < losses[0] / 2


def test_only_root_leaves_files(run_at: Callable[[str, int], tuple[Finished, Path]]) -> None:
    finished, run_dir = run_at("horovodrun", 2)
    assert finished.returncode == 0, finished.text
    assert {path.name for path in run_dir.parent.iterdir()} == {"run"}
    found = {path.name for path in run_dir.iterdir()}
    # times.jsonl: if the run was long enough to be looked at.
    always = {
        "checkpoints",
        "config.yaml",
        "logs",
        "metrics.jsonl",
        "metrics.prom",
        "saved.json",
        "summary.json",
        "tensorboard",
    }
    assert found - {"times.jsonl"} == always
    assert len(list((run_dir / "tensorboard" / "train").iterdir())) == 1
    assert finished.stdout.count(f"Done training for {EPOCHS} epochs, {STEPS} steps") == 1
    rows = metrics_of(run_dir, "train")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {"loss", "accuracy", "learning_rate", "examples_per_s", "examples_per_s_per_rank", "s_per_step"} <= {
        *rows[-1]
    }
    summary = summary_of(run_dir)
    assert (summary["ranks"], summary["steps"], summary["epochs"], summary["ended"]) == (2, STEPS, EPOCHS, "done")
    assert summary["versions"]["horovod"] == version("horovod")


@pytest.mark.long
def test_a_run_whose_words_nobody_takes_ends_as_others_do(base_config: Path, tmp_path: Path) -> None:
    words = ["--config", base_config, "--output-dir", tmp_path, "train.epochs=1"]
    deaf = ["bash", "-c", 'exec "$@" > /dev/full 2>&1', "-", *warm_python(), "-m", "horovod_train.main"]
    assert run_process([*deaf, *map(str, words)]).returncode == 0
    assert len(metrics_of(tmp_path, "train")) == summary_of(tmp_path)["steps"] == 15


@pytest.mark.long
def test_a_last_step_that_is_shorter_on_some_ranks_only_is_taken_by_all(base_config: Path, tmp_path: Path) -> None:
    """Of 719 records one rank has 360 and one 359, of the last 718 both have 359: only one has fewer rows."""
    words = ["data.global_batch_size=719", "train.epochs=40", "train.max_steps=null", "eval.every_epochs=null"]
    words += ["checkpoint.every_epochs=null", "watch={warn_after_s: 10, stop_after_s: 20, first_step_after_s: 100}"]
    finished = train(["--config", base_config, *words, "--output-dir", tmp_path / "run"], launcher="srun", np=2)
    assert finished.returncode == 0, finished.text
    assert summary_of(tmp_path / "run")["steps"] == 80


@pytest.mark.long
def test_written_config_starts_the_same_run_again(base_config: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(["--config", base_config, "train.max_steps=5", "--output-dir", first]).returncode == 0
    again = train(["--config", first / "config.yaml", "--output-dir", second])
    assert again.returncode == 0, again.text
    assert summary_of(first)["weights_sha256"] == summary_of(second)["weights_sha256"]


@pytest.mark.long
def test_a_run_that_began_at_a_path_keeps_its_steps_if_it_is_given_again_after_auto(
    base_config: Path, tmp_path: Path
) -> None:
    first, branch = tmp_path / "first", tmp_path / "branch"
    begin = ["--resume", first / "checkpoints" / "step-000000004"]
    for output_dir, max_steps, words in [(first, 4, []), (branch, 6, begin), (branch, 8, []), (branch, 10, begin)]:
        arguments = ["--config", base_config, *words, f"train.max_steps={max_steps}", "--output-dir", output_dir]
        finished = train(arguments)
        assert finished.returncode == 0, finished.text
    newest = branch / "checkpoints" / "step-000000008"
    assert f"checkpoint.resume: this run began at {begin[1]}, and resumes from its own newest " in finished.stdout
    assert f"resumed from {newest} at step 8" in finished.stdout
    assert [row["step"] for row in metrics_of(branch, "train")] == [5, 6, 7, 8, 9, 10]
    assert not list((branch / "checkpoints").glob("*.abandoned"))


@pytest.mark.exhaustive  # see test_leaving
@pytest.mark.parametrize(("launcher", "np"), [("mpirun", 2)])
def test_stopped_and_started_again_a_run_ends_as_if_it_had_not(
    base_config: Path, tmp_path: Path, launcher: str, np: int
) -> None:
    """The last start has the words of the one before it, as after a requeue, and goes on from there.

    The whole run has its own pause between exchanges; the others choose it, for which Horovod starts again.
    """
    whole, parts, branch = tmp_path / "whole", tmp_path / "parts", tmp_path / "branch"
    model = "model={name: user_models:mixed, options: {batch_norm: false}}"
    common = ["--config", base_config, model, "optimizer=adam", "lr_schedule.base_lr=0.01"]
    begin = ["--resume", str(parts / "checkpoints" / "step-000000022")]
    for output_dir, max_steps, words in [
        (whole, 40, ["horovod.cycle_time_ms=1"]),
        (parts, 22, []),
        (branch, 31, begin),
        (branch, 40, begin),
    ]:
        arguments = [*common, *words, f"train.max_steps={max_steps}", "--output-dir", output_dir]
        finished = train(arguments, launcher=launcher, np=np)
        assert finished.returncode == 0, finished.text
        chosen = "HOROVOD_CYCLE_TIME=0 (ms; a step's gradients have only " in finished.stdout
        assert chosen == (output_dir != whole)
    assert f"resumed from {branch / 'checkpoints' / 'step-000000031'} at step 31" in finished.stdout
    rows = [*metrics_of(parts, "train"), *metrics_of(branch, "train")]
    assert [row["step"] for row in rows] == list(range(1, 41))
    for row, again in zip(metrics_of(whole, "train"), rows, strict=True):
        assert row["learning_rate"] == again["learning_rate"]
        assert row["loss"] == again["loss"]
    assert summary_of(whole)["weights_sha256"] == summary_of(branch)["weights_sha256"]


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "np"), [("mpirun", 2), pytest.param("mpirun", 4, marks=pytest.mark.exhaustive)])
def test_evaluation_is_that_of_one_process(
    digits: Path, base_config: Path, tmp_path: Path, launcher: str, np: int
) -> None:
    """999 records in batches of 7 a rank: neither ranks nor batches divide them."""
    records = [
        record for path in sorted((digits / "train").glob("*.tfrecord")) for record in split_records(path.read_bytes())
    ]
    shutil.copy(digits / "dataset.json", tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "999.tfrecord").write_bytes(b"".join(records[:999]))
    arguments = [
        "--config",
        base_config,
        "lr_schedule.base_lr=0",
        "train.max_steps=1",
        "eval.every_epochs=1",
        f"data.eval={tmp_path / 'some'}",
    ]
    finished = train(
        [*arguments, "eval.batch_size_per_rank=7", "--output-dir", tmp_path / "run"], launcher=launcher, np=np
    )
    assert finished.returncode == 0, finished.text
    script = f"""
import keras, tensorflow as tf, user_models
from horovod_train.config.settings import DataConfig
from horovod_train.data.pipeline import Ranks
from horovod_train.data.pipeline import build_pipeline
from horovod_train.data.dataset import open_records
keras.utils.set_random_seed(1)
model = user_models.small()
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
config = DataConfig(eval=({str(tmp_path / "some")!r},))
records = open_records(config, "eval")
pipeline = build_pipeline(records, config, Ranks(0, 1), seed=0, training=False, global_batch_size=999)
(batch,) = map(pipeline.scaled, pipeline.batches(0, epochs=1))
assert batch.weights.numpy().sum() == 999
print(*model.evaluate(batch.inputs, batch.targets, verbose=0, batch_size=999))
"""
    (tmp_path / "alone.py").write_text(script)
    alone = run_process([*warm_python(), str(tmp_path / "alone.py")])
    assert alone.returncode == 0, alone.text
    loss, accuracy = (float(word) for word in alone.stdout.split())
    (row,) = metrics_of(tmp_path / "run", "eval")
    assert row["loss"] == pytest.approx(loss, rel=1e-5)
    assert row["accuracy"] == pytest.approx(accuracy, rel=1e-6)
