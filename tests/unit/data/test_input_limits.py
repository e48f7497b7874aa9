"""What the pipeline does at its borders: parts that fail, functions that lose rows, memory that is not there."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import batches, config, example, ids, image_record, make_images, pipeline, write_file
from PIL import Image

from horovod_train.config.settings import Spec
from horovod_train.data.dataset import open_records
from horovod_train.data.pipeline import Chunk, Pipeline, Ranks, build_pipeline, check_room_to_cache
from horovod_train.data.reader import records_at_a_time
from horovod_train.data.source import Blocks
from horovod_train.errors import UserError

RECORDS = 70


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data") / "train")


def parse_labels(records: tf.Tensor) -> tf.Tensor:
    return tf.io.parse_example(records, {"label": tf.io.FixedLenFeature((), tf.int64)})["label"]


def without_sevens(records: tf.Tensor) -> dict[str, tf.Tensor]:
    """A user's parse function that filters."""
    labels = parse_labels(records)
    return {"label": tf.boolean_mask(labels, labels != 7)}


def no_more_than_four(records: tf.Tensor) -> dict[str, tf.Tensor]:
    """A user's parse function that is right for one record only."""
    return {"label": parse_labels(records)[:4]}


def consume(made: Pipeline) -> list[int]:
    with made.explaining():
        return ids(batches(made))


def test_a_parse_function_that_drops_a_row_has_the_record_named(images: Path) -> None:
    made = pipeline(config(images, parse="test_input_limits:without_sevens", inputs=("label",), shuffle=False))
    with pytest.raises(UserError, match=r"0.tfrecord: record 7 at byte .* gives 0 rows of label for it; expected 1"):
        consume(made)


def test_a_parse_function_that_drops_a_row_leaves_that_record_out_where_bad_ones_are_skipped(images: Path) -> None:
    names = {"parse": "test_input_limits:without_sevens", "inputs": ("label",)}
    made = pipeline(config(images, on_bad_record="skip", **names))
    assert sorted(consume(made)) == [number for number in range(RECORDS) if number % 10 != 7]


def test_a_parse_function_that_loses_rows_of_many_records_only_is_told_so(images: Path) -> None:
    made = pipeline(config(images, parse="test_input_limits:no_more_than_four", inputs=("label",)))
    with pytest.raises(UserError, match="gives 4 rows of label for 72 records, and one for each record alone"):
        consume(made)


def test_whatever_fails_between_loader_and_queue_is_what_the_reader_is_told(images: Path) -> None:
    made = pipeline(config(images))

    def broken(spans: object) -> Iterator[list[np.ndarray]]:
        raise MemoryError("no room for a chunk")
        yield []

    made._load = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(MemoryError, match="no room for a chunk"):
        consume(made)


