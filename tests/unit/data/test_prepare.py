"""Making TFRecords: every kind gives records that train, and a folder is there whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import batches, config, ids, pipeline
from PIL import Image, PngImagePlugin

from horovod_train.commands.check_data import check_records
from horovod_train.data import prepare
from horovod_train.data.dataset import open_records
from horovod_train.data.files import hold_lock
from horovod_train.data.prepare import images, writing
from horovod_train.data.prepare.images import GREY_SCHEMA, load_digits, load_idx
from horovod_train.data.prepare.samples import make_mlp_samples
from horovod_train.data.prepare.tables import load_table
from horovod_train.errors import UserError


def run(*words: object) -> None:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    assert prepare.run(parser.parse_args([str(word) for word in words])) == 0


def values(folder: Path, split: str = "train") -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """record → (input, target) of a split, and that it has no fault."""
    assert check_records(config(folder / split)).bad == []
    found = {}
    for batch in batches(pipeline(config(folder / split), training=False)):
        for number, one, other in zip(batch.ids.tolist(), batch.inputs, batch.targets, strict=True):
            if number >= 0:
                found[number] = (one, other)
    return found


def idx(path: Path, array: np.ndarray) -> Path:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_digits_are_split_as_drawn_by_the_seed(tmp_path: Path) -> None:
    run("digits", "--out", tmp_path / "one")
    run("digits", "--out", tmp_path / "same")
    run("digits", "--out", tmp_path / "other", "--seed", 2)
    train, held_out = values(tmp_path / "one"), values(tmp_path / "one", "eval")
    assert (len(train), len(held_out)) == (1437, 360)
    assert train[0][0].shape == (28, 28, 1)
    assert (
        -0.5 == min(image.min() for image, _ in train.values()) < max(image.max() for image, _ in train.values()) == 0.5
    )
    images, labels = load_digits()
    found = [(np.rint((image[..., 0] + 0.5) * 255).astype(np.uint8).tobytes(), int(label))
             for image, label in [*train.values(), *held_out.values()]]  # fmt: skip
    assert sorted(found) == sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))
    first = Path("train/00000-of-00005.tfrecord")
    assert (tmp_path / "one" / first).read_bytes() == (tmp_path / "same" / first).read_bytes()
    assert (tmp_path / "one" / first).read_bytes() != (tmp_path / "other" / first).read_bytes()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_become_records(tmp_path: Path, suffix: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 6, 5))
    files = [idx(tmp_path / f"i{suffix}", pixels), idx(tmp_path / f"l{suffix}", np.arange(60) % 7)]
    run("idx", "--images", files[0], "--labels", files[1], "--out", tmp_path / "out", "--eval-fraction", 0.25)
    found = [*values(tmp_path / "out").values(), *values(tmp_path / "out", "eval").values()]
    assert len(values(tmp_path / "out", "eval")) == 15
    known = {pixels[number].astype(np.uint8).tobytes(): number % 7 for number in range(60)}
    for image, label in found:
        assert known.pop(np.rint((image + 0.5) * 255).astype(np.uint8).tobytes()) == label
    assert not known


def test_held_out_arrays_of_a_wider_dtype_keep_their_values(tmp_path: Path) -> None:
    for name, dtype, value in (("train", np.int8, 7), ("eval", np.int16, 3000)):
        np.savez(tmp_path / f"{name}.npz", x=np.full((6, 20), value, dtype), y=np.arange(6))
    run("npz", "--file", tmp_path / "train.npz", "--eval-file", tmp_path / "eval.npz", "--inputs", "x", "--targets",
        "y", "--out", tmp_path / "out")  # fmt: skip
    for split, value in (("train", 7), ("eval", 3000)):
        assert all((x == value).all() for x, _ in values(tmp_path / "out", split).values())


def test_held_out_arrays_of_another_shape_are_refused(tmp_path: Path) -> None:
    for name, width in (("train", 3), ("eval", 4)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((6, width), np.float32))
    with pytest.raises(UserError, match=r"eval\.npz: x: expected float32\[3\], as for training; received float32\[4\]"):
        run("npz", "--file", tmp_path / "train.npz", "--eval-file", tmp_path / "eval.npz", "--inputs", "x", "--out",
            tmp_path / "out")  # fmt: skip


def test_held_out_lines_are_typed_as_those_for_training(tmp_path: Path) -> None:
    """Of one file all cells of a column may be whole numbers, or read as numbers."""
    (tmp_path / "mixed.csv").write_text("zip,x,y\nA12,1.5,2\n01234,2.5,3\n")
    (tmp_path / "plain.csv").write_text("zip,x,y\n01234,1,0.5\n777,2,1\n")
    mixed, plain = tmp_path / "mixed.csv", tmp_path / "plain.csv"
    run("csv", "--file", mixed, "--eval-file", plain, "--targets", "y", "--out", tmp_path / "out")
    (batch, *_) = batches(pipeline(config(tmp_path / "out/eval"), training=False))
    columns = (*batch.inputs.values(), batch.targets)
    assert {*zip(*(column.tolist() for column in columns), strict=True)} == {(b"01234", 1, 0.5), (b"777", 2, 1)}
    words = ["csv", "--file", plain, "--eval-file", mixed, "--targets", "y"]
    run(*words, "--inputs", "x", "--out", tmp_path / "numbers")
    assert sorted((*x, y) for x, y in values(tmp_path / "numbers").values()) == [(1, 0.5), (2, 1)]
    assert sorted((*x, y) for x, y in values(tmp_path / "numbers", "eval").values()) == [(1.5, 2), (2.5, 3)]
    with pytest.raises(UserError, match=r"mixed\.csv: zip: expected int64\[\], as for training; received text\[\]\."):
        run(*words, "--separate", "--targets", "zip", "--inputs", "x", "--out", tmp_path / "no")


def test_a_small_fraction_of_few_records_is_one(tmp_path: Path) -> None:
    for records in (7, 1):
        np.savez(tmp_path / f"{records}.npz", x=np.zeros((records, 3), np.float32))
    words = ["npz", "--inputs", "x", "--eval-fraction", "0.1", "--out", tmp_path / "out"]
    run(*words, "--file", tmp_path / "7.npz")
    counts = json.loads((tmp_path / "out/dataset.json").read_text())["counts"]
    assert counts == {"train": 6, "eval": 1}
    with pytest.raises(UserError, match=r"--eval-fraction: 0\.1 of 1 record leaves none to train\."):
        run(*words, "--file", tmp_path / "1.npz", "--force")


def test_held_out_idx_files_stay_apart(tmp_path: Path) -> None:
    train = [idx(tmp_path / "i", np.zeros((20, 2, 2))), idx(tmp_path / "l", np.zeros(20))]
    held_out = [idx(tmp_path / "ei", np.full((9, 2, 2), 255)), idx(tmp_path / "el", np.ones(9))]
    run("idx", "--images", train[0], "--labels", train[1], "--eval-images", held_out[0], "--eval-labels", held_out[1],
        "--out", tmp_path / "out")  # fmt: skip
    assert {int(label) for _, label in values(tmp_path / "out").values()} == {0}
    assert {int(label) for _, label in values(tmp_path / "out", "eval").values()} == {1}


def test_made_samples_follow_a_rule_of_their_seed(tmp_path: Path) -> None:
    run("mlp-samples", "--records", 300, "--eval-records", 50, "--out", tmp_path / "out")
    train = values(tmp_path / "out")
    assert len(train) == 300
    assert train[0][0].dtype == train[0][1].dtype == np.float32
    samples, labels = make_mlp_samples(350, 1)
    rule = {tuple(sample): label for sample, label in zip(samples.tolist(), labels.tolist(), strict=True)}
    assert all(rule[tuple(int(value) for value in sample)] == label for sample, label in train.values())
    assert 0.3 < labels.mean() < 0.7
    assert not np.array_equal(labels, make_mlp_samples(350, 2)[1])


def test_arrays_become_records(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x": rng.random((30, 3)).astype(np.float32),
        "y": rng.integers(-5, 5, 30),
        "picture": rng.integers(0, 256, (30, 5, 4, 3)).astype(np.uint8),
        "word": np.array([f"w{n}" for n in range(30)]),
    }
    arrays["flag"] = arrays["y"] > 0
    np.savez(tmp_path / "a.npz", **arrays)
    run(
        "npz",
        "--file",
        tmp_path / "a.npz",
        "--inputs",
        "x",
        "picture",
        "word",
        "flag",
        "--targets",
        "y",
        "--out",
        tmp_path / "o",
    )
    (tmp_path / "npy").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "npy" / name, array)
    run(
        "npz",
        "--file",
        tmp_path / "npy",
        "--inputs",
        "x",
        "--targets",
        "y",
        "--eval-fraction",
        0.5,
        "--out",
        tmp_path / "p",
    )
    seen = 0
    for batch in batches(pipeline(config(tmp_path / "o/train"), training=False)):
        for row in np.flatnonzero(batch.ids >= 0):
            at = int(batch.inputs["word"][row][1:])
            assert all(np.array_equal(batch.inputs[name][row], arrays[name][at]) for name in ("x", "picture", "flag"))
            assert batch.targets[row] == arrays["y"][at]
            seen += 1
    assert seen == 30
    assert len(values(tmp_path / "p", "eval")) == 15


def test_tables_become_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [(n, n / 4, f"w{n}", n % 3) for n in range(40)]
    (tmp_path / "a.csv").write_text("a,b,c,y\n" + "".join(f"{a},{b},{c},{y}\n" for a, b, c, y in rows))
    (tmp_path / "e.csv").write_text("a,b,c,y\n1,2.5,z,0\n")
    source = ["csv", "--file", tmp_path / "a.csv", "--targets", "y"]
    run(*source, "--inputs", "a", "b", "--out", tmp_path / "joined")
    found = sorted((*one.tolist(), int(y)) for one, y in values(tmp_path / "joined").values())
    assert found == [(a, b, y) for a, b, _, y in rows]
    run(*source, "--eval-file", tmp_path / "e.csv", "--out", tmp_path / "separate")
    assert not caplog.messages
    run("csv", "--file", tmp_path / "a.csv", "--targets", "c", "--out", tmp_path / "text")
    (said,) = caplog.messages
    assert "target c is text, which no loss takes." in said
    batch = batches(pipeline(config(tmp_path / "separate/eval"), training=False))[0]
    assert {name: values[0] for name, values in batch.inputs.items()} == {"a": 1, "b": 2.5, "c": b"z"}


def test_cells_are_taken_for_no_other_numbers(tmp_path: Path) -> None:
    big = 2**64 - 1
    (tmp_path / "a.csv").write_text(f"a,b,c\n1_2,{big},7\n12,{big - 1},8\n")
    table = load_table(str(tmp_path / "a.csv"))
    assert table["a"].tolist() == ["1_2", "12"]
    assert table["b"].tolist() == [str(big), str(big - 1)]
    assert table["c"].dtype == np.int64


def test_a_long_cell_does_not_make_the_others_long(tmp_path: Path) -> None:
    rows = "".join(f"{'x' * (100_000 if n == 7 else 9)},{n}\n" for n in range(500))
    (tmp_path / "a.csv").write_text(f"text,y\n{rows}")
    tracemalloc.start()
    table = load_table(str(tmp_path / "a.csv"))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 * len(rows)
    assert len(table["text"][7]) == 100_000


@pytest.mark.long
def test_image_folders_become_records(tmp_path: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        for number in range(6):
            path = tmp_path / "images" / name / f"{number}.{('jpg', 'jpeg', 'png', 'webp', 'bmp', 'gif')[number]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (30 + number, 20), (label * 200,) * 3).save(path)
    run("images", "--images", tmp_path / "images", "--size", 16, "--eval-fraction", 0.25, "--out", tmp_path / "out")
    found = [*values(tmp_path / "out").values(), *values(tmp_path / "out", "eval").values()]
    assert len(found) == 12
    for image, target in found:
        assert image.shape == (16, 16, 3)
        assert np.abs(image - (target * 200 / 127.5 - 1)).max() < 0.05
    (raw,) = tf.data.TFRecordDataset(str(next((tmp_path / "out/train").glob("00000*")))).take(1)
    names = tf.train.Example.FromString(raw.numpy()).features.feature
    assert {"image/encoded", "image/class/label", "image/class/text", "image/filename"} <= set(names)
    described = json.loads((tmp_path / "out/dataset.json").read_text())["features"]["image/class/label"]
    assert described["class_names"] == ["cat", "dog"]


def test_names_of_images_and_classes_need_not_be_utf8(tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"tea"):
        folder = Path(os.fsdecode(os.fsencode(tmp_path / "images") + b"/" + name))
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / os.fsdecode(b"\xe9.png"))
    run("images", "--images", tmp_path / "images", "--out", tmp_path / "out")
    texts = set()
    for raw in tf.data.TFRecordDataset([str(path) for path in (tmp_path / "out/train").glob("*.tfrecord")]):
        features = tf.train.Example.FromString(raw.numpy()).features.feature
        texts.add(tuple(features[f"image/{name}"].bytes_list.value[0] for name in ("class/text", "filename")))
    assert {text for text, _ in texts} == {b"caf\xe9", b"tea"}
    assert all(name.endswith(b"\xe9.png") for _, name in texts)
    assert open_records(config(tmp_path / "out/train"), "train").schema.class_names["image/class/label"] == (
        os.fsdecode(b"caf\xe9"),
        "tea",
    )


def test_token_samples_are_labelled_by_the_kind_they_hold_most_of(tmp_path: Path) -> None:
    words = ["token-samples", "--records", 300, "--eval-records", 20, "--vocabulary", 21, "--max-length", 9]
    run(*words, "--out", tmp_path / "a")
    run(*words, "--out", tmp_path / "b", "--seed", 2)
    found, other = values(tmp_path / "a"), values(tmp_path / "b")
    lengths = {int((tokens > 0).sum()) for tokens, _ in found.values()}
    assert lengths == set(range(1, 10))
    # Sentences of one token tell the kinds; by them all others can be labelled.
    kind = {int(tokens[0]): int(label) for tokens, label in found.values() if (tokens > 0).sum() == 1}
    assert len(kind) > 5
    for tokens, label in found.values():
        real = tokens[tokens > 0].tolist()
        if all(token in kind for token in real):
            assert np.bincount([kind[token] for token in real], minlength=4).argmax() == label
    assert any(not np.array_equal(found[record][0], other[record][0]) for record in found)


def test_imagenet_samples_have_its_names_and_labels_from_1(tmp_path: Path) -> None:
    run("imagenet-samples", "--records", 8, "--eval-records", 4, "--classes", 3, "--size", 16, "--out", tmp_path / "a")
    assert {int(label) for _, label in values(tmp_path / "a").values()} <= {0, 1, 2}  # what the loss gets
    (path, *_) = sorted((tmp_path / "a" / "train").glob("*.tfrecord"))
    (record, *_) = tf.data.TFRecordDataset(str(path))
    stored = tf.train.Example.FromString(record.numpy()).features.feature
    names = ["encoded", "format", "colorspace", "channels", "height", "width", "filename"]
    assert set(stored) == {f"image/{name}" for name in names} | {
        f"image/class/{n}" for n in ("label", "synset", "text")
    }
    assert 1 <= stored["image/class/label"].int64_list.value[0] <= 3
    image = tf.io.decode_jpeg(stored["image/encoded"].bytes_list.value[0])
    assert image.shape == (*(stored[f"image/{n}"].int64_list.value[0] for n in ("height", "width")), 3)


def test_prepared_data_has_its_index_and_counts(tmp_path: Path) -> None:
    run("mlp-samples", "--records", 300, "--eval-records", 0, "--shards", 3, "--out", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["dataset.json", "train"]
    assert sorted(os.listdir(tmp_path / "out/train")) == [
        *(f"0000{shard}-of-00003.tfrecord" for shard in range(3)),
        "index.npz",
    ]
    records = open_records(config(tmp_path / "out/train"), "train")
    assert records.schema.counts == {"train": records.num_records} == {"train": 300}
    assert len(ids(batches(pipeline(config(tmp_path / "out/train"))))) == 300


def test_an_existing_folder_is_replaced_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("mlp-samples", "--records", 20, "--eval-records", 0, "--out", out)
    with pytest.raises(UserError, match=r"exists already\. Give another folder, or --force"):
        run("mlp-samples", "--records", 30, "--eval-records", 0, "--out", out)
    assert len(values(out)) == 20
    run("mlp-samples", "--records", 30, "--eval-records", 0, "--out", out, "--force")
    assert len(values(out)) == 30
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.long
def test_a_killed_prepare_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    program = f"""
import argparse, sys
sys.path[:0] = {sys.path!r}
from horovod_train.data import prepare
parser = argparse.ArgumentParser()
prepare.add_arguments(parser)
prepare.run(parser.parse_args(["mlp-samples", "--records", "3000000", "--out", {str(tmp_path / "out")!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not any(path.stat().st_size for path in tmp_path.glob(".out.*.partial/train/*.tfrecord")):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline, "it never began to write"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    assert [path.name.startswith(".") for path in tmp_path.iterdir()] == [True]
    with pytest.raises(UserError, match="does not exist"):
        open_records(config(tmp_path / "out/train"), "train")


def test_what_a_killed_prepare_has_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = [tmp_path / name for name in (".out.0123abcd.partial", ".out.89abcdef.partial", ".other.0123abcd.partial")]
    for draft in drafts:
        (draft / "train").mkdir(parents=True)
    (drafts[1] / "of the user").touch()
    run("mlp-samples", "--records", 20, "--out", tmp_path / "out")
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert note == f"note: {drafts[0]} is left of a prepare that was killed, or one is running; remove it if none is."
    assert all(draft.is_dir() for draft in drafts)


def test_numbers_that_records_do_not_hold_are_refused_or_said(tmp_path: Path, said: list[str]) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([1.0, 1e300]), y=np.array([0.5, np.inf]))
    with pytest.raises(UserError, match=r"a\.npz: x holds 1e\+300; records hold numbers as float32, up to 3\.4e38\."):
        run("npz", "--file", tmp_path / "a.npz", "--inputs", "x", "--out", tmp_path / "out")
    run("npz", "--file", tmp_path / "a.npz", "--inputs", "y", "--out", tmp_path / "out")  # as it is there too
    assert not said
    numbers = np.arange(2**24, 2**24 + 9)
    np.savez(tmp_path / "b.npz", x=numbers.astype(np.float64), y=numbers)
    run("npz", "--file", tmp_path / "b.npz", "--inputs", "x", "y", "--out", tmp_path / "b")
    start = "some of its whole numbers beyond 2^24 become one as float32"
    assert [line.partition(start)[0] for line in said] == [f"warning: {tmp_path}/b.npz: x: "]
    said.clear()
    (tmp_path / "c.csv").write_text("a,b,y\n" + "".join(f"{number},0.5,1\n" for number in numbers))
    run("csv", "--file", tmp_path / "c.csv", "--targets", "y", "--separate", "--out", tmp_path / "separate")
    assert not said
    run("csv", "--file", tmp_path / "c.csv", "--targets", "y", "--out", tmp_path / "joined")
    assert [line.partition(start)[0] for line in said] == [f"warning: {tmp_path}/c.csv: a: "]


def test_a_failed_prepare_leaves_nothing_at_all(tmp_path: Path) -> None:
    (tmp_path / "images/cat").mkdir(parents=True)
    (tmp_path / "images/cat/1.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cat/1.png: is no JPEG, PNG, WebP, BMP or GIF"):
        run("images", "--images", tmp_path / "images", "--out", tmp_path / "out")
    assert os.listdir(tmp_path) == ["images"]


@pytest.mark.parametrize(
    ("name", "mode", "words", "said"),
    [
        ("a.bmp", "P", [], "TensorFlow does not decode a BMP with a palette"),
        ("a.webp", "RGB", [], "TensorFlow does not decode a WEBP with an animation"),
        ("a.gif", "L", ["--channels", 1], "TensorFlow decodes GIF in colours only"),
        ("a.png", "RGB", [], "is no JPEG, PNG, WebP, BMP or GIF"),
        ("text.png", "RGB", [], r"cannot be read as an image: Decompressed data too large .*\.$"),
    ],
)
def test_an_image_that_tensorflow_cannot_decode_is_not_stored(
    name: str, mode: str, words: list[object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "images/cat").mkdir(parents=True)
    image, other = (Image.new("RGB", (8, 8), colour).convert(mode) for colour in ("red", "blue"))
    more: dict[str, Any] = {"save_all": True, "append_images": [other]} if name.endswith("webp") else {}
    if name == "text.png":
        more["pnginfo"] = PngImagePlugin.PngInfo()
        more["pnginfo"].add_itxt("workflow", "z" * 3_000_000, zip=True)
    image.save(tmp_path / "images/cat" / name, "TIFF" if name == "a.png" else None, **more)
    with pytest.raises(UserError, match=f"cat/{name}: {said}"):
        run("images", "--images", tmp_path / "images", *words, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("a.webp", "RGBA", "expected an image as JPEG, .* cannot be decoded: "),
        ("a.png", "I;16", "a PNG of 16 bits, of which 8 would be read"),
        ("a.bmp", "1", "expected an image as JPEG, .* cannot be decoded: "),
        ("cut.png", "RGB", "expected an image as JPEG, .* cannot be decoded: "),
    ],
)
def test_an_image_that_training_would_call_bad_is_not_stored(name: str, mode: str, said: str, tmp_path: Path) -> None:
    """Each of them is one for Pillow."""
    (tmp_path / "images/cat").mkdir(parents=True)
    path = tmp_path / "images/cat" / name
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 4), np.uint8), "RGBA")
    (image.convert("L").convert("I;16") if mode == "I;16" else image.convert(mode)).save(path)
    if name == "cut.png":
        path.write_bytes(path.read_bytes()[:-14])
    with Image.open(path) as opened:
        opened.load()
    with pytest.raises(UserError, match=f"cat/{name}: {said}"):
        run("images", "--images", tmp_path / "images", "--out", tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("can_lock", [True, False])
def test_processes_that_make_one_dataset_together_leave_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_lock: bool
) -> None:
    """By locks one writes it. Where a file system has none all do, and the first complete one stays."""
    barrier, reads = threading.Barrier(1 if can_lock else 3), []
    if not can_lock:
        monkeypatch.setattr(writing, "hold_lock", lambda places, limit_s: contextlib.nullcontext())

    def read() -> tuple[writing.Splits, writing.Encode]:
        reads.append(barrier.wait(timeout=60))
        return images._digits(writing.DEFAULT_SEED)

    out = tmp_path / "cache" / "digits"
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(writing.write_once, out, GREY_SCHEMA, read, 2) for _ in range(3)]
    assert [job.exception() for job in jobs] == [None] * 3
    assert len(reads) == (1 if can_lock else 3)
    assert os.listdir(out.parent) == ["digits"]
    assert len(values(out)) == 1437


