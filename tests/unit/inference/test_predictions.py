"""Rows that come in any order lie in the file in the order of their records, each once; and nothing else is left."""

from __future__ import annotations

import csv
import tracemalloc
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from conftest import WARNINGS_FAIL

from horovod_train.commands.cli import check_out
from horovod_train.config.settings import Config
from horovod_train.distributed.watchdog.heartbeat import Heartbeat
from horovod_train.errors import RunError, UserError
from horovod_train.host import boot_id
from horovod_train.inference import predictions
from horovod_train.inference.predictions import PREDICTIONS, Predictions, PredictionsFile, RecordNames, Specs
from horovod_train.inference.run import _loss, _write
from horovod_train.training.losses import takes_logits

SPECS: Specs = {"score": ((), np.dtype("float32")), "box": ((2, 2), np.dtype("float64"))}


def rows(ids: np.ndarray) -> dict[str, np.ndarray]:
    """What a record gets follows from its number; padding gets nonsense."""
    return {"score": ids.astype(np.float32) / 3, "box": ids[:, None, None] + np.arange(4.0).reshape(2, 2)}


def finish(file: Predictions) -> int:
    for _ in file.write():
        pass
    return file.written


def write(path: Path, parts: list[list[int]], records: int) -> int:
    with closing(PredictionsFile(path, SPECS, records)) as file:
        for part in parts:
            ids = np.array(part)
            file.put(ids, rows(ids))
        return finish(file)


def test_npz_holds_every_record_in_order(tmp_path: Path) -> None:
    assert write(tmp_path / "out.npz", [[4, 2, -1], [0, 3, 1]], 5) == 5
    with np.load(tmp_path / "out.npz") as found:
        assert found["record"].tolist() == [0, 1, 2, 3, 4]
        assert np.array_equal(found["score"], rows(np.arange(5))["score"])
        assert np.array_equal(found["box"], rows(np.arange(5))["box"])
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]


def test_csv_holds_every_number_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "out.csv", [[1, 0]], 2)
    with (tmp_path / "out.csv").open(newline="") as file:
        head, *lines = csv.reader(file)
    assert head == ["record", "score", "box[0,0]", "box[0,1]", "box[1,0]", "box[1,1]"]
    assert [int(line[0]) for line in lines] == [0, 1]
    assert [np.float32(line[1]) for line in lines] == rows(np.arange(2))["score"].tolist()


@pytest.mark.parametrize("suffix", ["npz", "csv"])
def test_records_left_out_are_not_made_up(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    assert write(path, [[3, 0]], 4) == 2
    found = np.load(path)["record"] if suffix == "npz" else np.loadtxt(path, delimiter=",", skiprows=1)[:, 0]
    assert found.tolist() == [0, 3]


@pytest.mark.parametrize("suffix", ["npz", "csv"])
def test_records_of_a_part_have_their_numbers_in_the_files(tmp_path: Path, suffix: str) -> None:
    path, names = tmp_path / f"out.{suffix}", RecordNames(numbers=np.array([2, 6, 13]))
    with closing(PredictionsFile(path, SPECS, 3, names)) as file:
        for number in (2, 0):  # one is bad, and left out
            file.put(np.array([number]), rows(np.array([number])))
        finish(file)
    found = np.load(path)["record"] if suffix == "npz" else np.loadtxt(path, delimiter=",", skiprows=1)[:, 0]
    assert found.tolist() == [2, 13]


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(tmp_path: Path) -> None:
    with closing(PredictionsFile(tmp_path / "out.npz", SPECS, 5)):
        (under_way,) = tmp_path.iterdir()
        left = tmp_path / ".out.npz.0123abcd.partial"
        names = ("more.npz.0123abcd", "out.npz.3210abcd", "out.npz.aaaabbbb")
        of_others = [tmp_path / f".{name}.partial" for name in names]
        for folder in (left, *of_others):
            folder.mkdir()
            (folder / "0.npy").touch()
            (folder / "host").write_text(boot_id())
        (of_others[1] / "notes.txt").touch()
        (of_others[2] / "host").write_text("another")
        write(tmp_path / "out.npz", [[4, 2, 0, 3, 1]], 5)
        assert set(tmp_path.iterdir()) == {under_way, *of_others, tmp_path / "out.npz"}


def test_a_record_left_out_does_not_bring_all_outputs_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "_BYTES", 1 << 16)
    records = 4000
    specs: Specs = {"output": ((250,), np.dtype("float64"))}  # 8 MB
    with closing(PredictionsFile(tmp_path / "out.npz", specs, records)) as file:
        for ids in np.split(np.arange(records), 40):
            file.put(np.where(ids == 7, -1, ids), {"output": np.repeat(ids[:, None], 250, axis=1).astype(float)})
        tracemalloc.start()
        finish(file)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 2e6
    with np.load(tmp_path / "out.npz") as found:
        assert found["output"].shape == (records - 1, 250)
        assert found["output"][:, 249].tolist() == found["record"].tolist()


