"""Generated records, to try models without data: small integers, sentences of tokens, JPEG images."""

from __future__ import annotations

import argparse
import io
from functools import partial

import numpy as np

from horovod_train.config.registry import import_extra
from horovod_train.data import counter_rng
from horovod_train.data.prepare.writing import Encode, Kind, Values, encode_rows, split_by_count, write_dataset
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError

TOKEN_KINDS = 4
_BIAS = 0.3
"""The fraction of a sentence that is drawn from one kind of token alone; the rest is drawn from all kinds."""

LABELS = 1001
"""ImageNet's 1000 classes count from 1; 0 is the background."""

_MLP_SAMPLES, _MLP_RULE = 1, 2  # so that the numbers for one purpose are independent of those for the others
_TOKEN_RULE, _TOKEN_SHAPE, _TOKENS = 1, 2, 3
_IMAGE_CLASSES, _IMAGES = 1, 2


def _add_arguments(parser: argparse.ArgumentParser, records: int, eval_records: int) -> None:
    parser.add_argument("--records", type=int, default=records, help="to train on; default %(default)s")
    parser.add_argument("--eval-records", type=int, default=eval_records, help="to evaluate; default %(default)s")
    parser.add_argument("--shards", type=int, default=4, help="files a split; default %(default)s")


def _count(arguments: argparse.Namespace, **minimums: int) -> int:
    """Return the number of records to generate. Raises UserError for an argument below its minimum."""
    for name, minimum in {"records": 1, "eval_records": 0, **minimums}.items():
        value = getattr(arguments, name)
        if value < minimum:
            raise UserError(f"--{name.replace('_', '-')} must be at least {minimum}; received {value}.")
    return arguments.records + arguments.eval_records


def _write(arguments: argparse.Namespace, records: int, schema: Schema, encode: Encode) -> None:
    write_dataset(arguments, schema, split_by_count(records, arguments.eval_records, arguments.seed), encode)


# --- small integers ---------------------------------------------------------------------------------------------

MLP_SCHEMA = Schema(
    {"sample": Feature("int64", (5,), cast="float32"), "label": Feature("int64", cast="float32", classes=2)},
    ("sample",),
    ("label",),
)


def _write_mlp_samples(arguments: argparse.Namespace) -> None:
    records = _count(arguments)
    values, labels = make_mlp_samples(records, arguments.seed)
    _write(arguments, records, MLP_SCHEMA, encode_rows(MLP_SCHEMA, {"sample": values, "label": labels}))


