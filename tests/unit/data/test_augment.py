"""Random changes to images: each draws for itself, the same for pixels and for files, and others with another seed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from made_records import batches, config, example, write_file
from PIL import Image

from horovod_train.config.settings import Spec
from horovod_train.data.augment import random_resized_crop
from horovod_train.data.dataset import open_records
from horovod_train.data.pipeline import Ranks, build_pipeline
from horovod_train.errors import UserError

RECORDS = 48
ALL = (Spec("flip"), Spec("flip", {"direction": "vertical"}), Spec("random_crop", {"padding": 3}))


def image_of(number: int) -> np.ndarray:
    """uint8 [8, 10, 3], without a symmetry."""
    return np.random.default_rng(number).integers(1, 255, (8, 10, 3), np.uint8)


def png(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def changed(
    folder: Path, augment: tuple[Spec, ...], decode: str = "raw", seed: int = 1, same: bool = False
) -> dict[int, np.ndarray]:
    """The augmented images by record. same: all records hold one image."""
    images = [image_of(0 if same else number) for number in range(RECORDS)]
    stored = [image.tobytes() if decode == "raw" else png(image) for image in images]
    write_file(folder / decode / "a.tfrecord", [example(image=each, label=0) for each in stored])
    features = {"image": {"type": "bytes", "shape": [8, 10, 3], "decode": decode}, "label": "int64"}
    data = config(folder / decode, features=features, inputs=("image",), targets=("label",), augment=augment)
    records = open_records(data, "train")
    made = build_pipeline(records, data, Ranks(0, 1), seed=seed, training=True, global_batch_size=16)
    return {
        number: image
        for batch in batches(made)
        for number, image in zip(batch.ids.tolist(), batch.inputs, strict=True)
        if number >= 0
    }


def test_files_of_images_change_as_stored_pixels_do(tmp_path: Path) -> None:
    """Although some of the changes are made to single images, while they are decoded."""
    pixels, files = (changed(tmp_path, ALL, decode) for decode in ("raw", "image"))
    assert len(files) == RECORDS
    assert all(np.array_equal(pixels[number], image) for number, image in files.items())


def test_two_changes_of_an_image_draw_independently(tmp_path: Path) -> None:
    found = changed(tmp_path, ALL[:2], "image")
    kinds = {
        (flipped, turned)
        for number, image in found.items()
        for flipped in (1, -1)
        for turned in (1, -1)
        if np.array_equal(image, image_of(number)[::turned, ::flipped])
    }
    assert len(kinds) == 4


def test_another_seed_of_the_run_draws_others(tmp_path: Path) -> None:
    one, other = (changed(tmp_path, ALL, seed=seed) for seed in (1, 2))
    assert sum(not np.array_equal(one[number], other[number]) for number in one) > RECORDS / 2


def brighter(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(image) + tf.cast(tf.random.stateless_uniform((), seed, 0, 255), image.dtype)


def test_a_users_function_gets_another_seed_for_each_image(tmp_path: Path) -> None:
    found = changed(tmp_path, (Spec("test_augment:brighter"),), same=True)
    assert len({int(image[0, 0, 0]) for image in found.values()}) > RECORDS / 2


def as_floats(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.cast(image, tf.float32) / 255


def narrower(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return image[:, :-1]


def noisy(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return image + 0.5


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "as_floats",
            "must return an image like the one it gets, uint8[8, 10, 3]; it returned float32[8, 10, 3]. Scaling",
        ),
        (
            "narrower",
            "must return an image like the one it gets, uint8[8, 10, 3]; it returned uint8[8, 9, 3]. Scaling",
        ),
        ("noisy", "for an image of uint8[8, 10, 3]: TypeError: "),
    ],
)
def test_a_users_function_that_gives_no_such_image_is_named(function: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        changed(tmp_path, (Spec("flip"), Spec(f"test_augment:{function}")))
    assert str(error.value).startswith(f"data.augment[1]: test_augment:{function}")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_part_that_is_the_whole_image_is_the_image() -> None:
    images = np.random.default_rng(0).integers(0, 255, (4, 6, 9, 3), np.uint8)
    change = random_resized_crop(area=(1.0, 1.0), ratio=(9 / 6, 9 / 6))((6, 9, 3), "bilinear")
    found = change.apply(tf.constant(images), tf.random.uniform((4, change.draws), seed=1))
    assert np.array_equal(found, images)
