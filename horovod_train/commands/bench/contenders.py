"""What `bench input` compares: functions (passes over the records) → batches, or chunks of them, of the same tensors.

Only where records hold JPEGs does one contender scale them too; see image_contenders.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial

import tensorflow as tf

from horovod_train.commands.bench import image_contenders
from horovod_train.commands.bench.delayed import DelayedSource
from horovod_train.config.settings import Config
from horovod_train.data.dataset import Records
from horovod_train.data.features import Feature
from horovod_train.data.parsing.serialized import example_spec
from horovod_train.data.pipeline.loader import Ranks
from horovod_train.data.pipeline.pipeline import Pipeline, build_pipeline
from horovod_train.data.source import RecordSource
from horovod_train.data.tfrecord.source import TFRecords
from horovod_train.data.transforms.decoding import ImageChanges, decode_image
from horovod_train.errors import UserError

Contender = Callable[[int], tf.data.Dataset]


def build_trainer_pipeline(
    records: Records, config: Config, batch_size: int, source: RecordSource | None = None
) -> Pipeline:
    """Build the trainer's pipeline: for JPEGs with random boxes and flips, otherwise without augmentation.

    source: gives the same records in another way.
    """
    augment = image_contenders.AUGMENT if _hold_jpegs(records) else ()
    data = dataclasses.replace(config.data, augment=augment)
    records = dataclasses.replace(records, source=source or records.source)
    return build_pipeline(records, data, Ranks(0, 1), seed=config.seed, training=True, global_batch_size=batch_size)


def build(records: Records, config: Config, batch_size: int, parse_calls: int, plan_name: str) -> dict[str, Contender]:
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
        return {plan_name: plan, **image_contenders.build(*_files(records), features, window, batch_size, unpack)}
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
    return image_contenders.hold_jpegs(*_files(records), _used(records))


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
