"""Where the timeline of a start is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_train.distributed.start import forget_timeline, timeline_environment
from horovod_train.errors import UserError


def test_each_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        (path,) = map(Path, timeline_environment(tmp_path / "run", is_root=True).values())
        path.touch(exist_ok=False)
        paths.append(path)
    assert sorted((tmp_path / "run" / "timeline").iterdir()) == sorted(paths)


def test_ranks_other_than_root_name_no_file(tmp_path: Path) -> None:
    assert timeline_environment(tmp_path / "run", is_root=False) == {"HOROVOD_TIMELINE": "DYNAMIC"}
    assert not (tmp_path / "run").exists()


def test_a_file_that_the_environment_names_is_not_replaced_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "/tmp/mine.json")
    with pytest.raises(UserError, match=r"^horovod\.timeline: the environment has HOROVOD_TIMELINE=/tmp/mine\.j"):
        timeline_environment(tmp_path, is_root=True)
    forget_timeline()
    assert timeline_environment(tmp_path, is_root=True).keys() == {"HOROVOD_TIMELINE"}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("")
    with pytest.raises(UserError, match=r"output_dir: cannot write .*timeline: File exists"):
        timeline_environment(tmp_path, is_root=True)
