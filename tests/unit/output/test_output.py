"""The run directory: whole files, each step once, nothing from ranks that are not root."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import tensorflow as tf

from horovod_train.config.loader import as_dict
from horovod_train.config.settings import Config, LogConfig, Spec
from horovod_train.errors import UserError
from horovod_train.output import logs, metrics, rank_log
from horovod_train.output.files import Lines, parse_json
from horovod_train.output.metrics import Aside, JsonLines, MetricsFile
from horovod_train.output.run_dir import Output, RunOutput, check_writable, open_output


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_after_the_step_of_a_resume_are_taken_back(tmp_path: Path) -> None:
    output = RunOutput(tmp_path)
    for step in (10, 20, 30):
        output.append_metrics("train", step, 0, {"loss": 1.0})
    output.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "los')  # a kill cut this line short
    again = RunOutput(tmp_path)
    again.rewind(20)
    again.append_metrics("train", 30, 0, {"loss": 0.5})
    again.close()
    assert steps(tmp_path) == [10, 20, 30]


def test_an_evaluation_that_will_be_made_again_is_taken_back(tmp_path: Path) -> None:
    output = RunOutput(tmp_path)
    for step in (10, 20):
        output.append_metrics("train", step, 0, {"loss": 1.0})
        output.append_metrics("eval", step, 0, {"loss": 1.0 / step})
    output.close()
    for is_evaluated, kept in ((True, [10, 10, 20, 20]), (False, [10, 10, 20])):
        again = RunOutput(tmp_path)
        again.rewind(20, is_evaluated=is_evaluated)
        assert again.last_metrics("eval") == {"loss": 0.05 if is_evaluated else 0.1}
        again.close()
        assert steps(tmp_path) == kept


def test_a_resume_holds_no_more_than_some_rows_in_memory(tmp_path: Path) -> None:
    rows = MetricsFile(tmp_path)
    for step in range(1_000):
        rows.write(step, 0, "train", {f"metric {number}": step / 7 for number in range(40)})
        rows.write(step, 0, "eval", {"loss": 1.0 / (1 + step)})
    rows.close()
    output = open_output(str(tmp_path), LogConfig(tensorboard=False), is_root=True, launched=True)
    tracemalloc.start()
    try:
        output.start_trackers(999, as_dict(Config()), anew=False)
        output.rewind(999, is_evaluated=False)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert output.last_metrics("eval") == {"loss": 1.0 / 999}
    output.close()
    size = (tmp_path / "metrics.jsonl").stat().st_size
    assert most < size / 4, (most, size)


def test_a_resume_parses_only_the_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for it, and a long run has a million rows."""
    rows = MetricsFile(tmp_path)
    for step in range(1, 300):
        rows.write(step, 0, "train", {"loss": 1.0 / step})
        rows.write(step, 0, "eval", {"loss": 2.0 / step})
        rows.write(step, 0, "eval", {"more": float(step)})
    parsed: list[str | bytes] = []
    monkeypatch.setattr(metrics, "parse_json", lambda line: parsed.append(line) or parse_json(line))
    rows.rewind(200)
    assert (rows.last("train"), rows.last("eval")) == ({"loss": 1 / 200}, {"loss": 2 / 200, "more": 200.0})
    rows.remove_evaluation(200)
    assert (rows.last("train"), rows.last("eval")) == ({"loss": 1 / 200}, {"loss": 2 / 199, "more": 199.0})
    assert len(steps(tmp_path)) == 598
    assert len(parsed) < 30


@pytest.mark.parametrize(
    ("line", "is_kept"),
    [
        ('{"step": 10, "seconds": {"input": [1, 2]}}', True),
        ('{"step": 11, "seconds": {"input": [1, 2]}}', False),
        ('{"step": 10, "seconds": {"input": [1, 2]}', False),  # a kill has cut it short
        ('{"step": 10, "verdict": "}"}', True),
        ('{"step": 10, "verdict": "of {"}', True),
        ('{"step":10,"verdict":"of another writer"}', True),
        ('{"step": 1e1}', True),
        ('{"step": 1', False),
        ('{"step": 10', False),
    ],
)
def test_a_resume_keeps_the_whole_rows_up_to_its_step(line: str, is_kept: bool, tmp_path: Path) -> None:
    (tmp_path / "times.jsonl").write_text(f'{{"step": 10, "verdict": "", "seconds": {{}}}}\n{line}')
    JsonLines(tmp_path / "times.jsonl", metrics.TIMES).rewind(10)
    assert (line in (tmp_path / "times.jsonl").read_text().splitlines()) == is_kept


