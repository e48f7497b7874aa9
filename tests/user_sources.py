"""Sources of a user's own, as `data.source` names them. The values of a record follow from its number."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

RECORDS = 137


def row(record: int) -> dict[str, Any]:
    return {"x": (np.arange(16) * 7 + record).astype(np.uint8).reshape(4, 4, 1), "y": record % 10}


class Items:
    """One record at a time. torn: records that raise; odd: of another shape; other: other features; says: __len__."""

    def __init__(
        self,
        path: str,
        records: Any = RECORDS,
        torn: tuple[int, ...] = (),
        odd: tuple[int, ...] = (),
        other: tuple[int, ...] = (),
        says: Any = None,
        changed: int | None = None,
    ) -> None:
        self.records, self.torn, self.odd, self.other = records, torn, odd, other
        self.says, self.changed = says, changed
        self.read_records: list[int] = []

    def __len__(self) -> int:
        return self.records if self.says is None else self.says

    def __getitem__(self, record: int) -> dict[str, Any]:
        if record >= self.records:
            raise IndexError(f"no record {record}")
        if record in self.torn:
            raise ValueError("torn page")
        self.read_records.append(record)
        found: dict[str, Any] = {"z": 1} if record in self.other else row(record)
        if record in self.odd:
            found["x"] = found["x"][:3]
        if record == self.changed:
            found["y"] += 1
        return found


class Named(Items):
    """It knows what identifies its records."""

    def fingerprint(self) -> Any:
        return "first edition" if self.says is None else self.says

    def __len__(self) -> int:
        return self.records


class Many:
    """Many records at a time. short: gives a row too few; torn: records that raise."""

    def __init__(self, path: str, records: int = RECORDS, short: bool = False, torn: tuple[int, ...] = ()) -> None:
        self.records, self.short, self.torn = records, short, torn

    def __len__(self) -> int:
        return self.records

    def read(self, records: np.ndarray) -> dict[str, Any]:
        if set(records.tolist()) & set(self.torn):
            raise OSError("torn page")
        rows = [row(record) for record in records.tolist()]
        x = np.stack([one["x"] for one in rows])
        return {"x": x[1:] if self.short else x, "y": [one["y"] for one in rows]}

    def fingerprint(self) -> str:
        return f"{self.records}"


class Digits:
    """The handwritten digits of an npz file, one at a time. torn: records that raise; pause_s: before each."""

    def __init__(self, path: str, torn: tuple[int, ...] = (), pause_s: float = 0.0) -> None:
        with np.load(path) as saved:
            self.images, self.labels = saved["image"], saved["label"]
        self.torn, self.pause_s = torn, pause_s

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, record: int) -> dict[str, Any]:
        time.sleep(self.pause_s)
        if record in self.torn:
            raise ValueError("torn page")
        return {"image": self.images[record], "label": self.labels[record]}


class NoLength:
    def __init__(self, path: str) -> None: ...

    def __getitem__(self, record: int) -> dict[str, Any]:
        return row(record)


class NoRecords:
    def __init__(self, path: str) -> None: ...

    def __len__(self) -> int:
        return RECORDS


class Lists(Items):
    def __getitem__(self, record: int) -> Any:
        return list(row(record).values())


class Broken:
    def __init__(self, path: str) -> None:
        raise FileNotFoundError(f"no {path}")
