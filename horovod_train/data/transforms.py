"""Turns stored values into what the model gets: decodes, augments, casts and scales; applies `data.preprocess`.

Runs in TensorFlow's graph, for one or many steps per call: images and `data.preprocess`, which is a user's function or
a preset's preprocessor, in tf.data on the host; casts and scales on the rank's device. Does not read or parse; the
caller passes random numbers.

Of a JPEG only the part that is used is decoded: the box is chosen first, from the size in the file's header. A bad file
does not fail the other rows of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_train.config.registry import load_function, load_preset, raised_at
from horovod_train.config.settings import Spec
from horovod_train.data.augment import Augmentation, ChangeImage, ChooseBox, build_augmentations
from horovod_train.data.batch_source import Tensors
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError, kind_of, one_line

_MISTAKES = (ValueError, TypeError, LookupError, AttributeError, NameError, tf.errors.InvalidArgumentError)
"""What mistakes in a user's function raise."""
_RATIOS = (1, 2, 4, 8)
"""Factors by which libjpeg can reduce an image while it decodes, at a fraction of the cost."""
_SIDE = 4
"""Pixels to decode on each side of a box. libjpeg interpolates colours between neighbours, but not those beyond a box,
and not at all where less than this is decoded. Cutting them off takes a tenth of the time, so random boxes, which stand
for no pixels in particular, go without."""
_CHANNELS = (1, 3, 4)
"""How many channels images have."""
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_PNG_HEAD = 26
"""Bytes up to a PNG's depth in bits and its kind of colours, which come last."""
_GREY, _PALETTE, _GREY_ALPHA = 0, 3, 4
"""Kinds of colours of a PNG."""
_DCT = {"fast": "INTEGER_FAST", "accurate": "INTEGER_ACCURATE"}
_Choose = Callable[[tf.Tensor], tf.Tensor]
Preprocess = Callable[[Tensors], Tensors]
"""Inputs [rows, …] → inputs [rows, …]."""


class ImageChanges(NamedTuple):
    """What to do with one image while it is decoded."""

    box: ChooseBox | None = None
    """Replaces the feature's own resizing by a cut that is resized to the feature's shape."""
    after: Sequence[ChangeImage] = ()
    """Applied to the image of the feature's shape, in order."""


