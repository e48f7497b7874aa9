"""Damaged inputs: each is named by file, record and byte, or by what else it is; none hangs and none goes unnoticed."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import FEATURES, SCHEMA, batches, config, example, image_record, make_images, pipeline, write_file
from PIL import Image

from horovod_train.config.settings import DataConfig
from horovod_train.errors import UserError
from horovod_train.tfrecord_framing import frame

FRAME = len(frame(image_record(0)))
"""Bytes of each record in the files of make_images: all are equally long."""

Damage = Callable[[Path], Any]
"""Spoils the data set in a folder with `train/` and `dataset.json`."""


def said_of(data: DataConfig, after_opening: Callable[[], Any] | None = None) -> str:
    """What the user is told when training on the records, in one line."""
    try:
        made = pipeline(data)
        if after_opening:
            after_opening()
        batches(made, epochs=2)
    except UserError as error:
        return str(error)
    except tf.errors.OpError as error:
        found = made.explain(error)
        assert isinstance(found, UserError), found
        return str(found)
    raise AssertionError("nobody noticed")


def cut(name: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / "train" / name, size)


def flip(name: str, byte: int) -> Damage:
    """Changes one bit and leaves size and time as they were, as a failing disk does."""

    def damage(folder: Path) -> None:
        path = folder / "train" / name
        times, data = path.stat(), bytearray(path.read_bytes())
        data[byte] ^= 0x10
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return damage


def put(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / "train" / name).write_bytes(content)


def record(content: bytes, name: str = "1.tfrecord", at: int = 3) -> Damage:
    """Puts other content into one record of a file."""

    def damage(folder: Path) -> None:
        records = [image_record(number) for number in range(7)]
        write_file(folder / "train" / name, [*records[:at], content, *records[at + 1 :]])

    return damage


def schema(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        features = {**FEATURES, **changes}
        content = {**SCHEMA, "features": features, "inputs": [*changes, "image_raw"]}
        (folder / "dataset.json").write_text(json.dumps(content))

    return damage


def jpeg(height: int, width: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((height, width), 99, np.uint8)).save(out, "JPEG")
    return out.getvalue()


def images(*files: bytes) -> Damage:
    """A data set of these images, 24×24 and grey."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder / "train")
        write_file(folder / "train/0.tfrecord", [example(image=file) for file in files])
        feature = {"type": "bytes", "shape": [24, 24, 1], "decode": "image"}
        (folder / "dataset.json").write_text(json.dumps({"features": {"image": feature}, "inputs": ["image"]}))

    return damage


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


GOOD = image_record(3)
PLAIN = b"".join(frame(image_record(number)) for number in range(7))

BEFORE: list[tuple[str, Damage, str]] = [
    ("cut in data", cut("0.tfrecord", 10 * FRAME + 20), f"0.tfrecord: record 10 at byte {10 * FRAME}: the file ends"),
    ("cut in a length", cut("0.tfrecord", 10 * FRAME + 5), f"record 10 at byte {10 * FRAME}: the file ends inside the"),
    (
        "cut in a checksum",
        cut("1.tfrecord", 7 * FRAME - 1),
        f"1.tfrecord: record 6 at byte {6 * FRAME}: the file ends 1",
    ),
    (
        "bit in a length",
        flip("2.tfrecord", 4 * FRAME),
        f"2.tfrecord: record 4 at byte {4 * FRAME}: the record's length",
    ),
    (
        "bit in a length's checksum",
        flip("2.tfrecord", 4 * FRAME + 9),
        f"record 4 at byte {4 * FRAME}: the record's len",
    ),
    ("bit in the first length", flip("2.tfrecord", 0), "2.tfrecord: is not a TFRecord file"),
    ("bit in data", flip("0.tfrecord", 5 * FRAME + 30), f"0.tfrecord: record 5 at byte {5 * FRAME}: its data does not"),
    (
        "bit in a checksum",
        flip("0.tfrecord", 6 * FRAME - 2),
        f"0.tfrecord: record 5 at byte {5 * FRAME}: its data does",
    ),
    ("empty file", put("1.tfrecord", b""), "1.tfrecord: the file is empty; expected TFRecords"),
    ("text", put("1.tfrecord", b"label,pixel\n1,2\n" * 9), "1.tfrecord: is not a TFRecord file"),
    (
        "a few bytes",
        put("1.tfrecord", b"abc"),
        "1.tfrecord: record 0 at byte 0: the file ends inside the record's length",
    ),
    ("gzip cut", put("1.tfrecord", gzip.compress(PLAIN)[:-30]), "1.tfrecord: the GZIP file ends early, after"),
    ("gzip broken", put("1.tfrecord", gzip.compress(PLAIN)[:30] + bytes(90)), "1.tfrecord: cannot be unpacked as GZIP"),
    ("gzip of nothing", put("1.tfrecord", gzip.compress(b"")), "1.tfrecord: holds no records once unpacked"),
    ("gzip of text", put("1.tfrecord", gzip.compress(b"text" * 99)), "1.tfrecord: is not a TFRecord file"),
    ("a folder for a file", lambda f: (f / "train/3.tfrecord").mkdir(), "3.tfrecord: cannot be read: Is a directory"),
    ("a link to nothing", lambda f: (f / "train/3.tfrecord").symlink_to("gone"), "3.tfrecord: cannot be read: No such"),
    (
        "no records in the folder",
        lambda f: [p.unlink() for p in f.glob("train/*")],
        "train holds no *.tfrecord* files.",
    ),
    ("no folder", lambda f: shutil.rmtree(f / "train"), "data.train: {folder}/train does not exist; {folder} does."),
    ("no schema", lambda f: (f / "dataset.json").unlink(), "train has no dataset.json, in it or above it"),
    ("half a schema", lambda f: os.truncate(f / "dataset.json", 50), "dataset.json:1: not valid JSON"),
    ("no example", record(b"\xff\xff"), f"1.tfrecord: record 3 at byte {3 * FRAME}: it is not a tf.train.Example."),
    (
        "a feature is missing",
        record(example(label=3)),
        "feature image_raw: expected bytes; the record does not have it.",
    ),
    (
        "a feature has no value",
        record(example(image_raw=[], label=1)),
        "feature image_raw: expected bytes; the record hol",
    ),
    (
        "another type",
        record(example(image_raw=bytes(16), label=3.5)),
        "feature label: expected int64; the record holds fl",
    ),
    (
        "too many values",
        record(example(image_raw=bytes(16), label=[1, 2])),
        "feature label: expected 1 values for shape []",
    ),
    (
        "too few bytes",
        record(example(image_raw=bytes(15), label=3)),
        "feature image_raw: expected 16 bytes for uint8[4, 4",
    ),
    (
        "label too large",
        record(example(image_raw=bytes(16), label=10)),
        "feature label: expected a value from 0 to 9; the",
    ),
    (
        "label negative",
        record(example(image_raw=bytes(16), label=-1)),
        "feature label: expected a value from 0 to 9; the r",
    ),
    (
        "a name nobody wrote",
        schema(depth={"type": "float"}),
        "feature depth: expected float; the record does not have it.",
    ),
    (
        "a list too long",
        both(record(example(image_raw=bytes(16), label=[1] * 9)), schema(label={"type": "int64", "max_length": 4})),
        f"record 3 at byte {3 * FRAME}: feature label: expected at most 4 values; the record holds 9.",
    ),
    (
        "no image",
        images(jpeg(24, 24), b"text"),
        "0.tfrecord: record 1 at byte {second}: feature image: expected an image as JPEG",
    ),
    (
        "half an image",
        images(jpeg(24, 24), jpeg(24, 24)[:-200]),
        "record 1 at byte {second}: feature image: expected an image",
    ),
    (
        "an image of another size",
        images(jpeg(24, 24), jpeg(24, 25)),
        "expected an image of [24, 24, 1]; the record holds",
    ),
]

