"""Turns stored values into what the model gets: decodes, augments, casts and scales; applies `data.preprocess`.

Runs in TensorFlow's graph, for one or many steps per call: images and `data.preprocess`, which is a user's function or
a preset's preprocessor, in tf.data on the host; casts and scales on the rank's device. Does not read or parse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from horovod_train.config.registry import load_function, raised_at
from horovod_train.config.settings import Spec
from horovod_train.data.augment import Augmentation, build_augmentations
from horovod_train.data.batch_source import Tensors
from horovod_train.data.decoding import ChangeImage, ImageChanges, decode_images
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError, one_line


class Transforms:
    """Turns the stored values of some features into tensors."""

    def __init__(self, features: dict[str, Feature], schema: Schema, augment: Sequence[Spec]) -> None:
        """Apply `augment` to all inputs and targets that are images, [height, width, channels], in the same way.

        Raises UserError if inputs and targets would not stay aligned.
        """
        images = _images(features, schema.inputs)
        if augment and not images:
            raise UserError(
                "data.augment: is for inputs [height, width, channels]; "
                f"there is none among {', '.join(schema.inputs)}."
            )
        images |= _images(features, schema.targets)
        self._features = features
        self._augmentations = {
            name: build_augmentations(augment if name in images else (), feature.shape, feature.interpolation)
            for name, feature in features.items()
        }
        _check_aligned(images, self._augmentations, [name for name in schema.targets if name not in schema.inputs])
        # At least one: unbatch() of TensorFlow 2.21 crashes on tensors without elements.
        self.draws = max([1, *(sum(change.draws for change in changes) for changes in self._augmentations.values())])
        """Random numbers that a row needs."""
        self.by_step = bool(augment) or any(feature.decode == "image" for feature in features.values())
        """Whether it takes rows of one step per call, [rows, ...]; otherwise any number of leading axes."""

    def apply(
        self, stored: dict[str, tf.Tensor], draws: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Return the tensors before `scale`, and for each image feature which rows could be decoded: bool [rows]."""
        tensors, decoded = {}, {}
        for name, values in stored.items():
            if name not in self._features:
                tensors[name] = values  # from a user's parse function, which also decodes and scales
                continue
            feature, augmentations, offset = self._features[name], self._augmentations[name], 0
            if feature.decode == "image":
                changes, count = _changes_on_decoding(augmentations)
                values, decoded[name] = decode_images(feature, values, draws, changes)
                offset, augmentations = sum(a.draws for a in augmentations[:count]), augmentations[count:]
            for augmentation in augmentations:
                values = augmentation.apply(values, draws[:, offset : offset + augmentation.draws])
                offset += augmentation.draws
            tensors[name] = values
        return tensors, decoded

    def scale(self, tensors: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return what the model gets: value * scale + offset, in the features' dtypes. Any number of leading axes."""
        return {
            name: cast_and_scale(self._features[name], values) if name in self._features else values
            for name, values in tensors.items()
        }


def _images(features: dict[str, Feature], names: Sequence[str]) -> dict[str, Feature]:
    named = {name: features[name] for name in names if name in features}
    return {name: feature for name, feature in named.items() if len(feature.shape) == 3 and not feature.max_length}


def _check_aligned(
    images: dict[str, Feature], augmentations: dict[str, list[Augmentation]], targets: Sequence[str]
) -> None:
    """Raise UserError if images differ in a way that makes the same draws change them differently."""
    for name in filter(images.__contains__, targets):
        first = next(iter(images))  # an input
        image, target = images[first], images[name]
        if any(augmentation.is_users for augmentation in augmentations[name]):
            raise UserError(
                f"data.augment: target {name} is an image and would have to change with the inputs; "
                "a function of your own is for inputs only. Use ours, or make the target no image."
            )
        if augmentations[name] and image.shape[:2] != target.shape[:2]:
            raise UserError(
                f"data.augment: target {name} changes with input {first} and must have its height and width, "
                f"{list(image.shape[:2])}; received {list(target.shape[:2])}."
            )
        if augmentations[name] and augmentations[name][0].box and image.decode != target.decode:
            raise UserError(
                f"data.augment: the first in the list cuts target {name} as it cuts input {first}; "
                f"both must be decode: image, or neither. Received {target.decode} and {image.decode}."
            )


def cast_and_scale(feature: Feature, values: tf.Tensor) -> tf.Tensor:
    """Return value * scale + offset in the feature's dtype, or the values cast only."""
    if feature.scale is not None or feature.offset is not None:
        dtype = tf.as_dtype(feature.tensor_dtype)
        values = tf.cast(values, dtype if dtype.is_floating else tf.float32)
        if feature.scale is not None:
            values *= tf.cast(feature.scale, values.dtype)
        if feature.offset is not None:
            values += tf.cast(feature.offset, values.dtype)
    return values if values.dtype == feature.tensor_dtype else tf.cast(values, feature.tensor_dtype)


def _changes_on_decoding(augmentations: Sequence[Augmentation]) -> tuple[ImageChanges, int]:
    """Return the first augmentations that can be applied to single images while they are decoded, and their number."""
    box = augmentations[0].box if augmentations else None
    after, number, offset = list[ChangeImage](), 0, 0
    for augmentation in augmentations:
        if augmentation.of_one is not None:
            after.append(_slice_draws(augmentation.of_one, offset, offset + augmentation.draws))
        elif number or box is None:
            break
        number, offset = number + 1, offset + augmentation.draws
    return ImageChanges(box, after), number


def _slice_draws(change: ChangeImage, first: int, last: int) -> ChangeImage:
    return lambda image, draws: change(image, draws[first:last])


Preprocess = Callable[[Tensors], Tensors]
"""Inputs [rows, …] → inputs [rows, …]."""


def load_preprocess(name: str | None) -> Preprocess | None:
    """Load `package.module:function`, or the preprocessor of a keras_hub preset's folder. Raises UserError."""
    if name is None:
        return None
    if ":" in name:
        return load_function(name, "data.preprocess")
    from horovod_train.presets import load_preprocessor  # keras_hub takes seconds

    return load_preprocessor(name)


def apply_preprocess(preprocess: Preprocess, name: str, inputs: Tensors, rows: int) -> Tensors:
    """Return the results for these inputs, with a known number of rows. Raises UserError if the number differs."""
    input_types = tf.nest.map_structure(lambda tensor: f"{tensor.dtype.name}{tensor.shape}", inputs)
    try:
        results = preprocess(inputs)
        leaves = list(results.values()) if isinstance(results, dict) else [results]
        if not leaves or not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
            raise ValueError(f"expected a tensor, or tensors by name; received {results}")
        return tf.nest.map_structure(lambda leaf: tf.ensure_shape(leaf, [rows, *leaf.shape[1:]]), results)
    except (ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
        text = one_line(error)[:300]
        raise UserError(f"data.preprocess: {name}, for inputs of {input_types}: {text}{raised_at(error)}") from error
