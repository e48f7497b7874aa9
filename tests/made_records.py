"""Small made data sets for the tests of the data room: what a record holds follows from its number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from horovod_train.config.settings import DataConfig
from horovod_train.data.batch_source import Batch
from horovod_train.data.dataset import open_records
from horovod_train.data.pipeline import Pipeline, Ranks, build_pipeline
from horovod_train.data.sampler import Rows
from horovod_train.tfrecord_framing import frame

FEATURES: dict[str, Any] = {
    "image_raw": {"type": "bytes", "shape": [4, 4, 1], "decode": "raw", "scale": 1 / 255, "offset": -0.5},
    "label": {"type": "int64", "classes": 10},
}
SCHEMA: dict[str, Any] = {"features": FEATURES, "inputs": ["image_raw"], "targets": ["label"]}


def example(**values: Any) -> bytes:
    """A serialized tf.train.Example of bytes, ints and floats, alone or in lists; the same bytes in every process."""
    features = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if items and isinstance(items[0], bytes):
            features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=items))
        elif items and isinstance(items[0], float):
            features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=items))
        else:
            features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=items))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)


def pixels(number: int) -> np.ndarray:
    """The image of a record, uint8 [4, 4, 1]."""
    return ((np.arange(16) * 7 + number) % 256).astype(np.uint8).reshape(4, 4, 1)


def image_record(number: int) -> bytes:
    return example(image_raw=pixels(number).tobytes(), label=number % 10)


def write_file(path: Path, records: Sequence[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(frame, records)))
    return path


def make_images(folder: Path, shards: Sequence[int] = (40, 7, 23)) -> Path:
    """A split of records as `prepare idx` writes them, numbered through its files; dataset.json lies above it."""
    first = 0
    for shard, records in enumerate(shards):
        write_file(folder / f"{shard}.tfrecord", [image_record(first + number) for number in range(records)])
        first += records
    (folder.parent / "dataset.json").write_text(json.dumps(SCHEMA))
    return folder


def config(folder: Path | str, **values: Any) -> DataConfig:
    return DataConfig(train=(str(folder),), **values)


def pipeline(data: DataConfig, rank: int = 0, size: int = 1, *, batch: int = 8, training: bool = True) -> Pipeline:
    records = open_records(data, "train")
    return build_pipeline(records, data, Ranks(rank, size), seed=1, training=training, global_batch_size=batch)


class NumpyBatch(NamedTuple):
    """A Batch as numpy arrays."""

    inputs: Any
    targets: Any
    weights: np.ndarray
    ids: np.ndarray
    count: Any  # which a tuple has as a method


def batches(made: Pipeline, epoch: int = 0, first_step: int = 0, epochs: int = 1) -> list[NumpyBatch]:
    """The batches as the model gets them, as numpy arrays."""
    return [as_numpy(made.scaled(batch)) for batch in made.batches(epoch, first_step, epochs)]


def as_numpy(batch: Batch) -> NumpyBatch:
    return NumpyBatch(**tf.nest.map_structure(lambda values: values.numpy(), batch._asdict()))


def ids_of(rows: Rows) -> np.ndarray:
    """The records that a rank reads, -1 for padding."""
    return np.where(rows.real, rows.records, -1)


def ids(found: Sequence[NumpyBatch]) -> list[int]:
    """The records in order, without padding."""
    return [number for batch in found for number in batch.ids.tolist() if number >= 0]
