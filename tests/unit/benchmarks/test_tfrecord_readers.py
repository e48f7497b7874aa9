"""benchmarks/tfrecords.py: the pipelines of tf.data read all records of the same files, as the plan does."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import tfrecords
from made_records import SCHEMA, example, make_images, write_file
from PIL import Image

TURNS = ["--rounds", "1", "--passes", "1", "--batch-size", "8"]


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tfrecords.py", str(folder), *TURNS])
    assert tfrecords.main() == 0


@pytest.mark.long
def test_three_ways_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SCHEMA["features"]["image_raw"]["decode"] == "raw"
    make_images(tmp_path / "train")
    compare(tmp_path / "train", monkeypatch)
    out = capsys.readouterr().out
    assert "shuffle(10000), whole batches parsed" in out
    assert "shuffle(10000), parsed one by one" in out


@pytest.mark.exhaustive
def test_jpegs_are_compared_with_what_decodes_no_more_than_a_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feature = {"type": "bytes", "decode": "image", "shape": [8, 10, 3], "resize": "crop", "scale": 0.5}
    features = {"image": feature, "raw": {"type": "bytes", "decode": "raw", "shape": [4]}, "label": "int64"}
    schema = {"features": features, "inputs": ["image", "raw"], "targets": ["label"]}
    for kind in ("JPEG", "PNG"):
        out = io.BytesIO()
        Image.new("RGB", (30, 40), (200, 100, 50)).save(out, kind)
        rows = [example(image=out.getvalue(), raw=b"abcd", label=number) for number in range(20)]
        write_file(tmp_path / kind / "train/a.tfrecord", rows)
        (tmp_path / kind / "dataset.json").write_text(json.dumps(schema))
    compare(tmp_path / "JPEG/train", monkeypatch)
    shown = capsys.readouterr().out
    assert "tf.data, JPEGs cut to uint8" in shown
    assert "tf.data, JPEGs cut and scaled" in shown
    compare(tmp_path / "PNG/train", monkeypatch)
    assert "JPEGs" not in capsys.readouterr().out
