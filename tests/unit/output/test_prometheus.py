"""metrics.prom: the newest figures, in Prometheus' text format, whole at any time."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest

from horovod_train.errors import UserError
from horovod_train.output.metrics import PrometheusFile
from horovod_train.output.run_dir import RunOutput, check_writable

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (NaN|[+-]Inf|-?[0-9.e+-]+)")
"""A line of https://prometheus.io/docs/instrumenting/exposition_formats/, without a timestamp, which the textfile
collector refuses."""


def samples(run_dir: Path) -> dict[str, float]:
    """`step`, or `metric train loss` → value. Each line is of the format, and its family has a type before it."""
    text, found, typed = (run_dir / "metrics.prom").read_text(), {}, ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, typed, kind = line.split()
            assert kind == "gauge"
        elif not line.startswith("# HELP "):
            matched = SAMPLE.fullmatch(line)
            assert matched, line
            assert matched[1] == typed
            labels = re.findall(r'="((?:[^"\\]|\\.)*)"', matched[2])
            assert labels[0] == str(run_dir.resolve())
            key = " ".join([matched[1].removeprefix("horovod_train_"), *labels[1:]])
            assert key not in found, "Prometheus refuses a file with the same labels twice"
            found[key] = float(matched[3])
    return found


def test_the_newest_figures_are_there_at_each_line_of_metrics(tmp_path: Path) -> None:
    before = time.time()
    output = RunOutput(tmp_path)
    output.rewind(100)
    at_start = samples(tmp_path)
    assert (at_start["running"], at_start["step"]) == (1, 100)
    assert before <= at_start["last_progress_timestamp_seconds"] <= time.time()
    output.append_metrics("train", 200, 2, {"loss": 0.5, "examples_per_s": 1234.5})
    output.append_metrics("eval", 200, 2, {"loss": 0.25, 'a "b"\\\n': -math.inf})
    output.append_metrics("train", 300, 3, {"loss": math.nan, "examples_per_s": 1000.0})
    found = samples(tmp_path)
    assert (found["step"], found["epoch"], found["examples_per_second"]) == (300, 3, 1000)
    assert math.isnan(found["metric train loss"])
    assert found["metric eval loss"] == 0.25
    assert found['metric eval a \\"b\\"\\\\\\n'] == -math.inf
    assert found["last_progress_timestamp_seconds"] >= at_start["last_progress_timestamp_seconds"]
    assert found["running"] == 1
    output.close()
    assert samples(tmp_path) == pytest.approx(found | {"running": 0}, nan_ok=True)


def test_a_reader_never_sees_half_of_it(tmp_path: Path) -> None:
    """Each version is another file, so one that is open stays as it was."""
    writer = PrometheusFile(tmp_path)
    writer.rewind(0)
    with (tmp_path / "metrics.prom").open() as old:
        writer.write(10, 0, "train", {f"m{number}": 1.0 for number in range(1000)})
        assert "m999" not in old.read()
    assert len(samples(tmp_path)) == 1004
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.prom"]


def test_a_disk_that_is_full_costs_one_warning(full_disk: Path, said: list[str]) -> None:
    writer = PrometheusFile(full_disk)
    writer.rewind(0)
    filler = full_disk / "filler"
    filler.write_bytes(bytes(65536 - 3 * 4096))
    many = {f"a metric with a long name {number}": 1.0 for number in range(200)}
    writer.write(10, 0, "train", many)
    writer.write(20, 0, "train", many)
    assert samples(full_disk)["step"] == 0
    (line,) = said
    assert "metrics.prom cannot be written: No space left on device. Training continues." in line
    filler.unlink()
    writer.write(30, 0, "train", {"loss": 1.0})
    assert samples(full_disk)["step"] == 30
    assert len(said) == 2


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.prom").write_text("node_load1 0.5\n")
    with pytest.raises(UserError, match=r"metrics\.prom is not a run's metrics for Prometheus"):
        check_writable(str(tmp_path))
    assert (tmp_path / "metrics.prom").read_text() == "node_load1 0.5\n"
