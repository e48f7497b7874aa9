"""Changes methods of single Keras objects: for good by a subclass, which is saved as their class, or inside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras


def take_class(instance: Any, derived: type) -> None:
    """Make `derived` the object's class, with the name, module and docstring of its present class.

    derived: a subclass of the object's class without data of its own.
    """
    base = type(instance)
    derived.__name__, derived.__qualname__ = base.__name__, base.__qualname__
    derived.__module__, derived.__doc__ = base.__module__, base.__doc__
    _register_as(base, derived)
    instance.__class__ = derived


def _register_as(base: type, derived: type) -> None:
    """Register `derived` under the name of `base`, if that is registered; what is saved loads as `base`."""
    name = keras.saving.get_registered_name(base)
    package, has_package, class_name = name.partition(">")
    original = keras.saving.get_registered_object(name)
    if has_package and original is not None:
        register = keras.saving.register_keras_serializable(package, class_name)
        register(derived)
        register(original)


@contextmanager
def method_replaced(
    objects: Iterable[Any], name: str, replacement: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Inside the block, each object has replacement(object, method) in place of its method of that name."""
    unique = list({id(each): each for each in objects}.values())
    for each in unique:
        setattr(each, name, replacement(each, getattr(each, name)))
    try:
        yield
    finally:
        for each in unique:
            delattr(each, name)
