"""`report`: the page shows what is in the files of a run, asks no server, and replaces nothing of others."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import WARNINGS_FAIL

from horovod_train.commands.explain import resume_of
from horovod_train.commands.report import (
    MOST_POINTS,
    Chart,
    Drawer,
    Phase,
    build_charts,
    build_page,
    read_run,
    thin,
    thin_phases,
)
from horovod_train.data.audit import AuditLog, Start
from horovod_train.errors import UserError
from horovod_train.main import main
from horovod_train.output.run_dir import describe_commit

TIME = "2026-11-22T10:00:{:06.3f}+00:00"
FIRST = [
    (0, "start", "rank 0 of 2, launcher horovodrun, process 7 on node1; on CPU, 1 threads"),
    (1, "info", "starting from initial weights"),
    (2, "info", "ends at step 60"),
    (2, "phase", "compile"),
    (5, "phase", "train after step 10"),
    (8, "slow", "rank 1 (node1) has been in input for 3 s at step 20; 1 rank waits for it"),
    (9, "phase", "save after step 40"),
    (11, "phase", "train after step 40"),
]
SECOND = [
    (30, "start", "rank 0 of 3, launcher srun, process 8 on node2; on CPU, 1 threads"),
    (31, "info", "resumed from runs/a/checkpoints/step-000000040 at step 40"),
    (31, "info", "ends at step 60"),
    (32, "phase", "train after step 50"),
    (39, "phase", "evaluate after step 60"),
    (40, "phase", "train after step 60"),
    (41, "end", "done, exit code 0"),
]
ROWS = [
    {"step": 20, "epoch": 1, "split": "train", "seconds": 7.5, "loss": 2.0, "s_per_step": 0.1},
    {"step": 40, "epoch": 1, "split": "train", "seconds": 8.5, "loss": None, "s_per_step": 0.2},
    {"step": 60, "epoch": 2, "split": "train", "seconds": 8.75, "loss": 1.25, "s_per_step": 0.3},
    {"step": 60, "epoch": 2, "split": "eval", "seconds": 10.0, "loss": 1.5},
]


THIRD = [
    (50, "start", "rank 0 of 3, launcher srun, process 9 on node2; on CPU, 1 threads"),
    (51, "failed", "data.train: there is no such folder"),
    (52, "end", "failed, exit code 2"),
]


def run_dir(
    folder: Path,
    rows: Sequence[object] = ROWS,
    config: str = "seed: 1\ndata: {shuffle: true}\n",
    third: Sequence[tuple[int, str, str]] = (),
) -> Path:
    """A run that was killed at step 40 on two ranks and resumed on three. third: what one more start has logged."""
    (folder / "logs").mkdir(parents=True)
    lines = [f"{TIME.format(second)} {kind} {text}\n" for second, kind, text in [*FIRST, *SECOND, *third]]
    (folder / "logs" / "rank-0.log").write_text("".join(lines))
    end = {"rank": 0, "host": "node2", "pid": 8, "ended": "done", "exit_code": 0, "time": TIME.format(41)}
    (folder / "logs" / "rank-0.end.json").write_text(json.dumps(end))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "config.yaml").write_text(config)
    (folder / "summary.json").write_text('{"steps": 60, "ended": "done", "versions": {"keras": "3.15.1"}}')
    return folder


def chart_of(charts: Sequence[Chart], name: str) -> Chart:
    return next(chart for chart in charts if chart.name == name)


def drawn(svg: str, number: int, name: str = "chart") -> np.ndarray:
    """The corners of the path of a curve, in the order in which it is drawn: [points, 2]."""
    path = re.search(rf'id="{name}-curve-{number}">.*?<path d="(.*?)"', svg, re.DOTALL)
    assert path
    return np.array([[float(x), float(y)] for x, y in re.findall(r"[ML] (\S+) (\S+)", path[1])])


@WARNINGS_FAIL
@pytest.mark.parametrize("name", [r"$\frac{$ x", "$a$", "recall[cat]", "a\x1b[31mb\x00\r\u2028", "<b>&\"'"])
def test_names_are_drawn_as_they_are(tmp_path: Path, name: str) -> None:
    rows = [{"step": step, "epoch": 1, "split": "train", "seconds": 1.0, name: 0.5} for step in (20, 40)]
    runs = [read_run(run_dir(tmp_path / folder, rows, config="x: 1\n")) for folder in ("a", "b $\\frac{$")]
    page = build_page(runs)
    shown = html.escape(name) if name.isprintable() else r"a\x1b[31mb\x00\x0d\u2028"
    assert page.count(shown) >= 4
    assert page.replace("\n", "").replace("\t", "").isprintable()
    assert "b $\\frac{$ train</text>" in page


def test_a_run_is_read_start_by_start(tmp_path: Path) -> None:
    first, second = (run := read_run(run_dir(tmp_path / "a"))).starts
    assert (first.story.size, first.story.launcher, first.story.host) == (2, "horovodrun", "node1")
    assert (first.from_step, first.last_step) == (0, 40)
    assert (second.story.size, second.story.launcher, second.from_step, second.last_step) == (3, "srun", 40, 60)
    assert (first.begin, first.end, second.begin, second.end) == (0, 11, 30, 41)
    assert first.seconds_in("train") == 4
    assert (first.seconds_in("save"), second.seconds_in("evaluate")) == (2, 1)
    assert (first.ended, second.ended) == ("its log ends without a word", "done, exit code 0")
    assert [remark.partition(" ")[2][:6] for remark in first.remarks] == ["rank 1"]
    assert run.settings == {"seed": 1, "data.shuffle": True}


KILLED = [
    (50, "start", "rank 0 of 3, launcher srun, process 9 on node2; on CPU, 1 threads"),
    (51, "info", "resumed from runs/a/checkpoints/step-000000060 at step 60"),
    (51, "info", "ends at step 900"),
    (52, "phase", "train after step 70"),
    (53, "info", "0:00:03  train step 80  epoch 3  loss 0.5"),
    (54, "info", "100:00:03  epoch 4  step 85  loss 0.5"),
    (55, "info", "compiling the step again, which takes minutes for large models"),
]
FAILED = [
    (56, "start", "rank 0 of 3, launcher srun, process 9 on node2; on CPU, 1 threads"),
    (57, "info", "resumed from runs/a/checkpoints/step-000000060 at step 60"),
    (57, "info", "ends at step 900"),
    (58, "phase", "train after step 70"),
    (59, "end", "failed, exit code 1"),
]


BEHIND = [
    (20, "start", "rank 0 of 3, launcher srun, process 9 on node3; on CPU, 1 threads"),
    (21, "info", "ends at step 90"),
    (22, "phase", "train after step 60"),
    (27, "phase", "save after step 80"),
    (24, "phase", "train after step 80"),
    (26, "end", "stopped, exit code 75"),
]


def test_a_clock_that_is_behind_or_set_back_makes_no_time_negative(tmp_path: Path) -> None:
    """That of the third start's host is behind, and is set back by more within that start."""
    *_, second, third = read_run(run_dir(tmp_path / "a", third=BEHIND)).starts
    assert second.end == third.begin == 41
    assert [(phase.name, phase.end - phase.begin) for phase in third.phases] == [
        ("start", 2),
        ("train", 5),
        ("save", 0),
        ("train", 2),
    ]
    assert third.end == 50