@pytest.mark.long
def test_a_process_that_hangs_while_it_makes_a_dataset_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_WAIT_S", 0.2)
    out = tmp_path / "digits"
    with hold_lock([tmp_path / "digits.dataset"]):
        images.prepare_digits_once(out)
    assert os.listdir(tmp_path) == ["digits"]
    assert len(values(out)) == 1437


def test_a_folder_that_is_no_dataset_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "mine").write_text("")
    with pytest.raises(OSError, match="is not a prepared dataset"):
        images.prepare_digits_once(tmp_path / "digits")
    assert os.listdir(tmp_path) == ["digits"]


def wrong_sources(folder: Path) -> list[tuple[list[object], str]]:
    idx(folder / "i", np.zeros((4, 2, 2)))
    idx(folder / "l", np.zeros(3))
    (folder / "cut").write_bytes((folder / "i").read_bytes()[:-3])
    (folder / "half.gz").write_bytes(gzip.compress(bytes(99))[:-9])
    np.savez(folder / "a.npz", x=np.zeros((3, 2)), y=np.zeros(2))
    np.savez(folder / "large.npz", x=np.array([1, 2**63], np.uint64))
    idx(folder / "none", np.zeros((0, 2, 2)))
    idx(folder / "no-labels", np.zeros(0))
    (folder / "ragged.csv").write_text("a,b\n1,2\n3\n")
    (folder / "gap.csv").write_text("a,b\n1,2\n,4\n")
    (folder / "head.csv").write_text("a,b\n")
    (folder / "ab.csv").write_text("a,inputs\n1,2\n3,4\n")
    (folder / "text.csv").write_text("a,inputs\nbig,2\nsmall,4\n")
    columns = ["csv", "--file", folder / "ab.csv", "--targets"]
    labels, table = ["--labels", folder / "l"], ["npz", "--file", folder / "a.npz", "--inputs", "x"]
    return [
        (["idx", "--images", folder / "gone", *labels], "gone: cannot be read: No such file"),
        (["idx", "--images", folder / "l", *labels], "is no idx file of uint8 with 3 dimensions"),
        (["idx", "--images", folder / "cut", *labels], "needs 16 bytes of data; the file has 13"),
        (["idx", "--images", folder / "half.gz", *labels], "half.gz: the gzip file is broken"),
        (["idx", "--images", folder / "i", *labels], "i holds 4 images, "),
        (["idx", "--images", folder / "i", *labels, "--eval-images", folder / "i"], "give both or neither"),
        ([*table, "--targets", "y"], "a.npz: y has 2 rows, x 3"),
        ([*table, "--targets", "z"], "a.npz has no z; it has x, y"),
        (["npz", "--file", folder / "i", "--inputs", "x"], "is not an npz file of plain arrays"),
        ([*table, "--eval-fraction", "1.5"], "--eval-fraction must be at least 0 and below 1; received 1.5"),
        ([*table, "--shards", "0"], "--shards must be at least 1; received 0"),
        (
            [*table, "--eval-file", folder / "a.npz", "--eval-fraction", "0.5"],
            "--eval-fraction: records for evaluation are given too; give one of them.",
        ),
        (["csv", "--file", folder / "ragged.csv"], "ragged.csv:3: expected 2 cells, as in the header; got 1"),
        (["csv", "--file", folder / "gap.csv"], "gap.csv:3: a is empty"),
        (["csv", "--file", folder / "head.csv"], "expected a header and at least one record"),
        (
            ["csv", "--file", folder / "ab.csv", "--eval-file", folder / "text.csv"],
            "text.csv: a: expected numbers, as for training; received text.",
        ),
        ([*columns, "a", "inputs"], "--targets: names every column of "),
        ([*columns, "inputs"], "--targets: inputs is also what the vector of the numeric columns is called; rename"),
        (["images", "--images", folder], "expected a folder for each class"),
        (["mlp-samples", "--records", "0"], "--records must be at least 1"),
        (["mlp-samples", "--out", "/proc/no"], "--out /proc/no: cannot be made"),
        (["npz", "--file", folder / "large.npz", "--inputs", "x"], "x holds 9223372036854775808; records hold"),
        (["idx", "--images", folder / "none", "--labels", folder / "no-labels"], "none: holds no image"),
    ]


