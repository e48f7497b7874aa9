"""Our models and the users' parts that docs/models.md shows: they train, and padding does not count."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import PROJECT, metrics_of, rank_environment, train

pytestmark = pytest.mark.long


EXAMPLES = ["averaged", "classification", "compiled", "finetuned", "gan", "homes", "tagging", "weighted"]


@pytest.fixture(scope="module")
def documented(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader of docs/models.md would have it: parts.py, the configs and the data that they name."""
    folder = tmp_path_factory.mktemp("documented")
    text = (PROJECT / "docs" / "models.md").read_text()
    (folder / "parts.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        name = re.match(r"# (\w+)\.yaml|# of a config", block)
        assert name, "each config in the docs begins with its name"
        if name[1]:
            (folder / f"{name[1]}.yaml").write_text(block)
    (folder / "data").mkdir()
    shutil.copytree(digits, folder / "data" / "digits")
    rng = np.random.default_rng(0)
    rooms, place = rng.normal(size=(320, 3)), rng.normal(size=(320, 2))
    price = rooms.sum(axis=1, keepdims=True)
    was_sold = (place.sum(axis=1, keepdims=True) > 0).astype(np.int64)
    importance = rng.uniform(0.5, 2.0, size=320)
    np.savez(folder / "homes.npz", rooms=rooms, place=place, price=price, was_sold=was_sold, importance=importance)
    words = rng.integers(1, 50, size=(320, 12))
    words = np.where(np.arange(12) < rng.integers(1, 13, size=(320, 1)), words, 0)
    np.savez(folder / "sentences.npz", words=words, tags=np.where(words > 0, 1 + words % 4, 0))
    for command in re.findall(r"^#   (prepare npz .*)$", text, re.MULTILINE):
        finished = train(command.split(), cwd=folder, environment=environment(folder))
        assert finished.returncode == 0, finished.text
    return folder


def environment(folder: Path) -> dict[str, str]:
    return rank_environment() | {"PYTHONPATH": f"{PROJECT}:{folder}"}


def run(folder: Path, words: list[Any], **ranks: Any) -> None:
    finished = train(words, cwd=folder, environment=environment(folder), fresh=False, **ranks)
    assert finished.returncode == 0, finished.text


@pytest.fixture(scope="module")
def learned(documented: Path) -> Callable[[str], Path]:
    """Name of an example → the directory of its run. Each is trained once."""

    @functools.cache
    def train_once(name: str) -> Path:
        if name == "finetuned":
            train_once("classification")
        ranks: dict[str, Any] = {"launcher": "mpirun", "np": 2} if name == "homes" else {}
        run(documented, ["--config", f"{name}.yaml", "--output-dir", name, "log.tensorboard=false"], **ranks)
        return documented / name

    return train_once


def test_every_example_of_the_docs_is_tried(documented: Path) -> None:
    assert sorted(path.stem for path in documented.glob("*.yaml")) == sorted(EXAMPLES)


def test_the_fine_tuned_example_begins_where_the_other_run_ended(learned: Callable[[str], Path]) -> None:
    anew, tuned = (metrics_of(learned(name), "eval") for name in ("classification", "finetuned"))
    accuracy = "sparse_categorical_accuracy"
    assert tuned[0][accuracy] > anew[0][accuracy]
    assert tuned[-1]["loss"] < tuned[0]["loss"]


def test_the_example_with_steps_of_its_own_trains_both_nets(documented: Path, learned: Callable[[str], Path]) -> None:
    """`evaluate` calls its test_step too, which draws the same noise again."""
    rows = metrics_of(learned("gan"), "eval")
    assert [set(row) & {"loss", "generator_loss"} for row in rows] == [{"loss", "generator_loss"}] * 5
    assert rows[-1]["loss"] != rows[0]["loss"]
    run(documented, ["evaluate", learned("gan"), "--out", "gan.json"])
    figures = json.loads((documented / "gan.json").read_text())
    assert figures["generator_loss"] == pytest.approx(rows[-1]["generator_loss"], rel=1e-6)
    (row, *_) = metrics_of(learned("gan"), "train")
    assert row["critic_optimizer_learning_rate"] == row["generator_optimizer_learning_rate"] == pytest.approx(0.001)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ("finetuned", "gan")])
def test_examples_of_the_docs_learn(learned: Callable[[str], Path], name: str) -> None:
    rows = metrics_of(learned(name), "eval")
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    if name == "homes":
        assert rows[-1]["loss"] == pytest.approx(0.5 * rows[-1]["price_loss"] + rows[-1]["sold_loss"], rel=1e-5)
    shown = {"classification": "top2", "homes": "sold_accuracy", "tagging": "word_accuracy"}
    shown |= {"averaged": "loss", "compiled": "accuracy", "weighted": "price_weighted_error"}
    assert shown[name] in rows[-1]


