"""Batches: the right records, in the right order, with the right values, at any number of ranks."""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import (
    SCHEMA,
    as_numpy,
    batches,
    config,
    example,
    ids,
    image_record,
    make_images,
    pipeline,
    pixels,
    write_file,
)
from PIL import Image

from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.batch_source import Feed, StepSize
from horovod_train.data.dataset import open_records
from horovod_train.data.schema import parse_feature
from horovod_train.data.transforms import cast_and_scale
from horovod_train.errors import UserError

RECORDS = 70


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data") / "train")


def scaled(numbers: list[int]) -> np.ndarray:
    return np.stack([pixels(number) for number in numbers]).astype(np.float32) * np.float32(1 / 255) - np.float32(0.5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("training", [True, False])
def test_ranks_read_every_record_once_with_its_own_values(images: Path, size: int, training: bool) -> None:
    found = []
    for rank in range(size):
        for batch in batches(pipeline(config(images), rank, size, batch=16, training=training)):
            real = batch.ids >= 0
            assert batch.weights.tolist() == real.astype(float).tolist()
            np.testing.assert_allclose(batch.inputs[real], scaled(batch.ids[real].tolist()), atol=1e-7)
            assert batch.targets[real].tolist() == (batch.ids[real] % 10).tolist()
            found += batch.ids[real].tolist()
    assert sorted(found) == list(range(RECORDS))


def test_ranks_agree_on_the_records_of_each_step(images: Path) -> None:
    by_rank = [batches(pipeline(config(images), rank, 3, batch=16)) for rank in range(3)]
    made = pipeline(config(images), 0, 3, batch=16)
    for step, shares in enumerate(zip(*by_rank, strict=True)):
        counts = {int(share.count) for share in shares}
        assert counts == {made.count(step)} == {sum(int((share.ids >= 0).sum()) for share in shares)}


def test_padding_repeats_real_records(images: Path) -> None:
    batch = batches(pipeline(config(images), 0, 3, batch=16))[-1]
    padding = batch.ids < 0
    assert padding.any()
    for image in batch.inputs[padding]:
        assert any(np.array_equal(image, known) for known in scaled(list(range(RECORDS))))


def test_shapes_are_static(images: Path) -> None:
    made = pipeline(config(images), 1, 3, batch=16)
    inputs: Any = made.element_spec.inputs
    assert inputs.shape == (6, 4, 4, 1)
    assert made.element_spec.weights.shape == made.element_spec.ids.shape == (6,)
    assert {batch.inputs.shape for batch in batches(made)} == {(6, 4, 4, 1)}


def test_epochs_follow_each_other_without_end(images: Path) -> None:
    made = pipeline(config(images), batch=16)
    through = [as_numpy(batch) for batch in itertools.islice(made.batches(0), 3 * made.steps_per_epoch)]
    assert ids(through) == [number for epoch in range(3) for number in ids(batches(made, epoch))]
    assert len({tuple(ids(batches(made, epoch))) for epoch in range(3)}) == 3


@pytest.mark.parametrize("stop", [0, 1, 4, 5])
def test_a_run_goes_on_at_other_sizes_with_the_records_that_are_left(images: Path, stop: int) -> None:
    whole = batches(pipeline(config(images), batch=16), epochs=2)
    parts = [batches(pipeline(config(images), rank, 3, batch=16), 0, stop, epochs=2) for rank in range(3)]
    rest = [ids(shares) for shares in zip(*parts, strict=True)]
    assert [sorted(step) for step in rest] == [sorted(ids([batch])) for batch in whole[stop:]]


def test_evaluation_keeps_the_order_and_leaves_nothing_out(images: Path) -> None:
    without = config(images, drop_remainder=True, augment=(Spec("flip"),))
    found = [ids(batches(pipeline(without, rank, 2, batch=16, training=False))) for rank in range(2)]
    assert [sorted(part) for part in found] == [list(range(35)), list(range(35, 70))]


def test_one_epoch_is_taken_in_calls_of_at_most_so_many_steps(images: Path) -> None:
    made = pipeline(config(images), batch=16, training=False)
    calls = [[batch.ids.numpy() for batch in itertools.islice(found, steps)] for found, steps, _ in made.one_epoch(2)]
    assert [len(call) for call in calls] == [2, 2, 1]
    full = StepSize(16, True, 16)
    assert [size for _, _, size in made.one_epoch(3)] == [full, full, StepSize(6, False, 6)]
    numbers = np.concatenate([number for call in calls for number in call])
    assert sorted(numbers[numbers >= 0].tolist()) == list(range(RECORDS))


@pytest.mark.parametrize("size", [3, 16, *(pytest.param(more, marks=pytest.mark.long) for more in (1, 2, 4))])
@pytest.mark.parametrize("drop_remainder", [False, True], ids=["", "drop_remainder"])
def test_a_step_has_as_many_records_as_its_size_says(images: Path, size: int, drop_remainder: bool) -> None:
    """Steps of 16 but the last, of 6: some of 16 ranks have none then. A size is full where every rank's is."""
    data = config(images, drop_remainder=drop_remainder)
    by_rank = []
    for rank in range(size):
        made = pipeline(data, rank, size, batch=16)
        rows = [int(np.sum(batch.ids >= 0)) for batch in batches(made)]
        sizes = [made.size_of(step) for step in range(made.steps_per_epoch)]
        assert [each.rows for each in sizes] == rows
        by_rank.append([each.is_full for each in sizes])
        assert [each.records for each in sizes] == [made.count(step) for step in range(made.steps_per_epoch)]
        assert made.size_of(0) is made.size_of(0)
    assert by_rank == [by_rank[0]] * size
    is_even = 16 % size == 0
    assert by_rank[0] == [is_even] * 4 + ([] if drop_remainder else [False])


def test_a_call_ends_where_the_size_of_steps_changes(images: Path) -> None:
    """Epochs of five steps, of which the last is short; steps are counted over epochs."""
    made = pipeline(config(images), 0, 2, batch=16)
    assert made.same_size_until(0, 0, 3) == 3
    assert made.same_size_until(0, 10, 30) == 14
    assert made.same_size_until(3, 13, 30) == 14
    assert made.same_size_until(4, 14, 30) == 15
    assert made.same_size_until(5, 15, 30) == 19
    assert made.same_size_until(4, 14, 15) == 15
    whole = pipeline(config(images, drop_remainder=True), 0, 2, batch=16)
    assert whole.same_size_until(1, 1, 30) == 30


def test_only_the_data_tells_the_size_of_a_step_whose_bad_records_are_skipped(images: Path) -> None:
    made = pipeline(config(images, on_bad_record="skip"), 0, 2, batch=16)
    assert {made.size_of(step) for step in range(made.steps_per_epoch)} == {StepSize(None, False)}
    assert made.same_size_until(2, 2, 30) == 30


def test_without_shuffling_steps_follow_the_files(images: Path) -> None:
    assert ids(batches(pipeline(config(images, shuffle=False), batch=16))) == list(range(RECORDS))


@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize("staged", [True, False])
def test_cache_and_stage_change_nothing(images: Path, tmp_path: Path, cache: str, staged: bool) -> None:
    plain = batches(pipeline(config(images), batch=16), epochs=2)
    kept = pipeline(config(images, cache=cache, stage_dir=str(tmp_path / "stage") if staged else None), batch=16)
    for batch, expected in zip(batches(kept, epochs=2), plain, strict=True):
        for value, other in zip(batch, expected, strict=True):
            assert np.array_equal(value, other)


def test_what_is_kept_in_memory_is_not_read_again(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    kept = pipeline(config(folder, cache="memory"))
    first = ids(batches(kept))
    for path in folder.glob("*.tfrecord"):
        path.unlink()
    assert sorted(ids(batches(kept, epoch=1))) == sorted(first)


def test_what_is_staged_is_not_read_again_by_any_rank(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    made = [pipeline(config(folder, stage_dir=str(tmp_path / "stage")), rank, 2) for rank in range(2)]
    first = [ids(batches(one)) for one in made]
    staged = sum(path.stat().st_size for path in (tmp_path / "stage").rglob("*.blocks"))
    assert staged == sum(path.stat().st_size for path in folder.glob("*.tfrecord"))
    for path in folder.glob("*.tfrecord"):
        path.unlink()
    again = [ids(batches(one, epoch=3)) for one in made]
    assert sorted(again[0] + again[1]) == sorted(first[0] + first[1]) == list(range(RECORDS))


def test_memory_holds_the_windows_that_lanes_are_in(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train", shards=[2000] * 8)
    made = pipeline(config(folder, shuffle_window=100), batch=4)
    loader = made._loader
    most = 0
    for steps in made.step_ranges(0, 0, 1):
        loader.parse(*loader.read(steps, ()))
        most = max(most, len(loader._reader._in_memory))
    blocks_of_a_chunk = 4 * (-(-loader.steps_per_chunk // 208) + 1)  # 2000 records make blocks of 256 and one of 208
    assert most <= blocks_of_a_chunk < 64


def test_an_epoch_holds_its_order_once(tmp_path: Path) -> None:
    """Not a second time for the widths of lists that it does not have: an order may have gigabytes."""
    made = pipeline(config(make_images(tmp_path / "train")))
    batches(made)
    assert len(made._loader._sequences) == 1
    sizes = [made.size_of(step) for step in range(made.steps_per_epoch)]
    assert len({id(size) for size in sizes}) == 2


def test_a_bad_record_can_be_skipped_and_is_counted(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    spoilt = [image_record(40), b"\xff", image_record(42), example(label=3), *map(image_record, range(44, 47))]
    write_file(folder / "1.tfrecord", spoilt)
    made = [pipeline(config(folder, on_bad_record="skip"), rank, 2) for rank in range(2)]
    found = [ids(batches(one)) for one in made]
    assert sorted(found[0] + found[1]) == [n for n in range(RECORDS) if n not in (41, 43)]
    assert made[0].skipped | made[1].skipped == {41, 43}
    assert len(made[0].skipped) + len(made[1].skipped) == 2
    assert len(batches(made[0])) == len(batches(made[1])) == made[0].steps_per_epoch


def test_padding_that_repeats_a_bad_record_does_not_skip_it_again(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train", shards=[3])
    write_file(folder / "0.tfrecord", [b"\xff", image_record(1), image_record(2)])
    made = [pipeline(config(folder, on_bad_record="skip"), rank, 2) for rank in range(2)]
    assert sorted(number for one in made for number in ids(batches(one))) == [1, 2]
    assert sorted(len(one.skipped) for one in made) == [0, 1]


def test_what_is_kept_in_memory_beside_bad_records_is_each_records_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_train.data.pipeline.CHUNK_RECORDS", 4)  # so that some chunks have no bad record
    folder = make_images(tmp_path / "train", shards=(30, 9))
    file = folder / "0.tfrecord"
    content = bytearray(file.read_bytes())
    content[content.index(b"image_raw") + 40] ^= 1  # the data of the first record no longer match their checksum
    file.write_bytes(bytes(content))
    plain, kept = (
        batches(pipeline(config(folder, cache=cache, on_bad_record="skip"), batch=4), epochs=6)
        for cache in ("none", "memory")
    )
    for one, other in zip(plain, kept, strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.inputs[one.ids >= 0], other.inputs[one.ids >= 0])


@pytest.mark.parametrize("damage", ["cut", "empty", "packed", "zeros"])
def test_a_damaged_file_can_be_skipped_from_its_damage_on(tmp_path: Path, damage: str) -> None:
    folder = make_images(tmp_path / "train")
    path = folder / "1.tfrecord"
    whole = path.read_bytes()
    left, content = {
        "cut": (6, whole[:-1]),
        "empty": (0, b""),
        "packed": (0, gzip.compress(whole)[:-1]),
        "zeros": (0, bytes(len(whole))),
    }[damage]
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"1\.tfrecord: "):
        pipeline(config(folder))
    for _ in range(2):  # the second finds the index of the first
        made = [pipeline(config(folder, on_bad_record="skip"), rank, 2) for rank in range(2)]
        found = [number for one in made for number in ids(batches(one))]
        assert sorted(found) == list(range(40 + left + 23))
        (problem,) = open_records(config(folder, on_bad_record="skip"), "train").problems
        assert problem.startswith(f"{path}: ")
        assert problem.endswith(".")


def test_nothing_but_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train", shards=[3])
    (folder / "0.tfrecord").write_bytes(b"")
    with pytest.raises(UserError, match=r"data\.train: no file holds a record\. .*0\.tfrecord: the file is empty"):
        pipeline(config(folder, on_bad_record="skip"))


def test_a_damaged_file_excuses_no_added_records(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    (folder.parent / "dataset.json").write_text(json.dumps({**SCHEMA, "counts": {"train": 70}}))
    path = folder / "1.tfrecord"
    path.write_bytes(path.read_bytes()[:-1])
    assert open_records(config(folder, on_bad_record="skip"), "train").num_records == 69
    write_file(folder / "9.tfrecord", [image_record(0)] * 5)
    with pytest.raises(UserError, match=r"holds 74 records; .* says 70"):
        open_records(config(folder, on_bad_record="skip"), "train")


def encoded(number: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.repeat(np.kron(pixels(number), np.ones((5, 6, 1), np.uint8)), 3, 2)).save(out, kind)
    return out.getvalue()


def make_encoded(folder: Path, resize: str = "none", **more: Any) -> Path:
    files = [encoded(number, "PNG" if number % 2 else "JPEG") for number in range(30)]
    write_file(folder / "0.tfrecord", [example(image=file, label=n) for n, file in enumerate(files)])
    shape = [20, 24, 3] if resize == "none" else [8, 8, 3]
    features = {
        "image": {"type": "bytes", "shape": shape, "decode": "image", "resize": resize, **more},
        "label": "int64",
    }
    (folder.parent / "dataset.json").write_text(
        json.dumps({"features": features, "inputs": "image", "targets": "label"})
    )
    return folder


def test_images_are_decoded(tmp_path: Path) -> None:
    made = pipeline(config(make_encoded(tmp_path / "train")))
    assert made.element_spec.inputs == tf.TensorSpec((8, 20, 24, 3), tf.uint8)
    for batch in batches(made):
        for number, image in zip(batch.ids, batch.inputs, strict=True):
            if number >= 0:
                exact = np.asarray(Image.open(io.BytesIO(encoded(number, "PNG"))))
                assert np.abs(image.astype(int) - exact).max() <= (0 if number % 2 else 60)


AUGMENT = (Spec("random_resized_crop"), Spec("flip"), Spec("random_crop", {"padding": 2}))


def by_number(made: list[Any]) -> dict[int, bytes]:
    return {
        number: image.tobytes()
        for batch in made
        for number, image in zip(batch.ids.tolist(), batch.inputs, strict=True)
        if number >= 0
    }


@pytest.mark.parametrize("kind", ["raw", pytest.param("encoded", marks=pytest.mark.long)])
def test_augmentation_repeats_for_the_same_epoch_and_record(tmp_path: Path, kind: str) -> None:
    make = make_images if kind == "raw" else make_encoded
    data = config(make(tmp_path / "train"), augment=AUGMENT)
    once = by_number(batches(pipeline(data, batch=16)))
    at_other_ranks = [by_number(batches(pipeline(data, rank, 2, batch=16), 0, 1)) for rank in range(2)]
    for found in at_other_ranks:
        assert all(once[number] == image for number, image in found.items())
    next_epoch = by_number(batches(pipeline(data, batch=16), 1))
    assert sum(once[number] != image for number, image in next_epoch.items()) > len(once) / 2


def test_flip_mirrors_about_half(images: Path) -> None:
    found = batches(pipeline(config(images, augment=(Spec("flip"),)), batch=16))
    mirrored = [
        np.allclose(image, scaled([number])[0][:, ::-1], atol=1e-6)
        for batch in found
        for number, image in zip(batch.ids, batch.inputs, strict=True)
        if number >= 0
    ]
    assert 20 < sum(mirrored) < 50


def test_random_crop_shifts(images: Path) -> None:
    found = batches(pipeline(config(images, augment=(Spec("random_crop", {"padding": 1}),)), batch=16))
    kinds = set()
    for batch in found:
        for number, image in zip(batch.ids, batch.inputs, strict=True):
            padded = np.pad(pixels(number), ((1, 1), (1, 1), (0, 0)))
            shifts = [(y, x) for y in range(3) for x in range(3)]
            as_stored = np.rint((image + 0.5) * 255).astype(np.uint8)
            fits = [s for s in shifts if number >= 0 and np.array_equal(padded[s[0] :, s[1] :][:4, :4], as_stored)]
            assert fits or number < 0
            kinds.update(fits)
    assert len(kinds) == 9


def test_augmentation_is_for_training_only(images: Path) -> None:
    data = config(images, augment=AUGMENT)
    assert by_number(batches(pipeline(data, training=False))) == by_number(
        batches(pipeline(config(images), training=False))
    )


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (Spec("flop"), "data.augment[0].name: unknown name 'flop'; did you mean flip"),
        (Spec("flip", {"direction": "up"}), "direction must be horizontal or vertical; received 'up'"),
        (Spec("random_crop", {"pad": 3}), "it takes: padding"),
        (Spec("random_resized_crop", {"area": [0, 1]}), "area must be [low, high]"),
        (Spec("nowhere:crop"), "cannot import 'nowhere:crop'"),
    ],
)
def test_wrong_augmentation_is_named(images: Path, augment: Spec, said: str) -> None:
    with pytest.raises(UserError) as error:
        pipeline(config(images, augment=(augment,)))
    assert said in str(error.value)


def own_parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
    """As a user would write it: the label is all that counts."""
    parsed = tf.io.parse_example(records, {"label": tf.io.FixedLenFeature((), tf.int64)})
    return {"twice": tf.stack([parsed["label"], parsed["label"]], 1), "label": parsed["label"]}


def own_augment(image: tf.Tensor, seed: tf.Tensor, brightness: float = 1.0) -> tf.Tensor:
    added = tf.random.stateless_uniform((), seed, 0, brightness)
    return tf.cast(tf.clip_by_value(tf.cast(image, tf.float32) + added, 0, 255), image.dtype)


def test_a_users_parse_function_is_used(images: Path) -> None:
    data = config(images, parse="test_pipeline:own_parse", inputs=("twice",), targets=("label",))
    found = batches(pipeline(data, batch=16))
    assert sorted(ids(found)) == list(range(RECORDS))
    for batch in found:
        assert batch.inputs.tolist() == [[label, label] for label in batch.targets.tolist()]


def test_a_users_parse_function_must_give_what_is_wanted(images: Path) -> None:
    with pytest.raises(UserError, match="gives twice, label; inputs and targets want thrice"):
        pipeline(config(images, parse="test_pipeline:own_parse", inputs=("thrice",)))


def test_a_feature_weights_its_record_and_padding_weighs_nothing(images: Path) -> None:
    """By the schema, and from a user's parse function; at ranks whose last batch has fewer records."""
    for given in ({}, {"parse": "test_pipeline:own_parse", "inputs": ("twice",), "targets": ("label",)}):
        data = config(images, weight="label", **given)
        for rank in (0, 1):
            found = batches(pipeline(data, rank, 2, batch=16))
            for batch in found:
                assert batch.weights.tolist() == np.where(batch.ids >= 0, batch.targets, 0).tolist()
            assert any((batch.ids < 0).any() for batch in found)


def test_a_weight_that_a_users_parse_function_does_not_give_is_refused(images: Path) -> None:
    for weight, said in {
        "thrice": "gives twice, label; there is no thrice",
        "twice": "feature twice is int64\\[2\\]",
    }.items():
        data = config(images, parse="test_pipeline:own_parse", inputs=("label",), weight=weight)
        with pytest.raises(UserError, match=f"data.weight: .*{said}"):
            pipeline(data)


def test_a_users_augment_function_is_used(images: Path) -> None:
    def data(brightness: float) -> DataConfig:
        return config(images, augment=(Spec("test_pipeline:own_augment", {"brightness": brightness}),))

    plain = by_number(batches(pipeline(config(images))))
    assert by_number(batches(pipeline(data(0.0)))) == plain
    assert by_number(batches(pipeline(data(90.0)))) != plain


@pytest.mark.parametrize(
    ("settings", "number", "expected"),
    [({"offset": -1}, 2**62 + 3, 2**62 + 2), ({"scale": 0.1, "offset": 1}, 10**13 + 10, 10**12 + 2)],
)
def test_scaled_integers_stay_different_numbers(settings: dict[str, int], number: int, expected: int) -> None:
    feature = parse_feature({"type": "int64", "cast": "int64", **settings}, "id")
    assert int(cast_and_scale(feature, tf.constant(number, tf.int64))) == expected


def test_features_of_all_kinds_become_tensors(tmp_path: Path) -> None:
    pairs = [np.array([n, -n], np.int16).tobytes() for n in range(1, 5)]
    rows = [
        example(i=[n, n + 1], f=[n / 2], s=b"word", v=list(range(n)), w=[b"a"] * n, x=pair)
        for n, pair in enumerate(pairs, 1)
    ]
    write_file(tmp_path / "a.tfrecord", rows)
    features = {
        "i": {"type": "int64", "shape": [2], "cast": "int32"},
        "f": {"type": "float", "scale": 2, "offset": 1},
        "s": "bytes",
        "v": {"type": "int64", "max_length": 5, "padding": -1},
        "w": {"type": "bytes", "max_length": 5},
        "x": {"type": "bytes", "decode": "raw", "raw_dtype": "int16", "shape": [2], "cast": "float16"},
    }
    data = config(tmp_path, features=features, inputs=("i", "f", "s", "v", "w", "x"), shuffle=False)
    (batch,) = batches(pipeline(data, batch=4))
    assert batch.targets == {}
    found = batch.inputs
    assert (found["i"].dtype, found["i"].tolist()) == (np.int32, [[1, 2], [2, 3], [3, 4], [4, 5]])
    assert (found["f"].dtype, found["f"].tolist()) == (np.float32, [2, 3, 4, 5])
    assert found["s"].tolist() == [b"word"] * 4
    assert found["v"].tolist() == [[0, -1, -1, -1, -1], [0, 1, -1, -1, -1], [0, 1, 2, -1, -1], [0, 1, 2, 3, -1]]
    assert found["w"].tolist()[1] == [b"a", b"a", b"", b"", b""]
    assert (found["x"].dtype, found["x"].tolist()) == (np.float16, [[1, -1], [2, -2], [3, -3], [4, -4]])


def test_a_dataset_may_be_freed_while_a_function_is_traced() -> None:
    """Python frees what is in cycles at any time, also while TensorFlow holds the lock of the graph."""
    feed = Feed(iter([]), [tf.TensorSpec([], tf.int64)] * 2, lambda failure: None, [])
    data = [feed.dataset(-1)]

    @tf.function
    def traced() -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        data.clear()
        gc.collect()
        assert len(graph.get_operations()) == before
        return tf.constant(0)

    traced()
    assert feed.queue.is_closed()


def wait_for_feeds() -> None:
    for thread in threading.enumerate():
        if thread.name == "feed":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.long
def test_passes_that_end_share_a_queue_which_tensorflow_keeps_until_the_process_ends(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = []

    def noted_queue(*arguments: Any, make: Any = tf.queue.FIFOQueue) -> Any:
        queues.append(make(*arguments))
        return queues[-1]

    monkeypatch.setattr(tf.queue, "FIFOQueue", noted_queue)
    made = pipeline(config(images, shuffle=False), training=False)
    for _ in range(5):
        found = made.batches(0, epochs=1)
        assert sorted(number for batch in found for number in batch.ids.numpy() if number >= 0) == list(range(RECORDS))
        wait_for_feeds()
        del found
        gc.collect()
    assert len(queues) == 1
    given_up = made.batches(0)
    next(given_up)
    del given_up
    gc.collect()
    wait_for_feeds()
    assert [(bool(queue.is_closed()), int(queue.size())) for queue in queues] == [(True, 0)]
    assert len(list(made.batches(0, epochs=1))) == made.steps_per_epoch
    assert len(queues) == 2


def test_what_a_reader_leaves_is_freed() -> None:
    enqueued = threading.Event()

    def items() -> Iterator[list[np.ndarray]]:
        yield [np.zeros(4)] * 2
        enqueued.set()

    free: list[tf.queue.FIFOQueue] = []
    feed = Feed(items(), [tf.TensorSpec([None], tf.float64)] * 2, print, free)
    data = feed.dataset(1)
    feed.start()
    assert enqueued.wait(60)
    wait_for_feeds()
    assert feed.queue.size() == 1
    del data
    gc.collect()
    assert (feed.queue.size(), free) == (0, [])


@pytest.mark.long
def test_a_process_ends_while_its_pipeline_still_has_more(images: Path) -> None:
    """TensorFlow's threads and the interpreter must not wait for each other at the end."""
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from made_records import config, pipeline
kept = [pipeline(config({str(images)!r}), rank, 2).batches(0) for rank in range(2)]
print([next(batches).ids.shape.as_list() for batches in kept])
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "[[4], [4]]\n"), ended.stderr
