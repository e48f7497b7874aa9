"""What a source of batches says of the inputs of a model is what the model gets, and survives a checkpoint's JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import user_streams
from made_records import config, example, make_images, pipeline, write_file

from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.model_inputs import Input, ModelInputs, inputs_in_config, unpack
from horovod_train.data.pipeline import Ranks
from horovod_train.data.stream import StreamPipeline, open_stream

LISTS: dict[str, Any] = {
    "words": {"type": "int64", "max_length": 5},
    "price": {"type": "float", "scale": 2.0},
    "label": {"type": "int64"},
}


def lists(folder: Path, **values: Any) -> DataConfig:
    write_file(folder / "a.tfrecord", [example(words=[n] * (1 + n % 5), price=float(n), label=n) for n in range(9)])
    given = {"features": LISTS, "inputs": ("words", "price"), "targets": ("label",), **values}
    return config(folder, index_dir=str(folder / "kept"), **given)


def first_two(words: tf.Tensor) -> tf.Tensor:
    return tf.cast(words, tf.float32)[:, :2]


def with_more_axes(price: tf.Tensor) -> tf.Tensor:
    return price[:, tf.newaxis]


def is_kept(found: ModelInputs) -> bool:
    """Whether a checkpoint gives the same back, with lists in place of tuples."""
    kept = unpack(json.loads(json.dumps(found.pack())))
    return kept == dataclasses.replace(found, features=json.loads(json.dumps(found.features)))


def test_one_input_is_alone_and_several_have_names(tmp_path: Path) -> None:
    image = pipeline(config(make_images(tmp_path / "images" / "train")), batch=8).model_inputs
    assert (image.inputs, image.is_dict) == ((Input("image_raw", "float32", (None, 4, 4, 1)),), False)
    pair = pipeline(lists(tmp_path / "lists"), batch=4).model_inputs
    words, price = Input("words", "int64", (None, 5)), Input("price", "float32", (None,))
    assert ({*pair.inputs}, pair.is_dict) == ({words, price}, True)
    assert pair.features["price"] == LISTS["price"]
    assert "label" not in pair.features
    assert is_kept(image)
    assert is_kept(pair)
    assert unpack({}) is None


def test_lists_cut_to_the_longest_of_a_batch_have_any_length(tmp_path: Path) -> None:
    found = pipeline(lists(tmp_path, inputs=("words",), bucket_by_length="words"), batch=4).model_inputs
    assert found.inputs == (Input("words", "int64", (None, None)),)
    assert is_kept(found)


def test_they_are_what_preprocess_makes(tmp_path: Path) -> None:
    data = lists(tmp_path, inputs=("words",), preprocess="test_model_inputs:first_two")
    found = pipeline(data, batch=4).model_inputs
    assert (found.inputs, found.preprocess) == ((Input("", "float32", (None, 2)),), data.preprocess)


def test_a_stream_tells_dtype_and_shape() -> None:
    data = DataConfig(dataset=Spec("user_streams:uneven"), global_batch_size=8)
    stream = open_stream(data, Ranks(0, 1), seed=3, training=True)
    assert stream is not None
    found = StreamPipeline(stream, 8, 2, None, prefetch_batches=None).model_inputs
    assert (found.inputs, found.is_dict) == ((Input("", "float32", (None, user_streams.WIDTH)),), False)
    assert is_kept(found)


def test_a_config_with_all_features_tells_the_same_as_its_records(tmp_path: Path) -> None:
    data = lists(tmp_path)
    said, found = inputs_in_config(data), pipeline(data, batch=4).model_inputs
    assert said is not None
    assert ({*said.inputs}, said.is_dict, said.features) == ({*found.inputs}, found.is_dict, found.features)


@pytest.mark.parametrize(
    "values",
    [
        {"features": {}},
        {"features": {"words": {"max_length": 5}}},  # as files that describe their records have it
        {"preprocess": "test_model_inputs:first_two"},
        {"bucket_by_length": "words"},
    ],
)
def test_a_config_that_leaves_something_to_the_records_tells_nothing(tmp_path: Path, values: dict[str, Any]) -> None:
    assert inputs_in_config(lists(tmp_path, **values)) is None


def test_it_says_what_is_done_to_stored_values_before(tmp_path: Path) -> None:
    image = pipeline(config(make_images(tmp_path / "images" / "train")), batch=8).model_inputs
    assert image.changes("image_raw") == f"scale: {1 / 255}, offset: -0.5"
    assert image.changes("input_layer_3") == image.changes("image_raw")  # the only input, whatever its name
    pair = pipeline(lists(tmp_path / "lists"), batch=4).model_inputs
    assert (pair.changes("price"), pair.changes("words"), pair.changes("else")) == ("scale: 2.0", "max_length: 5", "")
    data = lists(tmp_path / "made", inputs=("price",), preprocess="test_model_inputs:with_more_axes")
    made = pipeline(data, batch=4).model_inputs
    assert made.changes("") == "price (scale: 2.0), data.preprocess: test_model_inputs:with_more_axes"