def test_hooks_of_the_docs_add_their_figures(learned: Callable[[str], Path]) -> None:
    rows = metrics_of(learned("homes"), "norms")
    assert [row["step"] for row in rows] == [8, 16, 24, 32, 40]  # once, though both ranks call the hook
    kernels = [value for row in rows for name, value in row.items() if name.endswith("kernel")]
    assert kernels
    assert min(kernels) > 0


def test_several_outputs_are_predicted_by_name(documented: Path, learned: Callable[[str], Path]) -> None:
    run(documented, ["predict", learned("homes"), "--out", "homes_out.npz"], launcher="mpirun", np=2)
    with np.load(documented / "homes_out.npz") as found:
        assert {name: found[name].shape for name in found.files} == {
            "record": (64,),
            "price": (64, 1),
            "sold": (64, 1),
        }


def test_averages_that_were_not_kept_are_missed(documented: Path, learned: Callable[[str], Path]) -> None:
    words = ["evaluate", learned("tagging"), "--weights", "ema"]
    finished = train(words, cwd=documented, environment=environment(documented), fresh=False)
    assert finished.returncode == 2, finished.text
    (line,) = finished.stderr.splitlines()
    assert "holds no moving averages. Take --weights trained, or train with train.ema_decay" in line


def test_the_transformer_learns_and_padding_has_no_influence(tmp_path: Path) -> None:
    """Sentences padded to 20 and to 32, with other ranks and batches: the same outputs."""
    fewer = ["--records", "2000", "--vocabulary", "100", "--max-length", "20"]
    run(tmp_path, ["prepare", "token-samples", *fewer, "--out", "data/tokens"])
    words = ["--config", PROJECT / "configs" / "text_transformer.yaml", "--output-dir", "run", "log.tensorboard=false"]
    words += ["data.bucket_by_length=tokens"]  # in training
    options = "{vocabulary: 100, width: 32, blocks: 1, max_length: 32}"
    smaller = [f"model.options={options}", "train.epochs=3", "lr_schedule.base_lr=0.003", "data.global_batch_size=32"]
    run(tmp_path, [*words, *smaller], launcher="mpirun", np=2)
    rows = metrics_of(tmp_path / "run", "eval")
    assert rows[-1]["loss"] < 0.5 * np.log(4)  # knowing nothing of four kinds
    assert rows[-1]["accuracy"] > 0.8
    run(tmp_path, ["predict", "run", "--out", "short.npz"])
    schema = json.loads((tmp_path / "data" / "tokens" / "dataset.json").read_text())
    schema["features"]["tokens"]["max_length"] = 32
    (tmp_path / "data" / "tokens" / "dataset.json").write_text(json.dumps(schema))
    run(tmp_path, ["predict", "run", "--out", "long.npz"])
    short, long = (np.load(tmp_path / f"{name}.npz")["output"] for name in ("short", "long"))
    assert np.allclose(short, long, atol=1e-5 * np.abs(short).max())


@pytest.mark.exhaustive
def test_the_imagenet_config_runs_on_made_images(tmp_path: Path) -> None:
    run(tmp_path, ["prepare", "imagenet-samples", "--records", "64", "--eval-records", "8", "--out", "data/imagenet"])
    config = yaml.safe_load((PROJECT / "configs" / "imagenet_resnet50.yaml").read_text())
    config["data"]["features"]["image/encoded"]["shape"] = [32, 32, 3]
    config["data"]["batch_size_per_rank"] = 4
    config["model"]["options"]["image_size"] = 32
    config["train"] |= {"epochs": None, "max_steps": 4}
    config["data"]["eval"], config["checkpoint"] = [], {}  # which would compile it once more
    config["log"] = {"every_steps": 1, "tensorboard": False}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    run(tmp_path, ["--config", "small.yaml", "--output-dir", "run"], launcher="mpirun", np=2)
    rows = metrics_of(tmp_path / "run", "train")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # A mean over 1000 classes that nothing is known of, and the l2 penalty.
    assert 0.8 * np.log(1000) < rows[0]["loss"] < 1.6 * np.log(1000)
    assert rows[0]["learning_rate"] == pytest.approx(0.1 * 8 / 256 * 2 / (5 * 8), rel=1e-5)  # of the next step
    assert rows[0].keys() >= {"top1", "top5"}
