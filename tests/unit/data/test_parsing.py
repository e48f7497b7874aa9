"""Records parsed as one table give what TensorFlow's parser gives, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import example, image_record

from horovod_train.data.parsing import FixedLayout, FunctionParser, NotPlain, SchemaParser
from horovod_train.data.reader import parse_usable
from horovod_train.data.schema import Feature
from horovod_train.errors import UserError

FEATURES = {
    "label": Feature("int64"),
    "numbers": Feature("int64", (2, 2)),
    "real": Feature("float", (3,)),
    "raw": Feature("bytes", (4,), decode="raw", raw_dtype="int16"),
}


def as_table(records: list[bytes]) -> np.ndarray:
    assert len({len(record) for record in records}) == 1
    return np.stack([np.frombuffer(record, np.uint8) for record in records])


def by_template(records: list[bytes], features: dict[str, Feature] = FEATURES) -> dict[str, np.ndarray] | None:
    table = as_table(records)
    return FixedLayout(table[0], features).parse(table)


@st.composite
def alike(draw: st.DrawFn) -> list[bytes]:
    """Records whose integers take equally many bytes, place by place."""
    lowest = [draw(st.sampled_from([0, 1 << 7, 1 << 14, 1 << 31, 1 << 56, -(1 << 63)])) for _ in range(5)]

    def integer(low: int) -> int:
        return draw(st.integers(low, 127 if low == 0 else -1 if low < 0 else 2 * low - 1))

    reals = st.floats(width=32, allow_nan=False)
    return [
        example(
            label=integer(lowest[0]),
            numbers=[integer(low) for low in lowest[1:]],
            real=[draw(reals) for _ in range(3)],
            raw=draw(st.binary(min_size=8, max_size=8)),
            other=[draw(st.integers(0, 99)), draw(st.integers(0, 99))],
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


@settings(max_examples=60)
@given(alike())
def test_a_table_is_parsed_as_tensorflow_does(records: list[bytes]) -> None:
    found = by_template(records)
    assert found is not None
    usual = SchemaParser(FEATURES).parse(records)
    assert usual is not None
    for name, array in usual.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name], array)


def test_the_parser_takes_tables_and_lists_alike() -> None:
    features = {"image_raw": Feature("bytes", (4, 4, 1), decode="raw"), "label": Feature("int64", classes=10)}
    records = [image_record(number) for number in range(30)]
    parser = SchemaParser(features)
    one, other = parser.parse(records), parser.parse(as_table(records))
    assert one is not None
    assert other is not None
    assert all(np.array_equal(one[name], other[name]) for name in features)


def test_records_of_which_a_function_takes_only_one_at_a_time_are_parsed_so() -> None:
    def length_of(records: tf.Tensor) -> dict[str, tf.Tensor]:
        tf.debugging.assert_equal(tf.size(records), 1)
        return {"length": tf.strings.length(records)}

    parser = FunctionParser(length_of, "length_of")
    arrays, bad = parse_usable(parser, np.arange(3), [b"a", b"bb", b"ccc"], {}, lambda record, problem: problem)
    assert (arrays["length"].tolist(), bad) == ([1, 2, 3], {})


def test_a_record_that_tensorflow_alone_cannot_parse_is_a_bad_one() -> None:
    """To protobuf numbers in two pieces are one list."""
    whole, pieces = example(y=[1, 2]), [example(y=[1]), example(y=[2])]
    lists = [tf.train.Example.FromString(piece).features.feature["y"].int64_list for piece in pieces]
    split = b"".join(each.SerializeToString() for each in lists)
    key = b"\x0a\x01y\x12" + bytes([len(split) + 2]) + b"\x1a" + bytes([len(split)]) + split
    entry = b"\x0a" + bytes([len(key)]) + key
    record = b"\x0a" + bytes([len(entry)]) + entry
    parser = SchemaParser({"y": Feature("int64", (2,))})
    assert parser.problem(record) is None
    assert parser.parse([record]) is None
    arrays, bad = parse_usable(parser, np.arange(3), [whole, record, whole], {}, lambda at, problem: f"{at}: {problem}")
    assert arrays["y"].tolist() == [[1, 2], [1, 2]]
    assert bad == {1: "1: TensorFlow cannot parse it as its features say"}
    assert parse_usable(parser, np.arange(1), [record], {}, lambda at, problem: problem)[0] == {}


@pytest.mark.parametrize("name", ["z", "length"])
def test_a_mistake_in_a_users_function_is_told_with_its_line(name: str) -> None:
    def mistaken(records: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"length": {"length": records}[name].no_such_attribute}

    said = "KeyError: 'z'" if name == "z" else "AttributeError: .* has no attribute 'no_such_attribute'"
    with pytest.raises(UserError, match=rf"^data\.parse: mistaken cannot be traced: {said} \(at {__file__}:\d+\)$"):
        FunctionParser(mistaken, "mistaken")


def test_what_a_users_assertion_says_is_the_problem() -> None:
    def checked(records: tf.Tensor) -> dict[str, tf.Tensor]:
        length = tf.strings.length(records)
        tf.debugging.Assert(tf.reduce_all(length < 3), ["too long", length])
        return {"length": length}

    assert FunctionParser(checked, "checked").problem(b"abcd") == "assertion failed: [too long] [4]"


def test_records_that_differ_in_more_than_values_are_left_to_tensorflow() -> None:
    plain = example(label=1, numbers=[1, 2, 3, 4], real=[1.0, 2.0, 3.0], raw=bytes(8))
    renamed = plain.replace(b"numbers", b"Numbers")
    longer = example(label=300, numbers=[1, 2, 3, 4], real=[1.0, 2.0, 3.0], raw=bytes(8))
    shifted = example(label=1, numbers=[1, 2, 300], real=[1.0, 2.0, 3.0], raw=bytes(8))
    assert by_template([plain, renamed]) is None
    assert len(shifted) == len(plain)
    assert by_template([plain, shifted]) is None
    assert FixedLayout(as_table([plain])[0], FEATURES).parse(as_table([longer])) is None


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"text",
        b"\x0a\xff",
        example(label=1),
        example(label=[1, 2], numbers=[1, 2, 3, 4], real=[1.0, 2.0, 3.0], raw=bytes(8)),
        example(label=1, numbers=[1, 2, 3, 4], real=[1.0, 2.0], raw=bytes(8)),
        example(label=1, numbers=[1, 2, 3, 4], real=[1.0, 2.0, 3.0], raw=bytes(7)),
        example(label=1.0, numbers=[1, 2, 3, 4], real=[1.0, 2.0, 3.0], raw=bytes(8)),
        example(label=1, numbers=[1, 2, 3, 4], real=[1.0, 2.0, 3.0], raw=[bytes(8), b""]),
        example(label=1, numbers=[1, 2, 3, 4], real=[], raw=bytes(8)),
    ],
    # The bytes would not do: protobuf writes a map in another order in another process.
    ids=["nothing", "text", "cut", "lack", "more", "fewer", "shorter", "another type", "two values", "no value"],
)
def test_other_records_have_no_template(record: bytes) -> None:
    with pytest.raises(NotPlain):
        FixedLayout(np.frombuffer(record, np.uint8), FEATURES)


def test_a_record_made_by_hand_in_another_way_has_no_template() -> None:
    """Integers may also be stored one by one, not packed; TensorFlow reads both."""
    value: Any = tf.train.Feature(int64_list=tf.train.Int64List(value=[5]))
    packed = value.SerializeToString()
    assert packed == b"\x1a\x03\x0a\x01\x05"
    single = b"\x1a\x02\x08\x05"
    entry = b"\x0a\x05label\x12" + bytes([len(single)]) + single
    record = b"\x0a" + bytes([len(entry) + 2]) + b"\x0a" + bytes([len(entry)]) + entry
    features = {"label": Feature("int64")}
    with pytest.raises(NotPlain):
        FixedLayout(np.frombuffer(record, np.uint8), features)
    parsed = SchemaParser(features).parse(as_table([record, record]))
    assert parsed is not None
    assert parsed["label"].tolist() == [5, 5]
