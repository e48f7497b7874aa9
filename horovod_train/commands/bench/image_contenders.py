"""The tf.data pipelines that `bench input` compares with where records hold JPEGs: random boxes of them, and flips.

Written as for ImageNet in TensorFlow: sample_distorted_bounding_box and decode_and_crop_jpeg, so that no more than the
box is decoded; parallel, in any order, with the parallelism left to TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from horovod_train.config.settings import Spec
from horovod_train.data.features import Feature
from horovod_train.data.parsing.serialized import example_spec
from horovod_train.data.transforms.transforms import cast_and_scale

AUGMENT = (Spec("random_resized_crop"), Spec("flip"))
"""What the trainer does for the comparison."""

_AREA, _ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # as random_resized_crop
_PARALLEL = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": False}

Parsed = dict[str, tf.Tensor]


def hold_jpegs(files: list[str], packing: str, features: dict[str, Feature]) -> bool:
    """Return whether the first record has images that are resized, and all of them are JPEGs."""
    names = [name for name, feature in features.items() if feature.decode == "image" and feature.resize != "none"]
    if not names:
        return False
    record = next(iter(tf.data.TFRecordDataset(files, packing)))
    parsed = tf.io.parse_single_example(record, {name: example_spec(features[name]) for name in names})
    return all(bool(tf.io.is_jpeg(parsed[name])) for name in names)


def build(
    files: list[str],
    packing: str,
    features: dict[str, Feature],
    window: int,
    batch_size: int,
    unpack: Callable[[Feature, tf.Tensor], tf.Tensor],
) -> dict[str, Callable[[int], tf.data.Dataset]]:
    """Build the contenders by name: functions (passes over the records) → batches.

    One gives images as the trainer's pipeline does, the other as most scripts do. unpack: for what is no image.
    """
    specs = {name: example_spec(feature) for name, feature in features.items()}

    def batches(passes: int, finish: Callable[[Feature, tf.Tensor], tf.Tensor]) -> tf.data.Dataset:
        def make(record: tf.Tensor) -> Parsed:
            parsed = tf.io.parse_single_example(record, specs)
            return {name: finish(feature, parsed[name]) for name, feature in features.items()}

        data = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files))
        data = data.interleave(lambda name: tf.data.TFRecordDataset(name, packing), **_PARALLEL)
        data = data.shuffle(window).repeat(passes).map(make, **_PARALLEL)
        return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)

    def as_stored(feature: Feature, value: tf.Tensor) -> tf.Tensor:
        return tf.cast(_random_part(feature, value), tf.uint8) if feature.decode == "image" else unpack(feature, value)

    def as_scaled(feature: Feature, value: tf.Tensor) -> tf.Tensor:
        values = _random_part(feature, value) if feature.decode == "image" else unpack(feature, value)
        return cast_and_scale(feature, values)

    return {
        "tf.data, JPEGs cut to uint8": lambda passes: batches(passes, as_stored),
        "tf.data, JPEGs cut and scaled": lambda passes: batches(passes, as_scaled),
    }


def _random_part(feature: Feature, file: tf.Tensor) -> tf.Tensor:
    """Return a random part of an image, float32 of the feature's shape, mirrored or not."""
    everything = tf.constant([[[0.0, 0.0, 1.0, 1.0]]])
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(file), everything, area_range=_AREA, aspect_ratio_range=_ASPECT, max_attempts=100
    )
    image = tf.image.decode_and_crop_jpeg(file, tf.concat([begin[:2], size[:2]], 0), channels=feature.shape[2])
    image = tf.image.resize(tf.image.random_flip_left_right(image), feature.shape[:2])
    return tf.ensure_shape(image, feature.shape)
