"""The interface to stored records, the same for all formats; and whether two data sets hold the same records.

A source is all records of one split in a fixed order. It stores them in blocks: runs of neighbours that are read in one
piece. The sampler permutes blocks, reader keeps them in memory while they are needed, and the source reads them.

To add a kind: a module with an OpenSource, such as tfrecord.open_tfrecords, and a line in dataset.SOURCES.
Files that can be read by number need less: see random_access.

A part of a source, such as a file, is identified by its base name, its size, its number of records and a digest of what
they hold. Its folder and time do not matter, so copies on other disks and hosts are equal.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.schema import Feature
from horovod_train.shown_text import counted, listed

Arrays = dict[str, np.ndarray]
"""By name. Strings may be an eager tensor instead, which numpy.asarray copies into Python."""

Data = list[Any] | np.ndarray | Arrays
"""Records as a source gives them: one by one; uint8 [records, bytes] if all have one length; or arrays by name."""
_SHORT = 8  # hex digits: enough to tell which file differs once it is known that one does
Names = list[tuple[str, str]]
"""For each part in order, its base name and a short digest of all that identifies it."""


def split_records(data: Data) -> list[Any]:
    """Return a list with an item for each record: its bytes, or its values by name."""
    if isinstance(data, np.ndarray):
        return [row.tobytes() for row in data]
    if isinstance(data, dict):
        return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]
    return data


def mark_skipped(ids: Any) -> Any:
    """Return ids, int64 in an array or a tensor, that mark these records as skipped; for such ids, the records."""
    return -2 - ids


class Part(NamedTuple):
    """A file or another part of a source that has a path: what identifies it and its records."""

    path: str
    size: int
    """In bytes."""
    records: int
    digest: str
    """Hex, of what the records hold."""
    problem: str = ""
    """Why records after these are not read; "" for a complete part."""


def problems_of(parts: Sequence[Part]) -> list[str]:
    """Return a sentence for each part that is not complete."""
    return [f"{part.path}: {part.problem}" for part in parts if part.problem]


def same_content(parts: Sequence[Part], others: Sequence[Part]) -> list[tuple[str, str]]:
    """Return the path of each part that holds the records of one of the others, and the first such other's path."""
    by_content = {(other.size, other.records, other.digest): other.path for other in reversed(others) if other.records}
    pairs = [(part.path, by_content.get((part.size, part.records, part.digest))) for part in parts]
    return [(path, other) for path, other in pairs if other is not None]


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks of a source, in the order of the records. A record's number is its position in that order."""

    records: np.ndarray
    """int64 [blocks]: how many records each has."""
    bytes: np.ndarray
    """int64 [blocks]: how many bytes each takes in storage."""

    @cached_property
    def first_record(self) -> np.ndarray:
        """int64 [blocks + 1]: the number of each block's first record; at the end, the number of records."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.records, dtype=np.int64)])

    @property
    def num_records(self) -> int:
        return int(self.first_record[-1])

    @cached_property
    def are_single(self) -> bool:
        """Whether each block holds one record."""
        return len(self.records) == self.num_records and bool((self.records == 1).all())

    @cached_property
    def total_bytes(self) -> int:
        return int(self.bytes.sum())

    def containing(self, records: np.ndarray) -> np.ndarray:
        """Return the block that contains each record."""
        return np.searchsorted(self.first_record, records, side="right") - 1


class Parser(Protocol):
    """Parses batches of records into one array for each name, with rows as first axis."""

    dtypes: dict[str, str]
    """Of the arrays, as TensorFlow names them; an image is still its file's bytes, a string."""
    shapes: dict[str, tuple[int, ...]]
    """Of one row of the arrays."""

    def parse(self, records: Data) -> Arrays | None:
        """Return the arrays; None if some record does not fit."""

    def problem(self, record: Any) -> str | None:
        """Return what is wrong with one record; None if nothing is."""


@dataclass(frozen=True)
class LoadedBlock:
    """The records of a block, in memory."""

    data: Data
    name: Callable[[int, str], str]
    """(a record's position in the block, what is wrong with it) → the sentence that tells where the record is."""
    faults: Mapping[int, str]
    """Position of a record that cannot be used → that sentence. `data` holds no record at that position."""


