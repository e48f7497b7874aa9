"""Keys, numbers and names of variables, whether Keras' or TensorFlow's; values that belong to them."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_train.distributed.group import as_tf_variable

T = TypeVar("T")


def key_of(variable: Any) -> Any:
    """Return the dictionary key of a variable or tensor: equal for a Keras variable and the tf.Variable behind it."""
    return (variable if isinstance(variable, tf.Tensor) else as_tf_variable(variable)).ref()


def make_outside_graphs(make: Callable[[], T]) -> T:
    """Call `make` outside any tf.function that is being traced; return its result.

    In a thread, because TensorFlow lets a function make variables only in its first trace, even in an init_scope.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


class PerVariable(Generic[T]):
    """One value for each variable, made at the first lookup and dropped with the variable."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def __getitem__(self, variable: Any) -> T:
        if id(variable) not in self._values:
            self._values[id(variable)] = self._make()
            weakref.finalize(variable, self._values.pop, id(variable), None)
        return self._values[id(variable)]

    def values(self) -> list[T]:
        return list(self._values.values())


_numbers: defaultdict[int | None, PerVariable[int]] = defaultdict(lambda: PerVariable(itertools.count().__next__))


def number_of(variable: Any, process_set: hvd.ProcessSet = hvd.global_process_set) -> int:
    """Return the number of a variable in a process set. Variables are numbered in the order of their first lookup.

    All ranks of the set look up in the same order. Names would not do: Keras numbers layers and optimizers by how many
    there have been in the process, and rank 0 may have made more of them.
    """
    return _numbers[process_set.process_set_id][variable]


def forget_process_set(process_set_id: int) -> None:
    """Forget the numbers in a process set that is removed: Horovod gives its id to another."""
    _numbers.pop(process_set_id, None)


def name_of(variable: Any) -> str:
    """Return a variable's name for messages: "dense/kernel"."""
    return str(getattr(variable, "path", variable.name))
