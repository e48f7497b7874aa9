"""Which rank is named when none makes progress, and when; with invented heartbeats on an invented clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.watchdog.heartbeat import Beat, Heartbeat, StallDetector, files_being_read
from horovod_train.output import logs

LIMITS = WatchConfig(warn_after_s=60, stop_after_s=600, first_step_after_s=1800)
NOW = 1000.0


def detector_of(*doing: str, heard: dict[int, float] | None = None) -> StallDetector:
    """doing: of each rank, "phase step" or "phase step detail", as told 1 s before NOW unless `heard` says when."""
    detector = StallDetector([f"rank {rank} (node{rank})" for rank in range(len(doing))], range(len(doing)), LIMITS)
    for rank, text in enumerate(doing):
        phase, step, *detail = text.split(" ", 2)
        detector.hear(rank, Beat(phase, int(step), "".join(detail), 1, 73.0), (heard or {}).get(rank, NOW - 1))
    return detector


@pytest.mark.parametrize(
    ("doing", "sentence"),
    [
        (
            ["exchange 812", "input 812 reading train-00031", "exchange 812"],
            "rank 1 (node1) has been in input for 74 s at step 812, reading train-00031; 2 ranks wait for it",
        ),
        (["exchange 7", "compute 7"], "rank 1 (node1) has been in compute for 74 s at step 7; 1 rank waits for it"),
        # Evaluation is after the step that rank 0 has not done.
        (
            ["save 6", "evaluate 7", "evaluate 7"],
            "rank 0 (node0) has been in save for 74 s at step 6; 2 ranks wait for it",
        ),
        (["exchange 6", "exchange 7"], "rank 0 (node0) has been in exchange for 74 s at step 6; 1 rank waits for it"),
        (
            ["exchange 7", "exchange 7", "exchange 7"],
            "all 3 ranks have been in exchange for 74 s at step 7: none is behind the others",
        ),
        (["input 7 reading a", "input 7 reading a"], "both ranks have been in input for 74 s at step 7, reading a"),
        # What Python calls is named, and no time can end what differs.
        (
            ["exchange 7 in hvd.barrier", "exchange 7 in the start of model.fit", "exchange 7 in hvd.barrier"],
            "ranks have waited for each other in different exchanges for 74 s: rank 0 (node0), rank 2 (node2) in "
            "hvd.barrier; rank 1 (node1) in the start of model.fit",
        ),
        (
            ["exchange 7 in hvd.barrier", "train 7"],
            "rank 1 (node1) has been in train for 74 s at step 7; 1 rank waits for it in hvd.barrier",
        ),
        (
            ["exchange 7 reading a", "exchange 7 reading b"],
            "both ranks have been in exchange for 74 s at step 7, reading a: none is behind the others",
        ),
        (["input 7"], "rank 0 (node0) has been in input for 74 s at step 7"),
    ],
)
def test_the_one_that_is_waited_for_is_named(doing: list[str], sentence: str) -> None:
    assert detector_of(*doing).describe_stall(NOW) == sentence


def test_silence_is_named_before_slowness() -> None:
    detector = detector_of("input 7", "exchange 8", "compute 7 reading b", "exchange 8", heard={2: NOW - 31})
    assert detector.silent_ranks(NOW) == [2]
    assert detector.describe_stall(NOW) == (
        "rank 2 (node2) has sent no heartbeat for 31 s, last seen in compute at step 7, reading b; 3 ranks wait for it"
    )
    both = detector_of("exchange 8", "compute 7", "compute 7", heard={1: NOW - 40, 2: NOW - 31})
    assert both.describe_stall(NOW) == (
        "rank 1 (node1), rank 2 (node2) have sent no heartbeat for 40 s, "
        "last seen in compute at step 7; 1 rank waits for them"
    )


def test_any_change_on_any_rank_is_progress() -> None:
    detector = detector_of("exchange 7", "input 7 reading a", heard={0: 0.0, 1: 0.0})
    for detail, moves in [("reading b", 1), ("reading b", 2)]:
        now = 100.0 * moves
        assert detector.idle_s(now) == 100
        detector.hear(1, Beat("input", 7, detail, moves, 0.0), now)
        assert detector.idle_s(now) == 0
    detector.hear(1, Beat("input", 7, "reading b", 2, 30.0), 230.0)
    assert detector.idle_s(230.0) == 30


def test_who_was_away_blames_nobody_for_it() -> None:
    detector = detector_of("exchange 7", "exchange 7")
    detector.discount_pause(500.0)
    assert detector.silent_ranks(NOW + 500) == []
    assert detector.idle_s(NOW + 500) == 1


def test_before_the_first_step_and_while_compiling_the_limits_are_long() -> None:
    detector = detector_of("train 7", "train 7")
    assert (detector.warn_after_s(NOW), detector.stop_after_s(NOW)) == (180, 1800)
    detector.hear(0, Beat("train", 8, "", 1, 0.0, has_stepped=True), NOW)
    assert (detector.warn_after_s(NOW), detector.stop_after_s(NOW)) == (60, 600)
    detector.hear(1, Beat("compile", 8, "", 2, 0.0), NOW)
    assert detector.stop_after_s(NOW) == 1800


def test_a_rank_that_froze_right_after_the_first_step_is_not_taken_for_compiling() -> None:
    """Its last heartbeat is from before the end of the step, and no other rank gets to a second one."""
    detector = detector_of("compile 0", "compile 0", heard={0: NOW - 40, 1: NOW - 40})
    detector.hear(0, Beat("exchange", 1, "", 2, 0.0, has_stepped=True), NOW)
    assert detector.silent_ranks(NOW) == [1]
    assert detector.stop_after_s(NOW) == 600


def test_a_probe_speaks_inside_the_compiled_call_only() -> None:
    heartbeat = Heartbeat()
    heartbeat.set_probe(lambda: (12, "exchange", "inside"))
    assert heartbeat.read_probe().phase == "start"
    heartbeat.phase("train")
    with heartbeat.phase("save", "writing it"):
        found = heartbeat.read_probe()
        assert (found.phase, found.step, found.detail) == ("save", 12, "writing it")
    found = heartbeat.read_probe()
    assert (found.phase, found.step, found.detail) == ("exchange", 12, "inside")


def test_a_callback_at_every_step_does_not_fill_the_log(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    now = 1000.0
    monkeypatch.setattr("horovod_train.distributed.watchdog.heartbeat.time.monotonic", lambda: now)
    phases: list[str] = []
    heartbeat = Heartbeat()
    with logs.to_file(lambda kind, text: phases.append(text)):
        for _ in range(1200):  # two minutes
            now += 0.1
            heartbeat.phase("train")
            with heartbeat.phase("hook", "calling mine"):
                now += 0.001
    assert phases == [*["train", "hook"] * 3, "train"]
    assert not said


def test_a_callback_at_every_step_does_not_hide_another(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    now = 1000.0
    monkeypatch.setattr("horovod_train.distributed.watchdog.heartbeat.time.monotonic", lambda: now)
    phases: list[str] = []
    heartbeat = Heartbeat()
    with logs.to_file(lambda kind, text: phases.append(f"{text} at {now:.0f}")):
        heartbeat.phase("train")
        for step in range(500):  # 50 s
            now += 0.1
            with heartbeat.phase("hook", "calling mine"):
                pass
            if step in (299, 399):
                with heartbeat.phase("hook", "calling another"):
                    pass
    assert phases == ["train at 1000", "hook at 1000", "train at 1000", "hook at 1030", "train at 1030"]
    assert not said


def test_a_probe_that_fails_is_not_asked_again_and_the_main_thread_still_counts(said: list[str]) -> None:
    kinds: list[str] = []
    heartbeat = Heartbeat()
    heartbeat.set_probe(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with logs.to_file(lambda kind, text: kinds.append(kind)):
        heartbeat.phase("train")
        first = heartbeat.read_probe()
        heartbeat.phase("train")
        assert heartbeat.read_probe() != first
    assert kinds == ["warning", "phase"]
    (line,) = said
    assert line.startswith("warning: cannot read the step and its phases any more: ")


def test_a_probe_that_fails_after_it_was_replaced_does_not_matter(said: list[str]) -> None:
    """The watchdog's thread reads it while the main thread leaves the block that it was for."""
    heartbeat = Heartbeat()
    heartbeat.set_probe(lambda: (12, "exchange", ""))

    def is_late() -> tuple[int, str, str]:
        heartbeat.set_probe(lambda: (13, "exchange", ""))
        raise ValueError("its variables are gone")

    heartbeat.set_probe(is_late)
    heartbeat.read_probe()
    assert heartbeat.read_probe().step == 13
    assert said == []


def test_files_that_are_open_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "train-00031.tfrecord"
    path.write_bytes(b"")
    with path.open("rb"):
        assert files_being_read() == "reading train-00031.tfrecord"
    assert files_being_read() == ""
