"""The commands that look at data: check-data, index, bench input."""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import example, ids_of, image_record, make_images, write_file

from horovod_train.commands import bench, check_data, index
from horovod_train.config.settings import DataConfig
from horovod_train.data import tfrecord_index as index_module
from horovod_train.data.audit import AuditLog, Start
from horovod_train.data.dataset import build_plan, open_records
from horovod_train.data.tfrecord_index import load_entries
from horovod_train.errors import ReadFailed, UserError
from horovod_train.tfrecord_framing import frame


def run(command: ModuleType, *words: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return int(command.run(parser.parse_args([str(word) for word in words])))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_images(tmp_path / "data/train")
    make_images(tmp_path / "data/eval", shards=[12])
    return tmp_path / "data"


def test_good_data_is_summed_up(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check_data, data) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{data}/eval: 12 records in 1 file or folder, 0.0 MB; 0 faults, 0 duplicates" in lines
    assert f"{data}/train: 70 records in 3 files, 0.0 MB; 0 faults, 0 duplicates" in lines
    assert any(line.split() == ["label", "int64", "[]", "0", "9", "4.5"] for line in lines)
    assert "label: " + ", ".join(f"{label}: 7" for label in range(10)) in lines


def test_splits_of_tables_are_found_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, records in (("eval", 2), ("train", 3)):
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "a.csv").write_text("x,y\n" + "1,2\n" * records)
    assert run(check_data, tmp_path / "data") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" in ")[0] for line in lines if "records in" in line] == [
        f"{tmp_path}/data/{split}: {records} records" for split, records in (("eval", 2), ("train", 3))
    ]
    with pytest.raises(UserError, match=r"Its folders have records: data\.train=.*/data/train\?$"):
        open_records(DataConfig(train=(f"{tmp_path}/data",)), "train")


def test_images_by_class_need_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of any size, as those of photos differ; a file that is no image is still a fault."""
    for number in range(6):
        file = tmp_path / "photos" / ("train", "val")[number // 4] / f"class{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(np.full((8 + number, 6, 3), number, np.uint8)).numpy())
    assert run(check_data, tmp_path / "photos") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines if "records in" in line] == [
        f"{count} records in 1 file or folder, 0.0 MB; 0 faults, 0 duplicates" for count in (4, 2)
    ]
    file.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"check-data: 1 fault\."):
        run(check_data, tmp_path / "photos" / "val")
    assert f"{file}: feature image: expected an image" in capsys.readouterr().out


def test_duplicates_are_counted(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(data / "train/1.tfrecord", [image_record(0)] * 5)
    run(check_data, data / "train")
    assert "0 faults, 5 duplicates" in capsys.readouterr().out


def savez_by_bzip2(path: Path, **arrays: np.ndarray) -> None:
    """As other programs may write it; its damage is an error of another kind."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, savez_by_bzip2])
def test_a_bit_that_has_changed_in_an_npz_archive_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Any
) -> None:
    """Training reads rows of one that is not compressed without its checksums, which are of whole arrays."""
    path, rng = tmp_path / "a.npz", np.random.default_rng(0)
    save(path, x=rng.normal(size=(40, 3)), y=np.arange(40), unused=rng.normal(size=4000))
    data = f"data: {{train: {path}, inputs: x, targets: y, global_batch_size: 4}}"
    (tmp_path / "c.yaml").write_text(f"{data}\nmodel: users:model\ntrain: {{epochs: 1}}")
    words = ["--config", tmp_path / "c.yaml"]
    assert run(check_data, *words) == 0
    content = bytearray(path.read_bytes())
    content[-len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"check-data: 1 fault\."):
        run(check_data, *words)
    said = capsys.readouterr().out
    assert "40 records in 1 file" in said
    assert f"{path}: damaged: unused.npy does not match its checksum" in said.replace("\n", " ")


