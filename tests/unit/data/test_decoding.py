"""Of a JPEG only the part that is used is decoded; pixels are those of the whole image, cut afterwards."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import PROJECT, run_process
from made_records import as_numpy, batches, config, example, ids, pipeline, write_file
from PIL import Image

from horovod_train.config.settings import Spec
from horovod_train.data import transforms
from horovod_train.data.augment import Augmentation, random_resized_crop
from horovod_train.data.schema import Feature, parse_feature
from horovod_train.data.transforms import ImageChanges, decode_image
from horovod_train.errors import UserError

HEIGHT, WIDTH = 93, 130
KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {"quality": 85},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0, "quality": 95},
    "progressive": {"progressive": True},
    "with restarts": {"restart_marker_rows": 1},
}
AUGMENT = (Spec("random_resized_crop"), Spec("flip"))

Decode = Callable[[bytes, tuple[int, int, int, int]], np.ndarray]


def picture(height: int = HEIGHT, width: int = WIDTH, mode: str = "RGB", seed: int = 0, patch: int = 8) -> Image.Image:
    """An image of patches and noise, so that a pixel in another place is another pixel."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(1, height // patch), max(1, width // patch), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height))).astype(int)
    return Image.fromarray(np.clip(smooth + rng.integers(-20, 20, smooth.shape), 0, 255).astype(np.uint8)).convert(mode)


