"""Which weights of a checkpoint an evaluation, a prediction and an export take, and which they refuse."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from horovod_train.checkpoint.layout import Checkpoint, Facts, verify
from horovod_train.checkpoint.tensors import write
from horovod_train.commands import evaluate
from horovod_train.commands.cli import add_run_arguments, choose_run, chosen_weights
from horovod_train.config.loader import as_dict, dump, load
from horovod_train.config.settings import Config, DataConfig
from horovod_train.errors import UserError
from horovod_train.inference import run as inference
from horovod_train.inference.run import Weights, load_weights


def stack(blocks: int) -> keras.Model:
    names = [f"block{number}" for number in range(blocks)]
    return keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(2, name=name) for name in names)], name="net")


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    """Three blocks of ones, whose averages are twos."""
    arrays = {
        f"{kind}/{weight.path}": np.full(weight.shape, value, np.float32)
        for kind, value in (("model", 1), ("ema", 2))
        for weight in stack(3).weights
    }
    write(tmp_path / "saved", arrays, Facts(step=0, epoch=0, records=0, ranks=1, config={}, versions={}))
    return verify(tmp_path / "saved")


@pytest.mark.parametrize(("weights", "value"), [("auto", 2), ("trained", 1)])
def test_weights_or_their_averages_are_taken_by_the_same_model_alone(
    saved: Checkpoint, weights: Weights, value: int
) -> None:
    model = stack(3)
    load_weights(model, saved, weights)
    assert all(np.all(array == value) for array in model.get_weights())
    with pytest.raises(UserError, match="has model/net/block2/bias, model/net/block2/kernel, which the model lacks"):
        load_weights(stack(2), saved, weights)


@pytest.mark.parametrize("are_evaluated", [True, False], ids=["SwapEMAWeights", "use_ema alone"])
def test_figures_are_of_the_weights_that_the_run_evaluated(
    tmp_path: Path, are_evaluated: bool, said: list[str]
) -> None:
    """Other results have the averages, as `fit` ends with them; a line tells where those were not evaluated."""
    arrays = {
        f"{kind}/{weight.path}": np.full(weight.shape, value, np.float32)
        for kind, value in (("model", 1), ("ema", 2))
        for weight in stack(1).weights
    }
    write(tmp_path / "saved", arrays, Facts(5, 1, 0, 1, {}, {}, evaluates_averages=are_evaluated))
    found, model = verify(tmp_path / "saved"), stack(1)
    assert load_weights(model, found, "evaluated") == ("ema" if are_evaluated else "trained")
    assert all(np.all(array == 1 + are_evaluated) for array in model.get_weights())
    assert said == []
    assert load_weights(model, found, "auto") == "ema"
    assert all(np.all(array == 2) for array in model.get_weights())
    told = [line for line in said if "evaluations of the run saw the trained weights (--weights evaluated)" in line]
    assert len(told) == (not are_evaluated)


@pytest.mark.parametrize(
    ("given", "as_evaluated", "chosen"),
    [([], True, "evaluated"), ([], False, "auto"), (["--weights", "ema"], True, "ema")],
)
def test_auto_means_for_figures_the_weights_that_were_evaluated(
    given: list[str], as_evaluated: bool, chosen: str
) -> None:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    assert chosen_weights(parser.parse_args(["runs/a", *given]), as_evaluated=as_evaluated) == chosen


def test_figures_that_are_not_finite_are_json_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "choose_run", lambda _: (Config(data=DataConfig(eval=("a",))), "checkpoint"))
    monkeypatch.setattr(evaluate, "look_before_start", lambda *_, **__: None)
    monkeypatch.setattr(inference, "evaluate", lambda *_: {"step": 3, "loss": math.nan})
    evaluate.run(argparse.Namespace(out=str(tmp_path / "figures.json"), weights=None))
    assert json.loads((tmp_path / "figures.json").read_text(), parse_constant=pytest.fail) == {"step": 3, "loss": None}


def test_averages_of_a_part_are_taken_with_the_weights_of_the_rest(tmp_path: Path) -> None:
    """As an optimizer with use_ema saves them that trains a part of the model."""
    model = stack(3)
    arrays = {f"model/{weight.path}": np.full(weight.shape, 1, np.float32) for weight in model.weights}
    arrays |= {f"ema/{weight.path}": np.full(weight.shape, 2, np.float32) for weight in model.layers[0].weights}
    write(tmp_path / "saved", arrays, Facts(step=0, epoch=0, records=0, ranks=1, config={}, versions={}))
    assert load_weights(model, verify(tmp_path / "saved"), "auto") == "ema"
    assert [float(np.mean(array)) for array in model.get_weights()] == [2, 2, 1, 1, 1, 1]


def test_what_a_layer_derives_from_its_weights_follows_those_that_are_loaded(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Normalization(name="norm")], name="net")
    values = {"mean": [3.0, 5.0], "variance": [4.0, 4.0], "count": 0}
    arrays = {f"model/{weight.path}": np.array(values[weight.name], weight.dtype) for weight in model.weights}
    write(tmp_path / "saved", arrays, Facts(step=0, epoch=0, records=0, ranks=1, config={}, versions={}))
    load_weights(model, verify(tmp_path / "saved"), "auto")
    assert np.allclose(model(np.array([[5.0, 5.0]])), [[1.0, 0.0]])


class WithHead(keras.Model):
    """Has a part for training only, which is not there until it is trained."""

    def __init__(self) -> None:
        super().__init__(name="net")
        self.body, self.head = keras.layers.Dense(2, name="body"), keras.layers.Dense(1, name="head")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.body(x)) if training else self.body(x)


def test_weights_of_a_part_for_training_only_are_left_out_and_named(tmp_path: Path, said: list[str]) -> None:
    trained, model = WithHead(), WithHead()
    trained(np.ones((1, 2)), training=True)
    model(np.ones((1, 2)))
    arrays = {f"model/{weight.path}": np.ones(weight.shape, np.float32) for weight in trained.weights}
    write(tmp_path / "saved", arrays, Facts(step=0, epoch=0, records=0, ranks=1, config={}, versions={}))
    load_weights(model, verify(tmp_path / "saved"), "auto")
    assert all(np.all(array == 1) for array in model.get_weights())
    (line,) = said
    assert "the model is built without model/net/head/bias, model/net/head/kernel, which are left out" in line


def test_settings_of_the_model_that_are_newer_than_the_checkpoint_are_named(tmp_path: Path, said: list[str]) -> None:
    """config.yaml is that of the last start; what the command line gives is meant."""
    data = {"data": {"train": "t", "global_batch_size": 8}, "train": {"epochs": 1}}
    then, _ = load([data], ["model={name: 'a:b', options: {depth: 3}}", "data.preprocess='a:c'", "train.l2=0.1"])
    now, _ = load([data], ["model={name: 'a:b', options: {depth: 2}}", "data.preprocess='a:d'"])
    facts = Facts(step=5, epoch=0, records=0, ranks=1, config=as_dict(then), versions={})
    (tmp_path / "checkpoints").mkdir()
    write(tmp_path / "checkpoints" / "step-000000005", {"w": np.ones(1)}, facts)
    (tmp_path / "config.yaml").write_text(dump(now))
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    choose_run(parser.parse_args([str(tmp_path)]))
    assert said == [
        f"warning: config.yaml has other settings than {tmp_path / 'checkpoints' / 'step-000000005'}, and they count: "
        "data.preprocess a:c → a:d; model.options.depth 3 → 2"
    ]
    said.clear()
    choose_run(parser.parse_args([str(tmp_path), "model={name: 'a:b', options: {depth: 4}}", "data.preprocess=null"]))
    assert said == []
