"""Records what each rank really consumed, and checks that a whole run read every record once an epoch.

Each start of a run opens a file per rank under `RUN_DIR/audit`, named for the step where it starts. A start at a step
invalidates what earlier starts wrote from that step on, because those steps are repeated. Does not know the sampler;
see check-data.

If the disk cannot be written, training continues: the failure is reported once, and the audit has a gap.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from horovod_train.data.source import mark_skipped
from horovod_train.errors import UserError, reading, unusable
from horovod_train.output.files import Artifact, Lines, is_gone, open_regular, parse_json, remove

FOLDER = "audit"
_WRITE_FROM_BYTES = 1 << 16
_NAME = re.compile(r"epoch-(\d+)-step-(\d+)-rank-(\d+)\.jsonl")
_FILE = Artifact("a rank's audit", _NAME.pattern)


class Position(NamedTuple):
    """A step of an epoch, both counted from 0."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step}"


@dataclass(frozen=True)
class Start:
    """One start of a run on one rank: the first line of its file."""

    epoch: int
    step: int
    rank: int
    size: int
    num_records: int
    global_batch_size: int
    steps_per_epoch: int
    data: str
    """A digest of what the records hold."""
    data_sets: Sequence[tuple[str, int, int]] = ()
    """Of each: its name, its records and their repeats. Records are numbered in this order, repeats one by one."""

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.step)


class Audit:
    """Which records one rank consumes. This one, without data.audit, writes nothing."""

    def append(self, epoch: int, first_step: int, ids: np.ndarray) -> None:
        """Record the ids int64 [steps, rows] that this rank consumed from a step on, as in Batch."""

    def flush(self) -> None:
        """Write all appended lines to disk, if the disk accepts them. Call it before saving a checkpoint."""

    def close(self) -> None:
        """Flush for the last time."""


class AuditLog(Audit):
    """One rank's file of one start, until a later start of the run replaces or removes it."""

    def __init__(self, run_dir: str, start: Start) -> None:
        """Create the file. Raises UserError if that fails."""
        folder = Path(run_dir, FOLDER)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Remove what this start invalidates. Each rank removes only its own files, so no rank can remove a file
            # that another has just created. Root also removes those of ranks that no longer exist.
            for path, position, rank in _files(folder):
                if position >= start.position and (rank == start.rank or (start.rank == 0 and rank >= start.size)):
                    remove(path, _FILE)
        except OSError as error:
            raise unusable(f"data.audit: cannot write to {folder}", error, "Choose another --output-dir.") from error
        self._path = folder / f"epoch-{start.epoch:05}-step-{start.step:08}-rank-{start.rank}.jsonl"
        self.lines = Lines(self._path, write_from_bytes=_WRITE_FROM_BYTES)
        self._file: BinaryIO | None = None
        """Kept open, so that no other file gets its inode."""
        self._write(asdict(start))
        self.flush()

    def append(self, epoch: int, first_step: int, ids: np.ndarray) -> None:
        if self._is_ours():
            self._write({"epoch": epoch, "first_step": first_step, "ids": ids.tolist()})

    def flush(self) -> None:
        if self._is_ours():
            self.lines.flush(sync=True)
            if self._file is None:
                with contextlib.suppress(OSError):  # not written yet: the disk is full
                    self._file = self._path.open("rb")

    def close(self) -> None:
        if self._is_ours():
            self.lines.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_ours(self) -> bool:
        """Return whether the file is the one that this start made: a run that was suspended may have lost it."""
        if self._file is None:
            return True
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return is_gone(self._path.parent)  # a disk that is gone may come back
        except OSError:
            return True

    def _write(self, line: dict[str, object]) -> None:
        self.lines.append(json.dumps(line, separators=(",", ":")))


class DataSetAudit(NamedTuple):
    """What all ranks together consumed of one data set in one epoch."""

    name: str
    repeats: int
    records: int
    skipped: int
    missing: int
    twice: int
    """Beyond its repeats."""


