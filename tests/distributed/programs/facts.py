"""How a rank program leaves what it found: one JSON object a rank, named for the rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def leave(rank: int, facts: dict[str, Any]) -> None:
    path = Path(sys.argv[1]) / f"rank-{rank}.json"
    path.write_text(json.dumps(facts, default=_plain))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def rel_error(got: Any, expected: Any) -> float:
    """Largest absolute difference over the largest absolute value."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.max(np.abs(got - expected)) / max(np.max(np.abs(expected)), 1e-30))