def test_metrics_whose_last_line_lacks_its_end_are_continued_on_a_line_of_their_own(tmp_path: Path) -> None:
    output = RunOutput(tmp_path)
    output.append_metrics("train", 10, 0, {"loss": 1.0})
    output.close()
    written = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(written.removesuffix("\n"))
    again = RunOutput(tmp_path)
    again.rewind(10)
    again.append_metrics("train", 20, 0, {"loss": 0.5})
    again.close()
    assert steps(tmp_path) == [10, 20]


def test_metrics_of_a_run_that_has_none_yet_can_be_read(tmp_path: Path) -> None:
    output = RunOutput(tmp_path)
    for _ in range(2):
        output.rewind(0)
        assert (tmp_path / "metrics.jsonl").read_text() == ""
    output.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.prom"]


def test_numbers_that_are_not_finite_are_null_and_the_line_is_json_to_every_reader(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    output = RunOutput(tmp_path)
    output.append_metrics("train", 1, 0, {"loss": math.nan, "gain": -math.inf, "accuracy": 0.5})
    output.write_summary({"eval": output.last_metrics("train"), "examples_per_s": None, "list": [math.nan, 1]})
    output.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=refuse)
    assert (row["loss"], row["gain"], row["accuracy"]) == (None, None, 0.5)
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary == {
        "eval": {"loss": None, "gain": None, "accuracy": 0.5}, "examples_per_s": None, "list": [None, 1]
    }  # fmt: skip


OWN_WRITER = """
class Csv:
    def __init__(self, directory):
        self.path = directory / "metrics.csv"
        self.rows = []
    def write(self, step, epoch, split, values):
        self.rows.append(f"{step},{epoch},{split},{values['loss']}")
    def rewind(self, step):
        self.rows.append(f"from {step}")
    def close(self):
        self.path.write_text("\\n".join(self.rows))

def takes_two(directory, more):
    raise AssertionError
"""


def test_a_writer_of_the_users_own_gets_what_metrics_jsonl_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_writer.py").write_text(OWN_WRITER)
    monkeypatch.syspath_prepend(tmp_path)
    own = LogConfig(tensorboard=False, writers=("own_writer:Csv",))
    output = open_output(str(tmp_path / "run"), own, is_root=True, launched=True)
    output.rewind(5)
    output.append_metrics("train", 10, 0, {"loss": 1.0})
    output.append_metrics("eval", 20, 1, {"loss": 0.5})
    output.close()
    assert steps(tmp_path / "run") == [10, 20]
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines() == ["from 5", "10,0,train,1.0", "20,1,eval,0.5"]
    wrong = LogConfig(writers=("own_writer:takes_two",))
    with pytest.raises(UserError, match=r"^log\.writers\.options: own_writer:takes_two: missing a required argument"):
        open_output(str(tmp_path / "run"), wrong, is_root=True, launched=True)


DRAFTS = {
    ".config.yaml.0123abcd.partial": "# Written by horovod_tr",
    ".metrics.prom.0123abcd.partial": "",
    ".summary.json.0123abcd.partial": '{\n  "steps": 1',
    "trackers/.csv.json.0123abcd.partial": '{"run_id": "csv"',
    "csv/.train.csv.0123abcd.partial": "step,epoch,loss\n",
    "logs/.rank-1.end.json.0123abcd.partial": "{",
}
NOT_OURS = {".notes.partial": "", ".notes.md.0123abcd.partial": "", ".summary.json.89abcdef.partial": "a summary"}


