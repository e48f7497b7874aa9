"""Targets that are images: their classes are checked, they are resized as they are, and they change with the inputs."""

from __future__ import annotations

import dataclasses
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import NumpyBatch, batches, config, example, ids, pipeline, write_file
from PIL import Image

from horovod_train.config.settings import Spec
from horovod_train.data.pipeline import Pipeline
from horovod_train.data.schema import parse_feature
from horovod_train.errors import UserError

CLASSES = (0, 5, 20)
RECORDS = 24


def png(values: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    return out.getvalue()


def mask_of(number: int) -> np.ndarray:
    """uint8 [12, 16]: rectangles of three classes."""
    rows, columns = np.indices((12, 16))
    return np.array(CLASSES, np.uint8)[(rows // (2 + number % 3) + columns // (3 + number % 5) + number) % 3]


def make_masks(folder: Path, worst: int | None = None) -> Path:
    """Records of a mask, and of an image that holds ten times the mask's classes: so one tells the other."""
    masks = [mask_of(number) for number in range(RECORDS)]
    if worst is not None:
        masks[5][3, 4] = worst
    rows = [example(image=png(np.stack([mask * 10] * 3, 2)), mask=png(mask)) for mask in masks]
    write_file(folder / "a.tfrecord", rows)
    return folder


def made(
    folder: Path, shape: tuple[int, int] = (12, 16), more: dict[str, Any] | None = None, **values: Any
) -> Pipeline:
    common = {"type": "bytes", "decode": "image", "interpolation": "nearest", **(more or {})}
    features = {
        "image": {**common, "shape": [*shape, 3]},
        "mask": {**common, "shape": [*shape, 1], "classes": 21},
    }
    return pipeline(config(folder, features=features, inputs=("image",), targets=("mask",), **values))


def read(pipeline: Pipeline) -> list[NumpyBatch]:
    with pipeline.explaining():
        return batches(pipeline)


def differs(one: NumpyBatch) -> bool:
    return not np.array_equal(one.inputs, np.repeat(one.targets * 10, 3, axis=3))


def test_masks_come_as_they_are(tmp_path: Path) -> None:
    for batch in read(made(make_masks(tmp_path))):
        for number, mask in zip(batch.ids.tolist(), batch.targets, strict=True):
            assert np.array_equal(mask[..., 0], mask_of(number))
        assert not differs(batch)


@pytest.mark.long
def test_a_class_that_is_not_there_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    folder = make_masks(tmp_path, worst=21)
    said = r"record 5 at byte .* feature mask: expected values from 0 to 20; the image holds 21"
    with pytest.raises(UserError, match=said):
        read(made(folder))
    found = ids(read(made(folder, on_bad_record="skip")))
    assert sorted(found) == [number for number in range(RECORDS) if number != 5]


@pytest.mark.parametrize("resize", ["stretch", "crop"])
def test_a_mask_of_another_size_keeps_its_classes(tmp_path: Path, resize: str) -> None:
    for batch in read(made(make_masks(tmp_path), (7, 9), {"resize": resize})):
        assert set(np.unique(batch.targets)) <= set(CLASSES)
        assert not differs(batch)


@pytest.mark.parametrize(
    "first", ["random_resized_crop", *(pytest.param(name, marks=pytest.mark.long) for name in ("flip", "random_crop"))]
)
def test_image_and_mask_change_together(tmp_path: Path, first: str) -> None:
    augment = (Spec(first), Spec("flip", {"direction": "vertical"}), Spec("random_crop", {"padding": 2}))
    folder = make_masks(tmp_path)
    changed = read(made(folder, (8, 10), {"resize": "stretch"}, augment=augment))
    plain = read(made(folder, (8, 10), {"resize": "stretch"}))
    assert not any(map(differs, changed))
    assert sum(not np.array_equal(a.targets, b.targets) for a, b in zip(changed, plain, strict=True)) == len(plain)


def brighter(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return image


@pytest.mark.parametrize(
    ("change", "augment", "said"),
    [
        ({"shape": [6, 8, 1], "resize": "stretch"}, "flip", r"mask changes with input image and must have its height"),
        ({}, "test_segmentation:brighter", "target mask is an image and would have to change with the inputs"),
        ({"decode": "raw"}, "random_resized_crop", "both must be decode: image, or neither. Received raw and image"),
        ({"interpolation": "bilinear"}, "random_resized_crop", "would mix numbers of classes; give .* nearest"),
        ({"decode": "raw", "shape": [12, 16], "interpolation": "bilinear"}, "flip", r"mask has .* as \[12, 16, 1\]"),
    ],
)
def test_a_mask_that_would_not_change_with_its_image_is_refused(
    tmp_path: Path, change: dict[str, Any], augment: str, said: str
) -> None:
    image = {"type": "bytes", "decode": "image", "interpolation": "nearest", "shape": [12, 16, 3]}
    mask = {**image, "shape": [12, 16, 1], "classes": 21, **change}
    data = {"features": {"image": image, "mask": mask}, "inputs": ("image",), "targets": ("mask",)}
    with pytest.raises(UserError, match=said):
        pipeline(config(make_masks(tmp_path), augment=(Spec(augment),), **data))
    pipeline(config(tmp_path, **data))


def test_channels_that_come_first_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=np.zeros((4, 3, 12, 16), np.uint8), y=np.zeros(4, np.int64))
    data = config(tmp_path / "a.npz", inputs=("image",), targets=("y",), augment=(Spec("flip"),))
    with pytest.raises(
        UserError, match=r"image as \[height, width, channels\]; received \[3, 12, 16\], .* channels first"
    ):
        pipeline(data)
    np.savez(tmp_path / "a.npz", image=np.zeros((4, 3, 3, 200), np.uint8), y=np.zeros(4, np.int64))  # many channels
    pipeline(data)


def test_a_function_that_moves_no_pixel_may_stand_beside_any_mask(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=np.zeros((4, 12, 16, 3), np.uint8), mask=np.zeros((4, 12, 16), np.int64))
    data = config(tmp_path / "a.npz", inputs=("image",), targets=("mask",))
    pipeline(dataclasses.replace(data, augment=(Spec("test_segmentation:brighter"),)))
    with pytest.raises(UserError, match=r"mask has the height and width of image, .* as \[12, 16, 1\]"):
        pipeline(dataclasses.replace(data, augment=(Spec("flip"),)))


def test_a_mask_as_jpeg_is_a_bad_record(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.fromarray(mask_of(1)).save(out, "JPEG")
    rows = [example(image=png(np.stack([mask_of(1)] * 3, 2)), mask=out.getvalue())] * 4
    write_file(tmp_path / "a.tfrecord", rows)
    with pytest.raises(UserError, match="feature mask: a JPEG, which does not keep numbers of classes; store masks as"):
        read(made(tmp_path))


def grey_png(numbers: np.ndarray, depth: int, alpha: bool = False) -> bytes:
    """Of 1, 2 or 4 bits a pixel, or 16, which Pillow does not write; alpha: with a second value for each, all ones."""

    def piece(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width = numbers.shape
    if depth < 8:
        bits = np.unpackbits(numbers.astype(np.uint8)[:, :, None], axis=2)[:, :, -depth:].reshape(height, -1)
        rows = np.packbits(bits, axis=1)
    else:
        rows = np.stack([numbers, np.full_like(numbers, 65535)], -1) if alpha else numbers
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    head = struct.pack(">IIBBBBB", width, height, depth, 4 if alpha else 0, 0, 0, 0)
    parts = piece(b"IHDR", head), piece(b"IDAT", zlib.compress(lines)), piece(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("I;16", {"classes": 21, "interpolation": "nearest"}, "a PNG of 16 bits, of which 8 would be read; expected"),
        ("I;16", {}, "a PNG of 16 bits"),
        ("I;16 with alpha", {}, "a PNG of 16 bits"),
        ("P", {"classes": 21, "interpolation": "nearest"}, "a PNG with a palette, whose colours would be read; exp"),
        ("P", {"interpolation": "nearest"}, "with a palette, whose colours"),
        ("P", {}, ""),  # a picture
        ("L", {"classes": 21, "interpolation": "nearest"}, ""),
        ("1", {"interpolation": "nearest"}, "a PNG of depth 1, whose numbers would be scaled up to 255; expec"),
        ("4", {"classes": 21, "interpolation": "nearest"}, "a PNG of depth 4, whose numbers would"),
        ("1", {}, ""),  # a picture
    ],
)
def test_numbers_that_a_png_would_lose_are_a_bad_record(
    tmp_path: Path, kind: str, settings: dict[str, Any], said: str
) -> None:
    out, image = io.BytesIO(), Image.fromarray(mask_of(1))
    if kind == "P":
        image = image.convert("P")
        image.putpalette([value for number in range(256) for value in (number, 255 - number, 7 * number % 256)])
    elif kind == "I;16":
        image = Image.fromarray(mask_of(1).astype(np.uint16))
    elif kind == "1":
        image = image.point(lambda number: 255 * (number % 2)).convert("1")
    image.save(out, "PNG")
    if kind == "I;16 with alpha":
        out = io.BytesIO(grey_png(mask_of(1).astype(">u2"), depth=16, alpha=True))
    if kind == "4":
        out = io.BytesIO(grey_png(mask_of(1) % 16, depth=4))
    write_file(tmp_path / "a.tfrecord", [example(image=out.getvalue(), mask=png(mask_of(1)))] * 4)
    feature = {"type": "bytes", "decode": "image", "shape": [12, 16, 1], **settings}
    mask = {"type": "bytes", "decode": "image", "shape": [12, 16, 1]}
    made = pipeline(config(tmp_path, features={"image": feature, "mask": mask}, inputs=("image",), targets=("mask",)))
    if said:
        with pytest.raises(UserError, match=said):
            read(made)
    else:
        (batch, *_) = read(made)
        assert batch.inputs.shape[1:] == (12, 16, 1)


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        ({"type": "int64", "padding": 3}, "padding: 3 has no effect without max_length"),
        ({"type": "bytes", "raw_dtype": "int16"}, "raw_dtype: int16 has no effect without decode: raw"),
        (
            {"type": "bytes", "decode": "image", "shape": [4, 4, 3], "resize": "stretch", "crop_fraction": 0.9},
            "crop_fraction: 0.9 has no effect without resize: crop",
        ),
        ({"type": "int64", "interpolation": "nearest"}, "interpolation is for shape"),
        (
            {"type": "bytes", "decode": "image", "shape": [4, 4, 1], "resize": "crop", "classes": 3},
            "resize: crop would mix numbers of classes; give interpolation: nearest",
        ),
    ],
)
def test_what_would_have_no_effect_on_a_feature_is_refused(feature: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_feature(feature, "data.features: x")
