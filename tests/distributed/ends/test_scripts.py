"""A script of a user's own that goes wrong ends on all ranks, with the reason on top and an exit code that tells."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from conftest import PROGRAMS, Finished, launcher_command, run_process, warm_python
from test_watch import ours_among, started, until

SCRIPT = str(PROGRAMS / "users_script.py")


def run_script(tmp_path: Path, launcher: str, trouble: str) -> Finished:
    return run_process([*launcher_command(launcher, 2), *warm_python(), SCRIPT, str(tmp_path), trouble])


def own_lines(finished: Finished) -> list[str]:
    return ours_among(finished.stderr.splitlines())


def test_a_script_that_is_right_ends_with_0_and_says_nothing(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "mpirun", "none")
    assert finished.returncode == 0, finished.text
    assert sorted(finished.stdout.splitlines()) == ["128 steps", "128 steps", "rank 0: 4 epochs", "rank 1: 4 epochs"]
    assert own_lines(finished) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("launcher", "trouble"), [("mpirun", "takes-its-time"), ("srun", "unwatched")])
def test_a_script_that_takes_its_time_where_no_rank_waits_is_left_alone(
    tmp_path: Path, launcher: str, trouble: str
) -> None:
    """Longer than the watch lets ranks be idle: a validation, and what root does when the others have finished."""
    finished = run_script(tmp_path, launcher, trouble)
    assert finished.returncode == 0, finished.text
    assert finished.stdout.count("128 steps") == 2
    assert own_lines(finished) == []


@pytest.mark.exhaustive
def test_a_process_alone_is_not_watched(tmp_path: Path) -> None:
    finished = run_process([*warm_python(), SCRIPT, str(tmp_path), "takes-its-time"])
    assert finished.returncode == 0, finished.text
    assert own_lines(finished) == []


@pytest.mark.long
def test_a_function_is_called_on_two_ranks_and_its_results_come_back(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    finished = run_process([sys.executable, str(PROGRAMS / "run_function.py"), str(results)])
    assert finished.returncode == 0, finished.text
    alone, left, found = json.loads(results.read_text())
    assert alone == [0, 1, 1.0, []]
    assert left == []  # which the ranks would take for what the user has set
    assert found == [[0, 2, 1.5, []], [1, 2, 1.5, []]]


@pytest.mark.long
def test_a_model_that_is_built_on_root_only_is_broadcast_after_the_first_batch(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "srun", "builds-on-root")
    assert finished.returncode == 0, finished.text
    assert finished.stdout.count("128 steps") == 2


def test_ranks_with_different_numbers_of_rows_end_each_epoch_together(tmp_path: Path) -> None:
    """With equal rates, which rise from batch to batch; otherwise the ranks' weights would part."""
    finished = run_script(tmp_path, "srun", "uneven")
    assert finished.returncode == 0, finished.text
    assert finished.stdout.count(": 4 epochs") == 2
    assert finished.stdout.count(f"{4 * 32} steps") == 2
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("model.fit: ")]
    assert "(rank 0: epoch 1 of 33 batches; rank 1: epoch 1 of 32 batches); all end each epoch after 32" in line
    assert "ran out of data" not in finished.stderr


@pytest.mark.long
def test_files_are_written_by_root_alone_and_that_is_said(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "srun", "writes")
    assert finished.returncode == 0, finished.text
    assert sorted(path.name for path in tmp_path.glob("of-*")) == ["of-0.csv", "of-0.keras"]
    assert finished.stderr.count("ModelCheckpoint, CSVLogger run on rank 0 only, so that no file is written") == 1


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["backs-up", pytest.param("backs-up-on-root", marks=pytest.mark.exhaustive)])
def test_a_killed_script_continues_from_roots_backup_as_if_it_had_not_been(tmp_path: Path, trouble: str) -> None:
    """With BackupAndRestore and one folder on all ranks, and on root alone."""
    assert run_script(tmp_path, "srun", trouble).returncode != 0
    assert sorted(path.name for path in (tmp_path / "backup").iterdir()) == [
        "latest.weights.h5",
        "training_metadata.json",
    ]
    finished = run_script(tmp_path, "srun", trouble)
    assert finished.returncode == 0, finished.text
    assert finished.stdout.count(": 2 epochs") == 2
    assert finished.stdout.count("128 steps") == 2
    assert finished.stdout.count("as without the kill") == 2, finished.text
    assert not (tmp_path / "backup").exists()


@pytest.mark.long
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_after_the_same_batch(tmp_path: Path) -> None:
    """Also where one rank alone has TerminateOnNaN."""
    finished = run_script(tmp_path, "srun", "nan")
    assert finished.returncode == 0, finished.text
    assert finished.stdout.count(": 1 epochs") == 2
    assert re.findall(r"^(\d+) steps", finished.stdout, re.MULTILINE) == ["3", "3"]
    assert finished.stderr.count("the loss of rank 1 is not finite after batch 3; all ranks stop there.") == 1


