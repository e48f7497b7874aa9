"""The command `plan`: its figures, what it finds wrong before a run, and what it leaves unchecked with --fast."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import PROJECT, rank_environment, run_process, warm_python
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import config as data_config
from made_records import make_images

from horovod_train.checkpoint.layout import Facts, count_multiples, count_saves
from horovod_train.checkpoint.tensors import write
from horovod_train.commands import plan, plan_model
from horovod_train.commands.check_data import epoch_shares
from horovod_train.commands.plan import Sizes, collect, open_outlook, records_by_rank, rows_by_rank
from horovod_train.config.loader import load
from horovod_train.config.settings import CheckpointConfig, Config
from horovod_train.data.dataset import open_records
from horovod_train.data.sampler import Plan
from horovod_train.errors import UserError
from horovod_train.optim.schedules import Horizon, build_formula


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A whole config on 70 made records."""
    make_images(tmp_path / "data/train")
    make_images(tmp_path / "data/eval", shards=[12])
    file = tmp_path / "run.yaml"
    content = {
        "output_dir": str(tmp_path / "run"),
        "data": {"train": str(tmp_path / "data/train"), "eval": str(tmp_path / "data/eval"), "global_batch_size": 16},
        "model": {"name": "image_mlp", "options": {"image_size": 4, "hidden": 6}},
        "loss": {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}},
        "metrics": ["sparse_categorical_accuracy"],
        "optimizer": {"name": "sgd", "options": {"momentum": 0.9}},
        "lr_schedule": {"base_lr": 0.4, "warmup_epochs": 1, "decay": "cosine"},
        "train": {"epochs": 6},
        "checkpoint": {"every_epochs": 2},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def facts_of(config_file: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    assert plan.run(parser.parse_args(["--config", str(config_file), "--json", *words])) == 0
    return json.loads(capsys.readouterr().out)


def test_figures_of_a_run(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(config_file, capsys, "--np", "3")
    assert facts["records"]["train"]["records"] == 70
    assert facts["batch"] == {"global": 16, "rows_per_rank": {"5": 2, "6": 1}, "padding": {}}
    assert facts["steps"] == {"per_epoch": 5, "total": 30, "epochs": 6, "records_in_last_of_epoch": 6}
    assert facts["checkpoints"]["count"] == 3
    assert facts["faults"] == []
    assert any("a global batch of 18" in note for note in facts["notes"])


def test_records_of_a_class_are_shown_as_its(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.source=user_sources:Named", "data.inputs=x", "data.targets=y", "data.features={x: {cast: float32}}"]
    found = facts_of(config_file, capsys, *words)["records"]["train"]
    assert (found["records"], found["source"], found["inputs"]) == (137, "user_sources:Named", ["x"])
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    plan.run(parser.parse_args(["--config", str(config_file), "--fast", *words]))
    assert "137 records from user_sources:Named" in capsys.readouterr().out


def test_sizes_are_those_of_the_model_as_built(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 → 6 → 10: 172 weights, each with a momentum, and with a moving average if there are any."""
    plain = facts_of(config_file, capsys)["memory_per_rank"]
    assert (plain["parameters"], plain["trainable_parameters"]) == (172, 172)
    assert (plain["bytes"]["weights"], plain["bytes"]["gradients"]) == (172 * 4, 172 * 4)
    assert 172 * 4 <= plain["bytes"]["optimizer"] < 172 * 4 + 20  # and its counter and rate
    averaged = facts_of(config_file, capsys, "train.ema_decay=0.9")["memory_per_rank"]
    assert averaged["bytes"]["averages and progress"] - plain["bytes"]["averages and progress"] == 172 * 4
    words = ["optimizer={name: sgd, options: {momentum: 0.9, use_ema: true}}", "callbacks=SwapEMAWeights"]
    by_keras = facts_of(config_file, capsys, *words)
    assert by_keras["memory_per_rank"]["bytes"] == averaged["bytes"]
    assert "SwapEMAWeights has them evaluated" in by_keras["fine_tuning"]["averages"]


def test_what_the_log_of_a_run_would_warn_of_is_a_note(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "model={name: horovod_train.models.mlp:build_for_images, options: {image_size: 4}}"
    note = facts_of(config_file, capsys, model, "loss=auto", "loss.options={}")["notes"][-1]
    assert note.startswith("the loss sparse_categorical_crossentropy takes probabilities, but the model ends without")


def test_records_that_data_cache_keeps_are_in_the_memory_of_a_rank(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """70 records of 16 bytes and an int64, all of which a rank comes to meet."""
    assert facts_of(config_file, capsys, "--np", "3")["memory_per_rank"]["bytes"]["cached records"] == 0
    cached = facts_of(config_file, capsys, "--np", "3", "data.cache=memory")["memory_per_rank"]["bytes"]
    assert cached["cached records"] == 70 * (16 + 8)


def test_rates_are_those_of_the_schedule(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = facts_of(config_file, capsys, "--fast")["learning_rate"]
    config, _ = load([str(config_file)])
    rate = build_formula(config.lr_schedule, Horizon(16, 5, 30))
    steps = np.array([row["step"] for row in rows], np.float64)
    np.testing.assert_allclose([row["rate"] for row in rows], rate(steps, np))
    assert {0, 4, 29} <= set(steps)  # the first, the end of warm-up, the last


def test_a_constant_rate_is_one_line(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    constant = ["lr_schedule.base_lr=0.25", "lr_schedule.warmup_epochs=0", "lr_schedule.decay=constant"]
    assert plan.run(parser.parse_args(["--config", str(config_file), "--fast", *constant])) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learning rate")]
    assert line.split(maxsplit=2)[2] == "0.25, constant"


def test_time_against_walltime(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 epochs of 70 records and 6 evaluations of 12, at 10 records/s."""
    time = facts_of(config_file, capsys, "--fast", "--examples-per-s", "10", "--time", "00:00:30")["time"]
    assert time == {"records": 492, "seconds": 49.2, "walltime_s": 30.0, "jobs": 2}
    time = facts_of(config_file, capsys, "--fast", "--time", "60")["time"]
    assert time["needs_examples_per_s"] == 8.2


def test_the_evaluation_after_the_last_step_takes_time_too(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """6 epochs of 70 records, and evaluations of 12 after 20 and 30 steps."""
    words = ["--fast", "--time", "60", "eval.every_epochs=null", "eval.every_steps=20"]
    assert facts_of(config_file, capsys, *words)["time"]["records"] == 420 + 2 * 12


@pytest.mark.parametrize(
    ("words", "kept", "at_once"),
    [
        ([], 3, 3),
        (["checkpoint.keep=1"], 1, 2),
        (["checkpoint.every_minutes=5", "checkpoint.keep=7"], 7, 8),
        (["checkpoint.best={metric: loss, mode: min}", "checkpoint.keep=7"], 8, 9),
    ],
)
def test_checkpoints_on_the_disk_are_as_many_as_it_is_to_have_room_for(
    config_file: Path, capsys: pytest.CaptureFixture[str], words: list[str], kept: int, at_once: int
) -> None:
    """Of 3 saves by epoch, and of those by the clock or an evaluation."""
    sizes = Sizes("given", checkpoint_bytes=10)
    config, _ = load([str(config_file)], words)
    facts, _ = collect(open_outlook(config, 1, None), sizes, None, None)
    assert (facts["checkpoints"]["kept"], facts["checkpoints"]["bytes_at_most"]) == (kept, 10 * at_once)


def test_fast_answers_for_64_ranks_without_tensorflow_and_says_what_it_left_out(config_file: Path) -> None:
    words = [
        "plan",
        "--config",
        str(config_file),
        "data.global_batch_size=64",
        "model=convnett",
        "--np",
        "64",
        "--fast",
    ]
    script = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "from horovod_train.main import main\n"
        f"sys.exit(main({words!r}))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PROJECT,
        env=rank_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert "1 on 64 ranks" in finished.stdout
    assert "their names and options are not checked" in finished.stdout


@pytest.mark.parametrize(
    ("step", "words", "fault"),
    [
        (5, [], ""),
        (
            7,
            [],
            "its 7 steps were 1 epochs of 7; with the data and data.global_batch_size 16 of this config an epoch has 5",
        ),
        (
            5,
            ["data.eval=[]", "data.eval_fraction=0.01"],
            "was trained with data.eval_fraction null; 0.01 would evaluate",
        ),
    ],
)
def test_a_checkpoint_that_the_run_would_refuse_is_a_fault(
    config_file: Path, capsys: pytest.CaptureFixture[str], step: int, words: list[str], fault: str
) -> None:
    config = {"data": {"global_batch_size": 16, "train": [str(config_file.parent / "data/train")]}}
    folder = config_file.parent / "run" / "checkpoints" / f"step-{step:09}"
    folder.parent.mkdir(parents=True)
    write(folder, {"w": np.zeros(1)}, Facts(step, 1, 0, ranks=1, config=config, versions={}))
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    with pytest.raises(UserError) if fault else nullcontext():
        plan.run(parser.parse_args(["--config", str(config_file), "--json", *words]))
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert len(faults) == bool(fault)
    assert all(fault in found for found in faults)


def test_makes_nothing(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts_of(config_file, capsys)
    assert not (config_file.parent / "run").exists()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--np", "17"], "data.global_batch_size must be at least the number of ranks (17); received 16"),
        (["data.train=nowhere"], "nowhere"),
        (["output_dir=run.yaml/run"], "run.yaml is no folder"),
        (["checkpoint.resume=nowhere"], "checkpoint.resume: no checkpoint at nowhere"),
        (["model=convnett"], "model.name: unknown name 'convnett'; did you mean convnet"),
        (
            ["model.options={hidde: 3}"],
            "model.options: image_mlp: got an unexpected keyword argument 'hidde'; it takes:",
        ),
        (["model.options={image_size: 5}"], "data.train: the model's train_step does not fit records of"),
        (["loss=auto", "loss.options={}"], "loss: sparse_categorical_crossentropy takes probabilities, but the model"),
        (["metrics=[acuracy]"], "metrics: Keras has no 'acuracy'; did you mean accuracy"),
        (["optimizer=sdg"], "optimizer.name: Keras has no 'sdg'; did you mean SGD"),
        (["optimizer.options={nesterof: true}"], "nesterof"),
        (
            ["optimizer.options={weight_decay: 1e-4}"],
            "optimizer.options.weight_decay: expected a number; received '1e-4'",
        ),
        (
            ["loss={name: smoothed_sparse_categorical_crossentropy, options: {label_smoothing: 1e-1}}"],
            "loss.options.label_smoothing: expected a number; received '1e-1'. YAML reads 1e-1 as text: write 1.0e-1.",
        ),
        (["loss=no_such_package.losses:mine"], "loss.name: cannot import 'no_such_package.losses:mine'"),
        (["hooks=user_hooks:nota"], "hooks[0]: user_hooks has no 'nota'; did you mean note"),
        (["loss=user_models:mine"], "loss.name: user_models has no 'mine'; did you mean"),
        (
            ["early_stopping={metric: acc, patience: 3}"],
            "early_stopping.metric: the evaluation has no 'acc'; it has loss",
        ),
        (["log={activations: {a: layer9}, histograms_every_steps: 5}"], "log.activations"),
        (["horovod.op=adasum", "--np", "3"], "horovod.op: adasum needs a power of two of ranks; received 3"),
        (["data.inputs=[pixels]"], "pixels"),
        (["lr_schedule.decay=cosin"], "lr_schedule.decay.name: unknown name 'cosin'; did you mean cosine"),
        (["log.trackers=[mlfow]"], "log.trackers: unknown name 'mlfow'; did you mean mlflow"),
        (["log.writers=[user_models:mine]"], "log.writers: user_models has no 'mine'; did you mean"),
        (["data.augment=[{name: flop}]"], "data.augment[0].name: unknown name 'flop'; did you mean flip"),
    ],
)
def test_what_is_wrong_is_named_and_the_exit_code_says_so(
    config_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    fault: str,
) -> None:
    monkeypatch.chdir(config_file.parent)
    with pytest.raises(UserError, match="plan: 1 fault in the config"):
        facts_of(config_file, capsys, *words)
    (said,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault in said


def test_all_faults_are_said_at_once(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="plan: 3 faults"):
        facts_of(config_file, capsys, "model=convnett", "loss=mine", "data.eval=nowhere")


def test_fast_says_what_is_wrong_with_paths_and_rates(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="plan: 2 faults"):
        facts_of(config_file, capsys, "--fast", "lr_schedule.decay=cosin", "data.eval=nowhere")


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("parts:loss", "loss.options: parts:loss(targets, outputs, …): missing a required argument: 'weight'"),
        ("broken:loss", "loss.name: {folder}/broken.py:2: "),
        ("raising:loss", "loss.name: raising cannot be imported: RuntimeError: no licence (at {folder}/raising.py:1)"),
    ],
)
def test_faults_in_a_users_module_name_its_line(
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
    expected: str,
) -> None:
    (tmp_path / "parts.py").write_text("def loss(targets, outputs, weight, power=2): ...\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef loss(:\n")
    (tmp_path / "raising.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="plan: 1 fault"):
        facts_of(config_file, capsys, f"loss={loss}")
    (said,) = json.loads(capsys.readouterr().out)["faults"]
    assert said.startswith(expected.format(folder=tmp_path))


def test_a_loss_for_each_output_is_looked_at(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terms = "{digit: {name: huber, weight: 2.0}, other: hubert, third: {name: huber, options: {d: 1}}}"
    with pytest.raises(UserError, match="plan: 2 faults"):
        facts_of(config_file, capsys, "loss.name=per_output", f"loss.options={terms}")
    keys = [sentence.partition(":")[0] for sentence in json.loads(capsys.readouterr().out)["faults"]]
    assert keys == ["loss.options.other.name", "loss.options.third.options"]


OWN_STEP = """
import keras, tensorflow as tf
import horovod_train.tensorflow as hvd
from horovod_train.models import mlp

class Gathering(keras.Model):
    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(hvd.allgather(self(x, training=True)) ** 2) * hvd.size()
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        return {"loss": loss}

def build(**options):
    model = mlp.build_for_images(image_size=4, hidden=6)
    return Gathering(model.inputs, model.outputs)
"""


@pytest.mark.parametrize("is_up", [True, False])
def test_a_step_of_a_models_own_may_call_collectives(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    (tmp_path / "gathering.py").write_text(OWN_STEP)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--np", "3", "model=gathering:build"]
    words.append("loss={name: sparse_categorical_crossentropy, options: {from_logits: true}}")
    if is_up:
        assert facts_of(config_file, capsys, *words)["memory_per_rank"]["parameters"] == 172
        return
    monkeypatch.setattr(plan_model, "horovod_alone", nullcontext)
    with pytest.raises(UserError, match="plan: 1 fault"):
        facts_of(config_file, capsys, *words)
    assert "Horovod has not been initialized" in capsys.readouterr().out


# Links are the old names of configs.
CONFIGS = sorted(path for path in (PROJECT / "configs").glob("*.yaml") if not path.is_symlink())
ON_TOP_OF = {"mlp_asynchronous": "mlp_synchronous", "mlp_tensorboard": "mlp_synchronous", "digits_mlp": "mnist_mlp"}


BUILDS = """
import sys
from horovod_train.commands import plan_model
from horovod_train.config.loader import load
config, _ = load(sys.argv[1:])
assert plan_model.build(config, None) == (None, [])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_what_the_shipped_configs_name_can_be_built(path: Path, tmp_path: Path) -> None:
    """Each in a process of its own: a process that has used TensorFlow cannot cut its CPU into several devices."""
    below = [path.with_stem(ON_TOP_OF[path.stem])] if path.stem in ON_TOP_OF else []
    (tmp_path / "builds.py").write_text(BUILDS)
    finished = run_process([*warm_python(), str(tmp_path / "builds.py"), *map(str, [*below, path])])
    assert finished.returncode == 0, finished.text


ORDERS = st.sampled_from(["shuffled", "lanes", "file"])


@settings(max_examples=60)
@given(st.integers(1, 90), st.integers(1, 33), st.integers(1, 7), ORDERS, st.booleans())
def test_records_per_rank_are_those_that_the_ranks_read(
    records: int, batch: int, ranks: int, order: Any, drop: bool
) -> None:
    batch = max(batch, ranks)
    plan_ = Plan(np.array([records], np.int64), batch, order=order, drop_remainder=drop)
    read = [
        int(plan_.positions(rank, ranks, 0, plan_.steps_per_epoch)[1].sum()) if plan_.steps_per_epoch else 0
        for rank in range(ranks)
    ]
    assert records_by_rank(plan_, ranks) == read
    if records >= batch:
        first = [int(plan_.positions(rank, ranks, 0, 1)[1].sum()) for rank in range(ranks)]
        assert rows_by_rank(batch, ranks) == first


def test_records_per_rank_are_those_of_check_data(tmp_path: Path) -> None:
    records = open_records(data_config(make_images(tmp_path / "data/train")), "train")
    plan_ = Plan(records.source.blocks.records, 16)
    shares, _ = epoch_shares(plan_, records.source.blocks, 0, 3)
    assert records_by_rank(plan_, 3) == [share.records for share in shares]


def test_saves_are_counted_once_where_they_coincide() -> None:
    assert count_saves(CheckpointConfig(every_steps=4, every_epochs=1), 6, 18) == 6
    assert count_saves(CheckpointConfig(every_epochs=None), 6, 17) == 1
    # Without making a set of them.
    assert count_saves(CheckpointConfig(every_steps=1, every_epochs=1), 6, 10**12) == 10**12


@pytest.mark.parametrize("every", [[], [3], [4, 6], [6, 4], [5, 5]])
@pytest.mark.parametrize("at_end", [True, False])
def test_what_is_due_is_counted_as_a_set_would(every: list[int], at_end: bool) -> None:
    for last in range(1, 40):
        steps = {step for each in every for step in range(each, last + 1, each)} | ({last} if at_end else set())
        assert count_multiples(every, last, with_last=at_end) == len(steps)


def test_a_disk_without_room_for_the_checkpoints_is_a_note_or_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=10**9, free=10**7)
    monkeypatch.setattr("horovod_train.checkpoint.layout.shutil", SimpleNamespace(disk_usage=lambda folder: usage))
    config = Config(output_dir=str(tmp_path / "later" / "run"))
    saved = {"count": 9, "bytes_each": 4 * 10**6}
    note = plan._lack_of_room(config, {"checkpoints": saved})
    assert note is not None
    assert "has 10.0 MB free; checkpoints will take up to 16.0 MB, 4.0 MB each." in note
    assert plan._lack_of_room(config, {"checkpoints": {**saved, "count": 2}}) is None
    assert plan._lack_of_room(config, {"checkpoints": {**saved, "bytes_each": None}}) is None
    with pytest.raises(UserError, match=r"expected 11\.0 MB or more, which one checkpoint takes"):
        plan._lack_of_room(config, {"checkpoints": {**saved, "bytes_each": 11 * 10**6}})


@pytest.mark.long
def test_a_source_that_imports_keras_gets_tensorflow_whatever_keras_json_says(tmp_path: Path) -> None:
    """Before the command itself loads TensorFlow."""
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras/keras.json").write_text(json.dumps({"backend": "jax"}))
    source = "import keras\nimport numpy as np\nassert keras.backend.backend() == 'tensorflow'\nclass Rows:\n"
    source += "    def __init__(self, path): ...\n    def __len__(self): return 32\n"
    source += "    def __getitem__(self, record): return {'x': np.float32(record), 'y': np.float32(0)}\n"
    (tmp_path / "rows.py").write_text(source)
    data = "{source: 'rows:Rows', train: rows, inputs: [x], targets: [y], global_batch_size: 8}"
    (tmp_path / "c.yaml").write_text(f"data: {data}\nmodel: mlp\nloss: mse\noptimizer: sgd\ntrain: {{epochs: 1}}\n")
    environment = rank_environment() | {"KERAS_HOME": str(tmp_path / "keras")}
    environment["PYTHONPATH"] += f":{tmp_path}"
    words = ["plan", "--config", str(tmp_path / "c.yaml"), "--output-dir", str(tmp_path / "run"), "--fast"]
    finished = run_process([sys.executable, "-m", "horovod_train.main", *words], environment=environment)
    assert finished.returncode == 0, finished.text
    assert "32" in finished.stdout
