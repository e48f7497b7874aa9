"""Profiles that cannot be read are reported in one line. Of real steps: distributed/output/test_tensorboard.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from horovod_train.output.profile import Costs, Op, find_profiles, read_profiles


def folders_of(run_dir: Path, **files: bytes) -> list[Path]:
    """Profiles of a run: name of the folder → content of the file of the host "node1"."""
    for name, content in files.items():
        folder = run_dir / "tensorboard" / "plugins" / "profile" / name.replace("_", "-")
        folder.mkdir(parents=True)
        (folder / "node1.xplane.pb").write_bytes(content)
    return find_profiles(run_dir)


def test_profiles_are_found_in_the_order_of_their_steps(tmp_path: Path) -> None:
    assert find_profiles(tmp_path) == []
    folders = folders_of(tmp_path, step_000000020=b"", step_000000003=b"", step_000000003_2=b"")
    assert [folder.name for folder in folders] == ["step-000000003", "step-000000003-2", "step-000000020"]


def test_a_file_that_is_no_profile_is_said_so_beside_others(tmp_path: Path) -> None:
    pytest.importorskip("xprof", reason="reading profiles needs the extra `profile`")
    folders = folders_of(tmp_path, step_000000003=b"rubbish" * 100, step_000000020=b"")
    (tmp_path / "step-000000030").mkdir()
    read = read_profiles([*folders, tmp_path / "step-000000030"])
    assert [costs.step for costs in read] == [3, 20, 30]
    assert [costs.ops for costs in read] == [[], [], []]
    assert read[0].text() == f"profile of step 3: cannot be read: {folders[0] / 'node1.xplane.pb'} holds no ops."
    assert read[2].text() == "profile of step 30: cannot be read: there is no file *.xplane.pb."
    assert [path.name for folder in folders for path in folder.iterdir()] == ["node1.xplane.pb"] * 2


def test_without_xprof_the_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (costs,) = read_profiles(folders_of(tmp_path, step_000000003=b""))
    assert costs.text() == ("profile of step 3: cannot be read: it needs xprof: pip install 'horovod_train[profile]'.")


def test_a_reader_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xprof", reason="reading profiles needs the extra `profile`")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (costs,) = read_profiles(folders_of(tmp_path, step_000000003=b""))
    assert costs.text() == "profile of step 3: cannot be read: xprof ended with exit code 1: no word."


def test_each_op_has_a_line_with_its_share() -> None:
    costs = Costs(7, "Host", 8.0, [Op("MatMul", "dense/MatMul", 6.0), Op("Add", "dense/Add", 1.5)])
    heading, first, second = costs.text().splitlines()
    assert heading == "profile of step 7: 8.0 ms in ops on the host, all threads together"
    assert first.split() == ["6.00", "ms", "75.0", "%", "MatMul", "dense/MatMul"]
    assert second.split()[2:4] == ["18.8", "%"]