def file_of(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def feature(size: tuple[int, int] = (24, 30), channels: int = 3, **more: Any) -> Feature:
    return parse_feature(
        {"type": "bytes", "decode": "image", "shape": [*size, channels], "resize": "crop", **more}, "x"
    )


def decoder(wanted: Feature, *, drawn: bool = False) -> Decode:
    """Decodes a given box, in place of the feature's own or, if `drawn`, as a random one."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((), tf.string), tf.TensorSpec(4, tf.int32)])
    def decode(file: tf.Tensor, box: tf.Tensor) -> tf.Tensor:
        if drawn:
            return decode_image(wanted, file, tf.zeros(0), ImageChanges(lambda size, draws: box))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transforms, "_centre_box", lambda feature, size: box)
            return decode_image(wanted, file, tf.zeros(0), ImageChanges())

    return lambda file, box: decode(file, box).numpy()


def resized(image: np.ndarray | tf.Tensor, wanted: Feature, *, antialias: bool = True) -> np.ndarray:
    made = tf.image.resize(image, wanted.shape[:2], wanted.interpolation, antialias=antialias)
    return np.rint(made.numpy()).astype(np.uint8)


def whole(file: bytes, channels: int = 3) -> np.ndarray:
    pixels: np.ndarray = tf.io.decode_image(file, channels, expand_animations=False).numpy()
    return pixels


def cut(image: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    top, left, height, width = box
    return image[top : top + height, left : left + width]


def boxes(number: int, height: int = HEIGHT, width: int = WIDTH) -> list[tuple[int, int, int, int]]:
    """Boxes of any size and place, among them the whole image, single pixels, and those at and beside every side."""
    rng = np.random.default_rng(1)
    made = [(0, 0, height, width), (0, 0, 1, 1), (height - 1, width - 1, 1, 1), (16, 16, 16, 16), (0, 16, height, 1)]
    for _ in range(number):
        rows, columns = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        made.append((int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1)), rows, columns))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_of_a_jpeg_is_that_part_of_the_whole_image(kind: str, channels: int) -> None:
    wanted, file = feature((200, 300), channels), file_of(picture(), **KINDS[kind])  # larger: so never reduced
    decode, image = decoder(wanted), whole(file, channels)
    for box in boxes(60):
        assert np.array_equal(decode(file, box), resized(cut(image, box), wanted)), box


def test_a_random_part_is_that_of_the_whole_image_but_for_colours_at_its_sides() -> None:
    """Also why more is decoded on each side of a feature's own part."""
    box = (10, 16, 40, 40)
    for kind, options in KINDS.items():
        file = file_of(picture(), **options)
        made = decoder(feature((40, 40)), drawn=True)(file, box)
        differs = (made != cut(whole(file), box)).any((0, 2))
        assert not differs[1:-1].any()
        assert differs[[0, -1]].all() == (kind != "4:4:4")
        assert np.abs(made.astype(int) - cut(whole(file), box)).mean((1, 2)).max() < 3


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_jpegs_become_rgb_as_whole_images_do(mode: str) -> None:
    wanted, file = feature((200, 300)), file_of(picture(mode=mode))
    decode, image = decoder(wanted), whole(file)
    for box in boxes(20):
        assert np.array_equal(decode(file, box), resized(cut(image, box), wanted)), box


@pytest.mark.parametrize("resize", [{"resize": "crop", "crop_fraction": 0.875}, {"resize": "stretch"}])
def test_the_own_part_of_a_feature_is_that_of_the_whole_image(resize: dict[str, Any]) -> None:
    wanted, file = feature((60, 66), **resize), file_of(picture())
    made = tf.function(lambda: decode_image(wanted, tf.constant(file), tf.zeros(0), ImageChanges()))()
    side = round(HEIGHT * 0.875), round(HEIGHT * 0.875 * 66 / 60)
    box = ((HEIGHT - side[0]) // 2, (WIDTH - side[1]) // 2, *side) if "crop_fraction" in resize else boxes(0)[0]
    assert np.array_equal(made, resized(cut(whole(file), box), wanted))


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_much_larger_than_wanted_is_reduced_while_it_is_decoded(kind: str, ratio: int) -> None:
    wanted, file = feature((11, 16)), file_of(picture(), **KINDS[kind])
    reduced = tf.io.decode_jpeg(file, 3, ratio=ratio, dct_method="INTEGER_FAST").numpy()
    decode = decoder(wanted)
    for top, left in ((0, 0), (4, 2), (5, 1)):
        box = (top, left, 11 * ratio, 16 * ratio)
        smaller = (top // ratio, left // ratio, 11, 16)
        assert np.array_equal(decode(file, box), cut(reduced, smaller)), box
        one_less = (top, left, 11 * ratio - 1, 16 * ratio)
        assert not np.array_equal(decode(file, one_less), resized(cut(reduced, smaller), wanted))


def test_a_reduced_image_shows_the_same() -> None:
    wanted, file = feature((11, 16)), file_of(picture(patch=40))
    box = (3, 2, 88, 128)
    exact = tf.image.resize(cut(whole(file), box), (11, 16), antialias=True).numpy()
    for drawn in (False, True):
        decode = decoder(wanted, drawn=drawn)
        assert np.abs(decode(file, box) - exact).mean() < 8  # moved by less than a pixel
        assert np.abs(decode(file, (3, 2, 11, 16)) - exact).mean() > 20


def test_pixels_of_classes_are_never_reduced() -> None:
    wanted, file = feature((11, 16), interpolation="nearest"), file_of(picture())
    box = (3, 2, 88, 128)
    assert np.array_equal(decoder(wanted)(file, box), resized(cut(whole(file), box), wanted))


def test_dct_method_decides_the_arithmetic() -> None:
    file, box = file_of(picture()), (0, 0, HEIGHT, WIDTH)
    fast, accurate = (decoder(feature((HEIGHT, WIDTH), dct_method=name))(file, box) for name in ("fast", "accurate"))
    assert np.array_equal(fast, whole(file))
    assert np.array_equal(accurate, tf.io.decode_jpeg(file, 3, dct_method="INTEGER_ACCURATE").numpy())
    difference = np.abs(fast.astype(int) - accurate)
    assert 0 < difference.max() < 8
    unresized = feature((HEIGHT, WIDTH), resize="none", dct_method="accurate")
    made = tf.function(lambda: decode_image(unresized, tf.constant(file), tf.zeros(0), ImageChanges()))()
    assert np.array_equal(made, accurate)
    with pytest.raises(UserError, match="dct_method: accurate has no effect without decode: image"):
        parse_feature({"type": "int64", "dct_method": "accurate"}, "x")


def test_a_cut_jpeg_fails_or_is_right() -> None:
    wanted, file = feature((200, 300)), file_of(picture())
    decode, image, outcomes = decoder(wanted), whole(file), set()
    for length in (*range(0, len(file), 97), len(file) - 2, len(file) - 1):
        for box in boxes(4):
            try:
                made = decode(file[:length], box)
            except tf.errors.InvalidArgumentError:
                outcomes.add("failed")
            else:
                outcomes.add("right")
                assert np.array_equal(made, resized(cut(image, box), wanted)), (length, box)
    assert outcomes == {"failed", "right"}


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (5, 7), (375, 500), (4000, 3)])
def test_a_random_box_is_inside_the_image(size: tuple[int, int]) -> None:
    made = random_resized_crop(area=(0.01, 1.0))
    crop: Augmentation = made((4, 4, 3), "bilinear")
    assert crop.box is not None
    last = np.float32(1) - np.float32(2**-24)
    corners = np.random.default_rng(0).choice([0, 0.3, float(last)], (100, crop.draws)).astype(np.float32)
    found = np.array([crop.box(tf.constant(size), tf.constant(draws)).numpy() for draws in corners])
    assert (found[:, :2] >= 0).all()
    assert (found[:, 2:] >= 1).all()
    assert (found[:, :2] + found[:, 2:] <= size).all()
    assert {0} < set(found[:, 0]) or min(size) < 5  # of a narrow image hardly a part fits: its centre


def drawn_box(size: tuple[int, int], areas: Any, aspects: Any, place: float = 0.9, **options: Any) -> list[int]:
    """The box for draws given as one number, or as one for each of the ten tries."""
    crop: Augmentation = random_resized_crop(**options)((4, 4, 3), "bilinear")
    assert crop.box is not None
    draws = np.concatenate([np.broadcast_to(numbers, 10) for numbers in (areas, aspects)] + [np.full(2, place)])
    box: list[int] = crop.box(tf.constant(size), tf.constant(draws, tf.float32)).numpy().tolist()
    return box


def test_the_first_of_ten_random_parts_that_fits_is_taken() -> None:
    fits, too_high, too_wide = (0.25, 0.5), (0.99, 0.0), (0.99, 0.999)  # area 0.31 and aspect 1, and nearly all of it
    for at in (0, 1, 9):
        tries = np.array([too_high, too_wide] * 5)
        tries[at] = fits
        top, left, height, width = drawn_box((300, 300), *tries.T)
        assert height == width == round(300 * (0.08 + 0.92 * 0.25) ** 0.5)
        assert top == left == int(0.9 * (300 - height + 1))
    two_fit = np.array([(0.1, 0.5), *[fits] * 9])
    assert drawn_box((300, 300), *two_fit.T)[2] == round(300 * (0.08 + 0.92 * 0.1) ** 0.5)


def test_if_no_random_part_fits_it_is_the_largest_of_an_allowed_aspect() -> None:
    assert drawn_box((300, 400), 0.99, 0.0) == [0, 0, 300, 400]
    assert drawn_box((100, 1001), 0.99, 0.5) == [0, 434, 100, 133]
    assert drawn_box((1000, 90), 0.99, 0.5) == [440, 0, 120, 90]
    assert drawn_box((100, 1001), 0.5, 0.5, ratio=(2, 2)) == [0, 401, 100, 200]


def test_random_parts_are_of_the_areas_and_aspects_that_were_asked_for() -> None:
    """Parts that were cut to the image would be narrower, and those of a wide image lower than allowed."""
    crop: Augmentation = random_resized_crop()((4, 4, 3), "bilinear")
    assert crop.box is not None
    draws = np.random.default_rng(0).random((400, crop.draws), np.float32)
    box = partial(crop.box, tf.constant((375, 500)))
    choose = tf.function(lambda rows: tf.map_fn(box, rows, fn_output_signature=tf.int32))
    _, _, height, width = choose(draws).numpy().T
    assert (width / height).min() > 0.74
    assert (width / height).max() < 1.35
    assert 0.079 < (height * width / (375 * 500)).min() < 0.12
    assert 0.9 < (height * width / (375 * 500)).max() <= 1


def test_a_box_beyond_the_image_fails() -> None:
    file = file_of(picture())
    for box in ((0, 0, HEIGHT + 1, WIDTH), (60, 0, HEIGHT - 59, WIDTH), (0, 0, HEIGHT, WIDTH + 2), (-1, 0, 20, 20)):
        for kind in (file, file_of(picture(), "PNG")):
            for drawn in (False, True):
                with pytest.raises(tf.errors.InvalidArgumentError):
                    decoder(feature((200, 300)), drawn=drawn)(kind, box)


def images_of(folder: Path, files: list[bytes], **values: Any) -> Any:
    write_file(folder / "train/a.tfrecord", [example(image=file) for file in files])
    features = {"image": {"type": "bytes", "decode": "image", "shape": [8, 10, 3], "resize": "crop"}}
    return config(folder / "train", features=features, inputs=("image",), **values)


def by_number(made: list[Any]) -> dict[int, np.ndarray]:
    return {int(number): image for batch in made for number, image in zip(batch.ids, batch.inputs, strict=True)}


def test_a_png_among_jpegs_is_cut_as_they_are(tmp_path: Path) -> None:
    """The same pixels in both formats, if neither is reduced: the same images, drawn by the same numbers."""
    small = [picture(9, 12, seed=number) for number in range(16)]
    jpegs = [file_of(image, quality=90, subsampling=0) for image in small]  # no interpolated colours at borders
    mixed = [
        file_of(Image.fromarray(whole(file)), "PNG") if number % 3 == 1 else file for number, file in enumerate(jpegs)
    ]
    of_jpegs, of_mixed = (
        by_number(batches(pipeline(images_of(tmp_path / name, files, augment=AUGMENT))))
        for name, files in (("jpegs", jpegs), ("mixed", mixed))
    )
    assert len(of_jpegs) == 16
    for number, image in of_jpegs.items():
        assert np.array_equal(image, of_mixed[number]), number


@pytest.mark.parametrize(("kind", "options"), [("WEBP", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("GIF", {})])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_other_formats_are_decoded_as_pillow_does(kind: str, options: dict[str, Any], mode: str) -> None:
    wanted, file = feature((HEIGHT, WIDTH), resize="none"), file_of(picture(mode=mode), kind, **options)
    expected = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
    decode = tf.function(lambda: decode_image(wanted, tf.constant(file), tf.zeros(0), ImageChanges()))
    assert np.array_equal(decode(), expected)
    box = (9, 30, 60, 66)
    assert np.array_equal(decoder(feature((60, 66)))(file, box), cut(expected, box))


def test_a_gif_is_its_first_picture() -> None:
    pictures = [picture(seed=seed) for seed in range(3)]
    file = file_of(pictures[0], "GIF", save_all=True, append_images=pictures[1:])
    wanted = feature((HEIGHT, WIDTH), resize="none")
    made = tf.function(lambda: decode_image(wanted, tf.constant(file), tf.zeros(0), ImageChanges()))()
    assert np.array_equal(made, np.asarray(Image.open(io.BytesIO(file)).convert("RGB")))


def bad_file(name: str) -> bytes:
    good = file_of(picture())
    return {
        "cut": good[:300],
        "no image": b"text",
        "empty": b"",
        "only its start": b"\xff\xd8\xff",
        "CMYK for grey": file_of(picture(mode="CMYK")),
    }[name]


@pytest.mark.parametrize(
    ("name", "augment"),
    [
        ("cut", AUGMENT),
        *(pytest.param(name, (), marks=pytest.mark.long) for name in ("no image", "cut", "empty", "only its start")),
        *(pytest.param(name, AUGMENT, marks=pytest.mark.long) for name in ("no image", "empty", "only its start")),
    ],
)
def test_a_bad_image_is_named_or_skipped(tmp_path: Path, name: str, augment: tuple[Spec, ...]) -> None:
    files = [file_of(picture(seed=number)) for number in range(12)]
    files[7] = bad_file(name)
    made = pipeline(images_of(tmp_path, files, augment=augment))
    said = r"a\.tfrecord: record 7 at byte \d+: feature image: expected an image as JPEG, .* Read by rank 0 of 1"
    with pytest.raises(UserError, match=said), made.explaining():
        batches(made)
    skipping = pipeline(images_of(tmp_path, files, augment=augment, on_bad_record="skip"))
    assert sorted(ids(batches(skipping))) == [number for number in range(12) if number != 7]
    assert len(skipping.skipped) == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["JPEG", pytest.param("PNG", marks=pytest.mark.long)])
@pytest.mark.parametrize("augment", [(), AUGMENT])
def test_an_image_of_one_pixel_is_of_its_colour(tmp_path: Path, kind: str, augment: tuple[Spec, ...]) -> None:
    file = file_of(Image.new("RGB", (1, 1), (200, 100, 50)), kind)
    (batch,) = batches(pipeline(images_of(tmp_path, [file] * 8, augment=augment)))
    assert np.array_equal(batch.inputs, np.broadcast_to(whole(file)[0, 0], (8, 8, 10, 3)))


def test_images_leave_the_pipeline_as_bytes_and_are_scaled_in_the_step(tmp_path: Path) -> None:
    data = images_of(tmp_path, [file_of(picture(seed=number)) for number in range(8)])
    data.features["image"] |= {"scale": 1 / 127.5, "offset": -1.0}
    made = pipeline(data)
    assert made.element_spec.inputs == tf.TensorSpec((8, 8, 10, 3), tf.uint8)
    assert made.scaled_spec.inputs == tf.TensorSpec((8, 8, 10, 3), tf.float32)
    batch = next(made.batches(0, epochs=1))
    expected = as_numpy(batch).inputs.astype(np.float32) * np.float32(1 / 127.5) + np.float32(-1.0)
    assert np.array_equal(tf.function(made.scaled)(batch).inputs, expected)


ON_DEVICE = """
import sys
import numpy as np
import tensorflow as tf
sys.path.insert(0, "tests")
from made_records import config
from horovod_train.data.dataset import open_records
from horovod_train.data.pipeline import Ranks
from horovod_train.data.batch_source import for_each_batch
from horovod_train.data.pipeline import build_pipeline
from horovod_train.errors import UserError

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
features = {"image": {"type": "bytes", "decode": "image", "shape": [8, 10, 3], "resize": "crop", "scale": 0.5}}

def build(device, inputs):
    shown = features if inputs == "image" else {"image": "bytes"}
    data = config(sys.argv[1], features=shown, inputs=("image",))
    ranks = Ranks(0, 1, device=device)
    return build_pipeline(open_records(data, "train"), data, ranks, seed=1, training=True, global_batch_size=4)

def steps(made):
    @tf.function(autograph=False)
    def run(cursor):
        def act(batch, _, *before):
            return batch.ids, made.scaled(batch).inputs
        return for_each_batch(cursor, tf.constant(1), act, (tf.zeros(4, tf.int64), tf.zeros((4, 8, 10, 3))))
    batches = made.batches(0)
    return [batches.call(run) for _ in range(6)]

for one, other in zip(steps(build("CPU:0", "image")), steps(build("CPU:1", "image"))):
    assert all(np.array_equal(*pair) for pair in zip(one, other))
batch = next(iter(build("CPU:1", "image").chunks(0)))
print({value.device.rpartition("/")[2] for value in tf.nest.flatten(batch)})
print(next(iter(build("CPU:1", "text").chunks(0))).inputs.device.rpartition("/")[2])
made = build("CPU:1", "image")
try:
    with made.explaining():
        list(made.batches(0, epochs=1))
except UserError as error:
    print(error)
"""


@pytest.mark.long
def test_batches_wait_on_the_device_of_the_steps(tmp_path: Path) -> None:
    """On a second CPU device, which stands for a GPU. Strings stay on the host; errors still name the record."""
    files = [file_of(picture(seed=number)) for number in range(28)]
    images_of(tmp_path, [*files, b"no image"])
    finished = run_process([sys.executable, "-c", ON_DEVICE, str(tmp_path / "train")], cwd=PROJECT)
    assert finished.returncode == 0, finished.text
    on_device, of_text, named = finished.stdout.strip().splitlines()
    assert on_device == "{'device:CPU:1'}"
    assert of_text.endswith("CPU:0")
    assert "record 28 at byte" in named