@pytest.mark.long
@pytest.mark.parametrize("parse", [None, "test_input_limits:slower_at_first"])
def test_records_keep_their_order_however_many_are_parsed_at_the_same_time(
    images: Path, parse: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_train.data.pipeline.CHUNK_RECORDS", 8)
    names = {"parse": parse, "inputs": ("label",)} if parse else {}
    one, ten = (batches(pipeline(config(images, parallel_parse_calls=calls, **names)), epochs=3) for calls in (1, 10))
    assert len(one) == len(ten) == 27
    for batch, other in zip(one, ten, strict=True):
        assert all(np.array_equal(value, same) for value, same in zip(batch, other, strict=True))


def slower_at_first(records: tf.Tensor) -> dict[str, tf.Tensor]:
    """A user's parse function that takes the longer the earlier its records come: later calls overtake it."""
    labels = parse_labels(records)
    _, spent = tf.while_loop(
        lambda left, _: left > 0, lambda left, sums: (left - 1, sums + 1), (1000 * (9 - labels[0]), tf.constant(0))
    )
    return {"label": labels + tf.cast(spent * 0, tf.int64)}


def test_as_many_chunks_are_parsed_at_the_same_time_as_the_setting_says(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call waits for the others: with fewer at the same time none would end."""
    import threading

    monkeypatch.setattr("horovod_train.data.pipeline.CHUNK_RECORDS", 8)
    made = pipeline(config(images, parallel_parse_calls=4, drop_remainder=True))
    all_there, parse = threading.Barrier(4, timeout=300), made._loader.parse

    def meet(*read: Any) -> Chunk:
        all_there.wait()
        return parse(*read)

    made._loader.parse = meet  # type: ignore[method-assign,assignment]
    assert len(batches(made)) == 8


def test_a_bound_for_shuffling_that_the_blocks_of_all_lanes_exceed_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "a.tfrecord", [bytes(100_000 - 16)] * 40)
    data = {"features": {"a": "int64"}, "inputs": ("a",)}
    with pytest.raises(
        UserError, match=r"data.shuffle_mb: must be at least 4; received 2. .* its batch has records, 4"
    ):
        pipeline(config(tmp_path, shuffle_mb=2, **data), batch=4)
    pipeline(config(tmp_path, shuffle_mb=4, **data), batch=4)
    pipeline(config(tmp_path, shuffle_mb=2, **data), batch=4, size=2)
    pipeline(config(tmp_path, shuffle=False, **data), batch=4)


@pytest.mark.parametrize(("megabytes", "order"), [(3, "file"), (4, "lanes")])
def test_an_evaluation_reads_one_block_after_the_other_where_one_for_each_row_would_take_too_much(
    tmp_path: Path, megabytes: int, order: str
) -> None:
    """At any number of ranks: a loss may depend on the batches."""
    write_file(tmp_path / "a.tfrecord", [bytes(100_000 - 16)] * 40)
    data = config(tmp_path, shuffle_mb=megabytes, features={"a": "int64"}, inputs=("a",))
    for ranks in (1, 4):
        made = pipeline(data, batch=4, size=ranks, training=False)
        assert made._plan.order == order


@pytest.mark.parametrize(
    ("stored", "shape", "expected"), [(4, (1,), 4096), (1 << 20, (1,), 16), (17, (20_000,), 104), (1 << 26, (1,), 1)]
)
def test_so_many_records_are_read_together_as_fit_into_a_bound_stored_and_parsed(
    stored: int, shape: tuple[int, ...], expected: int
) -> None:
    parser: Any = SimpleNamespace(shapes={"x": shape, "text": ()}, dtypes={"x": "int64", "text": "string"})
    blocks = Blocks(np.array([100]), np.array([100 * stored]))
    assert records_at_a_time(blocks, parser) == expected


def test_memory_for_the_cache_counts_images_and_all_ranks_of_a_host(tmp_path: Path, images: Path) -> None:
    made = pipeline(config(images))
    assert made.bytes_to_cache == RECORDS * (16 + 8)  # uint8 [4, 4, 1] and int64
    write_file(tmp_path / "a.tfrecord", [example(image=bytes(1000), label=1)] * 5)
    features = {"image": {"type": "bytes", "decode": "image", "shape": [4, 4, 3]}, "label": "int64"}
    made = pipeline(config(tmp_path, features=features, inputs=("image",)))
    assert 5 * 1008 < made.bytes_to_cache < 5 * 1100
    check_room_to_cache(10**9, 1)
    with pytest.raises(UserError, match=r"data.cache: memory needs 8000000.0 GB for 8 rank\(s\) of this host, which"):
        check_room_to_cache(10**15, 8)


def test_a_pipeline_that_would_not_fit_beside_the_other_ranks_of_its_host_is_refused(images: Path) -> None:
    data = config(images, cache="memory")
    records = open_records(data, "train")
    with pytest.raises(UserError, match=r"data.cache: memory needs"):
        build_pipeline(records, data, Ranks(0, 1, on_host=10**12), seed=1, training=True, global_batch_size=8)


@pytest.mark.long
@pytest.mark.parametrize("size", [(1, 40), (40, 1), (1, 1)])
def test_an_image_one_pixel_wide_can_be_cropped_at_random(tmp_path: Path, size: tuple[int, int]) -> None:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 100, 50)).save(out, "PNG")
    write_file(tmp_path / "a.tfrecord", [example(image=out.getvalue())] * 8)
    features = {"image": {"type": "bytes", "decode": "image", "shape": [4, 4, 3]}}
    made = pipeline(config(tmp_path, features=features, inputs=("image",), augment=(Spec("random_resized_crop"),)))
    with made.explaining():
        (batch,) = batches(made)
    assert np.array_equal(batch.inputs, np.broadcast_to(np.array([200, 100, 50], np.uint8), (8, 4, 4, 3)))


def test_the_bytes_of_a_record_do_not_matter_to_a_cache_of_numbers(tmp_path: Path) -> None:
    write_file(tmp_path / "a.tfrecord", [image_record(number) for number in range(5)])
    made = pipeline(config(tmp_path, features={"label": "int64"}, inputs=("label",)))
    assert made.bytes_to_cache == 5 * 8