@dataclass
class EpochAudit:
    """What all ranks together consumed in one epoch."""

    epoch: int
    steps: int
    steps_per_epoch: int
    sizes: tuple[int, ...]
    """The numbers of ranks that took part, one start after the other."""
    records: int
    """How many were read and used."""
    skipped: list[int]
    """Records that could not be used, with `on_bad_record: skip`."""
    missing: list[int]
    """Records that a whole epoch did not read; those that `drop_remainder` leaves out are not counted."""
    twice: list[int]
    data: tuple[str, ...]
    """The digests of the data, one start after the other. With several digests, a number stands for several records."""
    data_sets: tuple[DataSetAudit, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.steps == self.steps_per_epoch


def audit(run_dir: str) -> list[EpochAudit]:
    """Combine what every start and rank wrote. Raises UserError if that has gaps or contradicts itself."""
    folder = Path(run_dir, FOLDER)
    starts: dict[Position, list[tuple[Start, dict[Position, np.ndarray]]]] = {}
    for path, position, _ in sorted(_files(folder)):
        starts.setdefault(position, []).append(_load(path))
    if not starts:
        raise UserError(f"{folder}: holds no audit. Run with data.audit: true to have one.")
    positions = sorted(starts)
    epochs: dict[int, dict[Position, tuple[Start, np.ndarray]]] = {}
    for position, end in zip(positions, [*positions[1:], None], strict=True):
        for step, ids in _join_ranks(folder, starts[position], end):
            epochs.setdefault(step.epoch, {})[step] = (starts[position][0][0], ids)
    return [_audit_epoch(epoch, steps) for epoch, steps in sorted(epochs.items())]


def _files(folder: Path) -> Iterator[tuple[Path, Position, int]]:
    for path in folder.glob("epoch-*.jsonl"):
        if match := _NAME.fullmatch(path.name):
            yield path, Position(int(match[1]), int(match[2])), int(match[3])


def _load(path: Path) -> tuple[Start, dict[Position, np.ndarray]]:
    steps: dict[Position, np.ndarray] = {}
    try:
        with reading(str(path)), open_regular(path) as file:
            lines = file.read().decode().split("\n")  # str.splitlines would split at what JSON text may hold
        start = Start(**parse_json(lines[0]))
        for line in lines[1:-1]:  # the run was killed in the last one; nothing after a checkpoint is needed
            entry = parse_json(line)
            for number, ids in enumerate(entry["ids"]):
                steps[Position(entry["epoch"], entry["first_step"] + number)] = np.array(ids, np.int64)
    except (IndexError, TypeError, KeyError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: is not an audit file: {error}.") from error
    return start, steps


def _join_ranks(
    folder: Path, files: list[tuple[Start, dict[Position, np.ndarray]]], end: Position | None
) -> Iterator[tuple[Position, np.ndarray]]:
    """Yield the ids of all ranks in each step of one start, up to the step where the next one starts."""
    start = files[0][0]
    ranks = sorted(header.rank for header, _ in files)
    if ranks != list(range(start.size)):
        raise UserError(f"{folder}: the start at {start.position} had {start.size} ranks; files are of {ranks}.")
    position = start.position
    while end is None or position < end:
        if lacking := [(header.rank, steps) for header, steps in files if position not in steps]:
            if holes := [rank for rank, steps in lacking if max(steps, default=position) > position]:
                raise UserError(f"{folder}: a hole at {position}: ranks {holes} could not write what they consumed.")
            if end is None:
                return  # the run ended, or was killed while some ranks had written this step
            missing = [rank for rank, _ in lacking]
            raise UserError(f"{folder}: {position} is missing for ranks {missing}, but the run continued after it.")
        joined = np.concatenate([steps[position] for _, steps in files])
        yield position, joined[joined != -1]
        is_last = position.step + 1 == start.steps_per_epoch
        position = Position(position.epoch + 1, 0) if is_last else Position(position.epoch, position.step + 1)


def _audit_epoch(epoch: int, steps: dict[Position, tuple[Start, np.ndarray]]) -> EpochAudit:
    starts = [start for _, (start, _) in sorted(steps.items())]
    start = starts[-1]
    read, skipped = np.zeros((2, max(start.num_records for start in starts)), np.int64)
    for _, ids in steps.values():
        np.add.at(read, ids[ids >= 0], 1)
        np.add.at(skipped, mark_skipped(ids[ids < 0]), 1)
    counts = read + skipped
    is_whole = len(steps) == start.steps_per_epoch
    missing = np.flatnonzero(counts == 0).tolist() if is_whole else []
    dropped = max(start.num_records - start.steps_per_epoch * start.global_batch_size, 0)
    if len(missing) == dropped:
        missing = []
    return EpochAudit(
        epoch,
        len(steps),
        start.steps_per_epoch,
        sizes=tuple(dict.fromkeys(start.size for start in starts)),
        records=int(read.sum()),
        skipped=np.flatnonzero(skipped).tolist(),
        missing=missing,
        twice=np.flatnonzero(counts > 1).tolist(),
        data=tuple(dict.fromkeys(start.data for start in starts)),
        data_sets=tuple(_audit_data_sets(start, read, skipped, missing)),
    )


def _audit_data_sets(start: Start, read: np.ndarray, skipped: np.ndarray, missing: list[int]) -> Iterator[DataSetAudit]:
    first = 0
    for name, records, repeats in start.data_sets:
        last = first + records * repeats
        used, left_out = read[first:last], skipped[first:last]
        missed, twice = sum(first <= number < last for number in missing), int((used + left_out > 1).sum())
        yield DataSetAudit(name, repeats, int(used.sum()), int((left_out > 0).sum()), missed, twice)
        first = last
