"""Stored values to the tensors the model gets: images decoded and augmented, then everything cast and scaled.

In TensorFlow's graph, a step or many at a time. Does not read or parse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from horovod_train.config import Spec
from horovod_train.data.augment import Augmentation, build_augmentations
from horovod_train.data.features import Feature
from horovod_train.data.images import Fit, decode_images
from horovod_train.errors import UserError


class _Steps(NamedTuple):
    """What is done to one feature."""

    feature: Feature
    augmentations: list[Augmentation]


class Finisher:
    """Turns the stored values of some features into tensors."""

    def __init__(self, features: dict[str, Feature], inputs: Sequence[str], augment: Sequence[Spec]) -> None:
        """`augment` is done to those inputs that are images, [height, width, channels]. Raises UserError."""
        images = [name for name in inputs if name in features and len(features[name].tensor_shape) == 3]
        if augment and not images:
            raise UserError(
                f"data.augment: is for inputs [height, width, channels]; there is none among {', '.join(inputs)}."
            )
        self._steps = {
            name: _Steps(feature, build_augmentations(augment, feature.shape) if name in images else [])
            for name, feature in features.items()
        }
        # At least one: unbatch() of TensorFlow 2.21 crashes on tensors without elements.
        self.draws = max([1, *(sum(a.draws for a in steps.augmentations) for steps in self._steps.values())])
        """Random numbers that a row needs."""
        self.by_step = bool(augment) or any(feature.decode == "image" for feature in features.values())
        """Whether it takes rows of one step at a time, [rows, ...]; else any number of leading axes."""

    def finish(
        self, stored: dict[str, tf.Tensor], draws: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """The tensors, and for each feature that is an image, which rows could be decoded: bool [rows]."""
        tensors, fine = {}, {}
        for name, values in stored.items():
            if name not in self._steps:
                tensors[name] = values  # a user's parse function has done it all
                continue
            feature, augmentations = self._steps[name]
            at = 0
            if feature.decode == "image":
                fit = augmentations[0] if augmentations and augmentations[0].fits else None
                values, fine[name] = decode_images(feature, values, draws, fit and _one(fit))
                if fit:
                    at, augmentations = fit.draws, augmentations[1:]
            for augmentation in augmentations:
                values = augmentation.apply(values, draws[:, at : at + augmentation.draws])
                at += augmentation.draws
            tensors[name] = cast_and_scale(feature, values)
        return tensors, fine


def cast_and_scale(feature: Feature, values: tf.Tensor) -> tf.Tensor:
    """value * scale + offset in the feature's dtype, or just cast."""
    if feature.scale is not None or feature.offset is not None:
        dtype = tf.as_dtype(feature.tensor_dtype)
        values = tf.cast(values, dtype if dtype.is_floating else tf.float32)
        if feature.scale is not None:
            values *= tf.cast(feature.scale, values.dtype)
        if feature.offset is not None:
            values += tf.cast(feature.offset, values.dtype)
    return values if values.dtype == feature.tensor_dtype else tf.cast(values, feature.tensor_dtype)


def _one(augmentation: Augmentation) -> Fit:
    return lambda image, draw: augmentation.apply(image[None], draw[None, : augmentation.draws])[0]
