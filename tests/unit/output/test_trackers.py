"""Trackers: each step once, also after a resume; one that is slow, gone or full costs rows, which are counted."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from user_trackers import Noted

from horovod_train.config.loader import as_dict, load
from horovod_train.config.settings import Config, LogConfig, Spec
from horovod_train.errors import UserError
from horovod_train.output import metrics
from horovod_train.output.files import Lines
from horovod_train.output.run_dir import Output, open_output
from horovod_train.output.trackers import Trackers, build_trackers
from horovod_train.output.trackers.csv_table import CsvTables
from horovod_train.output.trackers.sender import Ended, Row, Sender

CONFIG = as_dict(Config())


class Kept(Noted):
    """Keeps rows in memory. fails: raised by `log` as long as it is set; is_open: `log` waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.started: list[str | None] = []
        self.fails: BaseException | None = None
        self.has_tried, self.is_open = threading.Event(), threading.Event()
        self.is_open.set()

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        self.started.append(run_id)
        return run_id or f"run {len(self.started)}"

    def log(self, row: Row) -> None:
        self.has_tried.set()
        assert self.is_open.wait(60)
        if self.fails is not None:
            raise self.fails
        self.rows.append(row)

    def finish(self, ended: Ended, files: Sequence[Path]) -> None: ...

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


def started(
    tracker: Any,
    run_dir: Path,
    step: int = 0,
    anew: bool = False,
    rows: Callable[[], Iterable[metrics.Row]] = tuple,
    **options: Any,
) -> Trackers:
    """Return trackers of a run. rows: of earlier starts."""
    trackers = Trackers([Sender("kept", tracker, run_dir, pause_s=0.01, **options)])
    trackers.start(step, CONFIG, rows, anew=anew)
    return trackers


def test_a_copy_of_a_run_directory_begins_a_run_of_its_own(tmp_path: Path, said: list[str]) -> None:
    """A directory that was moved continues its run, also if another has its name now; a copy would log into it too."""
    (tmp_path / "run").mkdir()
    first, link = Kept(), tmp_path / "link"
    started(first, tmp_path / "run").finish("done", [])
    link.symlink_to("run")
    for directory, expected in (("run", "run 1"), ("link", "run 1"), ("copy", None), ("moved", "run 1")):
        if directory == "copy":
            shutil.copytree(tmp_path / "run", tmp_path / "copy")
        if directory == "moved":
            (tmp_path / "run").rename(tmp_path / "moved")
            (tmp_path / "run" / "trackers").mkdir(parents=True)
            (tmp_path / "run" / "trackers" / "kept.json").write_text('{"run_id": "another", "logged": {}}')
        tracker = Kept()
        started(tracker, tmp_path / directory, step=9).finish("done", [])
        assert tracker.started == [expected], directory
    assert [line for line in said if "is a copy of" in line] == [
        f"warning: log.trackers: kept: {tmp_path / 'copy'} is a copy of {tmp_path / 'run'}, to which run run 1 "
        "belongs; a new run begins"
    ]


@pytest.mark.parametrize("left", ["", "\0" * 70])
def test_a_record_that_a_power_cut_has_emptied_costs_rows_and_not_the_run(
    left: str, tmp_path: Path, said: list[str]
) -> None:
    """XFS and Lustre may keep the name of a file that was just replaced, and not its bytes."""
    trackers = started(Kept(), tmp_path)
    write(trackers, 1, 2)
    trackers.finish("stopped", [])
    (tmp_path / "trackers" / "kept.json").write_text(left)
    rows = [metrics.Row(step, 0, "train", 0.0, {"loss": 1.0}) for step in (1, 2, 3)]
    again = Kept()
    trackers = started(again, tmp_path, step=3, rows=lambda: rows)
    write(trackers, 4)
    trackers.finish("stopped", [])
    assert (again.started, again.steps) == (["run 1"], [4])
    assert said == [
        "warning: log.trackers: kept: may lack rows until step 3: its record was empty, as after a power cut, and they "
        "count as sent. metrics.jsonl has them."
    ]
    after = Kept()
    trackers = started(after, tmp_path, step=3, rows=lambda: rows)
    write(trackers, 4, 5)
    trackers.finish("done", [])
    assert (after.started, after.steps, len(said)) == (["run 1"], [5], 1)