@pytest.mark.parametrize(("named", "expected"), [("nowhere", 70), ("in its end", 95), ("in its rows", 90)])
def test_a_start_that_fails_or_is_killed_has_come_to_the_last_step_that_is_named(
    tmp_path: Path, named: str, expected: int
) -> None:
    rows = [*ROWS, ROWS[-1] | {"step": 90}] if named == "in its rows" else ROWS
    folder = run_dir(tmp_path / "a", rows, third=[*KILLED, *FAILED])
    if named == "in its end":
        end = {"rank": 0, "host": "node2", "pid": 9, "ended": "failed", "exit_code": 1, "time": TIME.format(59)}
        (folder / "logs" / "rank-0.end.json").write_text(json.dumps(end | {"step": 95, "phase": "train"}))
    run = read_run(folder)
    assert [start.last_step for start in run.starts] == [40, 60, 85, expected]
    assert run.explanation.last_step == expected


def test_each_row_is_of_the_start_that_wrote_it(tmp_path: Path) -> None:
    run = read_run(run_dir(tmp_path / "a"))
    assert [row.seconds for row in run.rows] == [7.5, 8.5, 38.75, 40.0]


def test_an_evaluation_that_a_resume_makes_up_for_is_of_the_later_start(tmp_path: Path) -> None:
    made_up = [ROWS[3] | {"step": 40, "seconds": 1.0}, ROWS[3] | {"step": 40, "split": "norms", "seconds": 2.0}]
    run = read_run(run_dir(tmp_path / "a", [*ROWS[:2], *made_up, *ROWS[2:]]))
    assert [row.seconds for row in run.rows] == [7.5, 8.5, 31.0, 32.0, 38.75, 40.0]


