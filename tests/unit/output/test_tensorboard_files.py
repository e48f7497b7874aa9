"""TensorBoard's files: numbers that are not finite, disks that fail, profiles that were begun or cannot be read.

Profiles of real steps: distributed/output/test_tensorboard.py.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from horovod_train.config.settings import LogConfig
from horovod_train.output import tensorboard
from horovod_train.output.files import MAX_PENDING_BYTES
from horovod_train.output.run_dir import open_output
from horovod_train.output.tensorboard import Costs, Events, Op, TensorBoardWriter, find_profiles, read_profiles


def histogram(folder: Path) -> Any:
    (file,) = (folder / "train").iterdir()
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(file))]
    (value,) = [value for event in events for value in event.summary.value]
    return tf.make_ndarray(value.tensor)


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    board = TensorBoardWriter(tmp_path)
    board.add_histograms(1, {"gradient": tf.constant([[1.0, np.nan], [np.inf, 3.0]], tf.float16)})
    board.close()
    buckets = histogram(tmp_path)
    assert buckets[:, 2].sum() == 2
    assert (buckets[:, 0].min(), buckets[:, 1].max()) == (1, 3)


def test_nothing_but_such_numbers_is_an_empty_histogram(tmp_path: Path) -> None:
    board = TensorBoardWriter(tmp_path)
    board.add_histograms(1, {"gradient": tf.constant([np.nan, np.nan])})
    board.close()
    assert histogram(tmp_path)[:, 2].sum() == 0


@pytest.mark.parametrize("values", [[1.0, 2.0, 2.5, 4.0], [3.0, 3.0], [7.0], []])
def test_buckets_are_those_of_tensorflow(tmp_path: Path, values: list[float]) -> None:
    with tf.summary.create_file_writer(str(tmp_path / "theirs" / "train")).as_default(1):
        tf.summary.histogram("weight", tf.constant(values))
    board = TensorBoardWriter(tmp_path / "ours")
    board.add_histograms(1, {"weight": tf.constant(values)})
    board.close()
    theirs, ours = histogram(tmp_path / "theirs"), histogram(tmp_path / "ours")
    assert theirs.shape == ours.shape
    assert np.allclose(theirs, ours)


def test_buckets_of_a_large_weight_are_counted_in_pieces_and_need_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.random.default_rng(1).normal(size=(500, 1000)).astype(np.float32)
    numbers[3:40] = np.nan  # more than a piece
    weight = tf.constant(numbers)
    whole, pieces = TensorBoardWriter(tmp_path / "whole"), TensorBoardWriter(tmp_path / "pieces")
    whole.add_histograms(1, {"weight": weight})
    monkeypatch.setattr(tensorboard, "NUMBERS_A_PIECE", 10_000)
    tracemalloc.start()
    try:
        pieces.add_histograms(1, {"weight": weight})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    whole.close()
    pieces.close()
    assert np.array_equal(histogram(tmp_path / "whole"), histogram(tmp_path / "pieces"))
    assert most < 1.5 * numbers.nbytes  # one copy, off the device


def test_a_disk_that_fails_is_said_once_and_costs_nothing_else(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "tensorboard").write_text("a file, where there should be a folder")
    board = TensorBoardWriter(tmp_path / "tensorboard")
    for step in (1, 2):
        board.add_scalars("train", step, {"loss": 1.0})
        board.add_histograms(step, {"weight": tf.ones([3])})
    board.close()
    assert len(said) == 2
    assert "cannot be written" in said[0]
    assert "training continues" in said[0]
    assert "lacks its last 6 events" in said[1]


def test_a_record_larger_than_what_is_held_is_written_where_there_is_room(tmp_path: Path) -> None:
    events = Events(tmp_path / "train", 0)
    events.add(b"x" * (MAX_PENDING_BYTES + 1))
    assert events.path.stat().st_size > MAX_PENDING_BYTES


def test_tensorboard_shows_a_start_whose_clock_is_behind_that_of_the_start_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads files by their names, and forgets steps that are not newer than one it reads."""
    now = time.time()
    for behind_s, steps in [(0, range(0, 300, 100)), (600, range(200, 600, 100)), (7200, range(500, 800, 100))]:
        monkeypatch.setattr(time, "time", lambda behind_s=behind_s: now - behind_s)
        board = TensorBoardWriter(tmp_path)
        for step in steps:
            board.add_scalars("train", step, {"loss": float(behind_s)})
        board.close()
    read = EventAccumulator(str(tmp_path / "train"))
    read.Reload()
    points = {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in read.Tensors("loss")}
    assert points == {0: 0.0, 100: 0.0, 200: 600.0, 300: 600.0, 400: 600.0, 500: 7200.0, 600: 7200.0, 700: 7200.0}


def test_tensorboard_forgets_what_a_resume_takes_back(tmp_path: Path) -> None:
    for step, points in [(0, (50, 100, 150, 200)), (110, (125, 200, 225))]:
        output = open_output(str(tmp_path), LogConfig(), is_root=True, launched=True)
        output.start_trackers(step, {"seed": 1}, anew=False)
        output.rewind(step)
        for point in points:
            output.append_metrics("train", point, 0, {"loss": 1.0})
        output.close()
    read = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "train"))
    read.Reload()
    assert [event.step for event in read.Tensors("loss")] == [50, 100, 125, 200, 225]


def test_a_profile_that_was_begun_is_ended_with_the_run(tmp_path: Path, said: list[str]) -> None:
    for _ in range(2):  # a profiler that was left on could not be started again
        board = TensorBoardWriter(tmp_path)
        board.start_profile(7)
        board.close()
    assert not said
    assert not [*tmp_path.rglob("*.pb")]
    board.start_profile(8)
    tf.reduce_sum(tf.ones([3])).numpy()
    board.stop_profile(8)
    assert [path.name for path in (tmp_path / "plugins" / "profile").iterdir()] == ["step-000000008"]


def test_loss_and_metrics_come_before_the_groups_of_speed_and_time_and_settings_are_there(tmp_path: Path) -> None:
    board = TensorBoardWriter(tmp_path)
    board.add_config(0, {"seed": 1, "lr_schedule": {"base_lr": 0.1}, "data": {"train": ["a", "b"]}})
    values = {"loss": 0.5, "accuracy": 1.0, "examples_per_s": 9.0, "compute_share": 1.0, "own_s_per_step_max": 0.1}
    board.write(3, 1, "train", values)
    board.close()
    (file,) = (tmp_path / "train").iterdir()
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(file))]
    found = {value.tag: value for event in events for value in event.summary.value}
    charts = [tag for tag in found if tag not in ("config", "_hparams_/session_start_info")]
    assert sorted(charts)[:2] == ["accuracy", "loss"]
    assert sorted(charts)[2:] == ["speed/examples_per_s", "time/compute_share", "time/own_s_per_step_max"]
    assert "| lr_schedule.base_lr | 0.1 |" in tf.make_ndarray(found["config"].tensor).item().decode()
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    content = found["_hparams_/session_start_info"].metadata.plugin_data.content
    hparams = plugin.HParamsPluginData.FromString(content).session_start_info.hparams
    assert {name: hparams[name].number_value for name in hparams} == {"seed": 1, "lr_schedule.base_lr": 0.1}


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
