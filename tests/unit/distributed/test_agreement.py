"""What tells ranks apart: a number for each variable that differs for other values, and who disagrees with whom."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import RanksDisagree
from horovod_train.tensorflow.agreement import check_equal, digest

OTHERS: dict[str, tuple[Any, Any]] = {
    "one bit": (np.float32(1.0), np.nextafter(np.float32(1.0), np.float32(2.0))),
    "a sign": ([1.0, 0.0], [1.0, -0.0]),
    "two that change places": ([1.0, 2.0, 3.0], [2.0, 1.0, 3.0]),
    "two that move apart": (np.array([5, 5], "int64"), np.array([4, 6], "int64")),
    "a flag": ([True, False], [False, True]),
    "a half": (np.array([1.0, 2.0], "float16"), np.array([2.0, 1.0], "float16")),
    "a byte": (np.array([255, 1], "uint8"), np.array([1, 255], "uint8")),
    "a double": (np.array([1.0], "float64"), np.array([1.0 + 2.0**-52], "float64")),
    "the top bit": (np.array([0], "int64"), np.array([-(2**63)], "int64")),
    "NaN": ([np.nan], [0.0]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_have_another_digest(name: str) -> None:
    one, other = (tf.constant(value) for value in OTHERS[name])
    assert int(digest(tf.Variable(one))) == int(digest(one)) != int(digest(other))


def test_the_first_variable_that_differs_is_named_with_the_ranks_that_are_unlike_the_first() -> None:
    digests = np.array([[1, 2, 3], [1, 2, 4], [1, 5, 3]])
    with pytest.raises(RanksDisagree, match=r"weights: b on rank 7 differs from that on rank 2\. Do so\. Where "):
        check_equal(digests, ["a", "b", "c"], [2, 4, 7], "Do so")
    check_equal(digests[:1], ["a", "b", "c"], [2], "Do so")


def said(*facts: dict[str, str]) -> str:
    """What root says where ranks have these facts; "" if it says nothing."""

    def check(own: dict[str, str], gather: Callable[[Any], list[Any]]) -> None:
        group = SimpleNamespace(size=len(facts), gather=gather, name=lambda rank: f"rank {rank}")
        consistency.check(cast(WorkerGroup, group), own, "at step 3")

    def note(own: Any) -> list[Any]:
        digests.append(own)
        return [own]

    digests: list[Any] = []
    for each in facts:
        check(each, note)
    answers = iter([digests, list(facts)])
    try:
        check(facts[0], lambda _: next(answers))
    except RanksDisagree as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([{"a": "1"}] * 3, ""),
        ([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}], ""),
        ([{"a": "1"}, {"a": "2"}, {"a": "1"}], "a: rank 1 has '2'; 2 of 3 have '1'."),
        ([{"a": "1"}, {"a": "2"}, {"a": "2"}], "a: rank 0 has '1'; 2 of 3 have '2'."),
        ([{"a": "2"}, {"a": "1"}], "a: rank 1 has '1'; 1 of 2 have '2'."),  # a tie is root's
        ([{"a": "1"}, {"a": "2"}], "a: rank 1 has '2'; 1 of 2 have '1'."),
        ([{"a": "1", "b": "1"}, {"a": "1", "b": "2"}], "b: rank 1 has '2'; 1 of 2 have '1'."),
        ([{"a": "1"}, {"a": "1", "b": "2"}], "b: rank 1 has '2'; 1 of 2 have 'absent'."),
        ([{"a": "0" * 64}, {"a": "f" * 64}], "a: rank 1 has ffffffffffff; 1 of 2 have 000000000000."),
        ([{"a": "0" * 63}, {"a": "0" * 62}], f"a: rank 1 has '{'0' * 62}'; 1 of 2 have '{'0' * 63}'."),
    ],
)
def test_ranks_that_disagree_with_most_are_named(facts: list[dict[str, str]], expected: str) -> None:
    assert said(*facts) == (expected and f"ranks disagree at step 3 on {expected}")