def test_a_start_that_fails_before_it_trains_owns_no_row(tmp_path: Path) -> None:
    run = read_run(run_dir(tmp_path / "a", third=THIRD))
    assert [row.seconds for row in run.rows] == [7.5, 8.5, 38.75, 40.0]


def test_the_summary_of_an_earlier_start_tells_versions_only(tmp_path: Path) -> None:
    folder = run_dir(tmp_path / "a", third=THIRD)
    end = {"rank": 0, "host": "node2", "pid": 9, "ended": "failed", "exit_code": 2, "time": TIME.format(52)}
    (folder / "logs" / "rank-0.end.json").write_text(json.dumps(end))
    summary = {"steps": 40, "epochs": 1, "weights_sha256": "abc", "versions": {"keras": "3.15.1"}}
    (folder / "summary.json").write_text(json.dumps({**summary, "eval": {"loss": 9.0}, "ended": "done"}))
    page = build_page([read_run(folder)])
    assert "<td>60, of the last line of metrics</td>" in page
    assert "<td>last eval</td><td>loss 1.5</td>" in page
    assert "<td>versions</td><td>keras 3.15.1</td>" in page
    assert "SHA-256 of the weights" not in page


def test_curves_hold_the_values_of_the_metrics(tmp_path: Path) -> None:
    charts = build_charts([read_run(run_dir(tmp_path / "a"))])
    assert [chart.name for chart in charts] == ["loss by step", "loss by time", "s_per_step by step"]
    train, evaluated = chart_of(charts, "loss by step").curves
    assert (train.x, evaluated.x, evaluated.y) == ([20, 40, 60], [60], [1.5])
    assert train.y[0] == 2.0
    assert math.isnan(train.y[1])
    by_time = chart_of(charts, "loss by time")
    assert (by_time.x_label, by_time.curves[0].x) == ("seconds since the first start", [7.5, 8.5, 38.75])


@WARNINGS_FAIL
def test_runs_whose_names_begin_with_an_underscore_are_in_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """matplotlib draws labels, but leaves those that begin so out of a legend, and warns if none is left."""
    monkeypatch.chdir(tmp_path)
    page = build_page([read_run(run_dir(Path("_a"))), read_run(run_dir(Path("_b")))])
    for label in ("_a train", "_a eval", "_b train", "_b eval"):
        assert re.search(rf"<text[^>]*>\s*{label}</text>", page)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_what_is_drawn_are_the_points_on_linear_axes(tmp_path: Path, is_shuffled: bool) -> None:
    rng = np.random.default_rng(0)
    steps, losses = np.arange(1, 201) * 10, np.cumsum(rng.normal(size=200))
    rows = [
        {"step": int(step), "epoch": 1, "split": "train", "seconds": float(step), "loss": float(loss)}
        for step, loss in zip(steps, losses, strict=True)
    ]
    runs = [read_run(run_dir(tmp_path / "a", rows))]
    svg = Drawer().chart(chart_of(build_charts(runs), "loss by step"), runs, "chart")
    expected = rng.permutation(losses) if is_shuffled else losses
    for pixels, values in zip(drawn(svg, 0).T, (steps, expected), strict=True):
        slope, offset = np.polyfit(values, pixels, 1)
        is_equal = np.max(np.abs(slope * values + offset - pixels)) < 1e-3
        assert is_equal == (not is_shuffled or values is steps)


def test_a_long_curve_keeps_its_peaks() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[[777, 50_001]] = 50, -50
    values[1234] = math.nan
    points = list(enumerate(values.tolist()))
    kept = thin(points, MOST_POINTS)
    assert len(kept) == MOST_POINTS
    assert set(kept) <= set(points)
    assert {(777, 50.0), (50_001, -50.0)} <= set(kept)