def test_a_record_that_a_power_cut_has_emptied_is_not_missed_where_the_tracker_tells_what_it_has(
    tmp_path: Path, said: list[str]
) -> None:
    for step in (0, 10):
        output = opened(tmp_path, Spec("csv"), step=step)
        output.append_metrics("train", step + 10, 0, {"loss": 0.1})
        close(output)
        (tmp_path / "trackers" / "csv.json").write_text("")
    assert [row["step"] for row in table(tmp_path / "csv" / "train.csv")] == ["10", "20"]
    assert [line for line in said if "warning" in line] == []


def test_another_run_begins_where_a_power_cut_has_left_no_id(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "kept.json").write_text("")
    tracker = Kept()
    started(tracker, tmp_path, step=9).finish("done", [])
    assert tracker.started == [None]
    assert said == [
        f"warning: log.trackers: {tmp_path / 'trackers' / 'kept.json'} is empty, as after a power cut: which run of "
        "the tracker it was of is not known, and a new run begins"
    ]


def write(trackers: Trackers, *steps: int, split: str = "train") -> None:
    for step in steps:
        trackers.write(step, 0, split, {"loss": 1.0 / step})


def opened(run_dir: Path, *trackers: Spec, step: int = 0) -> Output:
    output = open_output(str(run_dir), LogConfig(tensorboard=False, trackers=trackers), is_root=True, launched=True)
    output.start_trackers(step, CONFIG, anew=False)
    output.rewind(step)
    return output


def close(output: Output, ended: Ended = "done") -> None:
    output.finish_trackers(ended)
    output.close()


def calls(run_dir: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "calls.jsonl").read_text().splitlines()]
    return [call for call in found if call["call"] == name]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_class_of_the_users_gets_what_metrics_jsonl_gets_and_goes_on_with_one_run(tmp_path: Path) -> None:
    spec = Spec("user_trackers:Noted", {"word": "given"})
    output = opened(tmp_path, spec)
    output.write_config("seed: 1\n")
    for step in (10, 20, 30):
        output.append_metrics("train", step, 0, {"loss": 1.0 / step})
    output.append_metrics("eval", 30, 0, {"loss": 0.5})
    close(output, "stopped")
    again = opened(tmp_path, spec, step=20)  # from an earlier step, as after a kill
    for step in (30, 40):
        again.append_metrics("train", step, 0, {"loss": 1.0 / step})
    again.append_metrics("eval", 30, 0, {"loss": 0.4})
    again.append_metrics("eval", 60, 0, {"loss": 0.3})
    again.write_summary({"steps": 60})
    close(again)
    assert [(call["run_id"], call["step"], call["word"]) for call in calls(tmp_path, "start")] == [
        *((None, 0, "given"), ("the first", 20, "given"))
    ]
    logged = [(call["split"], call["step"]) for call in calls(tmp_path, "log")]
    assert logged == [("train", 10), ("train", 20), ("train", 30), ("eval", 30), ("train", 40), ("eval", 60)]
    assert calls(tmp_path, "log")[0]["values"] == {"loss": 0.1}
    ends = [(call["ended"], call["files"]) for call in calls(tmp_path, "finish")]
    assert ends == [("stopped", ["config.yaml"]), ("done", ["config.yaml", "summary.json"])]
    assert {call["thread"] for name in ("start", "log", "finish") for call in calls(tmp_path, name)} == {spec.name}


def test_two_rows_of_one_split_and_step_are_two(tmp_path: Path) -> None:
    """As of two hooks. Those that an earlier start has logged are not logged again."""
    tracker = Kept()
    trackers = started(tracker, tmp_path)
    write(trackers, 10, 10, 20)
    trackers.finish("stopped", [])
    assert tracker.steps == [10, 10, 20]
    again = Kept()
    trackers = started(again, tmp_path, step=10)
    write(trackers, 20, 30, 30)
    trackers.finish("done", [])
    assert again.steps == [30, 30]


