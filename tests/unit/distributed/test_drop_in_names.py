"""What a Horovod script may name is there with the same arguments, or is refused with what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import horovod.keras
import horovod.keras.callbacks
import horovod.tensorflow
import horovod.tensorflow.keras
import horovod.tensorflow.keras.callbacks
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import horovod_train.keras
import horovod_train.keras.callbacks
import horovod_train.tensorflow
from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError
from horovod_train.keras import callbacks
from horovod_train.tensorflow import REPLACEMENTS

HELPERS = {
    *("LocalGradientAggregationHelper", "check_extension", "check_num_rank_power_of_2", "gpu_available", "split_list"),
    *("handle_average_backwards_compatibility", "is_version_greater_equal_than", "refs_to_vars", "vars_to_refs"),
}
"""Horovod's modules import these for themselves."""
PAIRS = [
    (horovod.tensorflow, horovod_train.tensorflow),
    (horovod.tensorflow.keras, horovod_train.keras),
    (horovod.keras, horovod_train.keras),
    (horovod.tensorflow.keras.callbacks, horovod_train.keras.callbacks),
    (horovod.keras.callbacks, horovod_train.keras.callbacks),
]
PAIR = pytest.mark.parametrize(("stock", "ours"), PAIRS, ids=lambda module: module.__name__)


def names(stock: ModuleType) -> list[str]:
    """The functions, classes and constants of a module of Horovod's, and its elastic."""
    found = {name: value for name, value in vars(stock).items() if not name.startswith("_") and name not in HELPERS}
    constants = [name for name in found if name in ("Average", "Sum", "Adasum", "Min", "Max", "Product", "elastic")]
    return sorted({*constants, *(name for name, value in found.items() if _is_horovods(value))})


def _is_horovods(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("horovod")


def arguments(value: Any) -> set[str]:
    """The names of all that may be given; of a class, to its __init__."""
    found = inspect.signature(value.__init__ if inspect.isclass(value) else value).parameters.values()
    return {each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)} - {"self"}


@PAIR
def test_every_name_is_served_or_refused_with_what_to_do(stock: ModuleType, ours: ModuleType) -> None:
    assert len(names(stock)) >= 5
    for name in names(stock):
        if not hasattr(ours, name):
            assert name in REPLACEMENTS, f"{ours.__name__} has no {name}"
            with pytest.raises(AttributeError, match=f"has no '{name}': .*"):
                getattr(ours, name)


@PAIR
def test_every_argument_is_taken(stock: ModuleType, ours: ModuleType) -> None:
    for name in names(stock):
        theirs, own = getattr(stock, name), getattr(ours, name, None)
        if own is None or own is theirs or not callable(own) or isinstance(own, int):
            continue
        try:
            expected = arguments(theirs)
        except ValueError:
            continue  # written in C
        takes_all = any(each.kind == each.VAR_KEYWORD for each in inspect.signature(own).parameters.values())
        assert takes_all or expected <= arguments(own), f"{ours.__name__}.{name}"


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a rank of `horovodrun --min-np`."""
    for name, value in {"RANK": "0", "SIZE": "2", "ELASTIC": "1"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    launcher.detect.cache_clear()
    yield
    launcher.detect.cache_clear()


@pytest.mark.usefixtures("elastic")
def test_an_elastic_script_has_no_process_sets() -> None:
    with pytest.raises(UserError, match="add_process_set: horovodrun --min-np started an elastic script"):
        horovod_train.tensorflow.add_process_set([0, 1])


@pytest.mark.parametrize("module", [horovod_train.keras, horovod_train.tensorflow], ids=lambda module: module.__name__)
def test_an_unknown_name_is_an_attribute_error_as_of_any_module(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"has no 'no_such_name'$"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", ["allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"])
def test_means_of_integers_keep_their_fractions_and_sums_their_dtype(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In place of the exchange: what would be sent."""
    sent: list[tf.Tensor] = []

    def send(tensor: Any, *_: Any, **__: Any) -> Any:
        sent.extend([tensor] if isinstance(tensor, tf.Tensor) else tensor)
        return tensor

    monkeypatch.setattr(horovod.tensorflow, f"_{name}", send)
    monkeypatch.setattr(horovod.tensorflow.global_process_set, "size", lambda: 2)
    collective = getattr(horovod_train.tensorflow, name)
    for values, options in (([1, 2], {}), ([1, 2], {"op": horovod.tensorflow.Sum}), ([1.0, 2.0], {})):
        tensor = tf.constant(values)
        collective([tensor] if name.startswith("grouped") else tensor, **options)
    assert [tensor.dtype.name for tensor in sent] == ["float64", "int32", "float32"]


def test_a_rank_that_is_lost_while_ranks_meet_is_no_mistake_of_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any, **__: Any) -> None:
        raise HorovodInternalError("Horovod has been shut down")

    monkeypatch.setattr(horovod.tensorflow, "allreduce", lose)
    with pytest.raises(HorovodInternalError):
        callbacks._all_ranks_meet_within(300)
