"""Inputs that a function of the user's makes, in tf.data, of what records hold: data.preprocess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import batches, config, example, pipeline, write_file

from horovod_train.config.loader import load
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.errors import UserError
from horovod_train.models import build_model

WORDS = ["good film", "bad", "a good bad film", "film", "", "good"]
TOKENS = ["good", "bad", "film", "a"]


def tokens(text: tf.Tensor) -> dict[str, tf.Tensor]:
    """Texts [rows] → numbers of their words from 1, padded to 3, and which of them are words."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(TOKENS, tf.range(1, 1 + len(TOKENS), dtype=tf.int64)), 0
    )
    found = table.lookup(tf.strings.split(text).to_tensor(shape=[None, 3]))
    return {"ids": found, "mask": found > 0}


def scaled_twice(numbers: dict[str, tf.Tensor]) -> tf.Tensor:
    return tf.stack([numbers["a"] * 2, numbers["b"]], axis=1)


def of_one_row(text: tf.Tensor) -> tf.Tensor:
    return tf.zeros([1, 3])


def a_list(text: tf.Tensor) -> Any:
    return [1, 2]


def raises(text: tf.Tensor) -> tf.Tensor:
    raise ValueError("no vocabulary")


def data_of(folder: Path, name: str, **values: Any) -> DataConfig:
    write_file(folder / "a.tfrecord", [example(text=text.encode(), label=n) for n, text in enumerate(WORDS)])
    features = {"text": {"type": "bytes"}, "label": {"type": "int64"}}
    return config(folder, features=features, inputs=("text",), targets=("label",), preprocess=name, **values)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_gets_what_the_function_makes_of_texts(tmp_path: Path, training: bool) -> None:
    made = pipeline(data_of(tmp_path, "test_preprocess:tokens"), 1, 2, batch=4, training=training)
    assert made.scaled_spec.inputs["ids"].shape == (2, 3)
    for batch in batches(made):
        for label, ids, mask in zip(batch.targets, batch.inputs["ids"], batch.inputs["mask"], strict=True):
            expected = [TOKENS.index(word) + 1 for word in WORDS[label].split()][:3]
            assert ids.tolist() == expected + [0] * (3 - len(expected))
            assert mask.tolist() == [number > 0 for number in ids]


def test_it_gets_scaled_values_of_several_inputs(tmp_path: Path) -> None:
    write_file(tmp_path / "a.tfrecord", [example(a=float(n), b=n) for n in range(4)])
    features = {"a": {"type": "float", "scale": 3}, "b": {"type": "int64", "cast": "float32"}}
    data = config(
        tmp_path, features=features, inputs=("a", "b"), preprocess="test_preprocess:scaled_twice", shuffle=False
    )
    (batch,) = batches(pipeline(data, batch=4))
    assert np.array_equal(batch.inputs, [[6 * n, n] for n in range(4)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_preprocess:raises", r"test_preprocess:raises, for inputs of string\(4,\): no vocabulary \(at .*\)$"),
        ("test_preprocess:of_one_row", r"test_preprocess:of_one_row, for inputs of string\(4,\): "),
        (
            "test_preprocess:a_list",
            r"test_preprocess:a_list, for inputs of string\(4,\): expected a tensor, or tensors",
        ),
        ("test_preprocess:nothing", r"test_preprocess has no 'nothing'"),
        ("nowhere:tokens", r"nowhere"),
        ("no_folder", r"no_folder is no preset of a keras_hub task: it has no preprocessor\.json\.$"),
    ],
)
def test_a_function_that_does_not_serve_is_named(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.preprocess: .*{said}") as raised:
        pipeline(data_of(tmp_path, name), batch=4)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.preprocess=3"], "data.preprocess: expected a string"),
        (["data.preprocess=a:b", "data.bucket_by_length=w"], "data.bucket_by_length: does not go with data.preprocess"),
        (["data.preprocess=s3://a/b"], "data.preprocess: expected a local path"),
        (["data.preprocess=a:b", "data.train=[]", "data.dataset=a:b"], "data.preprocess: "),
    ],
)
def test_bad_settings_get_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        load([], ["data.train=here", "data.global_batch_size=8", "train.epochs=1", *words])
    assert str(raised.value).removeprefix("command line: ").startswith(said)


def test_a_folder_that_is_no_preset_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.name: .* is no preset of a keras_hub task: it has no task\.json\.$"):
        build_model(Spec(str(tmp_path)))
    with pytest.raises(UserError, match=r"^model\.options: .* is a preset, which takes no options; received"):
        build_model(Spec(str(tmp_path), {"hidden": 3}))
