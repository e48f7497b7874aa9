"""Records a second of TFRecord files, against pipelines of tf.data that read the same files, taking turns.

python benchmarks/tfrecords.py data/digits/train

All give the same tensors and are drained inside TensorFlow, on one rank. `plan` is this project's order, as
`bench input` measures it. The others are TensorFlow's shuffle with whole batches parsed, and one by one. Where records
hold JPEGs, they are written as for ImageNet in TensorFlow: sample_distorted_bounding_box and decode_and_crop_jpeg, so
that no more than the box is decoded; parallel, in any order. The plan then also takes random boxes and flips.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial

import tensorflow as tf

from horovod_train.commands.bench import PLAN, build_input, measure_turns, passes_of, show_turns
from horovod_train.config.settings import Config, DataConfig, Spec
from horovod_train.data.dataset import Records, open_records
from horovod_train.data.parsing import example_spec
from horovod_train.data.schema import Feature
from horovod_train.data.tfrecord import TFRecords
from horovod_train.data.transforms import ImageChanges, cast_and_scale, decode_image

Contender = Callable[[int], tf.data.Dataset]
"""Passes over the records → batches."""
AUGMENT = (Spec("random_resized_crop"), Spec("flip"))
PARSE_CALLS = 10
"""Number of parse calls in parallel where records are parsed one by one, a usual choice."""
_AREA, _ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # as random_resized_crop
_PARALLEL = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": False}


def build_contenders(records: Records, window: int, batch_size: int) -> dict[str, Contender]:
    """Build the contenders by name. window: records among which they shuffle."""
    assert isinstance(records.source, TFRecords), f"{records.setting} names records of another kind"
    assert all(
        not feature.max_length or not (feature.shape or feature.decode) for feature in records.schema.features.values()
    ), "pipelines of tf.data are written here for lists of numbers only"
    scanned, used = records.source.index.files, {*records.schema.inputs, *records.schema.targets}
    files, packing = [file.path for file in scanned], scanned[0].packing
    features = {name: feature for name, feature in records.schema.features.items() if name in used}
    specs = {name: example_spec(feature) for name, feature in features.items()}
    if _hold_jpegs(files, packing, features):
        return _build_image_contenders(files, packing, features, window, batch_size)

    def shuffled(passes: int) -> tf.data.Dataset:
        data = tf.data.TFRecordDataset(files, packing, num_parallel_reads=tf.data.AUTOTUNE)
        return data.shuffle(window, reshuffle_each_iteration=True).repeat(passes)

    def finish(parsed: dict[str, tf.Tensor], rank: int) -> dict[str, tf.Tensor]:
        return {name: _finish(feature, parsed[name], rank) for name, feature in features.items()}

    def parse_batches(passes: int) -> tf.data.Dataset:
        data = shuffled(passes).batch(batch_size)
        data = data.map(lambda rows: finish(tf.io.parse_example(rows, specs), 1), num_parallel_calls=tf.data.AUTOTUNE)
        return data.prefetch(tf.data.AUTOTUNE)

    def parse_singly(passes: int) -> tf.data.Dataset:
        data = shuffled(passes)
        data = data.map(lambda row: finish(tf.io.parse_single_example(row, specs), 0), num_parallel_calls=PARSE_CALLS)
        return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)

    return {
        f"shuffle({window}), whole batches parsed": parse_batches,
        f"shuffle({window}), parsed one by one": parse_singly,
    }


def _finish(feature: Feature, values: tf.Tensor | tf.RaggedTensor, rank: int) -> tf.Tensor:
    """Return the tensor of a feature before it is scaled; `rank` is 1 for a batch, 0 for one record."""
    if feature.max_length:
        if rank:
            values = values.to_tensor(feature.padding, shape=[None, feature.max_length])
        else:
            values = tf.pad(values, [[0, feature.max_length - tf.size(values)]], constant_values=feature.padding)
    elif feature.decode == "raw":
        values = tf.reshape(tf.io.decode_raw(values, feature.raw_dtype), [-1] * rank + list(feature.shape))
    elif feature.decode == "image":
        no_draws, plain = tf.zeros(0), ImageChanges()
        if rank:
            values = tf.map_fn(
                lambda f: decode_image(feature, f, no_draws, plain), values, fn_output_signature=tf.uint8
            )
        else:
            values = decode_image(feature, values, no_draws, plain)
    return values


def _hold_jpegs(files: list[str], packing: str, features: dict[str, Feature]) -> bool:
    """Return whether the first record has images that are resized, and all of them are JPEGs."""
    names = [name for name, feature in features.items() if feature.decode == "image" and feature.resize != "none"]
    if not names:
        return False
    record = next(iter(tf.data.TFRecordDataset(files, packing)))
    parsed = tf.io.parse_single_example(record, {name: example_spec(features[name]) for name in names})
    return all(bool(tf.io.is_jpeg(parsed[name])) for name in names)


def _build_image_contenders(
    files: list[str], packing: str, features: dict[str, Feature], window: int, batch_size: int
) -> dict[str, Contender]:
    """Build the contenders for JPEGs: one gives images as the trainer's pipeline does, the other as most scripts do."""
    specs = {name: example_spec(feature) for name, feature in features.items()}
    unpack = partial(_finish, rank=0)

    def batches(passes: int, finish: Callable[[Feature, tf.Tensor], tf.Tensor]) -> tf.data.Dataset:
        def make(record: tf.Tensor) -> dict[str, tf.Tensor]:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="PATH", help="a folder of TFRecords with a dataset.json")
    parser.add_argument("--batch-size", type=int, default=128, help="records a step; default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each; default %(default)s")
    parser.add_argument("--passes", type=int, default=3, help="over the records in a turn; default %(default)s")
    arguments = parser.parse_args()
    data = DataConfig(train=(arguments.path,))
    records = open_records(data, "train")
    contenders = build_contenders(records, data.shuffle_window, arguments.batch_size)
    if any("JPEGs" in name for name in contenders):
        data = dataclasses.replace(data, augment=AUGMENT)
    plan = passes_of(build_input(records, Config(data=data), arguments.batch_size))
    turns = measure_turns({PLAN: plan, **contenders}, records.num_records, arguments)
    show_turns(records, turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