def decode_images(
    feature: Feature, files: tf.Tensor, draws: tf.Tensor, changes: ImageChanges
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return images uint8 [rows, height, width, channels] from string [rows], and bool [rows]: False if unusable.

    Row i is changed with the numbers `draws[i]`.
    """
    count = files.shape[0]
    row = tf.function(lambda file, draw: decode_image(feature, file, draw, changes), autograph=False)
    decode = row.get_concrete_function(tf.TensorSpec((), tf.string), tf.TensorSpec(draws.shape[1:], draws.dtype))
    blank = tf.data.Dataset.from_tensors((tf.zeros(feature.shape, tf.uint8), tf.constant(False)))

    def decode_all(files: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # A parallel loop that writes all rows to one tensor: a fifth faster than a pipeline for each step.
        (images,) = tf.raw_ops.MapDefun(
            arguments=[files, draws],
            captured_inputs=decode.captured_inputs,
            output_types=[tf.uint8],
            output_shapes=[feature.shape],
            f=decode,
        )
        return tf.ensure_shape(images, (count, *feature.shape)), tf.ones(count, tf.bool)

    def decode_or_blank(file: tf.Tensor, draw: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        single = tf.data.Dataset.from_tensors((file, draw)).map(lambda *row: (decode(*row), tf.constant(True)))
        return single.ignore_errors().concatenate(blank).take(1).get_single_element()

    # Checking each record for errors costs as much as decoding a small image. So all rows of the step are first decoded
    # together. If that fails and gives no element, they are decoded one by one.
    together = tf.data.Dataset.from_tensors((files, draws)).map(decode_all).ignore_errors()
    rows = tf.data.Dataset.from_tensor_slices((files, draws))
    row_by_row = rows.map(decode_or_blank, num_parallel_calls=tf.data.AUTOTUNE).batch(count, drop_remainder=True)
    images, decoded = together.concatenate(row_by_row).take(1).get_single_element()
    if feature.classes:
        decoded &= tf.reduce_max(tf.cast(images, tf.int32), [1, 2, 3]) < feature.classes
    return images, decoded


def decode_image(feature: Feature, file: tf.Tensor, draw: tf.Tensor, changes: ImageChanges) -> tf.Tensor:
    """Return one image, uint8 of the feature's shape. Raises InvalidArgumentError for a file too small or no image."""
    if feature.classes:
        file = _refused_if(tf.io.is_jpeg(file), file, "a JPEG, which does not keep numbers of classes")
    random_box = changes.box
    choose = _box_of_resize(feature) if random_box is None else lambda size: random_box(size, draw)
    image = _decode(feature, file, choose, side=0 if random_box else _SIDE)
    image.set_shape((None, None, feature.shape[2]))
    if choose is not None:
        # Antialiasing costs more than decoding; random boxes go without, as is usual, and gain from the ratio only.
        image = tf.image.resize(image, feature.shape[:2], feature.interpolation, antialias=random_box is None)
    if image.dtype != tf.uint8:
        image = tf.cast(tf.round(image), tf.uint8)  # interpolated between values from 0 to 255
    image = tf.ensure_shape(image, feature.shape)
    for change in changes.after:
        image = change(image, draw)
    return tf.ensure_shape(image, feature.shape)


def image_problem(feature: Feature, file: bytes) -> str | None:
    """Return what is wrong with an image; None if nothing is."""
    if file.startswith(_PNG) and len(file) >= _PNG_HEAD and _changes_numbers(feature, *file[_PNG_HEAD - 2 : _PNG_HEAD]):
        depth = file[_PNG_HEAD - 2]
        what = f"of depth {depth}, whose numbers would be scaled up to 255"
        if depth == 16:
            what = "of 16 bits, of which 8 would be read"
        if file[_PNG_HEAD - 1] == _PALETTE:
            what = "with a palette, whose colours would be read"
        return f"a PNG {what}; expected numbers stored as 8 bits of grey"
    if feature.classes and file.startswith(_JPEG):
        return "a JPEG, which does not keep numbers of classes; store masks as PNG"
    try:
        image = _decode_whole(feature, file)
    except tf.errors.InvalidArgumentError as error:
        reason = str(error.message).split(" [Op:")[0].rsplit("}} ", 1)[-1]
        expected = "expected an image as JPEG, PNG, WebP, BMP or GIF"
        return f"{expected}; {len(file)} bytes that cannot be decoded: {reason.strip(' .')}"
    if feature.classes and int(tf.reduce_max(image)) >= feature.classes:
        return f"expected values from 0 to {feature.classes - 1}; the image holds {int(tf.reduce_max(image))}"
    if feature.resize != "none" or tuple(image.shape) == feature.shape:
        return None
    return f"expected an image of {list(feature.shape)}; the record holds {list(image.shape)}, and resize is none"


def _box_of_resize(feature: Feature) -> _Choose | None:
    """Return what chooses the part that `resize` keeps; None if the image is not resized."""
    if feature.resize == "crop":
        return partial(_centre_box, feature)
    return (lambda size: tf.concat([[0, 0], size], 0)) if feature.resize == "stretch" else None


def _centre_box(feature: Feature, size: tf.Tensor) -> tf.Tensor:
    """Return the largest centred box with the aspect of the feature's shape, times `crop_fraction`."""
    height, width = tf.unstack(tf.cast(size, tf.float32))
    aspect = feature.shape[1] / feature.shape[0]
    part_height = tf.minimum(height, width / aspect) * feature.crop_fraction
    extent = tf.cast(tf.maximum(tf.round(tf.stack([part_height, part_height * aspect])), 1), tf.int32)
    return tf.concat([(size - extent) // 2, extent], 0)


def _decode(feature: Feature, file: tf.Tensor, choose: _Choose | None, side: int) -> tf.Tensor:
    """Return the chosen part of an image, or a whole one; of a JPEG perhaps reduced, see _reduction. side: as _SIDE."""
    if choose is None and feature.dct_method == "fast":
        return _decode_whole(feature, file)

    is_jpeg = tf.io.is_jpeg(file)
    # A header in any case, because a branch for each record costs more than copying the file.
    size = tf.image.extract_jpeg_shape(tf.where(is_jpeg, file, _tiny_jpeg()))[:2]
    box = tf.concat([[0, 0], size], 0) if choose is None else choose(size)
    decode = partial(_decode_with_sides, width=size[1], side=side) if side else _decode_part

    def decode_other() -> tf.Tensor:
        image = _decode_whole(feature, file)
        return image if choose is None else _cut(image, choose(tf.shape(image)[:2]))

    mixes_pixels = choose is None or feature.interpolation == "nearest"
    ratios = _RATIOS[:1] if mixes_pixels else _RATIOS
    branches = [*(partial(decode, feature, file, box, ratio) for ratio in ratios), decode_other]
    branch = 0 if mixes_pixels else _reduction(feature, box)
    return tf.switch_case(tf.where(is_jpeg, branch, len(ratios)), branches)


def _tiny_jpeg() -> tf.Tensor:
    with tf.init_scope():  # once, when the function is traced
        file = tf.io.encode_jpeg(tf.zeros((1, 1, 3), tf.uint8)).numpy()
    return tf.constant(file)


def _reduction(feature: Feature, box: tf.Tensor) -> tf.Tensor:
    """Return the index in _RATIOS, int32, of the largest ratio that leaves the box at least the feature's shape."""
    times = tf.reduce_min(box[2:] // tf.constant(feature.shape[:2]))
    return tf.reduce_sum(tf.cast(times >= tf.constant(_RATIOS[1:]), tf.int32))


def _decode_part(feature: Feature, file: tf.Tensor, box: tf.Tensor, ratio: int) -> tf.Tensor:
    """Return the box of a JPEG, both reduced by `ratio`; colours at its left and right border may be a little off."""
    return _decode_jpeg(feature, file, box // ratio, ratio)


def _decode_with_sides(
    feature: Feature, file: tf.Tensor, box: tf.Tensor, ratio: int, width: tf.Tensor, side: int
) -> tf.Tensor:
    """Return the same pixels of a JPEG of this width as if all of it were decoded."""
    top, left, rows, columns = tf.unstack(box // ratio)
    first, last = tf.maximum(left - side, 0), tf.minimum(left + columns + side, -(-width // ratio))
    image = _decode_jpeg(feature, file, tf.stack([top, first, rows, last - first]), ratio)
    return tf.slice(image, [0, left - first, 0], [-1, columns, -1])


def _decode_jpeg(feature: Feature, file: tf.Tensor, box: tf.Tensor, ratio: int) -> tf.Tensor:
    return tf.image.decode_and_crop_jpeg(
        file, box, channels=feature.shape[2], ratio=ratio, dct_method=_DCT[feature.dct_method]
    )


def _changes_numbers(feature: Feature, depth: Any, colours: Any) -> Any:
    """Return whether TensorFlow would read other numbers from a PNG than it holds, where they are no colours.

    Of 16 bits it keeps 8, which makes 0 of each class in a mask; fewer bits it scales to 255, and for a palette it
    gives colours. depth, colours: as in the file's head, bytes or tensors.
    """
    are_classes = bool(feature.classes) or (feature.interpolation == "nearest" and feature.shape[2] == 1)
    is_deep = (depth == 16) & ((colours == _GREY) | (colours == _GREY_ALPHA) | are_classes)
    return is_deep | (((depth < 8) | (colours == _PALETTE)) & are_classes)


def _with_its_numbers(feature: Feature, file: tf.Tensor) -> tf.Tensor:
    """In a graph: return the file; fail for one whose numbers would change."""
    # Without a branch, which costs more for each record than this.
    padded = tf.strings.substr(tf.strings.join([tf.strings.substr(file, 0, _PNG_HEAD), "\0" * _PNG_HEAD]), 0, _PNG_HEAD)
    head = tf.io.decode_raw(padded, tf.uint8)
    is_png = tf.reduce_all(head[: len(_PNG)] == tf.constant(list(_PNG), tf.uint8))
    is_changed = is_png & _changes_numbers(feature, head[_PNG_HEAD - 2], head[_PNG_HEAD - 1])
    return _refused_if(is_changed, file, "a PNG that would be read with other numbers")


def _refused_if(condition: tf.Tensor, file: tf.Tensor, why: str) -> tf.Tensor:
    """In a graph: return the file, or fail; image_problem then tells the user."""
    with tf.control_dependencies([tf.debugging.Assert(~condition, [why])]):
        return tf.identity(file)


def _decode_whole(feature: Feature, file: tf.Tensor | bytes) -> tf.Tensor:
    if isinstance(file, tf.Tensor):
        file = _with_its_numbers(feature, file)
    image = tf.io.decode_image(file, channels=feature.shape[2], expand_animations=False)
    image.set_shape((None, None, feature.shape[2]))
    return image


def _cut(image: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
    top, left, height, width = tf.unstack(box)
    return tf.slice(image, [top, left, 0], [height, width, -1])  # fails where the box is not inside


class Transforms:
    """Turns the stored values of some features into tensors."""

    def __init__(self, features: dict[str, Feature], schema: Schema, augment: Sequence[Spec]) -> None:
        """Apply `augment` to all inputs and targets that are images, [height, width, channels], in the same way.

        Raises UserError if inputs and targets would not stay aligned.
        """

        def images_of(names: Sequence[str]) -> dict[str, Feature]:
            named = {name: features[name] for name in names if name in features}
            return {name: f for name, f in named.items() if len(f.shape) == 3 and not f.max_length}

        images = images_of(schema.inputs)
        if augment and not images:
            raise UserError(
                "data.augment: is for inputs [height, width, channels]; "
                f"there is none among {', '.join(schema.inputs)}."
            )
        images |= images_of(schema.targets)
        self._features = features
        self._augmentations = {
            name: build_augmentations(
                augment if name in images else (),
                feature.shape,
                feature.interpolation,
                feature.stored_dtype if name in schema.inputs else "",  # targets take none of the user's
            )
            for name, feature in features.items()
        }
        others = {name: feature for name, feature in features.items() if name not in images}
        if any(not change.is_users for name in images for change in self._augmentations[name]):  # ours move pixels
            _check_image_shapes(images, others)
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


def _check_image_shapes(images: dict[str, Feature], others: dict[str, Feature]) -> None:
    """Raise UserError for what is an image or a mask, but not [height, width, channels]: augmentation would miss it."""
    for name, image in images.items():
        if image.shape[0] in _CHANNELS and min(image.shape[1:]) > max(_CHANNELS):
            raise UserError(
                f"data.augment: expected {name} as [height, width, channels]; received {list(image.shape)}, which has "
                "the channels first. Store it with the channels last."
            )
        for other, feature in others.items():
            if feature.shape == image.shape[:2] and not feature.max_length:
                raise UserError(
                    f"data.augment: {other} has the height and width of {name}, {list(feature.shape)}, and would not "
                    f"change with it. Store it as {[*feature.shape, 1]}."
                )


def _check_aligned(
    images: dict[str, Feature], augmentations: dict[str, list[Augmentation]], targets: Sequence[str]
) -> None:
    """Raise UserError if images differ in a way that makes the same draws change them differently."""
    for name in targets:
        if name not in images or not (changes := augmentations[name]):
            continue
        first = next(iter(images))  # an input
        image, target = images[first], images[name]
        if any(change.is_users for change in changes):
            raise UserError(
                f"data.augment: target {name} is an image and would have to change with the inputs; "
                "a function of your own is for inputs only. Use ours, or make the target no image."
            )
        if image.shape[:2] != target.shape[:2]:
            raise UserError(
                f"data.augment: target {name} changes with input {first} and must have its height and width, "
                f"{list(image.shape[:2])}; received {list(target.shape[:2])}."
            )
        if changes[0].box and target.classes and target.interpolation != "nearest":
            raise UserError(
                f"data.augment: the first in the list resizes target {name}, and would mix numbers of classes; give "
                f"data.features.{name} interpolation: nearest."
            )
        if changes[0].box and image.decode != target.decode:
            raise UserError(
                f"data.augment: the first in the list cuts target {name} as it cuts input {first}; "
                f"both must be decode: image, or neither. Received {target.decode} and {image.decode}."
            )


def cast_and_scale(feature: Feature, values: tf.Tensor) -> tf.Tensor:
    """Return value * scale + offset in the feature's dtype, or the values cast only."""
    if feature.scale is not None or feature.offset is not None:
        dtype = tf.as_dtype(feature.tensor_dtype)
        if not dtype.is_floating:  # float32 would make one number of many
            only_adds = values.dtype.is_integer and feature.scale is None and float(feature.offset or 0).is_integer()
            dtype = tf.int64 if only_adds else tf.float64
        values, number = tf.cast(values, dtype), dtype.as_numpy_dtype  # tf.cast would make float32 of a Python number
        if feature.scale is not None:
            values *= number(feature.scale)
        if feature.offset is not None:
            values += number(feature.offset)
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


def load_preprocess(name: str | None) -> Preprocess | None:
    """Load `package.module:function`, or the preprocessor of a keras_hub preset's folder. Raises UserError."""
    if name is None:
        return None
    if ":" in name:
        return load_function(name, "data.preprocess")
    return load_preset(name, "preprocessor.json", "data.preprocess")  # its call makes what the model gets


def apply_preprocess(preprocess: Preprocess, name: str, inputs: Tensors, rows: int) -> Tensors:
    """Return the results for these inputs, with a known number of rows. Raises UserError if the number differs."""
    input_types = tf.nest.map_structure(lambda tensor: f"{tensor.dtype.name}{tensor.shape}", inputs)
    try:
        results = preprocess(inputs)
        leaves = list(results.values()) if isinstance(results, dict) else [results]
        if not leaves or not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
            raise ValueError(f"expected a tensor, or tensors by name; received {results}")
        return tf.nest.map_structure(lambda leaf: tf.ensure_shape(leaf, [rows, *leaf.shape[1:]]), results)
    except _MISTAKES as error:
        kind = "" if isinstance(error, ValueError | tf.errors.InvalidArgumentError) else f"{kind_of(error)}: "
        text = f"{kind}{one_line(error)[:300]}{raised_at(error)}"
        raise UserError(f"data.preprocess: {name}, for inputs of {input_types}: {text}") from error
