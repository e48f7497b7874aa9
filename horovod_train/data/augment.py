"""Random changes to training images, each drawn from (seed, epoch, record), so that a resumed run repeats them.

The caller passes the draws: numbers in [0, 1), a fixed few per record. Nothing here generates random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_train.config.registry import call, choose, raised_at
from horovod_train.config.settings import Spec
from horovod_train.errors import UserError, kind_of, one_line

ChooseBox = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""(height and width int32 [2], draws float32 [k]) → top, left, height, width, int32 [4], inside the image."""

ChangeImage = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""(image uint8 [h, w, c], draws float32 [k]) → image of the same shape."""

_TRIES = 10
"""Random parts among which random_resized_crop chooses the first that fits."""
_CROP_DRAWS = 2 * _TRIES + 2


class Augmentation(NamedTuple):
    """`draws`: how many numbers it needs. `apply`: (images [n, h, w, c], draws [n, draws]) → images, same dtype."""

    draws: int
    apply: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    box: ChooseBox | None = None
    """If it resizes a part of the image to the feature's shape: chooses that part, so that no more is decoded."""
    of_one: ChangeImage | None = None
    """The same change of one image, where that is faster than in a batch."""
    is_users: bool = False
    """Whether it is a user's function, about which nothing is known."""


def flip(direction: str = "horizontal") -> Augmentation:
    """Mirror every second image, on average."""
    axes = {"horizontal": 2, "vertical": 1}
    if direction not in axes:
        raise ValueError(f"direction must be horizontal or vertical; received {direction!r}")

    def apply(images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        return tf.where(draws[:, :1, None, None] < 0.5, tf.reverse(images, [axes[direction]]), images)

    def of_one(image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        # TensorFlow has a fast kernel for rows of three-channel pixels, but only for single images. This op takes the
        # choice as a tensor: a branch for each record would cost more.
        chosen = [draws[0] < 0.5 if axis == axes[direction] else tf.constant(False) for axis in (1, 2, 3)]
        return tf.raw_ops.Reverse(tensor=image, dims=tf.stack(chosen))

    return Augmentation(1, apply, of_one=of_one)


def random_crop(padding: int = 4) -> Augmentation:
    """Shift by up to `padding` pixels in each direction; new pixels are 0. (He et al. 2015, section 4.2: CIFAR-10.)"""
    if padding < 1:
        raise ValueError(f"padding must be at least 1; received {padding}")

    def apply(images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        _, height, width, _ = images.shape
        padded = tf.pad(images, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
        shifts = tf.cast(draws * (2 * padding + 1), tf.int32)
        rows = tf.gather(padded, shifts[:, :1] + tf.range(height), axis=1, batch_dims=1)
        return tf.gather(rows, shifts[:, 1:] + tf.range(width), axis=2, batch_dims=1)

    return Augmentation(2, apply)


def random_resized_crop(
    area: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (3 / 4, 4 / 3)
) -> Callable[[tuple[int, ...], str], Augmentation]:
    """Cut out a part of `area` (fraction) and aspect `ratio`, and resize it. (Szegedy et al. 2014, section 6.)

    As torchvision's RandomResizedCrop: of ten parts the first that fits into the image; if none does, the largest part
    of such an aspect, at the centre. Images that are decoded are cut at whole pixels; others between pixels.
    """
    for name, (low, high) in (("area", area), ("ratio", ratio)):
        if not 0 < low <= high:
            raise ValueError(f"{name} must be [low, high] with 0 < low <= high; received {[low, high]}")

    def choose_part(size: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return height and width, at least one pixel, and the place in what is left, 0 to 1: float32 [..., 2] each.

        size: height and width, float32 [2]. draws: [..., _CROP_DRAWS].
        """
        areas, aspects, place = tf.split(draws, [_TRIES, _TRIES, 2], -1)
        part = (area[0] + areas * (area[1] - area[0])) * size[0] * size[1]
        aspect = tf.exp(math.log(ratio[0]) + aspects * (math.log(ratio[1]) - math.log(ratio[0])))
        candidates = tf.stack([tf.sqrt(part / aspect), tf.sqrt(part * aspect)], -1)
        fits = tf.reduce_all(tf.round(candidates) <= size, -1)
        first = tf.argmax(tf.cast(fits, tf.int32), -1)
        extent = tf.minimum(tf.gather(candidates, first, axis=-2, batch_dims=first.shape.rank), size)
        any_fits = tf.reduce_any(fits, -1, keepdims=True)
        largest = tf.minimum(size, tf.stack([size[1] / ratio[0], size[0] * ratio[1]]))
        return tf.maximum(tf.where(any_fits, extent, largest), 1.0), tf.where(any_fits, place, 0.5)

    def box(size: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        extent, place = choose_part(tf.cast(size, tf.float32), draws[:_CROP_DRAWS])
        extent = tf.cast(tf.round(extent), tf.int32)
        room = tf.cast(size - extent + 1, tf.float32)
        # A draw is less than 1, but its product may be rounded up to the whole room.
        start = tf.minimum(tf.cast(place * room, tf.int32), size - extent)
        return tf.concat([start, extent], 0)

    def to_shape(shape: tuple[int, ...], interpolation: str) -> Augmentation:
        def apply(images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
            count, size = tf.shape(draws)[0], tf.cast(tf.shape(images)[1:3], tf.float32)
            extent, place = choose_part(size, draws)
            start = place * (size - extent)
            boxes = tf.concat([start, start + extent - 1], 1) / tf.tile(tf.maximum(size - 1, 1), [2])
            cut = tf.image.crop_and_resize(images, boxes, tf.range(count), shape[:2], interpolation)
            if images.dtype.is_floating:
                return tf.cast(cut, images.dtype)
            return tf.cast(tf.clip_by_value(tf.round(cut), images.dtype.min, images.dtype.max), images.dtype)

        return Augmentation(_CROP_DRAWS, apply, box=box)

    return to_shape


AUGMENTATIONS: dict[str, Callable[..., Any]] = {
    "flip": flip,
    "random_crop": random_crop,
    "random_resized_crop": random_resized_crop,
}


def build_augmentations(
    specs: Sequence[Spec], shape: tuple[int, ...], interpolation: str, dtype: str = ""
) -> list[Augmentation]:
    """Build what `data.augment` lists, for images of `shape` [height, width, channels]. Raises UserError.

    interpolation: bilinear or nearest, for images that change size. dtype: of the images, with which a user's function
    is tried; "": it is not.
    """
    augmentations: list[Augmentation] = []
    for number, spec in enumerate(specs):
        where = f"data.augment[{number}]"
        make = choose(AUGMENTATIONS, spec.name, f"{where}.name")
        if ":" in spec.name:
            function = tf.function(make)  # with AutoGraph, as in tf.data.Dataset.map
            if dtype:
                _try(function, spec, where, tf.TensorSpec(shape, dtype))
            augmentations.append(_wrap_function(function, spec.options))
            continue
        augmentation = call(make, spec, where)
        if not isinstance(augmentation, Augmentation):
            augmentation = augmentation(shape, interpolation)
        if augmentation.box and number:
            raise UserError(f"{where}: {spec.name} must come first: it decides the size of the image.")
        augmentations.append(augmentation)
    return augmentations


def _wrap_function(function: Callable[..., tf.Tensor], options: dict[str, Any]) -> Augmentation:
    """Wrap a user's function(image [h, w, c], seed int32 [2], **options) → image, for tf.random.stateless_ ones."""

    def apply(images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        seeds = tf.cast(draws * 2**24, tf.int32)
        changed = tf.map_fn(
            lambda row: function(row[0], row[1], **options), (images, seeds), fn_output_signature=images.dtype
        )
        return tf.ensure_shape(changed, images.shape)

    return Augmentation(2, apply, is_users=True)


def _try(function: Any, spec: Spec, where: str, image: tf.TensorSpec) -> None:
    """Raise UserError for a function, made by tf.function, that cannot be traced, or gives no such image."""
    given = f"{image.dtype.name}{image.shape.as_list()}"
    try:
        traced = function.get_concrete_function(image, tf.TensorSpec([2], tf.int32), **spec.options)
    except Exception as error:  # whatever the user's code raises
        text = f"{kind_of(error)}: {one_line(error)[:300]}{raised_at(error)}"
        raise UserError(f"{where}: {spec.name}, for an image of {given}: {text}") from error
    result = traced.structured_outputs
    is_tensor = isinstance(result, tf.Tensor)
    if not is_tensor or result.dtype != image.dtype or not result.shape.is_compatible_with(image.shape):
        received = f"{result.dtype.name}{[*result.shape]}" if is_tensor else type(result).__name__
        raise UserError(
            f"{where}: {spec.name} must return an image like the one it gets, {given}; it returned {received}. "
            "Scaling comes afterwards: scale and offset in data.features."
        )