def alternating(number: int, begin: float, end: float) -> tuple[Phase, ...]:
    """So many phases of equal length, of three kinds."""
    times = np.linspace(begin, end, number + 1).tolist()
    kinds = cycle(("train", "evaluate", "reading an index"))
    return tuple(Phase(kind, *times) for kind, times in zip(kinds, pairwise(times), strict=False))


def test_a_timeline_of_many_phases_has_a_bounded_number_of_bars(tmp_path: Path) -> None:
    run = read_run(run_dir(tmp_path / "a"))

    def bars(phases: int) -> int:
        first, last = (
            dataclasses.replace(start, phases=alternating(phases, start.begin, start.end)) for start in run.starts
        )
        return Drawer().timeline(dataclasses.replace(run, starts=(first, last)), "timeline").count("<path")

    assert bars(10) < bars(100) < bars(10_000) < 3 * MOST_POINTS


def test_bars_of_many_phases_are_as_long_as_these_and_where_they_are() -> None:
    phases = [*alternating(30_000, 5, 10_000), Phase("train", 10_000, 10_100)]
    thinned = list(thin_phases(phases, 10.0))
    for since in range(0, 10_100, 1000):
        for name, shown in (("train", "train"), ("evaluate", "evaluate"), ("reading an index", "start")):
            before, after = (
                sum(max(0.0, min(each.end, since + 1000) - max(each.begin, since)) for each in among if each.name == of)
                for among, of in ((phases, name), (thinned, shown))
            )
            assert abs(before - after) < 10, (since, name)


def test_the_timeline_shows_phases_that_can_be_seen_as_they_are(tmp_path: Path) -> None:
    for start in read_run(run_dir(tmp_path / "a")).starts:
        assert list(thin_phases(start.phases, 0.041)) == list(start.phases)


def test_the_page_asks_no_server_and_has_each_id_once(tmp_path: Path) -> None:
    page = build_page([read_run(run_dir(tmp_path / name)) for name in ("a", "b")])
    assert set(re.findall(r'(?:src|href|action)="(.)', page)) == {"#"}
    assert not re.search(r"<script|<link|@import|url\((?!#)", page)
    found = re.findall(r'\bid="(.*?)"', page)
    assert len(found) == len(set(found))
    assert set(re.findall(r'(?:href="|url\()#([\w-]+)', page)) <= set(found)


def test_the_page_tells_the_outcome_the_starts_and_which_settings_differ(tmp_path: Path) -> None:
    same, other = (
        run_dir(tmp_path / name, config=f"seed: {seed}\nshared: 1\n") for name, seed in (("a", 1), ("<b>", 2))
    )
    page = build_page([read_run(same), read_run(other)])
    assert f"{same}: finished after 60 steps" in page
    assert "<td>seed</td><td>1</td><td>2</td>" in page
    assert "<td>shared</td><td>1</td><td>1</td>" not in page
    assert "its log ends without a word" in page
    assert "<b>" not in page


def test_a_run_that_never_trained_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    page = build_page([read_run(tmp_path)])
    assert "No metrics were written." in page
    assert "the run ended before its ranks had connected" in page


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(run_dir(tmp_path / "a")), tmp_path / "report.html"
    assert [main(["report", run, "--out", str(out)]) for _ in range(2)] == [0, 0]
    out.write_text("<!doctype html>my own page")
    assert main(["report", run, "--out", str(out)]) == 2
    assert "is not a report, and stays as it is. Choose another name." in capsys.readouterr().err
    assert out.read_text() == "<!doctype html>my own page"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-run"], "no-run: expected a run directory, with config.yaml"),
        (["a", "--out", "a.pdf"], "--out: expected a name that ends in .html; received a.pdf."),
        (
            ["a", "--out", "missing/r.html"],
            "missing is not a folder that can be written to. Make it, or choose another.",
        ),
    ],
)
def test_what_cannot_be_reported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    run_dir(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "config.yaml:1: not valid YAML: "),
        ("a0: &a0 1\n" + "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 10}]\n" for n in range(9)), "expected at most"),
        ("a: &a [*a]", "config.yaml:1: expected values; received one that contains itself."),
        ("a: 2026-11-28", "expected what JSON can hold; 2026-11-28 is a date. Put it in quotes to have a string."),
        (f"a: {'[' * 3000}{']' * 3000}", "expected values within values at most 100 deep"),
    ],
)
def test_a_config_that_no_run_could_have_is_named(tmp_path: Path, config: str, said: str) -> None:
    run = run_dir(tmp_path / "a", config=config)
    with pytest.raises(UserError, match=f"^{re.escape(str(run))}.*{re.escape(said)}"):
        read_run(run)
    assert resume_of(run) == "auto"