def test_rows_that_a_kill_kept_from_the_tracker_come_after_the_resume(tmp_path: Path) -> None:
    output = opened(tmp_path)
    for step in (10, 20, 30):
        output.append_metrics("train", step, 0, {"loss": math.nan if step == 10 else 1.0 / step})
    output.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "los')
    again = opened(tmp_path, Spec("user_trackers:Noted"), step=20)
    again.append_metrics("train", 30, 0, {"loss": 3.0})
    close(again)
    found = [(call["step"], call["values"]["loss"]) for call in calls(tmp_path, "log")]
    assert found[1:] == [(20, 1 / 20), (30, 3.0)]
    assert found[0][0] == 10
    assert math.isnan(found[0][1])


def test_another_run_begins_if_the_run_is_not_to_resume(tmp_path: Path) -> None:
    first, second, third = Kept(), Kept(), Kept()
    for tracker, anew in ((first, False), (second, False), (third, True)):
        trackers = started(tracker, tmp_path, anew=anew)
        write(trackers, 10)
        trackers.finish("done", [])
    assert (first.started, second.started, third.started) == ([None], ["run 1"], [None])
    assert (first.steps, second.steps, third.steps) == ([10], [], [10])


def test_csv_has_a_row_for_each_step_and_a_column_for_each_value(tmp_path: Path) -> None:
    output = opened(tmp_path, Spec("csv"))
    output.append_metrics("train", 10, 0, {"loss": np.float64(0.1)})
    output.append_metrics("train", 20, 0, {"loss": math.nan, "a, b": 1.0})
    output.append_metrics("eval", 20, 1, {"loss": 0.2})
    output.append_metrics("train", 30, 1, {"loss": 0.3, "a, b": 2.0})
    close(output)
    with (tmp_path / "csv" / "train.csv").open("a") as file:
        file.write("40,1,0.")  # a kill cut it short
    evaluated = tmp_path / "csv" / "eval.csv"
    os.truncate(evaluated, evaluated.stat().st_size - 2)  # inside its last cell, which is a number still
    again = opened(tmp_path, Spec("csv"), step=20)
    again.append_metrics("train", 30, 1, {"loss": 0.25})
    close(again)
    assert table(tmp_path / "csv" / "train.csv") == [
        {"step": "10", "epoch": "0", "loss": "0.1", "a, b": ""},
        {"step": "20", "epoch": "0", "loss": "nan", "a, b": "1.0"},
        {"step": "30", "epoch": "1", "loss": "0.25", "a, b": ""},
    ]
    assert table(tmp_path / "csv" / "eval.csv") == [{"step": "20", "epoch": "1", "loss": "0.2"}]


@pytest.mark.parametrize("split", ["norms-l2", "a/b", "val loss", "größe", "50%", "v1.5"])
def test_csv_continues_the_table_of_a_split_whatever_its_name(tmp_path: Path, split: str) -> None:
    for step in (10, 20, 30):
        output = opened(tmp_path, Spec("csv"), step=step - 10)
        output.append_metrics(split, step, 0, {"loss": 0.5})
        close(output)
    (path,) = (tmp_path / "csv").iterdir()
    assert [row["step"] for row in table(path)] == ["10", "20", "30"]


@pytest.mark.parametrize("name", ["a\nb", "a\r\nb", "a\rb\n", '"\n"', "a\u2028b"])
def test_csv_continues_the_column_of_a_value_whatever_its_name(tmp_path: Path, name: str) -> None:
    for step in (10, 20, 30):
        output = opened(tmp_path, Spec("csv"), step=step - 10)
        output.append_metrics("train", step, 0, {name: 0.5} | ({"new": 1.0} if step == 30 else {}))
        close(output)
    assert table(tmp_path / "csv" / "train.csv") == [
        {"step": str(step), "epoch": "0", name: "0.5", "new": "1.0" if step == 30 else ""} for step in (10, 20, 30)
    ]