@pytest.mark.long
def test_all_ranks_may_stop_within_an_epoch_though_root_alone_evaluates(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "srun", "stops")
    assert finished.returncode == 0, finished.text
    assert re.findall(r"^(\d+) steps", finished.stdout, re.MULTILINE) == ["3", "3"]


@pytest.mark.long
def test_a_callback_that_decides_may_be_on_one_rank_only(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "srun", "decides-alone")
    assert finished.returncode == 0, finished.text
    assert finished.stdout.count(": 4 epochs") == 2


@pytest.mark.long
def test_a_callback_that_would_stop_one_rank_decides_on_means_and_stops_all(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "srun", "decides")
    assert finished.returncode == 0, finished.text
    assert finished.stdout.count(": 2 epochs") == 2


@pytest.mark.parametrize(
    ("trouble", "code", "words"),
    [
        pytest.param(
            "decides-too-early",
            2,
            "EarlyStopping must come after BroadcastGlobalVariablesCallback in callbacks",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "backs-up-too-early",
            2,
            "BackupAndRestore must come after BroadcastGlobalVariablesCallback in callbacks",
            marks=pytest.mark.long,
        ),
        ("forgets", 86, "ranks hold different weights: "),
    ],
)
def test_what_is_wrong_on_all_ranks_is_said_on_one_line(tmp_path: Path, trouble: str, code: int, words: str) -> None:
    finished = run_script(tmp_path, "srun", trouble)
    assert finished.returncode == code, finished.text
    line, *more = own_lines(finished)
    assert more == ([line] if trouble == "forgets" else [])  # which each rank shows: they meet at the first broadcast
    assert line.startswith("error: ")
    assert words in line
    assert "Traceback" not in finished.stderr


def test_an_exception_on_one_rank_is_shown_first_and_ends_all(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "srun", "raises")
    assert finished.returncode == 1, finished.text
    assert finished.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: no luck on rank 1" in finished.stderr
    (line,) = own_lines(finished)
    assert line.startswith("stopped: rank 1 (")
    assert line.endswith("failed: ValueError: no luck on rank 1")


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_rank_that_leaves_in_the_middle_without_an_error_is_named(tmp_path: Path, rank: int) -> None:
    command = [*launcher_command("srun", 3), *warm_python(), SCRIPT, str(tmp_path), f"leaves-{rank}"]
    finished = run_process(command)
    assert finished.returncode == 1, finished.text
    # Not by lines: Horovod's core writes a line of its log in parts, and another rank's line may come between them.
    said = re.findall(r"stopped: (rank \d) \(.+?\) ended by itself, by sys.exit or", finished.stderr)
    assert said == [f"rank {rank}"], finished.text
    assert "another rank has gone" not in finished.stderr


@pytest.mark.long
@pytest.mark.parametrize(("trouble", "step"), [("hangs", 96), ("hangs-in-its-loop", 12)])
def test_a_rank_that_hangs_in_a_callback_or_in_a_loop_of_its_own_is_named(
    tmp_path: Path, trouble: str, step: int
) -> None:
    finished = run_script(tmp_path, "srun", trouble)
    assert finished.returncode == 87, finished.text
    # Not by lines, because the stacks of both ranks are written at the same time.
    said = re.findall(
        rf"error: stalled: rank (\d) \(.+?\) has been in train for \d+ s at step {step}; 1 rank waits for it",
        finished.stderr,
    )
    assert said == ["1"], finished.text
    assert "AutoGraph could not transform" not in finished.stderr


@pytest.mark.exhaustive
def test_ranks_that_enter_different_exchanges_are_named_with_them(tmp_path: Path) -> None:
    finished = run_script(tmp_path, "srun", "broadcasts-alone")
    assert finished.returncode == 87, finished.text
    said = re.findall(
        r"error: stalled: ranks have waited for each other in different exchanges for \d+ s: rank 0 \(.+?\) in "
        r"hvd.barrier; rank 1 \(.+?\) in hvd.broadcast_variables",
        finished.stderr,
    )
    assert said, finished.text


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_on_its_host_and_the_others_end(tmp_path: Path) -> None:
    command = [*launcher_command("srun", 3), *warm_python(), SCRIPT, str(tmp_path), "trains-on"]
    with started(tmp_path, [command], 3) as job:
        until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(3)), job)
        os.kill(job.pid(2), signal.SIGKILL)
        job.wait_until_gone()
        assert job.processes[0].wait() != 0
    # Not by lines: Horovod's core writes a line of its log in parts, and another rank's line may come between them.
    said = re.findall(r"stopped: (rank \d) \(.+?\) (.*?\?)", "\n".join(job.said))
    assert said == [("rank 2", "disappeared: killed or out of memory?")], "\n".join(job.said)