def test_every_bad_record_is_named_and_the_rest_is_counted(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, size = data / "train/0.tfrecord", len(frame(image_record(0)))
    bytes_ = bytearray(path.read_bytes())
    bytes_[3 * size + 30] ^= 1
    path.write_bytes(bytes_)
    write_file(data / "train/1.tfrecord", [image_record(0), b"\xff", example(label=1)])
    (data / "train/2.tfrecord").write_bytes((data / "train/2.tfrecord").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"check-data: 4 faults"):
        run(check_data, data / "train")
    out = capsys.readouterr().out
    assert f"{path}: record 3 at byte {3 * size}: its data does not match its checksum." in out
    assert f"1.tfrecord: record 1 at byte {size}: it is not a tf.train.Example." in out
    assert f"1.tfrecord: record 2 at byte {size + 17}: feature image_raw: expected bytes" in out
    assert f"2.tfrecord: record 22 at byte {22 * size}: the file ends 1 bytes before the record does." in out
    assert "65 records in 3 files" in out  # those before the damage, too


def test_each_index_is_read_a_few_times_whatever_the_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path / "train", shards=[1] * 20)
    loaded: list[str] = []
    monkeypatch.setattr(index_module, "load_entries", lambda place: (loaded.append(place), load_entries(place))[1])
    assert run(check_data, tmp_path / "train") == 0
    assert loaded.count(str(tmp_path / "train/index.npz")) <= 2


def no_answer(*_: object) -> None:
    raise ReadFailed("data.train: no answer.")


