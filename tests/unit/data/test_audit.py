"""What a run consumed is written as it goes and put together over stops, resumes and changes of the number of ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from made_records import ids_of

from horovod_train.data.audit import Audit, AuditLog, EpochAudit, Start, audit
from horovod_train.data.sampler import Plan
from horovod_train.data.source import mark_skipped
from horovod_train.errors import UserError
from horovod_train.output.files import Lines

PLAN = Plan(np.full(7, 30), 32, seed=3)  # 210 records: 6 whole steps and one of 18
LAST = PLAN.steps_per_epoch


def run(
    folder: Path, size: int, begin: tuple[int, int], steps: int, *, ranks: int | None = None, data: str = ""
) -> None:
    """What `size` ranks write that start at a place and take so many steps; only the first `ranks` write the last."""
    for rank in range(size):
        place = begin
        log = AuditLog(str(folder), Start(*begin, rank, size, PLAN.num_records, PLAN.global_batch_size, LAST, data))
        for number in range(steps):
            epoch, step = place
            if number + 1 < steps or ranks is None or rank < ranks:
                log.append(epoch, step, ids_of(PLAN.rows(PLAN.sequence(epoch), rank, size, step, step + 1)))
            place = (epoch, step + 1) if step + 1 < LAST else (epoch + 1, 0)
        log.close()


@contextmanager
def no_room(log: AuditLog) -> Iterator[None]:
    path, log.lines.path = log.lines.path, Path("/dev/full")
    yield
    log.lines.path = path


def short(found: list[EpochAudit]) -> list[tuple[int, int, tuple[int, ...], int, int]]:
    return [(e.epoch, e.steps, e.sizes, len(e.missing), len(e.twice)) for e in found]


def test_a_run_without_stops(tmp_path: Path) -> None:
    run(tmp_path, 3, (0, 0), 2 * LAST)
    assert short(audit(str(tmp_path))) == [(0, 7, (3,), 0, 0), (1, 7, (3,), 0, 0)]


def test_a_run_stopped_and_resumed_at_other_sizes(tmp_path: Path) -> None:
    run(tmp_path, 2, (0, 0), 4)
    run(tmp_path, 3, (0, 4), 5)
    run(tmp_path, 1, (1, 2), 5)
    assert short(audit(str(tmp_path))) == [(0, 7, (2, 3), 0, 0), (1, 7, (3, 1), 0, 0)]


def test_steps_after_the_checkpoint_that_was_resumed_do_not_count(tmp_path: Path) -> None:
    run(tmp_path, 2, (0, 0), 6, ranks=1)  # killed in step 5, saved at step 3
    run(tmp_path, 3, (0, 3), 2)  # killed before it saved again
    run(tmp_path, 1, (0, 3), 4)
    assert short(audit(str(tmp_path))) == [(0, 7, (2, 1), 0, 0)]


def test_a_start_further_back_voids_what_came_after(tmp_path: Path) -> None:
    run(tmp_path, 2, (0, 0), 5)
    run(tmp_path, 2, (0, 5), 2)
    run(tmp_path, 2, (0, 2), 5)
    assert short(audit(str(tmp_path))) == [(0, 7, (2,), 0, 0)]
    assert len(list((tmp_path / "audit").iterdir())) == 4


def test_the_torn_end_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    run(tmp_path, 2, (0, 0), 5, ranks=1)
    path = tmp_path / "audit/epoch-00000-step-00000000-rank-0.jsonl"
    path.write_text(path.read_text()[:-7])
    assert short(audit(str(tmp_path))) == [(0, 4, (2,), 0, 0)]


def test_an_epoch_that_is_not_over_has_no_missing_records(tmp_path: Path) -> None:
    run(tmp_path, 2, (0, 0), 3)
    (found,) = audit(str(tmp_path))
    assert (found.is_whole, found.records) == (False, 96)


def test_dropped_records_are_not_missing(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, drop_remainder=True)
    log = AuditLog(str(tmp_path), Start(0, 0, 0, 1, 210, 32, plan.steps_per_epoch, ""))
    log.append(0, 0, ids_of(plan.rows(plan.sequence(0), 0, 1, 0, plan.steps_per_epoch)))
    log.close()
    assert short(audit(str(tmp_path))) == [(0, 6, (1,), 0, 0)]


@pytest.mark.parametrize("drop", [False, True])
def test_skipped_records_are_not_missing(drop: bool, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, drop_remainder=drop)
    log = AuditLog(str(tmp_path), Start(0, 0, 0, 1, 210, 32, plan.steps_per_epoch, ""))
    rows = ids_of(plan.rows(plan.sequence(0), 0, 1, 0, plan.steps_per_epoch))
    skipped = int(rows[2, 5])
    log.append(0, 0, np.where(rows == skipped, mark_skipped(rows), rows))
    log.close()
    (found,) = audit(str(tmp_path))
    assert (found.skipped, found.missing, found.twice) == ([skipped], [], [])
    assert found.records == int((rows >= 0).sum()) - 1


def test_missing_and_doubled_records_are_found(tmp_path: Path) -> None:
    run(tmp_path, 2, (0, 0), LAST)
    path = tmp_path / "audit/epoch-00000-step-00000000-rank-1.jsonl"
    lines = path.read_text().splitlines()
    entry = json.loads(lines[3])
    lost, doubled = entry["ids"][0][:2]
    entry["ids"][0][0] = doubled
    path.write_text("\n".join([*lines[:3], json.dumps(entry), *lines[4:]]) + "\n")
    (found,) = audit(str(tmp_path))
    assert (found.missing, found.twice) == ([lost], [doubled])


def test_a_resume_on_other_data_is_seen_inside_an_epoch_only(tmp_path: Path) -> None:
    for place, steps, data in [((0, 0), LAST, "a"), ((1, 0), 3, "b"), ((1, 3), 4, "c")]:
        run(tmp_path, 1, place, steps, data=data)
    assert [found.data for found in audit(str(tmp_path))] == [("a",), ("b", "c")]


def test_a_rank_that_wrote_nothing_is_noticed(tmp_path: Path) -> None:
    run(tmp_path, 3, (0, 0), LAST)
    next((tmp_path / "audit").glob("*rank-1*")).unlink()
    with pytest.raises(UserError, match=r"the start at epoch 0, step 0 had 3 ranks; files are of \[0, 2\]"):
        audit(str(tmp_path))


def test_a_gap_before_a_resume_is_noticed(tmp_path: Path) -> None:
    run(tmp_path, 2, (0, 0), 3, ranks=1)
    run(tmp_path, 2, (0, 3), 4)
    with pytest.raises(UserError, match=r"epoch 0, step 2 is missing for ranks \[1\], but the run continued after it"):
        audit(str(tmp_path))


def test_what_is_flushed_is_on_disk_before_close(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path), Start(0, 0, 0, 1, 210, 32, LAST, ""))
    log.append(0, 0, ids_of(PLAN.rows(PLAN.sequence(0), 0, 1, 0, 2)))
    log.flush()
    assert short(audit(str(tmp_path))) == [(0, 2, (1,), 0, 0)]
    log.close()
    log.close()


def test_a_full_disk_ends_nothing_and_is_caught_up_with(tmp_path: Path, said: list[str]) -> None:
    log = AuditLog(str(tmp_path), Start(0, 0, 0, 1, 210, 32, LAST, ""))
    with no_room(log):
        for step in range(3):
            log.append(0, step, ids_of(PLAN.rows(PLAN.sequence(0), 0, 1, step, step + 1)))
            log.flush()
    log.append(0, 3, ids_of(PLAN.rows(PLAN.sequence(0), 0, 1, 3, LAST)))
    log.close()
    assert short(audit(str(tmp_path))) == [(0, 7, (1,), 0, 0)]
    assert ["No space left on device" in line for line in said] == [True, False]


def test_what_never_came_to_the_disk_is_a_hole_and_no_end(tmp_path: Path) -> None:
    for rank in range(2):
        log = AuditLog(str(tmp_path), Start(0, 0, rank, 2, 210, 32, LAST, ""))
        for step in range(LAST):
            log.append(0, step, ids_of(PLAN.rows(PLAN.sequence(0), rank, 2, step, step + 1)))
            if (rank, step) == (1, 3):
                log.lines = Lines(log.lines.path)  # as if what was held had become too much
            log.flush()
        log.close()
    with pytest.raises(UserError, match=r"a hole at epoch 0, step 3: ranks \[1\] could not write what they consumed"):
        audit(str(tmp_path))


def test_an_audit_that_could_not_be_closed_ends_nothing(tmp_path: Path, said: list[str]) -> None:
    log = AuditLog(str(tmp_path), Start(0, 0, 0, 1, 210, 32, LAST, ""))
    log.append(0, 0, ids_of(PLAN.rows(PLAN.sequence(0), 0, 1, 0, 2)))
    with no_room(log):
        log.close()
    assert "No space left on device" in said[0]
    assert "lacks its last 1 lines" in said[1]


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_wakes_adds_nothing_to_the_audit_of_the_run_that_has_taken_its_directory(
    tmp_path: Path, begin: int, size: int
) -> None:
    """Another seed, or number of ranks, gives a step other records. What was consumed before is in memory still."""
    begins = Start(0, begin, 1, 2, 210, 32, LAST, "")
    run(tmp_path, 2, (0, 0), begin)
    suspended = AuditLog(str(tmp_path), begins)
    suspended.append(0, begin, np.array([[7, 7]]))
    run(tmp_path, size, (0, begin), LAST - begin)
    suspended.append(0, begin + 1, np.array([[8, 8]]))
    suspended.flush()
    suspended.append(0, begin + 2, np.array([[9, 9]]))
    suspended.close()
    sizes = (size,) if not begin else (2, size)
    ((_, steps, found, missing, twice),) = short(audit(str(tmp_path)))
    assert (steps, set(found), missing, twice) == (LAST, set(sizes), 0, 0)


def test_no_audit_leaves_nothing(tmp_path: Path) -> None:
    log = Audit()
    log.append(0, 0, np.zeros((1, 1), np.int64))
    log.flush()
    log.close()
    with pytest.raises(UserError, match=r"audit: holds no audit\. Run with data\.audit: true"):
        audit(str(tmp_path))
