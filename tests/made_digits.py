"""The digits as arrays, read by nothing of the project's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf


def images_of(split: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [n, 28, 28, 1] as the model gets them, and labels int64 [n], in the order of the records."""
    features = {"image_raw": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    files = sorted(str(path) for path in split.glob("*.tfrecord"))
    (rows,) = tf.data.TFRecordDataset(files).batch(100_000)
    found = tf.io.parse_example(rows, features)
    pixels = tf.cast(tf.io.decode_raw(found["image_raw"], tf.uint8), tf.float32)
    return tf.reshape(pixels / 255 - 0.5, [-1, 28, 28, 1]).numpy(), found["label"].numpy()
