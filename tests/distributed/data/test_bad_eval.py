"""Evaluation data that goes bad while a run trains is named by its own file, record and byte."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from conftest import split_records, train
from PIL import Image

from horovod_train.tfrecord_framing import frame

CONFIG = """
data: {{train: {data}/train, eval: {data}/eval, global_batch_size: 96}}
model: user_models:small
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
lr_schedule: {{base_lr: 0.1}}
log: {{tensorboard: false}}
train: {{epochs: 1}}
"""


def error_of(folder: Path, np: int = 1, *overrides: str) -> str:
    """The one line that a run on the data in a folder ends with, after it has trained."""
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(data=folder))
    words = ["--config", config, "--output-dir", folder / "run", *overrides]
    finished = train(words, launcher="none" if np == 1 else "mpirun", np=np)
    assert finished.returncode == 2, finished.text
    assert "Traceback" not in finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if "error: " in line]
    return line


@pytest.mark.long
@pytest.mark.parametrize("np", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_bad_record_is_named(digits: Path, tmp_path: Path, np: int) -> None:
    shutil.copytree(digits, tmp_path, dirs_exist_ok=True)
    victim = sorted((tmp_path / "eval").glob("*.tfrecord"))[0]
    data = bytearray(victim.read_bytes())
    first = len(next(split_records(bytes(data))))
    data[first + 30] ^= 0x10
    victim.write_bytes(data)
    assert f"eval/{victim.name}: record 1 at byte {first}: its data does not match" in error_of(tmp_path, np)


@pytest.mark.long
@pytest.mark.parametrize(("split", "np"), [("eval", 2), pytest.param("train", 1, marks=pytest.mark.long)])
def test_a_split_of_which_nothing_can_be_used_is_no_success(digits: Path, tmp_path: Path, split: str, np: int) -> None:
    """Its loss would be 0, which is the best that there is."""
    shutil.copytree(digits, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / split).glob("*.tfrecord"):
        data = bytearray(path.read_bytes())
        first = 0
        for record in split_records(bytes(data)):
            data[first + 30] ^= 0x10
            first += len(record)
        path.write_bytes(data)
    line = error_of(tmp_path, np, "data.on_bad_record=skip", "checkpoint.best={metric: loss, mode: min}")
    assert f"data.{split}: none of its {360 if split == 'eval' else 1437} records can be used" in line
    assert not (tmp_path / "run" / "checkpoints" / "best").exists()


@pytest.mark.long
def test_an_image_that_cannot_be_decoded_is_not_looked_for_in_the_training_data(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.fromarray(np.full((28, 28), 99, np.uint8)).save(out, "JPEG")
    write(tmp_path / "train", [out.getvalue()] * 96)
    # Its head is whole, and so are size and form of the image.
    write(tmp_path / "eval", [*[out.getvalue()] * 2, out.getvalue()[:-200], out.getvalue()])
    features = {"image": {"type": "bytes", "shape": [28, 28, 1], "decode": "image"}, "label": {"type": "int64"}}
    schema = {"features": features, "inputs": ["image"], "targets": ["label"]}
    (tmp_path / "dataset.json").write_text(json.dumps(schema))
    line = error_of(tmp_path)
    assert "eval/0.tfrecord: record 2 at byte" in line
    assert "feature image: " in line


def write(folder: Path, images: Sequence[bytes]) -> None:
    folder.mkdir()
    (folder / "0.tfrecord").write_bytes(b"".join(frame(example(image)) for image in images))


def example(image: bytes) -> bytes:
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[3])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)
