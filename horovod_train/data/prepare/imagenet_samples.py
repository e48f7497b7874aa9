"""Generated JPEG images in records with all of ImageNet's names, labels from 1: to try programs for ImageNet.

Each class has its own colours and direction of stripes. Position and width of the stripes and the image's size vary.
"""

from __future__ import annotations

import argparse
import io

import numpy as np

from horovod_train.config.registry import import_extra
from horovod_train.data import counter_rng
from horovod_train.data.prepare import samples
from horovod_train.data.prepare.writing import Values
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError

LABELS = 1001
"""ImageNet's 1000 classes count from 1; 0 is the background."""
_CLASSES, _IMAGES = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    samples.add_arguments(parser, records=1_000, eval_records=200)
    parser.add_argument("--classes", type=int, default=10, help="of ImageNet's 1000; default %(default)s")
    parser.add_argument("--size", type=int, default=224, help="height and width the model gets; default %(default)s")


def run(arguments: argparse.Namespace) -> None:
    samples.count(arguments, size=1, classes=1)
    if arguments.classes >= LABELS:
        raise UserError(f"--classes must be at most {LABELS - 1}; received {arguments.classes}.")
    samples.write(
        arguments,
        imagenet_schema(arguments.size),
        lambda record: _encode(record, arguments.classes, arguments.size, arguments.seed),
    )


def imagenet_schema(size: int) -> Schema:
    """Return a schema: centre crops of a square, scaled to [-1, 1]; labels from 0, as losses expect them."""
    image = Feature(
        "bytes", (size, size, 3), decode="image", resize="crop", crop_fraction=0.875, scale=1 / 127.5, offset=-1.0
    )
    label = Feature("int64", classes=LABELS, offset=-1, cast="int64")
    return Schema({"image/encoded": image, "image/class/label": label}, ("image/encoded",), ("image/class/label",))


def make_image(record: int, classes: int, size: int, seed: int) -> tuple[np.ndarray, int]:
    """Make an image uint8 [height, width, 3], 0.9 to 1.5 times `size`, and its label from 1 to `classes`."""
    label = 1 + record % classes
    colours = counter_rng.uniforms(counter_rng.key(seed, _CLASSES), np.array([label]), 7)[0]
    image_draws = counter_rng.uniforms(counter_rng.key(seed, _IMAGES), np.array([record]), 4)[0]
    height, width = (int(size * (0.9 + 0.6 * draw)) for draw in image_draws[:2])
    angle = np.pi * colours[6]
    y, x = np.mgrid[:height, :width] / size
    wave = np.sin(2 * np.pi * ((3 + 3 * image_draws[2]) * (x * np.cos(angle) + y * np.sin(angle)) + image_draws[3]))
    share = (0.5 + 0.5 * wave)[..., None]
    return np.rint(255 * (share * colours[:3] + (1 - share) * colours[3:6])).astype(np.uint8), label


def _encode(record: int, classes: int, size: int, seed: int) -> Values:
    pillow = import_extra("PIL.Image", "images", "prepare imagenet-samples")
    image, label = make_image(record, classes, size, seed)
    file = io.BytesIO()
    pillow.fromarray(image).save(file, "JPEG", quality=90)
    return {
        "image/encoded": file.getvalue(),
        "image/format": "JPEG",
        "image/colorspace": "RGB",
        "image/channels": 3,
        "image/height": image.shape[0],
        "image/width": image.shape[1],
        "image/filename": f"made_{record:08}.JPEG",
        "image/class/label": label,
        "image/class/synset": f"n{label:08}",
        "image/class/text": f"made class {label}",
    }