LoadBlock = Callable[[int], LoadedBlock]
"""Reads a block by its number. Several threads call it. Raises UserError if its part has disappeared or has changed."""


class RecordSource(Protocol):
    """The records of one split. Knows where they are; has read none of them. Needs no TensorFlow but in `parser`."""

    @property
    def blocks(self) -> Blocks: ...

    @property
    def parts(self) -> Sequence[Part]:
        """Return the parts in the order of the records: two sources with equal parts hold equal records."""

    def open(self) -> LoadBlock:
        """Prepare for reading in this process. Raises UserError for an unusable data.stage_dir."""

    def parser(self, features: dict[str, Feature]) -> Parser:
        """Build the parser of what is stored, as far as these features."""


OpenSource = Callable[[Sequence[str], DataConfig], RecordSource]
"""Opens files of one kind. Raises UserError for one that cannot be read, or is damaged.

With data.on_bad_record: skip it uses the records before the damage and says so in the part's `problem`.
"""


def parser_of_examples(features: dict[str, Feature]) -> Parser:
    """Return the parser of serialized tf.train.Examples."""
    from horovod_train.data.parsing import SchemaParser  # loads TensorFlow

    return SchemaParser(features)


def digest_of(parts: Sequence[Part]) -> str:
    """Return the SHA-256, in hex, of all that identifies the parts, in their order."""
    return hashlib.sha256(b"".join(map(_identity, parts))).hexdigest()


def names_of(parts: Sequence[Part]) -> Names:
    return [(os.path.basename(part.path), hashlib.sha256(_identity(part)).hexdigest()[:_SHORT]) for part in parts]


def pack(names: Names) -> str:
    """Return the names as short text for a checkpoint: about 9 bytes a file if names are numbered."""
    texts = "\0".join(name for name, _ in names).encode(errors="surrogateescape")
    digests = bytes.fromhex("".join(digest for _, digest in names))
    return base64.b64encode(zlib.compress(len(texts).to_bytes(8, "little") + texts + digests, 9)).decode()


def unpack(text: str) -> Names | None:
    """Return what was packed; None for anything else."""
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
        end = 8 + int.from_bytes(data[:8], "little")
        names = data[8:end].decode(errors="surrogateescape").split("\0")
        digests = data[end:].hex()
        return list(zip(names, (digests[at : at + _SHORT] for at in range(0, len(digests), _SHORT)), strict=True))
    except (binascii.Error, zlib.error, ValueError):
        return None


def difference(names: Names, reference: Names, owner: str) -> str:
    """Return how the names differ from the reference, beginning with a verb: "lacks 3.tfrecord, which rank 0 has".

    owner: whose reference it is, in the sentence.
    """
    counts, reference_counts = Counter(name for name, _ in names), Counter(name for name, _ in reference)
    if missing := sorted(reference_counts.keys() - counts):
        return f"lacks {listed(missing, 3, 'files')}, which {owner} has"
    if added := sorted(counts.keys() - reference_counts):
        return f"has {listed(added, 3, 'files')}, which {owner} lacks"
    if unequal := sorted(name for name in counts if counts[name] != reference_counts[name]):
        times = [f"{name} {counted(counts[name], 'time')}, not {reference_counts[name]}" for name in unequal]
        return f"differs from {owner} in how often files count: {listed(times, 3, 'files')}"
    if changed := sorted(name for name, _ in (Counter(names) - Counter(reference)).elements()):
        return f"has other content in {listed(changed, 3, 'files')} than {owner}"
    pairs = enumerate(zip(names, reference, strict=True), 1)
    number, name = next((number, part[0]) for number, (part, expected) in pairs if part != expected)
    return f"has the same files as {owner} in another order, from file {number} on ({name})"


def _identity(part: Part) -> bytes:
    facts = [os.path.basename(part.path), str(part.size), str(part.records), part.digest, ""]
    return "\0".join(facts).encode(errors="surrogateescape")
