"""What ranks tell each other comes back as it was; anything else is refused, and damage is an error, never code."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_train.distributed.objects import dump, load

ARRAYS = hnp.arrays(
    hnp.boolean_dtypes() | hnp.integer_dtypes(endianness="<") | hnp.floating_dtypes(endianness="<"),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
NUMBERS = hnp.arrays(hnp.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc"), ()).map(lambda array: array[()])
VALUES = st.recursive(
    PLAIN | ARRAYS | NUMBERS,
    lambda items: (
        st.lists(items, max_size=4)
        | st.lists(items, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["tuple", "dict", "bytes", "array"]), items, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, of equal types, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert same(load(dump(value)), value)


def test_bfloat16_and_numbers_that_are_not_finite_come_back() -> None:
    value = tf.constant([1.5, 3e38], tf.bfloat16).numpy()
    assert same(load(dump([value, float("inf")])), [value, float("inf")])
    assert np.isnan(load(dump(float("nan"))))


class Pair(NamedTuple):
    one: int


@dataclass
class Thing:
    one: int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, "value['a'][1] is of type set; ranks tell each other None, bool,"),
        (Thing(1), "value is of type Thing;"),
        ((Pair(1),), "value[0] is of type Pair;"),
        ([np.str_("a")], "value[0] is of type str_;"),
        ({1: "a"}, "value is of type dict with other keys;"),
        (np.array(["a"]), "value is of type array of <U1;"),
        (np.array([None]), "value is of type array of object;"),
        (np.array([1.0], ">f4"), "value is of type array of >f4;"),
    ],
)
def test_what_cannot_be_carried_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        dump(value)


SAMPLE = dump({"a": [1, (b"xy", np.arange(6.0).reshape(2, 3), np.float32(2))]})


def test_any_damaged_byte_is_an_error_or_another_value() -> None:
    for at in range(len(SAMPLE)):
        for byte in range(256):
            damaged = SAMPLE[:at] + bytes([byte]) + SAMPLE[at + 1 :]
            try:
                found = load(damaged)
            except ValueError:  # any other exception would be one that nothing expects
                continue
            assert same(load(dump(found)), found)


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "big") + text.encode()


@pytest.mark.parametrize(
    "data",
    [
        SAMPLE + b"x",
        b"\xff" * 40,
        header("[" * 100_000),
        header(json.dumps({"array": ["float64", [-1, -1]]})) + bytes(8),
        header(json.dumps({"array": ["float64", [1 << 40, 1 << 40]]})),
        header(json.dumps({"array": ["object", [1]]})) + bytes(8),
        header(json.dumps({"bytes": -5})) + b"abcde",
        header(json.dumps({"tuple": 3})),
        header(json.dumps({"dict": [[1, 2]]})),
        header(json.dumps({"number": {"array": ["float32", [1]]}})) + bytes(4),
        header(json.dumps({"a": 1, "b": 2})),
        pickle.dumps({"a": 1}),
    ],
)
def test_what_dump_has_not_made_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an object that a rank sent"):
        load(data)


@pytest.mark.parametrize("data", [SAMPLE, dump(1234)])
def test_a_part_of_an_object_is_an_error(data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(ValueError, match="not an object that a rank sent"):
            load(data[:length])
