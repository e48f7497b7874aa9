"""Finds the records that cannot be used, and names each by file, number and byte. Reads nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_train.data.parsing import Parser
from horovod_train.data.tfrecord.reader import Fault, Reader


def name_faults(
    reader: Reader, parser: Parser, records: np.ndarray, data: list[bytes], faults: Sequence[Fault]
) -> dict[int, str]:
    """Return a sentence for each bad record, in the order of `records`: those in `faults` and unparsable ones."""
    known = {fault.record: fault.message for fault in faults}
    found: dict[int, str] = {}
    for record, one in zip(records.tolist(), data, strict=True):
        if record in known:
            found[record] = known[record]
            continue
        problem = parser.problem(one)
        if problem:
            found[record] = reader.fault(record, problem).message
    return found