class Alone(NamedTuple):
    """A group of one rank, which notes in which phase it is when it meets the others."""

    heartbeat: Heartbeat
    phases: list[str]

    def raise_together(self) -> AbstractContextManager[None]:
        self.phases.append(self.heartbeat.name)
        return nullcontext()

    def broadcast_object(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize("suffix", ["npz", "csv"])
def test_ranks_meet_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Ranks that waited for a long time would count as stalled, for the watchdog and for Horovod."""
    monkeypatch.setattr(predictions, "_BYTES", 2 * 36)  # two records
    monkeypatch.setattr(predictions, "_ROWS", 2)
    group: Any = Alone(Heartbeat(), [])
    with closing(PredictionsFile(tmp_path / f"out.{suffix}", SPECS, 20)) as file:
        file.put(np.arange(20), rows(np.arange(20)))
        _write(group, file)
        assert file.written == 20
    assert len(group.phases) > 20 / 2
    assert set(group.phases) == {"write"}
    assert group.heartbeat.name == "start"


def test_the_room_of_a_whole_file_is_there_before_anything_is_predicted(full_disk: Path) -> None:
    """Of 64 kB, its parts would take 40, and it as many again."""
    with pytest.raises(UserError, match=r"--out .*out\.npz: cannot be written: No space left on device"):
        PredictionsFile(full_disk / "out.npz", {"score": ((), np.dtype("float32"))}, 10_000)
    assert not list(full_disk.iterdir())


def test_a_record_that_comes_twice_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="predicted twice"):
        write(tmp_path / "out.npz", [[0, 1], [1]], 3)
    assert not list(tmp_path.iterdir())


def test_other_ranks_have_every_method_and_no_effect() -> None:
    file = Predictions()
    public = {name for name in vars(PredictionsFile) if not name.startswith("_")}
    assert public <= {name for name in vars(Predictions) if not name.startswith("_")}
    file.put(np.arange(3), rows(np.arange(3)))
    assert finish(file) == 0
    file.close()


def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(UserError, match="cannot be written"):
        PredictionsFile(Path("/proc/out.npz"), SPECS, 3)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("out.csv", b"name,age\nann,3\n"),
        ("out.csv", b"record," + b"1" * 200_000 + b"\n"),  # longer than csv takes
        ("out.npz", b"PK not an archive"),
    ],
)
def test_a_file_that_predict_did_not_write_stays(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^--out .*{name}: is not a file that predict wrote, and stays as it is"):
        check_out("--out", str(tmp_path / name), PREDICTIONS)
    with pytest.raises(RunError, match="is not a file that predict wrote"):
        write(tmp_path / name, [[1, 0]], 2)
    assert (tmp_path / name).read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["out.csv", "out.npz"])
def test_predictions_are_replaced_by_new_ones(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, [[1, 0]], 2)
    check_out("--out", str(tmp_path / name), PREDICTIONS)
    assert write(tmp_path / name, [[1, 0, 2]], 3) == 3
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("dtype", "cells"), [("bool", ["0", "1"]), ("complex64", ["0j", "(1+0j)"]), ("int8", ["0", "1"])]
)
def test_outputs_of_every_kind_are_numbers_in_a_csv_and_replaced(tmp_path: Path, dtype: str, cells: list[str]) -> None:
    path, names = tmp_path / "out.csv", RecordNames((), ("ant", "bee"))
    for _ in range(2):
        check_out("--out", str(path), PREDICTIONS)
        with closing(PredictionsFile(path, {"output": ((2, 1), np.dtype(dtype))}, 1, names)) as file:
            file.put(np.arange(1), {"output": np.array([[[0], [1]]]).astype(dtype)})
            finish(file)
    assert path.read_text().splitlines()[1] == ",".join(["0", *cells])


def test_complex_scores_name_no_class(tmp_path: Path) -> None:
    """They have no order."""
    specs: Specs = {"output": ((2,), np.dtype("complex64"))}
    with closing(PredictionsFile(tmp_path / "out.csv", specs, 1, RecordNames((), ("ant", "bee")))) as file:
        file.put(np.arange(1), {"output": np.ones((1, 2), np.complex64)})
        finish(file)
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "record,output[0],output[1]"


ODDS = np.log([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]])
SCORES = {
    "logits": (ODDS + 3, True, ["0.7", "0.5"]),
    "probabilities": (np.exp(ODDS), False, ["0.7", "0.5"]),
    "margins": (ODDS, None, None),
}


@pytest.mark.parametrize("form", SCORES)
def test_a_class_comes_with_its_probability_where_scores_tell_one(form: str, tmp_path: Path) -> None:
    scores, are_logits, expected = SCORES[form]
    names = RecordNames(("a.jpg", "b.jpg"), ("ant", "bee", "cat"), are_logits)
    for suffix in ("csv", "npz"):
        path = tmp_path / f"out.{suffix}"
        with closing(PredictionsFile(path, {"output": ((3,), np.dtype("float64"))}, 2, names)) as file:
            file.put(np.array([1, 0]), {"output": scores[::-1]})
            finish(file)
        check_out("--out", str(path), PREDICTIONS)  # the next prediction may replace it
    with (tmp_path / "out.csv").open(newline="") as file_of_rows:
        rows = list(csv.DictReader(file_of_rows))
    assert [(row["file"], row["class"]) for row in rows] == [("a.jpg", "ant"), ("b.jpg", "cat")]
    found = [row["probability"] for row in rows] if "probability" in rows[0] else None
    assert found == expected
    arrays = np.load(tmp_path / "out.npz")
    assert arrays["file"].tolist() == ["a.jpg", "b.jpg"]
    assert arrays["class"].tolist() == ["ant", "cat"]
    assert ("probability" in arrays) == (expected is not None)


@WARNINGS_FAIL
@pytest.mark.parametrize("are_logits", [True, False, None])
@pytest.mark.parametrize("classes", [1, 2])
def test_scores_with_nan_name_no_class(tmp_path: Path, classes: int, are_logits: bool | None, said: list[str]) -> None:
    """Infinite ones do, and have a probability where that can be told."""
    names = RecordNames((), ("no", "yes"), are_logits)
    scores = np.array([[np.nan, 0.75], [0.25, np.nan], [0.0, 1.0], [0.0, np.inf]])[:, -classes:]
    for suffix in ("csv", "npz"):
        path = tmp_path / f"out.{suffix}"
        for _ in range(2):
            check_out("--out", str(path), PREDICTIONS)
            said.clear()
            with closing(PredictionsFile(path, {"output": ((classes,), np.dtype("float32"))}, 4, names)) as file:
                file.put(np.arange(4), {"output": scores.astype(np.float32)})
                finish(file)
        has_class = classes == 2 or are_logits is not None
        told = f"warning: {path}: {1 if classes == 1 else 2} record(s) have NaN among their scores, and no class"
        assert said == ([told] if has_class else [])
    with (tmp_path / "out.csv").open(newline="") as file_of_rows:
        rows = list(csv.DictReader(file_of_rows))
    if has_class:
        expected = ["yes", "", "yes", "yes"] if classes == 1 else ["", "", "yes", "yes"]
        assert [row["class"] for row in rows] == np.load(tmp_path / "out.npz")["class"].tolist() == expected
        empty = [row["probability"] for row in rows if not row["class"] and are_logits is not None]
        assert set(empty) <= {"nan"}


@pytest.mark.parametrize(("are_logits", "scores"), [(True, [[2.0], [-2.0]]), (False, [[0.880797], [0.119203]])])
def test_one_score_is_of_the_second_of_two_classes(are_logits: bool, scores: list[list[float]], tmp_path: Path) -> None:
    names = RecordNames((), ("no", "yes"), are_logits)
    specs: Specs = {"output": ((1,), np.dtype("float64"))}
    with closing(PredictionsFile(tmp_path / "out.csv", specs, 2, names)) as file:
        file.put(np.arange(2), {"output": np.array(scores)})
        finish(file)
    with (tmp_path / "out.csv").open(newline="") as file_of_rows:
        rows = list(csv.DictReader(file_of_rows))
    assert [row["class"] for row in rows] == ["yes", "no"]
    assert [float(row["probability"]) for row in rows] == pytest.approx([0.880797, 0.880797], abs=1e-5)


class WithOwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        raise AssertionError("it is not trained here")


def test_a_loss_that_only_the_models_own_step_knows_makes_no_probabilities() -> None:
    x = keras.Input((2,))
    outputs = keras.layers.Dense(2)(x)
    assert takes_logits(_loss(Config(), WithOwnStep(x, outputs))) is None
    assert takes_logits(_loss(Config(), keras.Model(x, outputs))) is False