def test_what_a_killed_start_was_writing_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name, text in (DRAFTS | NOT_OURS).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    config = LogConfig(tensorboard=False, trackers=(Spec("csv"),))
    output = open_output(str(tmp_path), config, is_root=True, launched=True)
    output.start_trackers(0, {}, anew=False)
    output.finish_trackers("done")
    output.close()
    rank_log.make_folder(tmp_path)
    assert {path.name for path in tmp_path.rglob(".*")} == set(NOT_OURS)


def test_other_ranks_have_every_method_and_no_effect(tmp_path: Path) -> None:
    output = open_output(str(tmp_path / "run"), LogConfig(), is_root=False, launched=True)
    assert type(output) is Output
    assert not (tmp_path / "run").exists()


def test_metrics_of_a_full_disk_are_written_when_there_is_room(tmp_path: Path, said: list[str]) -> None:
    lines = Lines(Path("/dev/full"))
    lines.append("1")
    lines.append("2")
    assert len(said) == 1
    assert "No space left on device" in said[0]
    lines.path = tmp_path / "metrics.jsonl"
    lines.append("3")
    assert lines.path.read_text() == "1\n2\n3\n"
    assert "3 lines from memory are in it now" in said[1]


def test_a_line_that_does_not_fit_leaves_no_part_of_itself(tmp_path: Path) -> None:
    """The limit takes the first bytes of the second line, as a disk does that fills up."""
    path = tmp_path / "metrics.jsonl"
    script = f"""
import resource
from pathlib import Path
from horovod_train.output.files import Lines
lines = Lines(Path({str(path)!r}))
lines.append("a" * 99)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
lines.append("b" * 5999)
assert Path({str(path)!r}).stat().st_size == 100
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.append("c" * 9)
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert path.read_text().split() == ["a" * 99, "b" * 5999, "c" * 9]


def test_of_too_many_lines_the_oldest_go_and_it_is_said(tmp_path: Path, said: list[str]) -> None:
    lines = Lines(Path("/dev/full"), max_pending_bytes=4)
    for line in "123":
        lines.append(line)
    lines.path = tmp_path / "metrics.jsonl"
    lines.flush()
    assert lines.path.read_text() == "2\n3\n"
    assert said[1].endswith("2 lines from memory are in it now; 1 are lost.")


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UserError, match="output_dir: cannot write to /proc/here"):
        check_writable("/proc/here")


@pytest.mark.parametrize("below", ["", "runs/a"])
def test_a_link_to_nothing_is_no_folder(tmp_path: Path, below: str) -> None:
    """Of a disk that is not mounted: said to exist, it would be looked for in vain."""
    (link := tmp_path / "scratch").symlink_to("/nowhere/scratch")
    with pytest.raises(UserError, match=f"^output_dir: {link} is a link to nothing: is its disk mounted"):
        check_writable(str(link / below))


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_files_that_no_run_wrote_are_not_replaced_by_one(tmp_path: Path, name: str) -> None:
    """As with `--config config.yaml --output-dir .`."""
    (tmp_path / name).write_text("seed: 3  # mine\n")
    with pytest.raises(UserError, match=rf"^output_dir: .*{name} is not a run's \w+, and a run would replace it"):
        check_writable(str(tmp_path))
    assert (tmp_path / name).read_text() == "seed: 3  # mine\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "times.jsonl", "parameters.jsonl", "metrics.prom"])
@pytest.mark.parametrize("follows", ["", '": 2}\n{"step": '])
def test_files_of_a_run_that_a_power_cut_has_filled_with_nul_bytes_are_those_of_a_run(
    name: str, follows: str, tmp_path: Path
) -> None:
    """A file system may keep the length of what was appended, and not the bytes."""
    (tmp_path / name).write_text("\0" * 300 + follows)
    output = open_output(str(tmp_path), LogConfig(tensorboard=False), is_root=True, launched=True)
    output.rewind(0)
    output.append_metrics("train", 1, 0, {"loss": 1.0})
    output.close()
    assert steps(tmp_path) == [1]
    assert b"\0" not in (tmp_path / name).read_bytes()


@pytest.mark.parametrize(("term", "has_bar"), [("xterm", True), ("dumb", False)])
def test_a_bar_is_for_terminals_that_draw_it_again(
    term: str, has_bar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("TERM", term)
    output = open_output(str(tmp_path), LogConfig(tensorboard=False), is_root=True, launched=False)
    output.start_progress(0, 2)
    output.close()
    assert ("training" in shown.getvalue()) == has_bar


def test_the_files_of_a_run_are_those_of_a_run(tmp_path: Path) -> None:
    for seed in (1, 2):
        output = open_output(str(tmp_path), LogConfig(tensorboard=False), is_root=True, launched=True)
        output.rewind(0)
        output.write_config(f"seed: {seed}\n")
        output.append_metrics("train", 1, 0, {"loss": 1.0})
        output.write_summary({"steps": 1})
        output.close()
    assert (tmp_path / "config.yaml").read_text().endswith("\nseed: 2\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "metrics.prom",
        "summary.json",
    ]


def test_a_config_that_is_held_back_is_written_with_the_summary_only(tmp_path: Path) -> None:
    """As at a start of a run that is done: its files tell of its end, and stay unless there is more to tell."""
    output = open_output(str(tmp_path), LogConfig(tensorboard=False), is_root=True, launched=True)
    assert not output.tells_end_at(9)
    output.write_config("seed: 1\n")
    output.write_summary({"steps": 9, "finished": True})
    assert (output.tells_end_at(9), output.tells_end_at(8)) == (True, False)
    output.write_config("seed: 2\n", held_back=True)
    assert (tmp_path / "config.yaml").read_text().endswith("\nseed: 1\n")
    output.write_summary({"steps": 9, "finished": False})
    assert (tmp_path / "config.yaml").read_text().endswith("\nseed: 2\n")
    assert not output.tells_end_at(9)
    output.close()


TRAIN = {"loss": 0.5, "accuracy": 0.75, "learning_rate": 0.1, "examples_per_s": 1000.0, "s_per_step": 0.01}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [re.sub(r"^\d+:\d\d:\d\d  ", "", record.getMessage()) for record in caplog.records]


def test_an_epoch_is_one_line_with_both_side_by_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = RunOutput(tmp_path)
    output.append_metrics("train", 23, 1, TRAIN, Aside({}, "compute-bound", shown=False))
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


def test_a_writer_without_what_is_asked_for_is_refused_before_training(tmp_path: Path) -> None:
    said = r"user_hooks:Halves must have write\(step, .*\), rewind\(step\) and close\(\): .*rewind"
    with pytest.raises(UserError, match=said):
        open_output(str(tmp_path), LogConfig(writers=("user_hooks:Halves",)), is_root=True, launched=True)


def test_rows_of_hooks_are_numbers_and_leave_ours_as_they_are(tmp_path: Path) -> None:
    output = RunOutput(tmp_path)
    output.rewind(0)
    output.append_metrics("train", 10, 0, {"loss": 1.0})
    output.append_metrics("train", 10, 0, {"norm": cast(float, np.float32(0.5)), "largest": tf.constant(2.0)})
    assert output.last_metrics("train") == {"loss": 1.0, "norm": 0.5, "largest": 2.0}
    with pytest.raises(ValueError, match="no value can be called seconds"):
        output.append_metrics("train", 10, 0, {"seconds": 1.0})
    output.append_metrics("train", 20, 0, {"loss": 0.5})
    assert output.last_metrics("train") == {"loss": 0.5}
    output.close()
    again = RunOutput(tmp_path)
    again.rewind(10)
    assert again.last_metrics("train") == {"loss": 1.0, "norm": 0.5, "largest": 2.0}


def test_a_slow_first_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    told = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        told.set()

    monkeypatch.setattr(logging.getLogger("horovod_train"), "info", tell)
    monkeypatch.setattr(logs, "SAY_AFTER_S", 0.0)
    with logs.said_if_slow("compiling"):
        assert told.wait(60)
    monkeypatch.setattr(logs, "SAY_AFTER_S", 3600.0)
    with logs.said_if_slow("a quick one"):
        pass
    assert lines == ["compiling"]
