"""Tell variables apart, whether Keras' or TensorFlow's; make variables of our own for them."""

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
    """Return what stands for a variable or tensor in a dictionary: equal for a Keras variable and its tf one."""
    return (variable if isinstance(variable, tf.Tensor) else as_tf_variable(variable)).ref()


def made_outside(make: Callable[[], T]) -> T:
    """Return make(), called outside of any tf.function that is being traced.

    In a thread, because TensorFlow lets a function make variables in its first trace only, also in an init_scope.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


class PerVariable(Generic[T]):
    """What belongs to each variable, made when it is first asked for and dropped with the variable."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._found: dict[int, T] = {}

    def __getitem__(self, variable: Any) -> T:
        if id(variable) not in self._found:
            self._found[id(variable)] = self._make()
            weakref.finalize(variable, self._found.pop, id(variable), None)
        return self._found[id(variable)]

    def values(self) -> list[T]:
        return list(self._found.values())


_numbers: defaultdict[int | None, PerVariable[int]] = defaultdict(lambda: PerVariable(itertools.count().__next__))


def number_of(variable: Any, process_set: hvd.ProcessSet = hvd.global_process_set) -> int:
    """Return a number that stands for a variable in a process set: how many others were asked for before, in it.

    All its ranks ask in the same order; ranks outside need not ask. Names would not do: Keras numbers layers and
    optimizers by how many there have been in the process, and rank 0 may have made some more.
    """
    return _numbers[process_set.process_set_id][variable]


def forget(process_set_id: int) -> None:
    """Forget the numbers in a process set that is removed: Horovod gives its own number to another."""
    _numbers.pop(process_set_id, None)


def name_of(variable: Any) -> str:
    """Return a variable's name for messages: "dense/kernel"."""
    return str(getattr(variable, "path", variable.name))
