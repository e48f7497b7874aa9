"""A log's reader splits exactly where its writer does, whatever characters the text has."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_train.commands.watch import Follower
from horovod_train.output.files import Lines, lines_in
from horovod_train.output.metrics import MetricsFile
from horovod_train.output.rank_log import introduction, make_folder, open_rank_log, read_stories
from horovod_train.output.removal import Artifact

ENDS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
"""Of lines, to str.splitlines."""
FORGED = f"2026-11-25T11:48:27.000+00:00 start {introduction(0, 1, 'none', 'elsewhere')}"


def test_the_ends_of_lines_are_all_that_python_knows() -> None:
    assert {end for end in map(chr, range(0x3000)) if len(f"a{end}b".splitlines()) > 1} == {*ENDS} - {"\r\n"}


@pytest.mark.parametrize("end", ENDS)
def test_no_text_begins_an_entry_of_its_own(end: str, tmp_path: Path) -> None:
    make_folder(tmp_path)
    log = open_rank_log(tmp_path, 0, "here", start_text=introduction(0, 1, "none", "here"))
    log.write("failed", f"bad{end}{FORGED}")
    log.write("info", f"also{end}")
    log.end("failed", 1)
    story = read_stories(tmp_path)[0]
    assert (story.host, [entry.kind for entry in story.entries]) == ("here", ["start", "failed", "info", "end"])
    assert FORGED in story.entries[1].text
    (tmp_path / "metrics.jsonl").touch()
    now = Follower(tmp_path).look().ranks[0]
    assert (now.about.host, now.ended) == ("here", "failed, exit code 1")


def test_no_password_reaches_the_logs(tmp_path: Path) -> None:
    make_folder(tmp_path)
    log = open_rank_log(tmp_path, 0, "here", start_text="begins")
    log.write("warning", "no answer of http://me:s3cret@host/x")
    log.end("failed", 1, error="no answer of http://me:s3cret@host/x")
    texts = [path.read_text() for path in (tmp_path / "logs").iterdir()]
    assert len(texts) == 2
    assert all("s3cret" not in text and "@host/x" in text for text in texts)


@pytest.mark.parametrize("end", [end for end in ENDS if "\n" not in end])
def test_a_log_that_another_version_wrote_has_lines_where_that_ended_them(end: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    began = FORGED.replace("elsewhere", "here")
    (tmp_path / "logs" / "rank-0.log").write_bytes(f"{began}\n{began} bad{end}{FORGED}\n".encode())
    assert read_stories(tmp_path)[0].host == "here"


@pytest.mark.parametrize("end", [end for end in ENDS if "\n" not in end])
def test_lines_that_are_kept_are_kept_whole(end: str, tmp_path: Path) -> None:
    lines = Lines(tmp_path / "a")
    lines.append(f"kept{end}whole")
    lines.append("other")
    lines.keep(lambda line: line.startswith("kept"), Artifact("a file", "a"))
    assert lines.read() == [f"kept{end}whole"]
    assert lines_in(b"a\nb") == ["a", "b"]  # b was cut short


@pytest.mark.parametrize("end", ENDS)
def test_rows_of_metrics_are_read_as_written(end: str, tmp_path: Path) -> None:
    rows = MetricsFile(tmp_path)
    rows.write(1, 0, "train", {f"a{end}b": 1.0})
    rows.write(2, 0, "train", {})
    rows.rewind(1)
    (row,) = rows.rows()
    assert row.values == {f"a{end}b": 1.0}
