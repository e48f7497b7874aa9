"""`watch` shows what a run's files say, while they grow and after."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pty
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import HANGS_AFTER_S, run_process, started, without_tensorflow

from horovod_train.commands import watch
from horovod_train.commands.cli import open_screen
from horovod_train.commands.watch import GONE_AFTER_S, Follower, draw, news, sparkline
from horovod_train.main import main
from horovod_train.output.lease import describe_me, open_lease, read_lease
from horovod_train.output.metrics import TIMES, JsonLines, MetricsFile, Row
from horovod_train.output.rank_log import end_file, introduction, make_folder, now, open_rank_log


class Run:
    """A run of 60 steps, written as runs write theirs; this process is its root."""

    def __init__(self, folder: Path, np: int = 4, launcher: str = "srun") -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        make_folder(folder)
        self.lease = open_lease(folder)
        self.metrics, self.times = MetricsFile(folder), JsonLines(folder / "times.jsonl", TIMES)
        self.logs: list[Any] = []
        for rank in range(np):
            host = f"node{rank // 2}"
            said = introduction(rank, np, launcher, host, "CPU")
            self.logs.append(open_rank_log(folder, rank, host, start_text=said))
        self.logs[0].write("info", "ends at step 60")

    def train(self, *steps: int, loss: float = 1.0) -> None:
        for step in steps:
            for log in self.logs:
                log.write("phase", f"train after step {step}")
            self.times.add_row({"step": step, "verdict": f"verdict of {step}", "seconds": {}})
            self.metrics.write(step, step // 10, "train", {"loss": loss / step, "s_per_step": 0.5, "input_share": 0.1})

    def end(self) -> None:
        for log in reversed(self.logs):  # root last: those who watch see the end of all
            log.end("done", 0, step=60, phase="train", error=None)
        self.lease.close()


def write_losses(run: Run, losses: Iterable[float], more: str = "") -> None:
    (run.folder / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {step}, "epoch": 1, "split": "train", "seconds": 1.0, "loss": {loss}{more}}}\n'
            for step, loss in enumerate(losses)
        )
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    yield made
    made.lease.close()


def shown(follower: Follower) -> list[str]:
    screen = open_screen(launched=True)
    with screen.capture() as found:
        screen.print(draw(follower.look()))
    return [line.rstrip() for line in found.get().splitlines()]


def test_a_running_one_shows_how_far_it_is_and_what_it_does(run: Run) -> None:
    run.train(10, 20, 30)
    title, progress, loss, verdict, *ranks = shown(Follower(run.folder))
    assert title.startswith(f"{run.folder}: 4 rank(s) on 2 host(s), launcher srun, for 0:00:0")
    assert progress.endswith("  step 30 of 60, epoch 3, 0:00:15 left")
    assert loss.split() == ["train", "loss", "0.03333", "█▃▁"]
    assert verdict == "verdict of 30"
    assert ranks == ["ranks 0-3 (node0 … node1): train, step 30 or later"]


@pytest.mark.parametrize("name", ["recall[cat]", "acc[/b]", "top[red]5", "a\x1b]0;b", "a\x9b31m"])
def test_names_of_metrics_are_shown_as_they_are_and_give_no_orders(run: Run, name: str) -> None:
    run.metrics.write(10, 1, "eval", {name: 0.5})
    run.logs[0].write("failed", f"metric {name}")
    follower = Follower(run.folder)
    text = "\n".join(shown(follower))
    seen = name.replace("\x1b", "\\x1b").replace("\x9b", "\\x9b")
    assert f"eval  {seen}  0.5" in text
    assert f"metric {seen}" in text
    screen = open_screen(launched=True)
    with screen.capture() as found:
        for line in news(None, follower.look()):
            screen.print(line, markup=False)
    assert found.get().replace("\n", "").isprintable()
    assert f"{seen} 0.5" in found.get()


def test_a_rank_in_trouble_is_named_first(run: Run) -> None:
    run.train(10)
    run.logs[2].write("phase", "evaluate after step 10")
    run.logs[3].write("stall", "rank 2 (node1) has been in evaluate for 60 s\nat step 10")
    *_, third, others, second = shown(Follower(run.folder))
    assert third == "rank 3 (node1): train, step 10 or later; rank 2 (node1) has been in evaluate for 60 s"
    assert others == "ranks 0-1 (node0): train, step 10 or later"
    assert second == "rank 2 (node1): evaluate, step 10 or later"


def test_of_a_traceback_the_error_is_shown(run: Run) -> None:
    run.train(10)
    text = 'Traceback (most recent call last):\n  File "a.py", line 3\nKeyError: 1\n\nDuring it:\n\nValueError: no luck'
    run.logs[1].write("failed", text)
    follower = Follower(run.folder)
    assert follower.look().ranks[1].trouble == "ValueError: no luck"
    run.logs[1].write("info", "later")
    assert follower.look().ranks[1].trouble == "ValueError: no luck"


def test_each_new_thing_is_told_once(run: Run) -> None:
    follower = Follower(run.folder)
    before = follower.look()
    assert [line.partition(":")[0] for line in news(None, before)] == [str(run.folder)]
    run.train(10, 20)
    after = follower.look()
    assert list(news(before, after)) == [
        "train step 10 of 60  epoch 1  loss 0.1  verdict of 10",
        "train step 20 of 60  epoch 2  loss 0.05  verdict of 20",
    ]
    assert list(news(after, follower.look())) == []


def test_rows_that_a_resume_takes_back_are_gone(run: Run) -> None:
    run.train(10, 20, 30)
    follower = Follower(run.folder)
    before = follower.look()
    run.metrics.rewind(10)
    run.train(20, loss=5.0)
    after = follower.look()
    assert [row.step for row in after.rows] == [10, 20]
    assert list(news(before, after)) == ["train step 20 of 60  epoch 2  loss 0.25  verdict of 20"]


def test_what_a_resume_takes_back_is_found_by_comparing_each_row_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train(*range(1, 301))
    follower = Follower(run.folder)
    before = follower.look()
    run.metrics.rewind(100)
    run.train(*range(101, 301), loss=5.0)
    after = follower.look()
    compared: list[Row] = []
    for name, compare in (("__eq__", tuple.__eq__), ("__ne__", tuple.__ne__)):
        monkeypatch.setattr(Row, name, lambda row, other, compare=compare: compared.append(row) or compare(row, other))
    assert len(list(news(before, after))) == 200
    assert 100 < len(compared) <= 600


def test_a_line_that_is_being_written_waits_for_its_end(run: Run) -> None:
    run.train(10)
    follower = Follower(run.folder)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "epoch": 2, "spl')
        file.flush()
        assert [row.step for row in follower.look().rows] == [10]
        file.write('it": "train", "seconds": 1.0, "loss": null}\n')
    found = follower.look()
    assert [(row.step, row.values) for row in found.rows][1:] == [(20, {"loss": None})]
    assert "not finite" in "\n".join(news(None, found))


def lose_lease(run: Run) -> None:
    """As of a process that has been killed."""
    run.lease.close()
    about = dataclasses.asdict(dataclasses.replace(describe_me("", run.folder), started="1"))
    (run.folder / "lease.json").write_text(json.dumps(about))


def test_ranks_are_shown_without_the_log_of_rank_0(run: Run) -> None:
    run.train(10)
    (run.folder / "logs" / "rank-0.log").write_text("")
    title, *_, ranks = shown(Follower(run.folder))
    assert title.startswith(f"{run.folder}: 4 rank(s) on 2 host(s), launcher srun")
    assert ranks == "ranks 1-3 (node0 … node1): train, step 10 or later"


def test_a_run_whose_process_has_gone_is_over(run: Run) -> None:
    run.train(10)
    follower = Follower(run.folder)
    before = follower.look()
    assert not before.is_over
    lose_lease(run)
    assert follower.look().is_over
    assert [*news(before, follower.last)][-1] == "no sign of life"
    assert "no sign of life" in "\n".join(shown(follower))


def test_a_run_that_has_given_up_its_lease_has_time_to_say_how_it_ended(run: Run) -> None:
    run.train(10)
    follower = Follower(run.folder)
    run.lease.close()
    assert not follower.look().is_over
    run.end()
    assert follower.look().is_over
    assert follower.last.silent_s is None


def test_a_run_without_lease_and_end_whose_logs_are_old_has_gone(run: Run) -> None:
    run.train(10)
    run.lease.close()
    assert not Follower(run.folder).look().is_over
    for log in (run.folder / "logs").iterdir():
        os.utime(log, (time.time() - GONE_AFTER_S - 1,) * 2)
    assert Follower(run.folder).look().is_over


def test_a_run_without_lease_and_end_has_gone_though_the_clock_of_its_files_is_ahead(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train(10)
    run.lease.close()
    for log in (run.folder / "logs").iterdir():
        os.utime(log, (time.time() + 3600,) * 2)
    follower = Follower(run.folder)
    assert not follower.look().is_over
    monkeypatch.setattr(watch, "GONE_AFTER_S", 0.05)
    time.sleep(0.1)
    assert follower.look().is_over


def launch_says(run: Run, line: str) -> None:
    time.sleep(0.005)
    with (run.folder / "logs" / "launch.log").open("a") as file:
        file.write(f"{now()} launch: {line}\n")


@pytest.mark.parametrize("lost", ["root", "another"])
def test_a_run_whose_ranks_launch_starts_again_is_not_over(tmp_path: Path, lost: str) -> None:
    run = Run(tmp_path / "run", np=2, launcher="launch")
    run.train(10)
    follower = Follower(run.folder)
    follower.look()
    if lost == "another":
        run.logs[0].end("followed", 1, step=10, phase="train", error=None)
    lose_lease(run)
    assert not follower.look().is_over  # launch waits for the others to end
    launch_says(run, "start 1 of at most 11: 2 rank(s)")
    launch_says(run, "rank 1 was killed by SIGKILL, after 9 s")
    launch_says(run, "start 2 of at most 11: 2 rank(s)")
    before = follower.last
    assert not follower.look().is_over
    assert f"{run.folder}: launch starts it again; before: 2 rank(s)" in next(iter(news(before, follower.last)))
    time.sleep(0.005)
    (run.folder / "lease.json").unlink()
    again = Run(run.folder, np=2, launcher="launch")
    look = follower.look()
    assert (look.is_over, look.is_starting) == (False, False)
    again.logs[0].end("failed", 2, step=10, phase="train", error="bad record")
    launch_says(run, "stopped: the config, the arguments or the data are bad, after 1 s")
    assert follower.look().is_over
    again.lease.close()


def test_ranks_that_launch_had_mpirun_start_may_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    make_folder(tmp_path / "run")
    said = tmp_path / "run" / "logs" / "launch.log"
    said.write_text("2020-11-26T12:00:00.000+00:00 launch: start 1 of at most 11: 2 rank(s)\n")
    for launcher, is_over in (("mpirun", False), ("mpirun", True)):  # the second one by hand
        run = Run(tmp_path / "run", np=2, launcher=launcher)
        run.logs[0].end("failed", 1, step=10, phase="train", error="a loss")
        run.lease.close()
        assert Follower(run.folder).look().is_over == is_over


def test_a_run_whose_launch_was_killed_is_over(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", np=2, launcher="launch")
    run.logs[0].end("stopped", 75, step=10, phase="train", error=None)
    run.lease.close()
    assert not Follower(run.folder).look().is_over
    for log in (run.folder / "logs").iterdir():
        os.utime(log, (time.time() - watch.LAUNCH_SAYS_WITHIN_S - 1,) * 2)
    assert Follower(run.folder).look().is_over


def test_a_run_that_ends_between_two_looks_at_its_files_has_not_gone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.train(10)
    follower = Follower(run.folder)

    def end_first(run_dir: Path) -> Any:
        monkeypatch.undo()
        found = read_lease(run_dir)
        run.end()
        lose_lease(run)
        return found

    monkeypatch.setattr(watch, "read_lease", end_first)
    look = follower.look()
    assert (look.is_over, look.silent_s) == (True, None)
    assert look.ranks[0].ended is not None


def test_what_says_in_a_log_that_a_rank_has_ended_comes_after_the_file_that_says_how(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, there = run.logs[0], []
    monkeypatch.setattr(
        log, "write", lambda kind, text: there.append((kind, end_file(run.folder / "logs", 0).exists()))
    )
    log.end("done", 0)
    assert there == [("end", True)]


@contextmanager
def watching(run_dir: Path, terminal: int | None = None, **variables: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "horovod_train.main", "watch", str(run_dir), "--every", "0.1"]
    stdout = subprocess.PIPE if terminal is None else terminal
    with started(words, stdout=stdout, environment={**os.environ, **variables}) as process:
        yield process


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}])
def test_lines_come_while_it_trains_until_it_ends(run: Run, variables: dict[str, str]) -> None:
    with watching(run.folder, None, **variables) as process:
        assert process.stdout
        assert "4 rank(s)" in process.stdout.readline()
        run.train(10)
        assert process.stdout.readline().startswith("train step 10 of 60")
        run.train(20)
        assert process.stdout.readline().startswith("train step 20 of 60")
        (run.folder / "summary.json").write_text('{"steps": 60}')
        run.end()
        rest = process.stdout.read()
        assert process.wait() == 0
    assert "rank 3 (node1): done, exit code 0" in rest
    assert f"{run.folder}: finished after 60 steps" in rest
    assert "\x1b" not in rest


def test_it_ends_when_nobody_reads_any_more(run: Run) -> None:
    """As after `| head -1`, while the run goes on."""
    with watching(run.folder) as process:
        assert process.stdout
        process.stdout.readline()
        process.stdout.close()
        run.train(10)
        assert process.wait(HANGS_AFTER_S) == 0


def read_until(terminal: int, text: str) -> str:
    """Return what a terminal gets until it has the text, whose blanks may be ends of lines."""
    shown = ""
    while re.sub(r"\s", "", text) not in re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\s", "", shown):
        shown += os.read(terminal, 65536).decode()
    return shown


@contextmanager
def terminal(folder: Path, **environment: str) -> Iterator[int]:
    """The end of a terminal at which one reads what `watch` shows there."""
    ours, its = pty.openpty()
    with watching(folder, its, **environment) as process:
        os.close(its)
        yield ours
        process.kill()
    os.close(ours)


def test_a_terminal_is_drawn_again(run: Run) -> None:
    with terminal(run.folder, TERM="xterm") as ours:
        text = read_until(ours, "step 0 of 60")
        run.train(50)
        text += read_until(ours, "step 50 of 60")
    assert "\x1b[1A" in text or "\x1b[2K" in text  # goes back up to draw over what was there


def test_a_narrow_terminal_shows_the_whole_of_each_line(run: Run) -> None:
    trouble = "rank 2 (node1) has been in input for 74 s, reading train-00031"
    run.metrics.write(10, 1, "train", {"a_metric_of_a_long_name_in_a_narrow_terminal": 0.5})
    run.logs[3].write("stall", trouble)
    with terminal(run.folder, TERM="xterm", COLUMNS="40", LINES="60") as ours:
        text = read_until(ours, trouble)
    lines = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line).strip("\r") for line in text.split("\n")]
    assert max(map(len, lines)) <= 40
    assert not re.search(r"\S…", text)  # how rich shows that it has cut something off


def test_a_terminal_that_cannot_draw_again_gets_lines(run: Run) -> None:
    with terminal(run.folder, TERM="dumb") as ours:
        text = read_until(ours, "4 rank(s)")
        run.train(50)
        text += read_until(ours, "train step 50 of 60")
    assert "\x1b" not in text


def test_a_run_that_ended_is_looked_at_without_tensorflow(run: Run, tmp_path: Path) -> None:
    run.train(10)
    run.logs[1].end("failed", 1, step=10, phase="train", error="no memory")
    run.logs[0].end("followed", 1, step=10, phase="train", error=None)
    words = [sys.executable, "-m", "horovod_train.main", "watch", str(run.folder)]
    finished = run_process(words, environment=without_tensorflow(tmp_path))
    assert finished.returncode == 1, finished.text
    assert "rank 1 (node0) failed in train at step 10: no memory" in finished.stdout


@pytest.mark.parametrize("words", [["nowhere"], ["."], [".", "--every", "0"], [".", "--every", "nan"]])
def test_bad_words_are_one_line(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / words[0]), *words[1:]]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1], ""),
        ([1, 1], "▁▁"),
        ([0, 7], "▁█"),
        ([7, 0], "█▁"),
        ([0, 5e-324], "▁█"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_curve_goes_from_the_smallest_to_the_largest(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_values_that_are_too_large_are_left_out_of_a_curve(run: Run) -> None:
    """The difference of such is infinite."""
    write_losses(run, [0.0, -1.7e308, 1.7e308, 7])
    assert shown(Follower(run.folder))[2].split() == ["train", "loss", "7", "▁█"]
    write_losses(run, [-1.7e308, 1.7e308])
    assert shown(Follower(run.folder))[2].split() == ["train", "loss", "1.7e+308"]


def test_a_long_curve_keeps_its_course() -> None:
    assert sparkline([float(n) for n in range(1000)]) == "".join(sorted(sparkline([float(n) for n in range(1000)])))
    assert len(sparkline([1.0, 2.0] * 500)) == 24


@pytest.mark.parametrize("rows", [60, 1000, 9001])
def test_the_curve_of_a_constant_is_flat(run: Run, rows: int) -> None:
    write_losses(run, [0.1] * rows)
    assert shown(Follower(run.folder))[2].split() == ["train", "loss", "0.1", "▁" * 24]


@pytest.mark.parametrize(("rows", "farthest"), [(2000, 0), (2047, 0), (30_011, 1)])
def test_a_curve_is_drawn_from_all_values_also_of_a_long_run(run: Run, rows: int, farthest: int) -> None:
    losses = [math.sin(step / rows * 9) + step % 7 for step in range(rows)]
    write_losses(run, losses)
    follower = Follower(run.folder)
    expected, found = sparkline(losses), shown(follower)[2].split()[-1]
    assert max(abs(ord(a) - ord(b)) for a, b in zip(expected, found, strict=True)) <= farthest
    assert shown(follower)[2].split()[-1] == found


def test_a_look_holds_as_much_of_a_long_run_as_of_a_shorter_one(run: Run) -> None:
    def most_held(rows: int) -> int:
        write_losses(run, map(float, range(rows)), ', "s_per_step": 0.5')
        (run.folder / "times.jsonl").write_text(
            "".join(f'{{"step": {step}, "verdict": "input {step}"}}\n' for step in range(rows))
        )
        follower = Follower(run.folder)
        tracemalloc.start()
        for _ in range(2):
            shown(follower)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    shown(Follower(run.folder))  # what is imported once
    assert most_held(9000) < 1.2 * most_held(3000)


def test_all_lines_since_the_last_look_are_told_after_a_resume_too(run: Run) -> None:
    write_losses(run, range(5000))
    follower = Follower(run.folder)
    before = follower.look()
    assert len(list(news(None, before))) == 11
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "split": "train", "loss": 1}}\n' for step in range(5000, 8000))
    after = follower.look()
    assert [int(line.split()[2]) for line in news(before, after)] == list(range(5000, 8000))
    run.metrics.rewind(7500)
    assert list(news(after, follower.look())) == []
    run.train(*range(7501, 7600))
    assert [int(line.split()[2]) for line in news(after, follower.look())] == list(range(7501, 7600))
