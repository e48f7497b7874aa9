"""Without --config, and without data, ranks train the built-in example in any folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Finished, rank_environment, summary_of, train, without_tensorflow

from horovod_train.commands.cli import EXAMPLE
from horovod_train.main import main

SHORT = ["train.max_steps=4", "checkpoint.every_epochs=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks start, and next to it the user's cache folder; both are empty."""
    here = tmp_path_factory.mktemp("first") / "here"
    here.mkdir()
    return here


@pytest.fixture(scope="module")
def started(folder: Path) -> list[Finished]:
    """The first start, and the second one."""
    environment = rank_environment() | {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    return [train(SHORT, launcher="horovodrun", np=2, cwd=folder, environment=environment) for _ in range(2)]


@pytest.mark.long
def test_ranks_train_in_an_empty_folder(folder: Path, started: list[Finished]) -> None:
    first, _ = started
    assert first.returncode == 0, first.text
    summary = summary_of(folder / "runs" / "digits_convnet")
    assert (summary["ranks"], summary["steps"], summary["finished"]) == (2, 4, True)
    assert summary["config"]["data"]["train"] == [f"{folder.parent}/cache/horovod_train/digits/train"]
    assert [path.name for path in folder.iterdir()] == ["runs"]
    assert [path.name for path in (folder.parent / "cache" / "horovod_train").iterdir()] == ["digits"]


@pytest.mark.long
def test_root_says_in_one_line_what_it_trains(started: list[Finished]) -> None:
    (line,) = [line for line in started[0].stdout.splitlines() if "no --config: " in line]
    assert "digits_convnet" in line
    assert "output in runs/digits_convnet." in line
    assert started[0].stdout.splitlines()[0] == line


@pytest.mark.long
def test_a_second_start_resumes(started: list[Finished]) -> None:
    second = started[1]
    assert second.returncode == 0, second.text
    assert "resumed from runs/digits_convnet/checkpoints/" in second.stdout
    assert "Done training" in second.stdout


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """It ends all ranks, before TensorFlow is loaded."""
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    environment = without_tensorflow(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "file")}
    finished = train([], launcher="mpirun", np=3, cwd=tmp_path / "here", environment=environment)
    assert finished.returncode == 2, finished.text
    (line,) = [line for line in finished.stderr.splitlines() if "error: " in line]
    assert line.startswith(f"error: {tmp_path}/file/horovod_train/digits: the data cannot be made there: Not a dir")
    assert "prepare digits --out data/digits" in line
    assert list((tmp_path / "here").iterdir()) == []


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["--print-config", *words]) == 0
    return [" ".join(line.split("#")[0].split()) for line in capsys.readouterr().out.splitlines()]


def test_data_that_is_here_or_named_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert {"- /cache/horovod_train/digits/train", "- /cache/horovod_train/digits/eval"} <= set(printed(capsys))
    named = printed(capsys, "data.train=mine", "data.eval=other", "--output-dir", "out")
    assert "- mine" in named
    assert "output_dir: out" in named
    assert not [line for line in named if "/cache" in line]
    (tmp_path / "data" / "digits").mkdir(parents=True)
    assert "- /cache/horovod_train/digits/train" in printed(capsys)  # an empty folder is no dataset
    (tmp_path / "data" / "digits" / "dataset.json").touch()
    assert "- data/digits/train" in printed(capsys)


def test_a_built_in_config_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits_convnet").mkdir()  # a folder is no config
    assert "output_dir: runs/digits_convnet" in printed(capsys, "--config", "digits_convnet")
    shutil.rmtree(tmp_path / "digits_convnet")
    text = Path(EXAMPLE).read_text().replace("runs/digits_convnet", "runs/mine")
    (tmp_path / "digits_convnet").write_text(text)
    assert "output_dir: runs/mine" in printed(capsys, "--config", "digits_convnet")
