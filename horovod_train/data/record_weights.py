"""Checks the feature that `data.weight` names: one number a record, finite and at least 0.

Does not multiply anything by it; see pipeline and training.steps.shares.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_train.data.schema import Feature, Schema
from horovod_train.data.source import Arrays, Data, Parser
from horovod_train.errors import UserError


def check_weight(name: str | None, schema: Schema) -> None:
    """Raise UserError if there is no feature of that name, or if it is not one number a record. None: no weights."""
    if name is None:
        return
    if name not in schema.features:
        raise UserError(f"data.weight: there is no feature {name}; there are {', '.join(schema.features)}.")
    feature = schema.features[name]
    _check_kind(name, feature.tensor_shape, feature.tensor_dtype)


def _check_kind(name: str, shape: tuple[int, ...], dtype: str) -> None:
    if shape or dtype == "string":
        kind = "of strings" if dtype == "string" else f"{dtype}{list(shape)}"
        raise UserError(f"data.weight: expected one number a record, shape []; feature {name} is {kind}.")


class WeightChecker:
    """Parses as another parser does, and finds weights that are negative or not finite. A Parser."""

    def __init__(self, parser: Parser, name: str, feature: Feature | None) -> None:
        """feature: as the schema describes it; None if a user's function parses. Raises UserError."""
        self._parser, self._name, self._feature = parser, name, feature
        self.dtypes, self.shapes = parser.dtypes, parser.shapes
        if name not in self.dtypes:
            raise UserError(f"data.weight: data.parse gives {', '.join(self.dtypes)}; there is no {name}.")
        _check_kind(name, self.shapes[name], self.dtypes[name])

    def parse(self, records: Data) -> Arrays | None:
        arrays = self._parser.parse(records)
        return arrays if arrays is None or self._find_invalid(arrays) is None else None

    def problem(self, record: Any) -> str | None:
        if problem := self._parser.problem(record):
            return problem
        arrays = self._parser.parse([record])
        invalid = None if arrays is None else self._find_invalid(arrays)
        return None if invalid is None else f"feature {self._name}: expected a weight of 0 or more; it is {invalid:g}"

    def _find_invalid(self, arrays: Arrays) -> float | None:
        """Return the first value that is no weight; None if all are weights."""
        values = np.asarray(arrays[self._name], np.float64)
        if self._feature is not None:
            values = values * (1 if self._feature.scale is None else self._feature.scale) + (self._feature.offset or 0)
        invalid = values[~(np.isfinite(values) & (values >= 0))]
        return float(invalid[0]) if invalid.size else None
