"""Reads records by number: loads whole blocks ahead of need, and takes the records out of them. Knows no format.

Frees the blocks that keep_only does not name, so its memory is what the plan's windows span. Also finds the records of
a batch that cannot be used, and how long the lists of all records are, for buckets; see sampler. Lengths are measured
once and saved, in `data.index_dir` or the user's cache folder; copies of the records share them, because the file is
named by the digest of what the records hold. Parsing TFRecords needs TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.files import paths_in_cache, save_to_first
from horovod_train.data.sampler import Buckets
from horovod_train.data.schema import Feature, Schema
from horovod_train.data.source import Arrays, Blocks, Data, LoadedBlock, Parser, RecordSource, split_records
from horovod_train.data.storage import Retries
from horovod_train.errors import UserError
from horovod_train.output.console import track
from horovod_train.output.files import Artifact, open_atomically
from horovod_train.shown_text import error_line

CHUNK_RECORDS, _CHUNK_BYTES = 4096, 16 << 20
_MAGIC = b"\x93NUMPY"


class _Part(NamedTuple):
    """The records to take from one block."""

    block: LoadedBlock
    positions: np.ndarray
    """int64: their positions in the block."""
    rows: np.ndarray
    """int64: their rows in the result."""


class Reader:
    """Not for several threads at the same time."""

    def __init__(self, source: RecordSource, threads: int = DataConfig.read_threads) -> None:
        """threads: how many blocks are loaded at the same time."""
        self._blocks, self._load = source.blocks, source.open()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="read-blocks")
        self._in_memory: dict[int, Future[LoadedBlock]] = {}

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Start loading the blocks that are not in memory yet."""
        for block in blocks:
            if block not in self._in_memory:
                self._in_memory[block] = self._threads.submit(self._load, block)

    def keep_only(self, blocks: Iterable[int]) -> None:
        """Free all other blocks."""
        for block in self._in_memory.keys() - set(blocks):
            del self._in_memory[block]

    def read(self, records: np.ndarray) -> tuple[Data, dict[int, str]]:
        """Return the records in the order of `records`, and a sentence for each that cannot be used, by its number.

        Raises UserError if a part has disappeared, has changed or cannot be read.
        """
        blocks = self._blocks.containing(records)
        order = np.argsort(blocks, kind="stable")
        needed, first = np.unique(blocks[order], return_index=True)
        self.read_ahead(needed.tolist())
        positions = records - self._blocks.first_record[blocks]
        parts = [
            _Part(self._in_memory[block].result(), positions[rows], rows)
            for block, rows in zip(needed.tolist(), np.split(order, first[1:]), strict=True)
        ]
        faults = {
            int(records[row]): part.block.faults[position]
            for part in parts
            if part.block.faults
            for row, position in zip(part.rows.tolist(), part.positions.tolist(), strict=True)
            if position in part.block.faults
        }
        return _join(parts, len(records)), faults

    def close(self) -> None:
        """Load no further block, and repeat no request for those being loaded: Python's exit waits for the threads.

        Any thread may call it. What reads at that moment gets an error.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        if any(block.running() for block in list(self._in_memory.values())):
            Retries.give_up_all()

    def name_record(self, record: int, problem: str) -> str:
        """Return a sentence with the place of a record and its problem, short. Loads its block if necessary."""
        (block,) = self._blocks.containing(np.array([record])).tolist()
        self.read_ahead([block])
        return self._in_memory[block].result().name(record - int(self._blocks.first_record[block]), error_line(problem))


def _join(parts: Sequence[_Part], records: int) -> Data:
    """Join the records of all parts: in arrays, or one by one unless all parts have arrays of the same kinds."""
    arrays = [_arrays(part.block.data) for part in parts]
    kinds = [[(name, array.dtype, array.shape[1:]) for name, array in of_part.items()] for of_part in arrays]
    if not kinds[0] or any(of_part != kinds[0] for of_part in kinds):
        in_order: list[Any] = [None] * records
        for part in parts:
            stored = split_records(part.block.data)
            for row, position in zip(part.rows.tolist(), part.positions.tolist(), strict=True):
                in_order[row] = stored[position]
        return in_order
    joined = {name: np.empty((records, *shape), dtype) for name, dtype, shape in kinds[0]}
    for part, of_part in zip(parts, arrays, strict=True):
        for name, array in joined.items():
            array[part.rows] = of_part[name][part.positions]
    return joined if isinstance(parts[0].block.data, dict) else joined[""]


def _arrays(data: Data) -> Arrays:
    """Return the arrays of a block; none if its records are one by one."""
    return data if isinstance(data, dict) else {"": data} if isinstance(data, np.ndarray) else {}


def parse_usable(
    parser: Parser, records: np.ndarray, data: Data, faults: Mapping[int, str], name_record: Callable[[int, str], str]
) -> tuple[Arrays, dict[int, str]]:
    """Parse records; one by one if they do not parse together. faults, name_record: as of Reader.

    Return the arrays of the usable records, and a sentence for each other record, by its number; both in order.
    """
    arrays = None if faults else parser.parse(data)
    if arrays is not None:
        return arrays, {}
    usable, unusable = [], dict[int, str]()
    for record, stored in zip(records.tolist(), split_records(data), strict=True):
        if record in faults:
            unusable[record] = faults[record]
        elif problem := parser.problem(stored):
            unusable[record] = name_record(record, problem)
        else:
            usable.append(stored)
    arrays = parser.parse(usable) if usable else {}
    if arrays is None:  # as of a user's function that takes each record, but not these together
        rows = [parser.parse([stored]) for stored in usable]
        left = [record for record in records.tolist() if record not in unusable]
        for record, row in zip(left, rows, strict=True):
            if row is None:
                unusable[record] = name_record(record, "TensorFlow cannot parse it as its features say")
        parsed = [row for row in rows if row]
        arrays = {name: np.concatenate([row[name] for row in parsed]) for name in parser.dtypes} if parsed else {}
        unusable = dict(sorted(unusable.items()))
    return arrays, unusable


def records_at_a_time(blocks: Blocks, parser: Parser, most: int = CHUNK_RECORDS) -> int:
    """Return how many records are read together: of 16 MiB at most, as they are stored and as they are parsed."""
    stored = blocks.total_bytes / max(blocks.num_records, 1)
    return max(1, int(min(most, _CHUNK_BYTES / max(stored, bytes_parsed(parser), 1))))


def bytes_parsed(parser: Parser) -> int:
    """Return the bytes of a parsed record, lists at their full length; without strings."""
    dtypes = (item for item in parser.dtypes.items() if item[1] != "string")
    return sum(np.dtype(dtype).itemsize * math.prod(parser.shapes[name]) for name, dtype in dtypes)


def parse_all(
    source: RecordSource, reader: Reader, parser: Parser, description: str
) -> Iterator[tuple[np.ndarray, Data, Arrays, dict[int, str]]]:
    """Read all records in their order, some thousand at a time. description: of the work, on a progress bar.

    Yield for each chunk the numbers of its records, their stored data, and the results of parse_usable.
    """
    chunk = records_at_a_time(source.blocks, parser)
    firsts = range(0, source.blocks.num_records, chunk)
    for first in track(firsts, len(firsts), description):
        records = np.arange(first, min(first + chunk, source.blocks.num_records))
        data, faults = reader.read(records)
        yield records, data, *parse_usable(parser, records, data, faults, reader.name_record)
        reader.keep_only(source.blocks.containing(records[-1:]).tolist())


# --- the lengths of lists, for buckets ------------------------------------------------------------------------


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


_LENGTHS = Artifact("lengths of records", r"lengths-[0-9a-f]{16}\.npy", content_matches=_is_array)


def find_buckets(source: RecordSource, digest: str, schema: Schema, config: DataConfig) -> Buckets | None:
    """Return the lengths of all lists and how to bucket by them; None without data.bucket_by_length.

    digest: of the source. Reads all records unless their lengths are saved. Raises UserError if the feature is no list.
    """
    by = config.bucket_by_length
    if by is None:
        return None
    lists = {name: feature for name, feature in schema.features.items() if feature.max_length}
    if by not in lists:
        raise UserError(
            f"data.bucket_by_length: {by} is no list (a feature with max_length). "
            f"The lists of {schema.where}: {', '.join(lists) or 'none'}."
        )
    used = {*schema.inputs, *schema.targets, by}
    lists = {name: feature for name, feature in lists.items() if name in used}
    # 3: files of lower numbers may hold other lengths, of records that could not be read when they were measured.
    cache_key = hashlib.sha256(f"3 {digest} {lists!r}".encode()).hexdigest()[:16]
    places = paths_in_cache(f"lengths-{cache_key}.npy", config.index_dir)
    lengths = _load_lengths(places, (source.blocks.num_records, len(lists)))
    if lengths is None:
        lengths = _measure_lengths(source, lists, config)
        save_to_first(places, partial(_save_lengths, lengths))
    max_lengths = tuple(feature.max_length or 0 for feature in lists.values())
    return Buckets(tuple(lists), lengths, by, config.bucket_steps, max_lengths)


def _measure_lengths(source: RecordSource, lists: dict[str, Feature], config: DataConfig) -> np.ndarray:
    """Read all records; a bad one gets the full length, because it may be repaired, and is reported when it is used."""
    reader, parser = Reader(source, config.read_threads), source.parser(lists)
    full = np.array([feature.max_length for feature in lists.values()], np.int32)
    lengths = np.tile(full, (source.blocks.num_records, 1))
    for records, _, arrays, bad in parse_all(source, reader, parser, "reading records once, for their lengths"):
        usable = records[~np.isin(records, list(bad))]
        for column, (name, feature) in enumerate(lists.items()):
            if len(usable):
                lengths[usable, column] = lengths_of(feature, np.asarray(arrays[name]))
    return lengths


def lengths_of(feature: Feature, values: np.ndarray) -> np.ndarray:
    """Return the lengths of lists [records, max_length, …], without the padding at their ends: int64 [records]."""
    padding = b"" if feature.stored_dtype == "string" else np.asarray(feature.padding, values.dtype)
    is_item = (values != padding).reshape(*values.shape[:2], -1).any(axis=2)
    return np.where(is_item.any(axis=1), is_item.shape[1] - np.argmax(is_item[:, ::-1], axis=1), 0)


def without_padding(feature: Feature, values: np.ndarray) -> np.ndarray:
    """Return the values of records [records, …]; those of lists [items, …] without the padding at their ends."""
    if feature.max_length is None:
        return values
    return values[np.arange(values.shape[1]) < lengths_of(feature, values)[:, None]]


def _load_lengths(places: Sequence[Path], shape: tuple[int, int]) -> np.ndarray | None:
    for place in places:
        with contextlib.suppress(OSError, ValueError, EOFError):
            lengths = np.load(place, mmap_mode="r", allow_pickle=False)  # ranks of a host share its pages
            if lengths.shape == shape and lengths.dtype == np.int32:
                return lengths
    return None


def _save_lengths(lengths: np.ndarray, place: Path) -> None:
    with open_atomically(place, _LENGTHS, sync=False) as file:
        np.save(file, lengths)
