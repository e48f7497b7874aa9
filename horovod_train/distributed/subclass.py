"""Give an object another class that looks like its own, so that it is saved and loads as what it was."""

from __future__ import annotations

from typing import Any


def take_class(instance: Any, derived: type) -> None:
    """Make `derived` the object's class, with the name, module and docstring of its present class.

    derived: a subclass of the object's class without data of its own.
    """
    base = type(instance)
    derived.__name__, derived.__qualname__ = base.__name__, base.__qualname__
    derived.__module__, derived.__doc__ = base.__module__, base.__doc__
    instance.__class__ = derived