def test_csv_holds_no_more_than_some_rows_of_a_long_table_in_memory(tmp_path: Path) -> None:
    columns = [f"metric {number}" for number in range(40)]
    (tmp_path / "csv").mkdir()
    path = tmp_path / "csv" / "train.csv"
    lines = [",".join(map(str, [step, 0, *[step / 7] * 40])) for step in range(2_000)]
    path.write_text("\n".join([",".join(["step", "epoch", *columns]), *lines, ""]))
    tables, size = CsvTables(), path.stat().st_size
    tracemalloc.start()
    try:
        tables.start(tmp_path, "csv", 1_998, {})
        tables.log(Row(1_999, 0, "train", {"another": 1.0}, 0.0))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tables.finish("done", [])
    rows = table(path)
    assert (len(rows), rows[1_998]["metric 39"], rows[1_998]["another"]) == (2_000, str(1_998 / 7), "")
    assert rows[1_999]["another"] == "1.0"
    assert most < size / 4, (most, size)


def test_csv_begins_no_column_before_the_rows_that_it_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk that has room again a moment later: they would follow longer rows."""
    tables = CsvTables()
    tables.start(tmp_path, None, 0, {})
    tables.log(Row(1, 0, "train", {"loss": 1.0}, 0.0))
    with monkeypatch.context() as full:
        full.setattr(Lines, "_write", lambda *about: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        tables.log(Row(2, 0, "train", {"loss": 2.0}, 0.0))
        with pytest.raises(OSError, match="has rows in memory that cannot be written"):
            tables.log(Row(3, 0, "train", {"loss": 3.0, "new": 1.0}, 0.0))
    tables.log(Row(3, 0, "train", {"loss": 3.0, "new": 1.0}, 0.0))
    tables.finish("done", [])
    assert [(row["loss"], row["new"]) for row in table(tmp_path / "csv" / "train.csv")] == [
        *(("1.0", ""), ("2.0", ""), ("3.0", "1.0"))
    ]


def test_csv_begins_a_table_anew_that_a_power_cut_has_filled_with_nul_bytes(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("\0" * 90 + "0.5\n20,0,0.25\n")
    output = opened(tmp_path, Spec("csv"), step=20)
    output.append_metrics("train", 30, 0, {"loss": 0.5})
    close(output)
    assert table(tmp_path / "csv" / "train.csv") == [{"step": "30", "epoch": "0", "loss": "0.5"}]


def test_csv_leaves_a_table_of_somebody_else_alone(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("name,age\nAda,36\n")
    with pytest.raises(UserError, match=r"^log\.trackers: csv: cannot begin a run: .*is not a run's table"):
        opened(tmp_path, Spec("csv"))
    assert (tmp_path / "csv" / "train.csv").read_text() == "name,age\nAda,36\n"


def test_a_slow_tracker_is_not_waited_for_and_what_is_dropped_is_counted(tmp_path: Path, said: list[str]) -> None:
    tracker = Kept()
    tracker.is_open.clear()
    trackers = started(tracker, tmp_path, most_rows=3)
    write(trackers, 1)
    assert tracker.has_tried.wait(60)
    write(trackers, *range(2, 11))  # each returns, though nothing is taken
    tracker.is_open.set()
    trackers.finish("done", [])
    assert tracker.steps == [1, 8, 9, 10]
    assert said == ["warning: log.trackers: kept: lacks 6 rows of metrics, which metrics.jsonl has."]


@pytest.mark.parametrize(("run", "lacking"), [("run 1", (8, 9)), ("another", range(1, 10))])
def test_rows_of_earlier_starts_neither_wait_nor_are_lost(
    run: str, lacking: Sequence[int], tmp_path: Path, said: list[str]
) -> None:
    """Also if the run is gone from the tracker, which then lacks all of them."""
    first = started(Kept(), tmp_path)
    write(first, *range(1, 8))
    first.finish("stopped", [])
    read: list[int] = []

    class Late(Kept):
        def start(self, *about: Any) -> str:
            assert self.is_open.wait(60)
            return run

    def rows() -> Iterator[metrics.Row]:
        for step in range(1, 13):
            read.append(step)
            yield metrics.Row(step, 0, "train", 0.0, {"loss": 1.0})

    tracker = Late()
    tracker.is_open.clear()
    trackers = started(tracker, tmp_path, step=9, rows=rows, most_rows=4)
    write(trackers, 10, 11)
    assert read == []
    tracker.is_open.set()
    trackers.finish("done", [])
    assert tracker.steps == [*lacking, 10, 11]
    assert [line for line in said if "lack" in line] == []


@pytest.mark.parametrize("is_read", [True, False])
def test_the_evaluation_that_a_start_begins_with_is_sent_once(is_read: bool, tmp_path: Path) -> None:
    """It is in metrics.jsonl by the time that a tracker has taken the rows of earlier starts, and in the queue."""
    rows = [metrics.Row(10, 0, split, 0.0, {"loss": 0.1}) for split in ("train", "norms", "norms", "eval")]
    tracker = Kept()
    trackers = started(tracker, tmp_path, step=10, rows=lambda: rows if is_read else rows[:-1])
    write(trackers, 10, split="eval")
    write(trackers, 20)
    trackers.finish("done", [])
    sent = [(row.split, row.step) for row in tracker.rows]
    assert sent == [("train", 10), ("norms", 10), ("norms", 10), ("eval", 10), ("train", 20)]


def test_rows_of_earlier_starts_that_cannot_be_read_cost_only_themselves(tmp_path: Path, said: list[str]) -> None:
    def rows() -> Iterator[metrics.Row]:
        yield metrics.Row(1, 0, "train", 0.0, {})
        raise UserError("the disk is gone.")

    tracker = Kept()
    trackers = started(tracker, tmp_path, step=9, rows=rows)
    write(trackers, 10)
    trackers.finish("done", [])
    assert tracker.steps == [1, 10]
    assert said == ["warning: log.trackers: kept: may lack rows of earlier starts: the disk is gone."]


def test_a_tracker_that_never_answers_does_not_keep_the_run_from_ending(tmp_path: Path, said: list[str]) -> None:
    tracker = Kept()
    tracker.is_open.clear()
    trackers = started(tracker, tmp_path)
    write(trackers, 1, 2)
    trackers.finish("done", [], timeout_s=0.05)
    assert said == [
        "warning: log.trackers: kept: lacks 2 rows of metrics, which metrics.jsonl has. It had not answered when the "
        "run ended."
    ]
    tracker.is_open.set()


def test_a_tracker_that_comes_back_has_missed_nothing(tmp_path: Path, said: list[str]) -> None:
    tracker = Kept()
    tracker.fails = ConnectionError("refused")
    trackers = started(tracker, tmp_path)
    write(trackers, 1, 2, 3)
    for _ in range(3):
        tracker.has_tried.clear()
        assert tracker.has_tried.wait(60)
    tracker.fails = None
    trackers.finish("done", [])
    assert tracker.steps == [1, 2, 3]
    assert said == [
        "warning: log.trackers: kept: cannot log step 1: ConnectionError: refused. Training continues, and it is tried "
        "again.",
        "log.trackers: kept: works again",
    ]


def test_a_call_that_fails_while_the_run_ends_is_made_once_more(tmp_path: Path, said: list[str]) -> None:
    class Late(Kept):
        def log(self, row: Row) -> None:
            super().log(row)
            if row.step == 2 and self.steps.count(2) == 1:
                sender.ask_to_finish("done", [])
                raise ConnectionError("refused")

    tracker = Late()
    sender = Sender("kept", tracker, tmp_path, pause_s=0.01)
    sender.start(0, CONFIG, tuple, anew=False)
    for step in (1, 2, 3):
        sender.write(Row(step, 0, "train", {}, 0.0))
    sender.wait_until_finished(time.monotonic() + 300)
    assert tracker.steps == [1, 2, 2, 3]
    assert said == [
        "warning: log.trackers: kept: cannot log step 2: ConnectionError: refused.",
        "log.trackers: kept: works again",
    ]


def test_a_sender_that_has_lost_the_directory_sends_nothing_and_leaves_the_record_of_the_run_that_has_it(
    tmp_path: Path,
) -> None:
    """The run was suspended while the tracker answered, with a row in the queue."""
    tracker, is_ours = Kept(), threading.Event()
    is_ours.set()
    trackers = started(tracker, tmp_path, is_ours=is_ours.is_set)
    write(trackers, 1)
    wait_until(lambda: json.loads((tmp_path / "trackers" / "kept.json").read_text())["logged"] == {"train": 1})
    tracker.has_tried.clear()
    tracker.is_open.clear()
    write(trackers, 2, 3)
    assert tracker.has_tried.wait(60)
    is_ours.clear()
    (tmp_path / "trackers" / "kept.json").write_text("theirs")
    tracker.is_open.set()
    trackers.finish("done", [])
    assert tracker.steps == [1, 2]
    assert (tmp_path / "trackers" / "kept.json").read_text() == "theirs"


def test_a_tracker_that_is_gone_is_said_once_and_its_rows_are_counted(tmp_path: Path, said: list[str]) -> None:
    tracker = Kept()
    trackers = started(tracker, tmp_path)
    write(trackers, 1)
    wait_until(lambda: tracker.rows)
    tracker.fails = ConnectionError("refused")
    write(trackers, 2, 3)
    for _ in range(3):
        tracker.has_tried.clear()
        assert tracker.has_tried.wait(60)
    trackers.finish("done", [])
    assert len([line for line in said if "cannot" in line]) == 1
    assert said[-1] == "warning: log.trackers: kept: lacks 2 rows of metrics, which metrics.jsonl has."


def test_a_tracker_that_ends_its_process_is_called_again(tmp_path: Path, said: list[str]) -> None:
    """As a command-line tool does that is called as a library."""
    tracker = Kept()
    trackers = started(tracker, tmp_path)
    tracker.fails = SystemExit("no licence")
    write(trackers, 1, 2)
    wait_until(lambda: any("cannot log" in line for line in said))
    tracker.fails = None
    wait_until(lambda: tracker.steps == [1, 2])
    trackers.finish("done", [])
    assert said == [
        "warning: log.trackers: kept: cannot log step 1: SystemExit: no licence. Training continues, and it is tried "
        "again.",
        "log.trackers: kept: works again",
    ]


def test_a_tracker_that_ends_its_process_at_the_start_is_one_line(tmp_path: Path) -> None:
    class Ends(Kept):
        def start(self, *about: Any) -> str:
            raise SystemExit(3)

    with pytest.raises(UserError, match=r"^log\.trackers: kept: cannot begin a run: SystemExit: 3\.$"):
        started(Ends(), tmp_path)


def test_the_reason_at_the_end_of_a_long_error_is_said(tmp_path: Path, said: list[str]) -> None:
    tracker = Kept()
    trackers = started(tracker, tmp_path)
    tracker.fails = ConnectionError(f"https://host{'/long' * 100} (certificate verify failed: self-signed certificate)")
    write(trackers, 1)
    assert tracker.has_tried.wait(60)
    trackers.finish("done", [])
    assert re.search(
        r"cannot log step 1: ConnectionError: https://host\S+ … \S+ \(certificate verify failed: self-sig", said[0]
    )
    assert len(said[0]) < 450


def test_a_row_that_a_tracker_refuses_is_left_out_alone(tmp_path: Path, said: list[str]) -> None:
    class Picky(Kept):
        def log(self, row: Row) -> None:
            if row.step % 2:
                raise ValueError("odd")
            super().log(row)

    tracker = Picky()
    trackers = started(tracker, tmp_path)
    write(trackers, 1, 2, 3, 4)
    trackers.finish("done", [])
    assert tracker.steps == [2, 4]
    assert said == [
        "warning: log.trackers: kept: refuses the row of step 1: ValueError: odd. Such rows are left out.",
        "warning: log.trackers: kept: lacks 2 rows of metrics, which metrics.jsonl has.",
    ]


def test_a_run_does_not_begin_without_its_tracker_but_continues_without_it(tmp_path: Path, said: list[str]) -> None:
    unreachable = Spec("user_trackers:Unreachable")
    with pytest.raises(UserError) as caught:
        opened(tmp_path, unreachable)
    assert str(caught.value).startswith(
        "log.trackers: user_trackers:Unreachable: cannot begin a run: ConnectionError: nobody at tracker.example:5000 "
        "(at "
    )
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "user_trackers.Unreachable.json").write_text('{"run_id": "7", "logged": {"train": 10}}\n')
    output = opened(tmp_path, unreachable, step=10)
    output.append_metrics("train", 20, 0, {"loss": 0.1})
    close(output)
    about = [line for line in said if "Unreachable" in line]
    assert len(about) == 2
    assert "cannot continue the run: ConnectionError" in about[0]
    assert "lacks 1 row of metrics" in about[1]


def test_mlflow_gets_changed_settings_a_hundred_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses more in one request, and the run could never be continued there."""
    batches: list[tuple[str, int]] = []

    class Client:
        def log_batch(self, run_id: str, **content: list[Any]) -> None:
            batches.extend((kind, len(each)) for kind, each in content.items())

    known = {f"data.features.{number}": "old" for number in range(230)}
    run = SimpleNamespace(
        info=SimpleNamespace(run_id="7", lifecycle_stage="active"), data=SimpleNamespace(params=known)
    )
    client: Any = Client()
    client.get_run, client.update_run = lambda run_id: run, lambda *about, **more: None
    variable = SimpleNamespace(is_set=lambda: True, get=lambda: None)
    names = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_EXPERIMENT_NAME")
    entities = SimpleNamespace(Param=tuple, RunTag=lambda *pair: pair)
    package: Any = ModuleType("mlflow")
    package.MlflowClient, package.get_tracking_uri, package.entities = lambda uri: client, lambda: "", entities
    package.exceptions = SimpleNamespace(MlflowException=ValueError)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    variables: Any = ModuleType("mlflow.environment_variables")
    vars(variables).update(dict.fromkeys(names, variable))
    monkeypatch.setitem(sys.modules, "mlflow.environment_variables", variables)
    (tracker,) = build_trackers([Spec("mlflow")])
    config = {"data": {"features": {str(number): "new" for number in range(230)}}}
    assert tracker.start(Path("run"), "7", 400, config) == "7"
    assert batches == [("tags", 100), ("tags", 100), ("tags", 30)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Spec("mlfow"), "log.trackers: unknown name 'mlfow'; did you mean mlflow"),
        (Spec("user_trackers:Note"), "log.trackers: user_trackers has no 'Note'; did you mean"),
        (Spec("user_trackers:Noted", {"sound": 1}), "log.trackers.options: user_trackers:Noted: got an unexpected"),
        (Spec("user_trackers:WithoutFinish"), "log.trackers: user_trackers:WithoutFinish must have start(directory, "),
        (Spec("mlflow"), "log.trackers: needs mlflow (import of mlflow halted"),
        (Spec("wandb", {"project": "p"}), "log.trackers: needs wandb (import of wandb halted"),
    ],
)
def test_a_wrong_tracker_is_one_line(spec: Spec, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        build_trackers([spec])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_tracker_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "data: {train: x, global_batch_size: 4}\ntrain: {epochs: 1}\nlog: {trackers: [csv, {name: csv}]}\n"
    )
    with pytest.raises(UserError, match=r"log\.trackers: expected each tracker once; received csv 2 times"):
        load([str(tmp_path / "c.yaml")])


def test_a_record_that_no_run_has_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "csv.json").write_text("[1]")
    with pytest.raises(UserError, match=r"csv\.json: expected a record of a run's tracker: .* Remove the file"):
        opened(tmp_path, Spec("csv"))
