"""What a run says of an epoch: one line with training and evaluation, and a word while the first step is compiled."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import pytest

from horovod_train.output.metrics import Aside
from horovod_train.output.run_dir import RunOutput
from horovod_train.training import run

TRAIN = {"loss": 0.5, "accuracy": 0.75, "learning_rate": 0.1, "examples_per_s": 1000.0, "s_per_step": 0.01}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [re.sub(r"^\d+:\d\d:\d\d  ", "", record.getMessage()) for record in caplog.records]


def test_an_epoch_is_one_line_with_both_side_by_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = RunOutput(tmp_path)
    output.append_metrics("train", 23, 1, TRAIN, Aside({}, "compute-bound"), shown=False)
    assert said(caplog) == []
    output.append_metrics("eval", 23, 1, {"loss": 0.25, "accuracy": 0.875})
    assert said(caplog) == [
        "epoch 1  step 23  loss 0.5  accuracy 0.75  val_loss 0.25  val_accuracy 0.875  learning_rate 0.1  "
        "examples_per_s 1000  compute-bound"
    ]
    assert output.last_metrics("train")["s_per_step"] == 0.01  # the files have all figures, as before
    output.close()


def test_an_evaluation_at_another_step_is_a_line_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = RunOutput(tmp_path)
    output.append_metrics("train", 20, 0, {"loss": 0.5})
    output.append_metrics("eval", 23, 1, {"loss": 0.25})
    assert said(caplog) == ["train step 20  epoch 0  loss 0.5", "eval  step 23  epoch 1  loss 0.25"]
    output.close()


def test_a_slow_first_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    told = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        told.set()

    monkeypatch.setattr(run.log, "info", tell)
    monkeypatch.setattr(run, "SAY_AFTER_S", 0.0)
    with run.said_if_slow("compiling"):
        assert told.wait(60)
    with run.said_if_slow("later steps", unless=True):
        pass
    monkeypatch.setattr(run, "SAY_AFTER_S", 3600.0)
    with run.said_if_slow("a quick one"):
        pass
    assert lines == ["compiling"]
