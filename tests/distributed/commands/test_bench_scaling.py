"""`bench scaling` trains a config as it is on several numbers of ranks, and its figures are those of the runs."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, run_process

from horovod_train.commands.bench import Measured, Point, environments_apart, measured_config, table
from horovod_train.config.loader import dump, load
from horovod_train.errors import UserError
from horovod_train.main import main

CONFIG = str(PROJECT / "configs" / "digits_convnet.yaml")


def test_efficiency_is_against_as_many_runs_without_exchange() -> None:
    shares = {"input": 0.1, "compute": 0.6, "exchange": 0.3}
    alone = [Measured(100.0, shares, 2.0), Measured(110.0, shares, 3.0), Measured(90.0, shares, 9.0)]
    pair = [Measured(rate, shares, 4.0) for rate in (150.0, 140.0, 160.0)]
    apart = [Measured(rate, shares, 4.0) for rate in (200.0, 190.0, 230.0)]
    *_, first, second = table([Point(1, alone, alone), Point(2, pair, apart)])
    assert first == "| 1 | 100 | 90 to 110 | 1.00 | 1.00 | 10 % | 60 % | 30 % | 3.0 |"
    assert second == "| 2 | 150 | 140 to 160 | 1.50 | 0.75 | 10 % | 60 % | 30 % | 4.0 |"


def test_nothing_but_training_is_measured() -> None:
    given, _ = load([CONFIG], ["data.train=a", "checkpoint.every_steps=7", "checkpoint.best.metric=loss"])
    config = measured_config(given, 300)
    assert (config.train.max_steps, config.log.every_steps, config.data.eval) == (300, 30, ())
    assert (config.checkpoint.every_steps, config.checkpoint.every_epochs, config.checkpoint.best) == (None, None, None)
    for kept in ("model", "optimizer", "loss", "precision", "horovod"):
        assert getattr(config, kept) == getattr(given, kept)


def test_what_a_run_does_besides_is_not_measured_and_not_in_its_way(tmp_path: Path) -> None:
    besides = ["log.graph=true", "log.histograms_every_steps=5", "log.profile_at_steps=[3]", "log.trackers=[csv]"]
    given, _ = load([CONFIG], ["data.train=a", "data.eval=[]", "data.eval_fraction=0.2", *besides])
    (tmp_path / "c.yaml").write_text(dump(measured_config(given, 300)))
    config, _ = load([str(tmp_path / "c.yaml")])
    assert config.log.trackers == ()
    assert config.eval.every_epochs is None
    assert config.data.eval_fraction == 0.2  # the records of training are the same


@pytest.mark.parametrize(
    ("visible", "per_rank", "expected"),
    [
        (None, 1, ["0", "1"]),
        (None, 2, ["0,1", "2,3"]),
        ("3,GPU-ab,5", 1, ["3", "GPU-ab"]),
        ("4,5,6,7", 2, ["4,5", "6,7"]),
        ("", 1, [None, None]),
        ("-1", 1, [None, None]),
    ],
)
def test_runs_without_exchange_get_gpus_of_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, per_rank: int, expected: list[str | None]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = environments_apart(2, per_rank)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in found] == expected


def test_too_few_gpus_for_the_runs_without_exchange_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with pytest.raises(UserError, match="3 ranks of 1 take 3 GPUs; CUDA_VISIBLE_DEVICES names 2: 3,5"):
        environments_apart(3, 1)


@pytest.mark.exhaustive
def test_two_numbers_of_ranks_are_measured(digits: Path, tmp_path: Path) -> None:
    words = ["bench", "scaling", "--config", CONFIG, f"data.train={digits / 'train'}", f"data.eval={digits / 'eval'}"]
    words += ["--np", "2,1", "--steps", "40", "--rounds", "1", "--way", "horovodrun"]
    files = ["--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]
    finished = run_process([sys.executable, "-m", "horovod_train.main", *words, *files], cwd=tmp_path)
    assert finished.returncode == 0, finished.text
    found = json.loads((tmp_path / "a.json").read_text())["ranks"]
    assert list(found) == ["1", "2"]
    (one,), (two,), (apart,) = found["1"]["together"], found["2"]["together"], found["2"]["apart"]
    assert found["1"]["apart"] == [one]
    for measured in (one, two, apart):
        assert sum(measured["shares"].values()) == pytest.approx(1.0)
        assert measured["first_step_s"] > 0
    assert two["shares"]["exchange"] > statistics.mean([one["shares"]["exchange"], apart["shares"]["exchange"]])
    row = next(line for line in finished.stdout.splitlines() if line.startswith("| 2 |"))
    assert f"| {two['examples_per_s'] / apart['examples_per_s']:.2f} |" in row
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "a.png"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--np", "0"], "--np: expected a whole number of at least 1; received '0'."),
        (["--np", "1,two"], "--np: expected a whole number of at least 1; received 'two'."),
        (["--steps", "3"], "--steps must be at least 20; received 3."),
        (["--json", __file__], "--json"),
        (["--png", "/nowhere/a.png"], "--png /nowhere/a.png: expected a new file in a folder that exists."),
        (["data.shufle=true"], "data.shufle"),
    ],
)
def test_bad_words_are_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", "--config", CONFIG, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


@pytest.mark.long
def test_a_run_that_fails_is_told_of_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "scaling", "--config", CONFIG, f"data.train={tmp_path / 'none'}", "--np", "1", "--rounds", "1"]
    assert main(words) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench: a run failed: error: data.train: " in line
