"""`bench input`: records per second of the plan, of TensorFlow's shuffle with whole batches parsed, and of one by one.

All three read the same files, give the same tensors, and are drained inside TensorFlow. One rank. Where records hold
JPEGs, the others are tf.data at its best: random boxes of which no more is decoded than is used. With --delay-ms the
plan is compared with itself, reading from a store with that latency.

What `bench input` compares: functions (passes over the records) → batches, or chunks of them, of the same tensors.

Only where records hold JPEGs does one contender scale them too; see image_contenders.

The tf.data pipelines that `bench input` compares with where records hold JPEGs: random boxes of them, and flips.

Written as for ImageNet in TensorFlow: sample_distorted_bounding_box and decode_and_crop_jpeg, so that no more than the
box is decoded; parallel, in any order, with the parallelism left to TensorFlow.

Records of which every block comes late, as from a store with that latency: to see what read-ahead hides.

The delay is in the thread that loads the block, where a file system or an object store would make it wait.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from horovod_train.commands.cli import add_config, build_table, count, load_from_arguments, open_screen
from horovod_train.config.settings import Config, DataConfig, Spec
from horovod_train.data.dataset import Records, open_records
from horovod_train.data.decoding import ImageChanges, decode_image
from horovod_train.data.parsing import example_spec
from horovod_train.data.pipeline.loader import Ranks
from horovod_train.data.pipeline.pipeline import Pipeline, build_pipeline
from horovod_train.data.schema import Feature
from horovod_train.data.source import LoadBlock, LoadedBlock, Parser, RecordSource
from horovod_train.data.tfrecord.source import TFRecords
from horovod_train.data.transforms import cast_and_scale
from horovod_train.errors import UserError
from horovod_train.output import logs

if TYPE_CHECKING:
    import tensorflow as tf


PLAN = "plan"
PARSE_CALLS = 10
"""Number of parse calls in parallel in the contender that parses records one by one, a usual choice."""


class Turn(NamedTuple):
    """What a pass over the records took, averaged over a turn."""

    seconds: float
    cpu_seconds: float
    """Of all threads, in the system too: a pipeline that leaves cores idle is slower than these say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="PATH", help="a folder of records, or a glob")
    add_config(parser, "read what it trains on")
    parser.add_argument("--batch-size", type=count, default=128, help="records a step; default %(default)s")
    parser.add_argument("--rounds", type=count, default=5, help="turns of each; default %(default)s")
    parser.add_argument(
        "--delay-ms", type=float, default=0.0, help="compare with blocks that come so late, instead of other pipelines"
    )
    parser.add_argument("--passes", type=count, default=3, help="over the records in a turn; default %(default)s")


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.path) == bool(arguments.config):
        raise UserError("bench input: give either the path of records or --config.")
    if arguments.delay_ms < 0:
        raise UserError(f"bench input: --delay-ms must be at least 0; received {arguments.delay_ms:g}.")
    in_folder = Config(data=DataConfig(train=(arguments.path,)))
    config = load_from_arguments(arguments.config) if arguments.config else in_folder
    if config.data.parse:
        raise UserError("bench input: needs features; data.parse cannot be taken apart.")
    records = open_records(config.data, "train")
    logs.load_tensorflow()
    _show(records, _measure(records, config, arguments), _starts(records, config, arguments.batch_size))
    return 0


def _measure(records: Records, config: Config, arguments: argparse.Namespace) -> dict[str, list[Turn]]:
    """Return the turns of each contender. The first turn is a warm-up and is not counted."""

    if arguments.delay_ms:
        ways = build_delayed(records, config, arguments.batch_size, arguments.delay_ms, PLAN)
    else:
        ways = build_contenders(records, config, arguments.batch_size, PARSE_CALLS, PLAN)
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for _ in range(arguments.rounds + 1):
        for name, build in ways.items():
            turns[name].append(_drain(build, arguments.passes, records.num_records, arguments.batch_size))
    return {name: taken[1:] for name, taken in turns.items()}


def _drain(build: Callable[[int], tf.data.Dataset], passes: int, num_records: int, batch_size: int) -> Turn:
    started, cpu_before = time.perf_counter(), time.process_time()
    batches = build(passes).reduce(0, lambda count, element: count + _steps_in(element))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    assert int(batches) >= passes * (num_records // batch_size), "a contender left records out"
    return Turn(seconds / passes, cpu_seconds / passes)


def _steps_in(element: Any) -> Any:
    """Return how many steps an element has, which a compiled step takes out of it without copying."""
    import tensorflow as tf

    from horovod_train.data.pipeline.batch_source import Batch

    return tf.shape(element.count)[0] if isinstance(element, Batch) else 1


def _starts(records: Records, config: Config, batch_size: int) -> dict[str, float]:
    """Return seconds until the first batch, at the beginning of an epoch and near its end."""

    pipeline = build_trainer_pipeline(records, config, batch_size)
    seconds = {}
    for percent in (0, 90):
        times = []
        for epoch in range(3):
            started = time.perf_counter()
            next(pipeline.batches(epoch, pipeline.steps_per_epoch * percent // 100))
            times.append(time.perf_counter() - started)
        seconds[f"{percent} %"] = statistics.median(times)
    return seconds


def _show(records: Records, turns: dict[str, list[Turn]], starts: dict[str, float]) -> None:
    console = open_screen()
    rows = []
    size = sum(part.size for part in records.source.parts)
    median = {name: statistics.median(turn.seconds for turn in taken) for name, taken in turns.items()}
    for name, taken in turns.items():
        times = [turn.seconds for turn in taken]
        rates = [f"{records.num_records / value:,.0f}" for value in (median[name], max(times), min(times))]
        ratio = f"{median[name] / median[PLAN]:.2f}"
        rows.append((name, *rates, f"{size / median[name] / 1e6:.1f}", ratio))
    console.print(build_table(("", "records/s", "slowest", "fastest", "MB/s", "ratio"), rows, left=("",)))
    cpu = {name: statistics.median(turn.cpu_seconds for turn in taken) for name, taken in turns.items()}
    micros = {name: seconds / records.num_records * 1e6 for name, seconds in cpu.items()}
    print("CPU time per record: " + ", ".join(f"{name} {value:,.1f} µs" for name, value in micros.items()))
    delays = ", ".join(f"at {position} of an epoch {value:.2f} s" for position, value in starts.items())
    print(f"the plan's first batch: {delays}")


Contender = Callable[[int], tf.data.Dataset]


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
