"""What `bench input` compares: functions (passes over the records) → batches, or chunks of them, of the same tensors.

Where records hold JPEGs, the tf.data pipelines are written as for ImageNet in TensorFlow: sample_distorted_bounding_box
and decode_and_crop_jpeg, so that no more than the box is decoded; parallel, in any order. A late block is late in the
thread that loads it, where a file system or an object store would make it wait.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from functools import partial

import tensorflow as tf

from horovod_train.config.settings import Config, Spec
from horovod_train.data.dataset import Records
from horovod_train.data.parsing import example_spec
from horovod_train.data.pipeline import Pipeline, Ranks, build_pipeline
from horovod_train.data.schema import Feature
from horovod_train.data.source import LoadBlock, LoadedBlock, Parser, RecordSource
from horovod_train.data.tfrecord.source import TFRecords
from horovod_train.data.transforms import ImageChanges, cast_and_scale, decode_image
from horovod_train.errors import UserError

Contender = Callable[[int], tf.data.Dataset]
AUGMENT = (Spec("random_resized_crop"), Spec("flip"))
"""What the trainer does for the comparison."""
_AREA, _ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # as random_resized_crop
_PARALLEL = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": False}
Parsed = dict[str, tf.Tensor]


def build_trainer_pipeline(
    records: Records, config: Config, batch_size: int, source: RecordSource | None = None
) -> Pipeline:
    """Build the trainer's pipeline: for JPEGs with random boxes and flips, otherwise without augmentation.

    source: gives the same records in another way.
    """
    augment = AUGMENT if _hold_jpegs(records) else ()
    data = dataclasses.replace(config.data, augment=augment)
    records = dataclasses.replace(records, source=source or records.source)
    return build_pipeline(records, data, Ranks(0, 1), seed=config.seed, training=True, global_batch_size=batch_size)


def build_contenders(
    records: Records, config: Config, batch_size: int, parse_calls: int, plan_name: str
) -> dict[str, Contender]:
    """Build the contenders by name. `parse_calls`: parallel parse calls of the contender that parses records singly.

    Raises UserError for records that are not in TFRecord files; benchmarks/sources.py compares readers of others.
    """
    window, features = config.data.shuffle_window, _used(records)
    specs = {name: example_spec(feature) for name, feature in features.items()}
    plan = _plan(build_trainer_pipeline(records, config, batch_size))

    def shuffled(passes: int) -> tf.data.Dataset:
        data = tf.data.TFRecordDataset(*_files(records), num_parallel_reads=tf.data.AUTOTUNE)
        return data.shuffle(window, reshuffle_each_iteration=True).repeat(passes)

    def finish(parsed: dict[str, tf.Tensor], rank: int) -> dict[str, tf.Tensor]:
        return {name: _finish(feature, parsed[name], rank) for name, feature in features.items()}

    def parse_batches(passes: int) -> tf.data.Dataset:
        data = shuffled(passes).batch(batch_size)
        data = data.map(lambda rows: finish(tf.io.parse_example(rows, specs), 1), num_parallel_calls=tf.data.AUTOTUNE)
        return data.prefetch(tf.data.AUTOTUNE)

    def parse_singly(passes: int) -> tf.data.Dataset:
        data = shuffled(passes)
        data = data.map(lambda row: finish(tf.io.parse_single_example(row, specs), 0), num_parallel_calls=parse_calls)
        return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)

    if _hold_jpegs(records):
        unpack = partial(_finish, rank=0)
        return {plan_name: plan, **build_image_contenders(*_files(records), features, window, batch_size, unpack)}
    return {
        plan_name: plan,
        f"shuffle({window}), whole batches parsed": parse_batches,
        f"shuffle({window}), parsed one by one": parse_singly,
    }


def build_delayed(
    records: Records, config: Config, batch_size: int, delay_ms: float, plan_name: str
) -> dict[str, Contender]:
    """Build the plan, and the plan that gets every block `delay_ms` late."""
    delayed_source = DelayedSource(records.source, delay_ms / 1e3)
    delayed = build_trainer_pipeline(records, config, batch_size, delayed_source)
    return {
        plan_name: _plan(build_trainer_pipeline(records, config, batch_size)),
        f"{plan_name}, blocks {delay_ms:g} ms late": _plan(delayed),
    }


def _plan(pipeline: Pipeline) -> Contender:
    epochs = itertools.count()
    return lambda passes: pipeline.chunks(next(epochs) * passes, epochs=passes)


def _used(records: Records) -> dict[str, Feature]:
    used = {*records.schema.inputs, *records.schema.targets}
    features = {name: feature for name, feature in records.schema.features.items() if name in used}
    for name, feature in features.items():
        if feature.max_length and (feature.shape or feature.sequence or feature.decode != "none"):
            raise UserError(
                f"bench input: compares readers of numbers and plain lists; feature {name} is none of them."
            )
    return features


def _files(records: Records) -> tuple[list[str], str]:
    """Return the paths of the files, and how they are packed. Raises UserError."""
    if not isinstance(records.source, TFRecords):
        raise UserError(f"bench input: compares readers of TFRecords; {records.setting} names records of another kind.")
    files = records.source.index.files
    return [file.path for file in files], files[0].packing


def _hold_jpegs(records: Records) -> bool:
    return hold_jpegs(*_files(records), _used(records))


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


def hold_jpegs(files: list[str], packing: str, features: dict[str, Feature]) -> bool:
    """Return whether the first record has images that are resized, and all of them are JPEGs."""
    names = [name for name, feature in features.items() if feature.decode == "image" and feature.resize != "none"]
    if not names:
        return False
    record = next(iter(tf.data.TFRecordDataset(files, packing)))
    parsed = tf.io.parse_single_example(record, {name: example_spec(features[name]) for name in names})
    return all(bool(tf.io.is_jpeg(parsed[name])) for name in names)


def build_image_contenders(
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


class DelayedSource:
    """A RecordSource like another one, but for the delay."""

    def __init__(self, source: RecordSource, delay_s: float) -> None:
        self._source, self._delay_s = source, delay_s
        self.blocks, self.parts = source.blocks, source.parts

    def open(self) -> LoadBlock:
        load = self._source.open()

        def load_delayed(block: int) -> LoadedBlock:
            time.sleep(self._delay_s)
            return load(block)

        return load_delayed

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self._source.parser(features)
