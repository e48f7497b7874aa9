"""What `init` has switched on or off, for the parts that act later."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guards:
    check_weights: bool = True
    """Compare weights over the ranks at the tenth exchange, and after each epoch of model.fit."""
    files_on_root_only: bool = True
    """Let callbacks that write files run on one rank of model.fit."""
    end_epochs_together: bool = True
    """End an epoch of model.fit on all ranks where the data of one has ended."""


_guards = Guards()


def switch(guards: Guards) -> None:
    global _guards
    _guards = guards


def guards() -> Guards:
    return _guards