DEEP, LONG = f"{'[' * 100_000}{']' * 100_000}", "9" * 5000
LATER = "2026-19-22T08:06:50.000+00:00"
ODD = {
    "deep-summary": ("summary.json", f'{{"steps": {DEEP}}}'),
    "deep-end": ("logs/rank-0.end.json", DEEP),
    "deep-row": ("metrics.jsonl", f'{{"step": {DEEP}}}\n'),
    "deep-lease": ("lease.json", DEEP[100_000 - 30_000 :]),
    "deep-manifest": ("checkpoints/step-000000040/manifest.json", DEEP),
    "deep-manifest-that-can-be-read": (
        "checkpoints/step-000000040/manifest.json",
        f'{{"sha256": 1, "a": {DEEP[99_100:-99_100]}}}',
    ),
    "long-number-in-summary": ("summary.json", f'{{"steps": {LONG}}}'),
    "other-kinds-in-summary": ("summary.json", '{"steps": [1], "versions": "1", "train": [1], "eval": 2, "ended": 3}'),
    "long-numbers-in-log": (
        "logs/rank-0.log",
        f"+{TIME.format(45)} phase train after step {LONG}\n{TIME.format(46)} info ends at step {LONG}\n",
    ),
    "long-ranks-in-log": (
        "logs/rank-1.log",
        f"{TIME.format(45)} start rank {LONG} of {LONG}, launcher a, process {LONG} on b\n",
    ),
    "long-exit-code-in-log": ("logs/rank-0.log", f"+{TIME.format(45)} end failed, exit code {LONG}\n"),
    "month-19-in-log": ("logs/rank-0.log", f"+{LATER} info a\n"),
    "month-19-of-launch": ("logs/launch.log", f"{LATER} launch: start 1 of at most 3: 2 rank(s)\n"),
    "other-kinds-in-end": (
        "logs/rank-0.end.json",
        '{"host": "node2", "pid": 8, "ended": "failed", "exit_code": 1, "step": "x", "time": "2026-01-01"}',
    ),
    "large-metrics": (
        "metrics.jsonl",
        f'{{"step": 1, "split": "train", "loss": {"9" * 400}}}\n{{"step": {"9" * 400}, "split": "train", "loss": 1}}\n',
    ),
    "large-floats": (
        "metrics.jsonl",
        "".join(
            f'{{"step": {n}, "split": "train", "loss": {v}}}\n'
            for n, v in enumerate(("1e308", "-1e308", "Infinity", "NaN", "1.5"))
        ),
    ),
    "long-step-in-metrics": ("metrics.jsonl", f'{{"step": {LONG}, "split": "train"}}\n'),
    "deep-audit": ("audit/epoch-0-step-0-rank-0.jsonl", f"{DEEP}\n"),
}
"""What might lie in a run directory: a file, and its content; + adds to what is there."""
PIPES = [
    "summary.json",
    "metrics.jsonl",
    "lease.json",
    "logs/rank-0.log",
    "logs/rank-1.log",
    "logs/rank-0.end.json",
    "logs/launch.log",
    "checkpoints/step-000000040/manifest.json",
    "audit/epoch-0-step-0-rank-0.jsonl",
]


def put(run: Path, name: str) -> Path:
    file = run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