@pytest.mark.parametrize("case", range(23))
def test_wrong_sources_are_named(tmp_path: Path, case: int) -> None:
    cases = wrong_sources(tmp_path)
    assert len(cases) == 23
    words, said = cases[case]
    with pytest.raises(UserError) as error:
        run(words[0], "--out", tmp_path / "out", *words[1:])
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_idx_files_are_read_as_written(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (3, 4, 5))
    assert np.array_equal(load_idx(str(idx(tmp_path / "a", array)), 3), array)


def test_shards_are_sized_by_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((500, 1000), np.uint8))
    monkeypatch.setattr(writing, "_SHARD_BYTES", 50_000)
    run("npz", "--file", tmp_path / "a.npz", "--inputs", "x", "--out", tmp_path / "out")
    assert len(list((tmp_path / "out/train").glob("*.tfrecord"))) == 11  # 500 records of 1030 bytes


@pytest.mark.parametrize(
    "stranger", ["imagenet/best.keras", "train/notes.txt", "dataset.json.bak", "train/00000-of-00004.tfrecord.gz"]
)
def test_force_replaces_no_folder_that_holds_anything_else(tmp_path: Path, stranger: str) -> None:
    out = tmp_path / "out"
    run("mlp-samples", "--records", 20, "--eval-records", 0, "--out", out)
    (out / stranger).parent.mkdir(exist_ok=True)
    (out / stranger).write_text("mine")
    with pytest.raises(UserError, match=r"^--out .*: holds .*, which is no part of a prepared dataset, and stays"):
        run("mlp-samples", "--records", 30, "--eval-records", 0, "--out", out, "--force")
    assert (out / stranger).read_text() == "mine"
    assert os.listdir(tmp_path) == ["out"]


def test_force_replaces_no_folder_of_another_kind_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "data/imagenet").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^--out .*data: is not a prepared dataset, and stays as it is"):
        run("mlp-samples", "--records", 30, "--out", tmp_path / "data", "--force")
    run("mlp-samples", "--records", 20, "--eval-records", 0, "--out", tmp_path / "far")
    (tmp_path / "link").symlink_to(tmp_path / "far")
    with pytest.raises(UserError, match=r"^--out .*link/?: is a link, not a prepared dataset"):
        run("mlp-samples", "--records", 30, "--out", f"{tmp_path / 'link'}/", "--force")
    assert len(values(tmp_path / "far")) == 20
    assert sorted(os.listdir(tmp_path)) == ["data", "far", "link"]