AFTER: list[tuple[str, Damage, str]] = [
    ("file removed", lambda f: (f / "train/1.tfrecord").unlink(), "1.tfrecord: cannot be read any more: No such file"),
    ("file grown", lambda f: (f / "train/1.tfrecord").write_bytes(PLAIN * 2), "1.tfrecord: was changed while in use"),
    (
        "file written again",
        lambda f: (f / "train/1.tfrecord").write_bytes(PLAIN),
        "1.tfrecord: was changed while in use",
    ),
    ("file cut", cut("0.tfrecord", 99), f"0.tfrecord: was changed while in use: {40 * FRAME} bytes before, 99 now"),
    (
        "bit in a length",
        flip("0.tfrecord", 5 * FRAME + 1),
        f"0.tfrecord: record 5 at byte {5 * FRAME}: the record's len",
    ),
    ("bit in data", flip("2.tfrecord", FRAME + 30), f"2.tfrecord: record 1 at byte {FRAME}: its data does not match"),
    (
        "a folder in its place",
        lambda f: shutil.rmtree(f / "train"),
        "cannot be read any more: No such file or directory",
    ),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_images(folder / "train")
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "data"))


def expected(text: str, folder: Path) -> str:
    return text.replace("{folder}", str(folder)).replace("{second}", str(len(frame(example(image=jpeg(24, 24))))))


def test_whole_data_is_not_complained_about(folder: Path) -> None:
    with pytest.raises(AssertionError, match="nobody noticed"):
        said_of(config(folder / "train"))


@pytest.mark.parametrize(("damage", "said"), [case[1:] for case in BEFORE], ids=[case[0] for case in BEFORE])
def test_damage_is_named(folder: Path, damage: Damage, said: str) -> None:
    damage(folder)
    message = said_of(config(folder / "train"))
    assert expected(said, folder) in message
    assert "\n" not in message


@pytest.mark.parametrize(("damage", "said"), [case[1:] for case in AFTER], ids=[case[0] for case in AFTER])
def test_damage_while_training_is_named(folder: Path, damage: Damage, said: str) -> None:
    message = said_of(config(folder / "train"), after_opening=lambda: damage(folder))
    assert expected(said, folder) in message
    assert "\n" not in message


def test_wrong_paths_are_named(folder: Path) -> None:
    train = str(folder / "train")
    assert said_of(config(folder)) == (
        f"data.train: {folder} holds no *.tfrecord* files. Its folders have some: data.train={train}?"
    )
    assert said_of(config(f"{train}/*.gone")) == f"data.train: {train}/*.gone matches no file."
    twice = dataclasses.replace(config(train), train=(train, f"{train}/0*"))
    assert "0.tfrecord is named twice" in said_of(twice)
    assert "stage_dir: /proc/no cannot be used" in said_of(config(train, stage_dir="/proc/no"))
    assert "do not fill one batch of 8" in said_of(config(f"{train}/1*", drop_remainder=True))