def test_an_audit_is_compared_with_the_data_themselves(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers alone say nothing where other records lie under them."""
    run_dir = tmp_path / "run"
    settings = DataConfig(train=(f"{data}/train",))
    records = open_records(settings, "train")
    plan = build_plan(records, settings, seed=1, training=True, global_batch_size=70)
    log = AuditLog(str(run_dir), Start(0, 0, 0, 1, 70, 70, 1, data=records.digest))
    with pytest.raises(UserError, match="its ranks have noted no step yet"):
        run(check_data, "--audit", run_dir)
    log.append(0, 0, ids_of(plan.rows(plan.sequence(0), 0, 1, 0, 1)))
    log.close()
    assert run(check_data, "--audit", run_dir) == 0
    assert "not compared with data.train" in capsys.readouterr().out
    (run_dir / "config.yaml").write_text(
        f"data: {{train: {data}/train, global_batch_size: 70}}\ntrain: {{epochs: 1}}\n"
    )
    assert run(check_data, "--audit", run_dir) == 0
    assert "data.train holds what the run read" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(check_data, "scan_records", no_answer)
        assert run(check_data, "--audit", run_dir) == 0
    assert "not compared with data.train: data.train: no answer" in capsys.readouterr().out
    write_file(data / "train/1.tfrecord", [image_record(number) for number in range(100, 107)])
    with pytest.raises(UserError, match=r"data.train does not hold the records that the run read in epoch 0"):
        run(check_data, "--audit", run_dir)


def test_shares_of_ranks_are_shown_and_add_up(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check_data, data / "train", "--np", 6, "--epochs", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "70 records in 3 blocks; 6 ranks, global batch 192, 1 steps an epoch, seed 1" in lines[0]
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [(row[0], row[1]) for row in rows] == [(str(e), str(r)) for e in range(2) for r in range(6)]
    assert sum(int(row[2]) for row in rows) == 140
    assert lines[-1] == "each record once an epoch"


def test_a_repeated_data_set_is_said_to_come_so_often(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "a.yaml"
    train = f"[{{path: {data}/train, repeats: 2}}]"
    config.write_text(f"data: {{train: {train}, global_batch_size: 20}}\ntrain: {{epochs: 1}}\n")
    assert run(check_data, "--config", config, "--np", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "140 records in 6 blocks" in "\n".join(lines)
    assert lines[-1] == "each record once an epoch for each repeat of its data set"


def test_a_config_says_what_to_check(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(
        f"data: {{train: {data}/train, eval: {data}/eval, global_batch_size: 20}}\ntrain: {{epochs: 1}}\n"
    )
    assert run(check_data, "--config", config, "--np", 2) == 0
    assert "global batch 20, 4 steps" in capsys.readouterr().out
    assert run(check_data, "--config", config, "data.global_batch_size=8") == 0
    assert "12 records in 1 file or folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (4, r"data\.global_batch_size must be at least the number of ranks \(6\); received 4\."),
        (60, r"data\.shuffle_mb: must be at least 5; received 1\."),
    ],
)
def test_shares_that_a_run_refuses_are_refused(data: Path, tmp_path: Path, batch: int, said: str) -> None:
    write_file(data / "train/0.tfrecord", [bytes(100_000)] * 40)
    config = tmp_path / "a.yaml"
    config.write_text(
        f"data: {{train: {data}/train, global_batch_size: {batch}, shuffle_mb: 1}}\ntrain: {{epochs: 1}}\n"
    )
    with pytest.raises(UserError, match=said):
        run(check_data, "--np", 6, "--config", config)


@pytest.mark.parametrize("part", ["fold=1/5", "eval_fraction=0.2"])
def test_records_of_which_a_part_is_held_out_are_checked_once(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(
        f"data: {{train: {data}/train, eval: {data}/train, global_batch_size: 8}}\ntrain: {{epochs: 1}}\n"
    )
    assert run(check_data, "--config", config, f"data.{part}") == 0
    assert capsys.readouterr().out.count("70 records in 3 files") == 1


def test_what_to_check_must_be_said_once() -> None:
    with pytest.raises(UserError, match="give either the path of records or --config"):
        run(check_data)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--audit", "run", "data"], "--audit takes the data of the run's own config; leave out PATH"),
        (["--audit", "run", "--np", 2], "leave out --np"),
        (["data", "--epochs", 2], "--epochs has no effect without --np N"),
    ],
)
def test_an_argument_that_would_have_no_effect_is_refused(words: list[object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(check_data, *words)


def test_index_says_what_it_found(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(index, data) == 0
    assert f"{data}/train: 70 records in 3 files, 3 blocks" in capsys.readouterr().out
    assert (data / "train/index.npz").exists()


def test_bench_input_says_how_fast_records_are_read(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bench, "input", data / "train", "--rounds", 1, "--passes", 1, "--batch-size", 16) == 0
    head, plan, *further = capsys.readouterr().out.splitlines()
    assert head.split() == ["records/s", "slowest", "fastest", "MB/s"]
    assert plan.startswith("plan")
    assert re.match(r"CPU time per record: plan [\d,.]+ µs$", further[0])
    assert re.match(r"the plan's first batch: at 0 % of an epoch [\d.]+ s, at 90 % of an epoch [\d.]+ s$", further[1])


def test_bench_input_reads_records_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40))
    assert run(bench, "input", tmp_path / "a.npz", "--rounds", 1, "--passes", 1, "--batch-size", 16) == 0
    assert "CPU time per record: plan" in capsys.readouterr().out


def test_bench_input_reads_whole_files_of_a_config_that_parts_and_repeats_them(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "a.yaml"
    train = f"train: [{{path: {data}/train, repeats: 2}}], eval_fraction: 0.2"
    config.write_text(f"data: {{{train}, global_batch_size: 16}}\ntrain: {{epochs: 1}}\n")
    turns = ("--rounds", 1, "--passes", 1, "--batch-size", 16)
    assert run(bench, "input", "--config", config, *turns) == 0
    assert "CPU time per record: plan" in capsys.readouterr().out


def test_bench_input_shows_what_a_late_store_gives(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = ("--rounds", 1, "--passes", 1, "--batch-size", 16)
    assert run(bench, "input", data / "train", *turns, "--delay-ms", 5) == 0
    out = capsys.readouterr().out
    assert "plan, blocks 5 ms late" in out
    assert "ratio" in out
    with pytest.raises(UserError, match="--delay-ms must be at least 0; received -1"):
        run(bench, "input", data / "train", *turns, "--delay-ms", -1)