def make_mlp_samples(records: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make samples int64 [records, 5] from -4 to 4, and labels: 1 if a weighted sum of a sample is positive."""
    uniforms = counter_rng.uniforms(counter_rng.key(seed, _MLP_SAMPLES), np.arange(records), 5)
    values = np.floor(uniforms * 9).astype(np.int64) - 4
    weights = counter_rng.uniforms(counter_rng.key(seed, _MLP_RULE), np.arange(1), 5)[0] - 0.5
    return values, (values @ weights > 0).astype(np.int64)


MLP = Kind(
    "Generated samples for a small MLP: five small integers and a 0/1 label from a rule that --seed draws.",
    partial(_add_arguments, records=10_000, eval_records=1_000),
    _write_mlp_samples,
)

# --- sentences of tokens ----------------------------------------------------------------------------------------


def _add_token_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser, records=8_000, eval_records=1_000)
    parser.add_argument("--vocabulary", type=int, default=1000, help="tokens, padding included; default %(default)s")
    parser.add_argument("--max-length", type=int, default=64, help="longest sentence; default %(default)s")


def _write_token_samples(arguments: argparse.Namespace) -> None:
    records = _count(arguments, vocabulary=TOKEN_KINDS + 1, max_length=1)
    tokens, lengths, labels = make_token_samples(records, arguments.vocabulary, arguments.max_length, arguments.seed)
    sentence = Feature("int64", max_length=arguments.max_length, classes=arguments.vocabulary)
    schema = Schema({"tokens": sentence, "label": Feature("int64", classes=TOKEN_KINDS)}, ("tokens",), ("label",))

    def encode(record: int) -> Values:
        return {"tokens": tokens[record, : lengths[record]], "label": labels[record]}

    _write(arguments, records, schema, encode)


def make_token_samples(records: int, vocabulary: int, max_length: int, seed: int) -> tuple[np.ndarray, ...]:
    """Make tokens int64 [records, max_length], 0 past the end; lengths int64 [records]; labels int64 [records].

    The label is the most frequent kind of the sentence; of several such kinds, the first.
    """
    order = 1 + counter_rng.permutation(counter_rng.key(seed, _TOKEN_RULE), np.arange(vocabulary - 1))
    kind = np.zeros(vocabulary, np.int64)
    kind[order] = np.arange(vocabulary - 1) % TOKEN_KINDS
    length_draw, kind_draw = counter_rng.uniforms(counter_rng.key(seed, _TOKEN_SHAPE), np.arange(records), 2).T
    lengths = 1 + np.floor(length_draw * max_length).astype(np.int64)
    favoured = np.floor(kind_draw * TOKEN_KINDS).astype(np.int64)
    uniforms = counter_rng.uniforms(counter_rng.key(seed, _TOKENS), np.arange(records), 2 * max_length)
    from_all = 1 + np.floor(uniforms[:, :max_length] * (vocabulary - 1)).astype(np.int64)
    # order[i] is of kind i % TOKEN_KINDS, so the tokens of the favoured kind are TOKEN_KINDS apart.
    number_in_kind = np.floor(uniforms[:, :max_length] * ((vocabulary - 1) // TOKEN_KINDS)).astype(np.int64)
    of_kind = order[number_in_kind * TOKEN_KINDS + favoured[:, None]]
    tokens = np.where(uniforms[:, max_length:] < _BIAS, of_kind, from_all)
    tokens = np.where(np.arange(max_length) < lengths[:, None], tokens, 0)
    counts = np.stack([((kind[tokens] == number) & (tokens > 0)).sum(axis=1) for number in range(TOKEN_KINDS)], axis=1)
    return tokens, lengths, counts.argmax(axis=1)


TOKENS = Kind(
    """Generated sentences of tokens, of any length up to --max-length, labelled with their most frequent kind of token.

    --seed draws the kind of each token, and so the rule for labels. Token 0 is padding.
    """,
    _add_token_arguments,
    _write_token_samples,
)

# --- images -----------------------------------------------------------------------------------------------------


def _add_imagenet_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser, records=1_000, eval_records=200)
    parser.add_argument("--classes", type=int, default=10, help="of ImageNet's 1000; default %(default)s")
    parser.add_argument("--size", type=int, default=224, help="height and width the model gets; default %(default)s")


def _write_imagenet_samples(arguments: argparse.Namespace) -> None:
    records, classes, size = _count(arguments, size=1, classes=1), arguments.classes, arguments.size
    if classes >= LABELS:
        raise UserError(f"--classes must be at most {LABELS - 1}; received {classes}.")
    # Centre crops of a square, scaled to [-1, 1]; labels from 0, as losses expect them.
    image = Feature(
        "bytes", (size, size, 3), decode="image", resize="crop", crop_fraction=0.875, scale=1 / 127.5, offset=-1.0
    )
    label = Feature("int64", classes=LABELS, offset=-1, cast="int64")
    features = {"image/encoded": image, "image/class/label": label}
    schema = Schema(features, ("image/encoded",), ("image/class/label",))
    _write(arguments, records, schema, lambda record: _encode_image(record, classes, size, arguments.seed))


def _encode_image(record: int, classes: int, size: int, seed: int) -> Values:
    pillow = import_extra("PIL.Image", "images", "prepare imagenet-samples")
    image, label = _make_image(record, classes, size, seed)
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


def _make_image(record: int, classes: int, size: int, seed: int) -> tuple[np.ndarray, int]:
    """Make an image uint8 [height, width, 3], 0.9 to 1.5 times `size`, and its label from 1 to `classes`."""
    label = 1 + record % classes
    colours = counter_rng.uniforms(counter_rng.key(seed, _IMAGE_CLASSES), np.array([label]), 7)[0]
    image_draws = counter_rng.uniforms(counter_rng.key(seed, _IMAGES), np.array([record]), 4)[0]
    height, width = (int(size * (0.9 + 0.6 * draw)) for draw in image_draws[:2])
    angle = np.pi * colours[6]
    y, x = np.mgrid[:height, :width] / size
    wave = np.sin(2 * np.pi * ((3 + 3 * image_draws[2]) * (x * np.cos(angle) + y * np.sin(angle)) + image_draws[3]))
    share = (0.5 + 0.5 * wave)[..., None]
    return np.rint(255 * (share * colours[:3] + (1 - share) * colours[3:6])).astype(np.uint8), label


IMAGENET = Kind(
    """Generated JPEG images in records with all of ImageNet's names, labels from 1: to try programs for ImageNet.

    Each class has its own colours and direction of stripes. Position and width of the stripes and the image's size
    vary.
    """,
    _add_imagenet_arguments,
    _write_imagenet_samples,
)
