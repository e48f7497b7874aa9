"""The result of a check of `doctor`: one line, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """level "fail": a run here would fail, hang or be wrong. "warning": all or part of it would be slow."""

    name: str
    level: Level
    text: str
    do: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """The figures behind the line, in JSON types."""
    rows: tuple[str, ...] = ()
    """Lines of a table to show below."""

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "rows"}


Facts = Mapping[str, Any]


def ok(name: str, text: str, facts: Facts | None = None, rows: Sequence[str] = ()) -> CheckResult:
    return CheckResult(name, "ok", text, "", dict(facts or {}), tuple(rows))


def warning(name: str, text: str, do: str, facts: Facts | None = None, rows: Sequence[str] = ()) -> CheckResult:
    return CheckResult(name, "warning", text, do, dict(facts or {}), tuple(rows))


def fail(name: str, text: str, do: str, facts: Facts | None = None) -> CheckResult:
    return CheckResult(name, "fail", text, do, dict(facts or {}))
