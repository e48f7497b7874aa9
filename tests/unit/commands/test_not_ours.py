"""Files that only look like a run's are refused and stay; damaged files of a run are read as far as they go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from horovod_train.commands.cli import Parser, add_config_arguments, config_parts, split_overrides
from horovod_train.commands.evaluate import FIGURES
from horovod_train.commands.explain import explain, resume_of
from horovod_train.commands.watch import Follower
from horovod_train.config.registry import call
from horovod_train.config.settings import Spec
from horovod_train.errors import UserError
from horovod_train.inference.predictions import PREDICTIONS
from horovod_train.output.files import Artifact, NotOurs, check
from horovod_train.output.metrics import METRICS, PARAMETERS, TIMES, MetricsFile
from horovod_train.output.rank_log import end_file, introduction, make_folder, open_rank_log


@pytest.mark.parametrize("artifact", [METRICS, TIMES, PARAMETERS])
def test_rows_of_another_trainer_are_not_ours(artifact: Artifact, tmp_path: Path) -> None:
    path = tmp_path / artifact.name.replace("\\", "")
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n')
    with pytest.raises(NotOurs):
        check(path, artifact)
    path.write_text('{"step": ')  # as a kill leaves it
    assert check(path, artifact) == [path]


def test_rows_of_another_trainer_stay(tmp_path: Path) -> None:
    foreign = '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(foreign)
    with pytest.raises(UserError, match="is not a run's metrics"):
        MetricsFile(tmp_path).rewind(0)
    assert (tmp_path / "metrics.jsonl").read_text() == foreign


def test_own_rows_are_kept_beside_what_is_none(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.write(5, 0, "train", {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("ab") as opened:
        opened.write(b'\xff\xfe\n{"step": 5, "epoch": 0}\n{"step": 5, "split": "train", "loss": "x"}\n')
    again = MetricsFile(tmp_path)
    again.rewind(5)
    assert again.last("train") == {"loss": 1.0}


@pytest.mark.parametrize(
    ("artifact", "name", "text"),
    [
        (FIGURES, "card.json", '{\n  "name": "my card",\n  "checkpoint": "gpt2"\n}\n'),
        (PREDICTIONS, "labels.csv", "record,label\n0,cat\n"),
        (PREDICTIONS, "table.csv", "name,output\n0,1\n"),
    ],
)
def test_a_file_of_the_user_is_not_replaced(artifact: Artifact, name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(NotOurs):
        check(tmp_path / name, artifact)


@pytest.mark.parametrize(
    "text", ["record,output\n", "record,output[0],output[1]\n0,0.5,1e-3\n", "record,a,b\n3,1,nan\n"]
)
def test_predictions_of_before_are_replaced(text: str, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text(text)
    assert check(tmp_path / "out.csv", PREDICTIONS)


def test_every_config_that_is_given_counts() -> None:
    parser = Parser()
    add_config_arguments(parser)
    words = config_parts(parser.parse_args(["--config", "a.yaml", "seed=5", "--config", "b.yaml"]))
    assert words == (["a.yaml", "b.yaml"], ["seed=5"])


def test_a_path_may_have_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    words = split_overrides([str(tmp_path / "lr=0.1"), "lr_schedule.base_lr=0.1"])
    assert words == ([str(tmp_path / "lr=0.1")], ["lr_schedule.base_lr=0.1"])


def test_a_name_that_is_no_function_is_one_line() -> None:
    with pytest.raises(UserError, match=r"model: os:path must be a function or a class; it is module\."):
        call(json, Spec("os:path"), "model")  # type: ignore[arg-type]


def test_a_stopped_run_without_logs_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 7, "ended": "STOP file", "finished": False}))
    found = explain(tmp_path)
    assert (found.state, found.what) == ("stopped", "stopped after 7 steps: STOP file")
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 7, "ended": "early stopping", "finished": True}))
    assert explain(tmp_path).state == "finished"


def test_what_others_have_put_into_a_run_does_not_hide_it(tmp_path: Path) -> None:
    make_folder(tmp_path)
    open_rank_log(tmp_path, 0, "node0", start_text=introduction(0, 1, "none", "node0", "CPU")).write("phase", "train")
    logs = tmp_path / "logs"
    (logs / "rank-0.old.log").write_text((logs / "rank-0.log").read_text())
    end_file(logs, 0).write_text('{"ended": "failed", "exit_code": 1, "time": "x"}')
    (tmp_path / "config.yaml").write_bytes(b"\xff")
    assert list(Follower(tmp_path).look().ranks) == [0]
    assert explain(tmp_path).state in ("disappeared", "running")
    assert resume_of(tmp_path) == "auto"


def test_a_log_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank-0.log").mkdir(parents=True)
    with pytest.raises(UserError, match=r"rank-0\.log: cannot be read: Is a directory\."):
        explain(tmp_path)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "x", "true"])
def test_options_take_finite_numbers_only(text: str) -> None:
    parser = Parser()
    parser.add_argument("--seconds", type=float)
    assert parser.parse_args(["--seconds=-1e-3"]).seconds == -1e-3
    with pytest.raises(UserError, match="argument --seconds: expected a number; received"):
        parser.parse_args([f"--seconds={text}"])