@pytest.mark.parametrize("kind", ODD)
def test_what_no_run_writes_is_left_out_or_named(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, (name, text) = run_dir(tmp_path / "a"), ODD[kind]
    with put(run, name).open("a" if text.startswith("+") else "w") as file:
        file.write(text.removeprefix("+"))
    is_told(run, tmp_path, capsys)


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_a_run_directory_is_not_waited_for(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_dir(tmp_path / "a")
    put(run, name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    is_told(run, tmp_path, capsys)


def is_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command tells what there is, or ends with one line."""
    for words in (["explain", str(run)], ["report", str(run), "--out", str(tmp_path / "a.html")]):
        code = main(words)
        said = capsys.readouterr().err.splitlines()
        assert code != 2 or (len(said) == 1 and str(run) in said[0])
        assert "Traceback" not in "".join(said)


def test_a_pipe_in_the_place_of_a_config_is_not_waited_for(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "a")
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    with pytest.raises(UserError, match=r"config.yaml: cannot be read: it is a pipe, a socket or a device"):
        read_run(run)
    assert resume_of(run) == "auto"


@pytest.mark.long
def test_a_hundred_thousand_rows_make_a_page_of_few_megabytes_without_tensorflow(tmp_path: Path) -> None:
    rows = [{"step": n, "epoch": 1, "split": "train", "seconds": n / 9, "loss": 1 / n} for n in range(1, 100_001)]
    run, out = run_dir(tmp_path / "a", rows), tmp_path / "report.html"
    program = (
        "import sys; from horovod_train.main import main; code = main(sys.argv[1:]); "
        "assert not {'tensorflow', 'keras', 'horovod'} & set(sys.modules); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", program, "report", str(run), "--out", str(out)], check=True)
    assert out.stat().st_size < 3e6


def audited(folder: Path, ids: Sequence[Sequence[int]], records: int) -> Path:
    """A run on one rank, which has noted that it consumed these records in the steps of an epoch."""
    run_dir(folder)
    log = AuditLog(str(folder), Start(0, 0, 0, 1, records, 2, len(ids), "digest"))
    for step, consumed in enumerate(ids):
        log.append(0, step, np.array([consumed]))
    log.close()
    return folder


def test_the_page_tells_what_the_audit_found(tmp_path: Path) -> None:
    assert read_run(run_dir(tmp_path / "none")).audit == "none; data.audit: true writes one"
    clean = read_run(audited(tmp_path / "clean", [[3, 1], [0, 2]], 4))
    assert clean.audit == "every record once in 1 whole epoch(s), none twice in 1 begun"
    wrong = read_run(audited(tmp_path / "wrong", [[3, 1], [1, 2]], 4))
    assert wrong.audit == "epoch 0: 1 missing, 1 twice"
    assert wrong.audit in build_page([wrong])


def test_code_below_a_folder_of_any_name_is_described(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9"))
    subprocess.run(["git", "init", "-q", folder], check=True)
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *name, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    found = describe_commit(folder)
    assert found
    assert found.endswith("/caf\\xe9")


def test_the_page_tells_which_commits_ran(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path / "code"], check=True)
    assert describe_commit(tmp_path / "code") is None
    assert describe_commit(tmp_path) is None
    (tmp_path / "code" / "model.py").write_text("a = 1\n")
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["add", "."], [*name, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", tmp_path / "code", *words], check=True)
    found = describe_commit(tmp_path / "code")
    assert found
    assert re.fullmatch(rf"commit [0-9a-f]{{40}} of {tmp_path}/code", found)
    (tmp_path / "code" / "model.py").write_text("a = 2\n")
    assert describe_commit(tmp_path / "code") == f"{found}, with changes that are not committed"
    log = run_dir(tmp_path / "a") / "logs" / "rank-0.log"
    log.write_text(f"{log.read_text()}{TIME.format(42)} info code: {found}\n")
    assert found in build_page([read_run(tmp_path / "a")])


def test_curves_come_first_and_a_run_that_failed_tells_how_far_it_came(tmp_path: Path) -> None:
    config = "lr_schedule: {base_lr: 0.1}\ndata: {global_batch_size: 64, weight: null}\n"
    failed, other = run_dir(tmp_path / "a", config=config), run_dir(tmp_path / "b", config=config.replace("64", "32"))
    (failed / "summary.json").unlink()
    page = build_page([read_run(failed), read_run(other)])
    assert page.index('id="curves"') < page.index('id="settings"') < page.index('id="run-0"')
    assert "<td>60, of the last line of metrics</td>" in page
    assert "<td>last eval</td><td>loss 1.5</td>" in page
    assert "<td>data.<wbr>global_<wbr>batch_<wbr>size</td><td>64</td><td>32</td>" in page
    assert "<td>data.<wbr>weight</td><td>–</td>" in page
    assert "Speed, time and rates: 1" in page
