"""How a run can end badly: one exception class per exit code. Says nothing about how they are shown; see main."""

from __future__ import annotations


class RunError(Exception):
    """Ends the run with `exit_code`; its text is one line that a user can act on."""

    exit_code = 1


class UserError(RunError):
    """Bad config, arguments or data: the line says where, what was expected, what came and what to do."""

    exit_code = 2


class RanksDisagree(RunError):
    """The ranks hold different weights."""

    exit_code = 86


class RanksStartApart(RanksDisagree):
    """The ranks were started with different data, config, code or versions: found before they train."""

    exit_code = 2


class DivergedError(RunError):
    """The loss is no longer a finite number."""


class Stalled(RunError):
    """No rank made progress for too long."""

    exit_code = 87


class AlreadySaid(RunError):
    """The reason has been shown; what is left to give is the exit code."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class FailedElsewhere(AlreadySaid):
    """Another rank failed and has said why; this one only leaves, without a word of its own."""
