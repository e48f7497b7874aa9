"""Decodes JPEG and PNG files to image tensors of one size, one step per call; a bad file does not fail its step.

Follows a Feature with `decode: image`. Does not augment, except that a random crop may replace resizing.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from horovod_train.data.features import Feature

Resize = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""(image uint8 [h, w, c], draws float32 [k]) → numbers [H, W, c], in 0 … 255."""


def decode_images(
    feature: Feature, files: tf.Tensor, draws: tf.Tensor, resize: Resize | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return images uint8 [rows, height, width, channels] from string [rows], and bool [rows]: False if unusable.

    `resize` replaces the feature's own resizing; row i gets `draws[i]`.
    """
    rows = tf.data.Dataset.from_tensor_slices((files, draws))
    count = files.shape[0]
    zeros = tf.data.Dataset.from_tensors((tf.zeros(feature.shape, tf.uint8), tf.constant(False)))

    def decode(file: tf.Tensor, draw: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return decode_image(feature, file, draw, resize), tf.constant(True)

    def decode_or_blank(file: tf.Tensor, draw: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        one = tf.data.Dataset.from_tensors((file, draw)).map(decode).ignore_errors()
        return one.concatenate(zeros).take(1).get_single_element()

    # Checking each record for errors costs as much as decoding a small image. So the step is first decoded as a whole.
    # If that fails and gives no element, it is decoded record by record.
    whole = rows.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(count, drop_remainder=True).ignore_errors()
    singly = rows.map(decode_or_blank, num_parallel_calls=tf.data.AUTOTUNE).batch(count, drop_remainder=True)
    images, decoded = whole.concatenate(singly).take(1).get_single_element()
    if feature.classes:
        decoded &= tf.reduce_max(tf.cast(images, tf.int32), [1, 2, 3]) < feature.classes
    return images, decoded


def decode_image(feature: Feature, file: tf.Tensor, draw: tf.Tensor, resize: Resize | None) -> tf.Tensor:
    """Return one image, uint8 of the feature's shape. Raises InvalidArgumentError for a file too small or no image."""
    image = tf.io.decode_image(file, channels=feature.shape[2], expand_animations=False)
    image.set_shape((None, None, feature.shape[2]))
    if resize is not None:
        image = resize(image, draw)
    elif feature.resize != "none":
        part = _centre(image, feature) if feature.resize == "crop" else image
        image = tf.image.resize(part, feature.shape[:2], feature.interpolation, antialias=True)
    if image.dtype != tf.uint8:
        image = tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
    return tf.ensure_shape(image, feature.shape)


def image_problem(feature: Feature, file: bytes) -> str | None:
    """Return what is wrong with an image; None if nothing is."""
    try:
        image = tf.io.decode_image(file, channels=feature.shape[2], expand_animations=False)
    except tf.errors.InvalidArgumentError as error:
        reason = str(error.message).split(" [Op:")[0].rsplit("}} ", 1)[-1]
        return f"expected a JPEG or PNG image; {len(file)} bytes that cannot be decoded: {reason.strip(' .')}"
    if feature.classes and int(tf.reduce_max(image)) >= feature.classes:
        return f"expected values from 0 to {feature.classes - 1}; the image holds {int(tf.reduce_max(image))}"
    if feature.resize != "none" or tuple(image.shape) == feature.shape:
        return None
    return f"expected an image of {list(feature.shape)}; the record holds {list(image.shape)}, and resize is none"


def _centre(image: tf.Tensor, feature: Feature) -> tf.Tensor:
    """Return the largest centred part with the aspect of the feature's shape, times `crop_fraction`."""
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))
    aspect = feature.shape[1] / feature.shape[0]
    part_height = tf.minimum(height, width / aspect) * feature.crop_fraction
    size = tf.cast(tf.maximum(tf.round(tf.stack([part_height, part_height * aspect])), 1), tf.int32)
    top, left = tf.unstack((tf.shape(image)[:2] - size) // 2)
    return image[top : top + size[0], left : left + size[1]]
