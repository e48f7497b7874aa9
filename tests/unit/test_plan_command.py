"""The command `plan`: its figures against what training does, its verdict on names against what imports say."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import yaml
from conftest import PROJECT, rank_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import config as data_config
from made_records import make_images

from horovod_train.commands import plan
from horovod_train.commands.plan_facts import records_by_rank, rows_by_rank, save_steps
from horovod_train.commands.plan_names import wrong_names
from horovod_train.commands.plan_sizes import SLOTS, find_size, parse_count, slots
from horovod_train.config.loader import load
from horovod_train.config.settings import CheckpointConfig, Config, Spec, TrainConfig
from horovod_train.data.dataset import open_records
from horovod_train.data.rank_shares import epoch_shares
from horovod_train.data.sampler import Plan
from horovod_train.errors import UserError
from horovod_train.optim.optimizers import build_optimizer
from horovod_train.optim.schedules import Horizon, build_formula
from horovod_train.training.losses import build_loss


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A whole config on 70 made records."""
    make_images(tmp_path / "data/train")
    make_images(tmp_path / "data/eval", shards=[12])
    file = tmp_path / "run.yaml"
    content = {
        "output_dir": str(tmp_path / "run"),
        "data": {"train": str(tmp_path / "data/train"), "eval": str(tmp_path / "data/eval"), "global_batch_size": 16},
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
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_figures_of_a_run(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(config_file, capsys, "--np", "3", "--parameters", "1M")
    assert facts["records"]["train"]["records"] == 70
    assert facts["batch"] == {"global": 16, "rows_per_rank": {"5": 2, "6": 1}}
    assert facts["steps"] == {"per_epoch": 5, "total": 30, "epochs": 6, "records_in_last_of_epoch": 6}
    assert facts["checkpoints"]["count"] == 3
    assert facts["checkpoints"]["bytes_each"] == 1_000_000 * 4 * 2
    assert facts["memory_per_rank"]["bytes"]["slots"] == 4_000_000
    assert facts["faults"] == []
    assert any("a global batch of 18" in note for note in facts["notes"])


def test_rates_are_those_of_the_schedule(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = facts_of(config_file, capsys)["learning_rate"]
    config, _ = load([str(config_file)])
    rate = build_formula(config.lr_schedule, Horizon(16, 5, 30))
    steps = np.array([row["step"] for row in rows], np.float64)
    np.testing.assert_allclose([row["rate"] for row in rows], rate(steps, np))
    assert {0, 4, 29} <= set(steps)  # the first, the end of warm-up, the last


def test_time_against_walltime(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 epochs of 70 records and 6 evaluations of 12, at 10 records/s."""
    time = facts_of(config_file, capsys, "--examples-per-s", "10", "--time", "00:00:30")["time"]
    assert time == {"records": 492, "seconds": 49.2, "walltime_s": 30.0, "jobs": 2}
    time = facts_of(config_file, capsys, "--time", "60")["time"]
    assert time["needs_examples_per_s"] == 8.2


def test_answers_at_once_for_64_ranks_and_never_loads_tensorflow(config_file: Path) -> None:
    words = ["plan", "--config", str(config_file), "data.global_batch_size=64", "--np", "64"]
    script = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "from horovod_train.main import main\n"
        f"sys.exit(main({words!r}))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", script]
    finished = subprocess.run(
        command, cwd=PROJECT, env=rank_environment(), capture_output=True, text=True, check=False, timeout=300
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert finished.returncode == 0, finished.stderr
    assert "1 on 64 ranks" in finished.stdout
    # Seconds of computing: those on the clock depend on what else the machine does.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


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
        (["model=convnett"], "model.name: unknown name 'convnett'; known here: convnet"),
        (["model.options={hidde: 3}"], "model.options: convnet does not take 'hidde'; it takes:"),
        (["optimizer=sdg"], "optimizer.name: Keras has no 'sdg'; near it: SGD"),
        (["loss=no_such_package.losses:mine"], "cannot find the module of 'no_such_package.losses:mine'"),
        (["loss=user_models:mine"], "loss.name: user_models has no 'mine'; it has"),
        (["lr_schedule.decay=cosin"], "lr_schedule.decay.name: unknown name 'cosin'; known here: cosine"),
        (["data.augment=[{name: flop}]"], "data.augment[0].name: unknown name 'flop'; known here: flip"),
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


def write_module(folder: Path) -> None:
    """A package whose import would fail: it must be looked at, not run."""
    (folder / "mine").mkdir()
    (folder / "mine/__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "mine/other.py").write_text("def far(targets, outputs, *, scale=1.0): ...\n")
    (folder / "mine/parts.py").write_text(
        "from mine.other import far as near\n"
        "from mine import other\n"
        "try:\n    import json\nexcept ImportError:\n    fallback = None\n"
        "def loss(targets, outputs, weight, power=2): ...\n"
        "class Loss:\n    def __init__(self, margin, name='mine'): ...\n"
        "made = object()\n"
    )
    (folder / "mine/broken.py").write_text("x = 1\ndef loss(:\n")


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (Spec("mine.parts:loss", {"weight": 1}), None),
        (Spec("mine.parts:near", {"scale": 1}), None),
        (Spec("mine.parts:made"), None),
        (Spec("mine.parts:fallback"), None),
        (Spec("mine.parts:Loss", {"margin": 1}), None),
        (Spec("mine.parts:loss"), "loss.options: mine.parts:loss needs 'weight'."),
        (Spec("mine.parts:loss", {"weight": 1, "pow": 2}), "does not take 'pow'; it takes: weight, power."),
        (Spec("mine.parts:near", {"skale": 1}), "does not take 'skale'; it takes: scale."),
        (Spec("mine.parts:lost"), "mine.parts has no 'lost'; it has Loss"),
        (Spec("mine.part:loss"), "cannot find the module of 'mine.part:loss'"),
        (Spec("mine.broken:loss"), "broken.py:2: "),
    ],
)
def test_functions_are_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Spec, expected: str | None
) -> None:
    write_module(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said = [sentence for sentence in wrong_names(Config(loss=loss)) if sentence.startswith("loss")]
    assert len(said) == (expected is not None), said
    assert expected is None or expected in said[0]
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    "loss",
    [
        Spec("sparse_categorical_crossentropy", {"from_logits": True}),
        Spec("SparseCategoricalCrossentropy", {"from_logit": True}),
        Spec("huber", {"delta": 2.0}),
        Spec("hubert"),
        Spec("mean_squared_error", {"delta": 2.0}),
    ],
)
def test_verdict_on_keras_losses_is_that_of_training(loss: Spec) -> None:
    try:
        build_loss(loss)
        is_good = True
    except UserError:
        is_good = False
    assert is_good == (not list(wrong_names(Config(loss=loss))))


# Links are the old names of configs.
CONFIGS = sorted(path for path in (PROJECT / "configs").glob("*.yaml") if not path.is_symlink())
ON_TOP_OF = {"mlp_asynchronous": "mlp_synchronous", "mlp_tensorboard": "mlp_synchronous", "digits_mlp": "mnist_mlp"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_names_in_the_configs_that_are_shipped_are_found(path: Path) -> None:
    below = [path.with_stem(ON_TOP_OF[path.stem])] if path.stem in ON_TOP_OF else []
    config, _ = load([str(file) for file in [*below, path]])
    assert list(wrong_names(config)) == []


def test_a_loss_for_each_output_is_looked_at() -> None:
    wrong = {"name": "huber", "options": {"d": 1}}
    options = {"digit": {"name": "huber", "weight": 2.0}, "other": "hubert", "third": wrong}
    said = list(wrong_names(Config(loss=Spec("per_output", options))))
    keys = [sentence.partition(":")[0] for sentence in said]
    assert keys == ["loss.options.other.name", "loss.options.third.options"]


@pytest.mark.parametrize(
    "optimizer",
    [
        Spec("sgd", {"momentum": 0.9, "nesterov": True}),
        Spec("sgd", {"momentum": 0.9, "nesterof": True}),
        Spec("AdamW", {"beta_1": 0.8, "weight_decay": 0.1, "clipvalue": 1.0}),
        Spec("lion", {"rho": 0.9}),
        Spec("lars", {"trust_coefficient": 0.002}),
        Spec("adem"),
        *(Spec(name) for name in SLOTS),
    ],
    ids=str,
)
def test_verdict_on_keras_optimizers_is_that_of_training(optimizer: Spec) -> None:
    config = Config(optimizer=optimizer)
    try:
        build_optimizer(config, Horizon(16, 5, 30))
        is_good = True
    except UserError:
        is_good = False
    assert is_good == (not list(wrong_names(config)))


ORDERS = st.sampled_from(["shuffled", "lanes", "file"])


@settings(deadline=None, max_examples=60)
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
    config = Config(train=TrainConfig(epochs=3), checkpoint=CheckpointConfig(every_steps=4, every_epochs=1))
    assert save_steps(config, Horizon(16, 6, 18)) == [4, 6, 8, 12, 16, 18]
    config = Config(checkpoint=CheckpointConfig(every_epochs=None))
    assert save_steps(config, Horizon(16, 6, 17)) == [17]


def built_slots(spec: Spec) -> float:
    """Values that a Keras optimizer really keeps for each parameter."""
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50)])
    optimizer = build_optimizer(Config(optimizer=spec), Horizon(16, 5, 30))
    optimizer.build(model.trainable_variables)
    kept = sum(int(np.prod(variable.shape)) for variable in optimizer.variables if len(variable.shape))
    return kept / model.count_params()


@pytest.mark.parametrize("name", sorted(SLOTS))
def test_slots_are_those_of_keras(name: str) -> None:
    assert built_slots(Spec(name)) == pytest.approx(slots(Spec(name)), abs=0.05)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("sgd", {"momentum": 0.9}),
        Spec("adam", {"amsgrad": True}),
        Spec("rmsprop", {"momentum": 0.9, "centered": True}),
    ],
    ids=lambda spec: str(spec.options),
)
def test_slots_that_options_add_are_those_of_keras(spec: Spec) -> None:
    assert built_slots(spec) == slots(spec)
    assert built_slots(Spec(spec.name)) < slots(spec)  # type: ignore[operator]


def test_moving_averages_and_late_gradients_are_counted() -> None:
    plain = Config(optimizer=Spec("adam"))
    kept = Config(optimizer=Spec("adam"), train=TrainConfig(ema_decay=0.9, synchronization="stale"))
    assert find_size(plain, "1M", None).checkpoint_bytes == 12_000_000
    assert find_size(kept, "1M", None).checkpoint_bytes == 20_000_000


def test_an_optimizer_of_the_users_is_not_guessed() -> None:
    assert slots(Spec("mine.parts:optimizer")) is None


@pytest.mark.parametrize(("text", "count"), [("25600000", 25_600_000), ("25.6M", 25_600_000), ("7b", 7_000_000_000)])
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


def test_a_count_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="--parameters: expected a number"):
        parse_count("many")
