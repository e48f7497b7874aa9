"""A small data set and a config for it, for programs that call main several times in one process on each rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import yaml


def config_of(folder: Path, is_root: bool, num_records: int, unused_bytes: int = 0, **sections: Any) -> Path:
    """Return the path of a config in `folder` with further `sections`; root writes it and its data, others wait.

    unused_bytes: that each record holds besides what is used.
    """
    path = folder / "c.yaml"
    if is_root:
        _write_records(folder / "data", num_records, unused_bytes)
        data = {
            "train": str(folder / "data"),
            "features": {"x": {"type": "float", "shape": [6]}, "y": {"type": "int64"}},
            "inputs": "x",
            "targets": "y",
            "global_batch_size": 8,
        }
        loss = {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}
        partial = path.with_suffix(".tmp")
        partial.write_text(yaml.safe_dump({"data": data, "model": "user_models:tiny", "loss": loss, **sections}))
        partial.rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path


def _write_records(folder: Path, num_records: int, unused_bytes: int) -> None:
    folder.mkdir()
    rng = np.random.default_rng(1)
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
        for x in rng.normal(size=(num_records, 6)):
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(x.sum() > 0)]))
            values = tf.train.Feature(float_list=tf.train.FloatList(value=x))
            unused = tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(unused_bytes)]))
            example = tf.train.Example(features=tf.train.Features(feature={"x": values, "y": label, "unused": unused}))
            writer.write(example.SerializeToString(deterministic=True))
