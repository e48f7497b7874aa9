"""The command `check-data`: reads every record and prints what it holds; or what each rank would read, or has read.

python -m horovod_train.main check-data data/digits
python -m horovod_train.main check-data --config configs/digits_convnet.yaml --np 6 --epochs 2
python -m horovod_train.main check-data --audit runs/digits

Does not stop at the first fault: every record that can be reached is checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from horovod_train.commands.cli import add_config, build_table, count, files_or_folder, load_from_arguments, open_screen
from horovod_train.config.loader import load
from horovod_train.config.paths import is_remote
from horovod_train.config.rules import resolve
from horovod_train.config.settings import Config, DataConfig
from horovod_train.data.audit import EpochAudit, audit
from horovod_train.data.dataset import (
    SOURCES,
    Records,
    build_plan,
    check_counts,
    check_room_to_shuffle,
    find_records,
    open_records,
    scan_records,
)
from horovod_train.data.files import record_folders
from horovod_train.data.prepare.images import class_names
from horovod_train.data.random_access import FILES
from horovod_train.data.random_access.images import is_image_folder
from horovod_train.data.random_access.source import RandomAccessRecords
from horovod_train.data.reader import Reader, parse_all, without_padding
from horovod_train.data.sampler import Plan
from horovod_train.data.source import Blocks, split_records
from horovod_train.data.storage import DEFAULT
from horovod_train.errors import ReadFailed, RunError, UserError
from horovod_train.host import usable_cores
from horovod_train.output import logs
from horovod_train.shown_text import counted

_ROWS_PER_RANK = 32  # of a batch, if its size is not given
_MAX_LISTED = 100
_MAX_CLASSES = 1000
_STEPS_AT_A_TIME = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a folder of records or of splits, or a glob")
    add_config(parser, "check what it trains and evaluates on")
    parser.add_argument("--np", type=count, metavar="N", help="show what each of N ranks would read instead")
    parser.add_argument("--epochs", type=count, help="in how many epochs, with --np; default 1")
    parser.add_argument("--audit", metavar="RUN_DIR", help="check what the ranks of a run did read instead")


def run(arguments: argparse.Namespace) -> int:
    console = open_screen()
    _check_together(arguments)
    if arguments.audit:
        epochs = audit(arguments.audit)
        if not epochs:
            raise UserError(f"--audit: {arguments.audit}: its ranks have noted no step yet.")
        _show_audit(console, epochs)
        return _compare_data(console, arguments.audit, epochs[-1])
    configs = _configs(arguments)
    if arguments.np is not None:
        trained_on = configs if arguments.paths else configs[:1]
        number = 1 if arguments.epochs is None else arguments.epochs
        return max(_show_shares(console, config, arguments.np, number) for config in trained_on)
    return _check(console, configs)


def _check_together(arguments: argparse.Namespace) -> None:
    """Raise UserError for arguments that would have no effect beside others."""
    if arguments.audit:
        excluded = {"PATH": arguments.paths, "--config": arguments.config, "--np": arguments.np}
        if conflicting := [name for name, value in excluded.items() if value]:
            raise UserError(f"check-data: --audit takes the data of the run's own config; leave out {conflicting[0]}.")
    if arguments.epochs is not None and arguments.np is None:
        raise UserError("check-data: --epochs has no effect without --np N.")


def _check(console: Console, configs: Sequence[Config]) -> int:
    for config in configs:
        find_records(config.data, "train")  # reports a wrong path before TensorFlow is loaded
    logs.load_tensorflow(on_cpu=True)
    reports = [check_records(config.data) for config in configs]
    for report in reports:
        _show_report(console, report)
    bad = [sentence for report in reports for sentence in report.bad]
    for sentence in bad[:_MAX_LISTED]:
        console.print(sentence, markup=False)
    if bad:
        suffix = f", the first {_MAX_LISTED} shown" if len(bad) > _MAX_LISTED else ""
        raise UserError(f"check-data: {counted(len(bad), 'fault')}{suffix}.")
    return 0


def _configs(arguments: argparse.Namespace) -> list[Config]:
    """Return one config for each split, with the split as its `data.train`."""
    if bool(arguments.paths) == bool(arguments.config):
        raise UserError("check-data: give either the path of records or --config.")
    if arguments.paths:
        folders = [folder for path in arguments.paths for folder in _splits(path)]
        return [Config(data=DataConfig(train=(folder,), features=_features(folder))) for folder in folders]
    config = load_from_arguments(arguments.config)
    splits = [config.data.train]
    if config.data.eval and config.data.eval != config.data.paths("train"):  # equal with fold and eval_fraction
        splits.append(config.data.eval)
    return [dataclasses.replace(config, data=dataclasses.replace(config.data, train=split)) for split in splits]


def _splits(path: str) -> list[str]:
    """Return the path itself, or of a folder of splits those that hold records, or images by class."""
    folders = record_folders(path, SOURCES)
    if folders != [path] or (os.path.isdir(path) and is_image_folder(path, DEFAULT)):
        return folders
    splits = [os.path.join(path, name) for name in class_names(path)] if os.path.isdir(path) else []
    return [folder for folder in splits if is_image_folder(folder, DEFAULT)] or record_folders(path, [*SOURCES, *FILES])


def _features(folder: str) -> dict[str, Any]:
    """Return what is to be said of images by class so that each can be read: any size is good without a config."""
    if not os.path.isdir(folder) or not is_image_folder(folder, DEFAULT):
        return {}
    return {"image": {"type": "bytes", "decode": "image", "shape": [1, 1, 3], "resize": "stretch"}}


# --- what the records hold --------------------------------------------------------------------------------------


@dataclass
class FeatureSummary:
    """The values of one feature over all good records, as they are stored, without those that are not finite.

    Strings and images have no numbers.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    values: int = 0
    histogram: Counter[int] | None = None
    """How often each value occurs, for a scalar integer with few different values."""

    def add(self, values: np.ndarray) -> None:
        if self.dtype == "string":
            return
        if values.dtype.kind == "f":
            values = values[np.isfinite(values)]
        if not values.size:
            return
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        self.total += float(values.sum(dtype=np.float64))
        self.values += values.size
        if self.histogram is not None:
            different, counts = np.unique(values, return_counts=True)
            self.histogram.update(dict(zip(different.tolist(), counts.tolist(), strict=True)))
            if len(self.histogram) > _MAX_CLASSES:
                self.histogram = None

    def figures(self) -> list[float]:
        """Return the least, the most and the mean; none without values."""
        return [self.low, self.high, self.total / self.values] if self.values else []


@dataclass
class Report:
    """What one split holds, and its problems."""

    where: str
    files: int = 0
    bytes: int = 0
    records: int = 0
    notes: list[str] = field(default_factory=list)
    """What is left out, and what else users should know."""
    bad: list[str] = field(default_factory=list)
    """The sentence that names each bad record or file."""
    duplicates: int = 0
    """Records with exactly the bytes of an earlier one."""
    features: dict[str, FeatureSummary] = field(default_factory=dict)


def check_records(config: DataConfig) -> Report:
    """Read all records of `data.train`. Raises UserError only if there are none to read."""
    config = dataclasses.replace(config, on_bad_record="skip")  # opening would end at a bad first record
    split_files, paths = find_records(config, "train"), config.paths("train")
    report = Report(", ".join(paths), files=len(split_files.files), notes=list(split_files.notes))
    # Opening a remote file checks it.
    readable = [f for f in split_files.files if config.source or is_remote(f) or os.access(f, os.R_OK)]
    report.bad += [f"{name}: cannot be read." for name in sorted({*split_files.files} - {*readable})]
    if not readable:
        return report
    try:
        records = split_files.open(readable)
        report.bytes, report.records = sum(part.size for part in records.source.parts), records.num_records
        of_stores = records.source if isinstance(records.source, RandomAccessRecords) else None
        unwritten = of_stores.unwritten if of_stores else []
        report.bad += [*records.problems, *unwritten, *(of_stores.damage() if of_stores else [])]
        report.notes += [note for note in records.notes if note not in unwritten]
        if len(readable) == len(split_files.files):
            check_counts(records, paths)
    except RunError as error:
        report.bad.append(str(error))
    if report.records:
        _read_all(records, config, report)
    return report


def _read_all(records: Records, config: DataConfig, report: Report) -> None:
    """Read all records in their order, and add to the report what is in them."""
    from horovod_train.data.parsing import build_parser  # loads TensorFlow
    from horovod_train.data.transforms import image_problem

    features, reader = records.schema.features, Reader(records.source)
    parser = build_parser(records.source, features, config)
    for name, dtype in parser.dtypes.items():
        is_counted = dtype.startswith(("int", "uint")) and parser.shapes[name] == ()
        report.features[name] = FeatureSummary(dtype, parser.shapes[name], histogram=Counter() if is_counted else None)
    digests = np.zeros(records.num_records, np.uint64)
    with ThreadPoolExecutor(usable_cores()) as threads:
        for numbers, data, arrays, bad in parse_all(records.source, reader, parser, f"checking {report.where}"):
            usable = ~np.isin(numbers, list(bad))
            stored, numbers = itertools.compress(split_records(data), usable), numbers[usable]
            digests[numbers] = np.frombuffer(b"".join(map(_digest, stored)), np.uint64)
            for name, values in arrays.items():
                array = np.asarray(values)  # a parser in TensorFlow gives tensors
                feature = features.get(name)
                report.features[name].add(without_padding(feature, array) if feature else array)
                for record, fault in _not_finite(numbers, array):
                    bad.setdefault(record, reader.name_record(record, f"feature {name}: {fault}"))
                if feature and feature.decode == "image":
                    problems = threads.map(partial(image_problem, feature), array.tolist())
                    for record, problem in zip(numbers.tolist(), problems, strict=True):
                        if problem:
                            bad[record] = reader.name_record(record, f"feature {name}: {problem}")
            report.bad += [bad[record] for record in sorted(bad)]
    usable_digests = digests[digests != 0]
    report.duplicates = len(usable_digests) - len(np.unique(usable_digests))


def _not_finite(numbers: np.ndarray, values: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yield each record with a value that is not finite, and which. numbers: of the records, in the order of rows."""
    if values.dtype.kind != "f":
        return
    rows = values.reshape(len(values), -1)
    for row in np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist():
        (first,) = rows[row][~np.isfinite(rows[row])][:1].tolist()
        yield int(numbers[row]), f"expected finite numbers; the record holds {first}"


def _digest(record: Any) -> bytes:
    data = record if isinstance(record, bytes) else b"".join(map(_bytes_of_value, record.values()))
    return hashlib.blake2b(data, digest_size=8).digest()


def _bytes_of_value(value: Any) -> bytes:
    array = np.asarray(value)  # of objects for lists of text, whose bytes would be addresses
    content = repr(array.tolist()).encode(errors="surrogatepass") if array.dtype.hasobject else array.tobytes()
    return f"{array.dtype} {array.shape} ".encode() + content


def _show_report(console: Console, report: Report) -> None:
    console.print(
        f"{report.where}: {report.records} records in {files_or_folder(report.files)}, {report.bytes / 1e6:.1f} MB; "
        f"{counted(len(report.bad), 'fault')}, {counted(report.duplicates, 'duplicate')}",
        markup=False,
    )
    rows = [
        (name, f.dtype, str(list(f.shape)), *([f"{value:.6g}" for value in f.figures()] or [""] * 3))
        for name, f in report.features.items()
    ]
    titles = ("feature", "stored as", "shape", "least", "most", "mean")
    console.print(build_table(titles, rows, left=titles[:2]))
    for name, feature in report.features.items():
        if feature.histogram:
            counts = sorted(feature.histogram.items())
            listed = ", ".join(f"{value}: {number}" for value, number in counts[:_MAX_LISTED])
            more = f", … {len(counts) - _MAX_LISTED} more" if len(counts) > _MAX_LISTED else ""
            console.print(f"{name}: {listed}{more}", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    console.print()


# --- what each rank would read ----------------------------------------------------------------------------------


def _show_shares(console: Console, config: Config, size: int, epochs: int) -> int:
    has_batch = bool(config.data.global_batch(size))  # no config is given with a path
    data = resolve(config, size).data if has_batch else config.data
    records = open_records(data, "train")
    batch = data.global_batch(size) or _ROWS_PER_RANK * size
    plan = build_plan(records, data, seed=config.seed, training=True, global_batch_size=batch)
    if has_batch:
        check_room_to_shuffle(plan, records, data, size)
    where = ", ".join(data.paths("train"))
    console.print(
        f"{where}: {plan.num_records} records in {len(plan.block_counts)} blocks; {size} ranks, "
        f"global batch {batch}, {plan.steps_per_epoch} steps an epoch, seed {config.seed}",
        markup=False,
    )
    rows, wrong = [], 0
    for epoch in range(epochs):
        shares, counts = epoch_shares(plan, records.source.blocks, epoch, size)
        for s in shares:
            first = ", ".join(map(str, s.first)) + ", …"
            rows.append((epoch, s.rank, s.records, s.padding, s.blocks, f"{s.bytes / 1e6:.1f}", first))
        expected = min(plan.num_records, plan.steps_per_epoch * batch)
        wrong += int(np.sum(counts > 1)) + abs(int(np.sum(counts > 0)) - expected)
    titles = ("epoch", "rank", "records", "padding rows", "blocks", "MB", "first records")
    console.print(build_table(titles, rows, left=titles[-1:]))
    each = "each record once an epoch"
    if any(data_set.repeats > 1 for data_set in records.data_sets):
        each = "each record once an epoch for each repeat of its data set"
    console.print(each if not wrong else f"{wrong} records not once an epoch")
    return 0 if not wrong else 1


@dataclass
class RankShare:
    """One rank in one epoch."""

    rank: int
    records: int = 0
    padding: int = 0
    """Rows with weight 0."""
    blocks: int = 0
    bytes: int = 0
    """The total size of those blocks: the rank reads at least this."""
    first: tuple[int, ...] = ()
    """The first records that it reads."""


def epoch_shares(plan: Plan, blocks: Blocks, epoch: int, size: int) -> tuple[list[RankShare], np.ndarray]:
    """Return the share of each of `size` ranks, and how often all ranks together read each record: int64 [records]."""
    sequence, counts, shares = plan.sequence(epoch), np.zeros(plan.num_records, np.int64), []
    for rank in range(size):
        share, is_block_read = RankShare(rank), np.zeros(len(blocks.records), bool)
        for first in range(0, plan.steps_per_epoch, _STEPS_AT_A_TIME):
            rows = plan.rows(sequence, rank, size, first, min(first + _STEPS_AT_A_TIME, plan.steps_per_epoch))
            records = rows.records[rows.real]
            np.add.at(counts, records, 1)
            is_block_read[blocks.containing(records)] = True
            share.records += len(records)
            share.padding += rows.real.size - len(records)
            share.first = share.first or tuple(records[:4].tolist())
        share.blocks, share.bytes = int(is_block_read.sum()), int(blocks.bytes[is_block_read].sum())
        shares.append(share)
    return shares, counts


# --- what each rank has read ------------------------------------------------------------------------------------


def _show_audit(console: Console, epochs: Sequence[EpochAudit]) -> None:
    rows = []
    for e in epochs:
        missing = str(len(e.missing)) if e.is_whole else "not over"
        ranks = " → ".join(map(str, e.sizes))
        steps = f"{e.steps} of {e.steps_per_epoch}"
        rows.append((e.epoch, steps, ranks, e.records, len(e.skipped), missing, len(e.twice)))
    console.print(build_table(("epoch", "steps", "ranks", "records", "skipped", "missing", "twice"), rows, left=()))
    _show_data_sets(console, epochs)
    for e in epochs:
        for what, records in (("skipped", e.skipped), ("missing", e.missing), ("twice", e.twice)):
            if records:
                console.print(f"epoch {e.epoch}: {what}: {', '.join(map(str, records[:_MAX_LISTED]))}", markup=False)
    for e in epochs:
        if len(e.data) > 1:
            raise UserError(f"check-data: in epoch {e.epoch} a resume read other data, under the same numbers.")
    if any(e.missing or e.twice for e in epochs):
        raise UserError("check-data: not every record was consumed once an epoch.")


def _show_data_sets(console: Console, epochs: Sequence[EpochAudit]) -> None:
    """Show what was read of each data set, if there are several."""
    rows = []
    for e in epochs:
        for part in e.data_sets if len(e.data_sets) > 1 else ():
            missing = str(part.missing) if e.is_whole else "not over"
            rows.append((e.epoch, f"{part.repeats} ×", part.records, part.skipped, missing, part.twice, part.name))
    if rows:
        titles = ("epoch", "repeats", "records", "skipped", "missing", "twice", "data set")
        console.print(build_table(titles, rows, left=titles[-1:]))


def _compare_data(console: Console, run_dir: str, last: EpochAudit) -> int:
    """Print whether data.train still holds the records that the run read. Raises UserError if not."""
    try:
        config, _ = load([os.path.join(run_dir, "config.yaml")], [])
        digest = scan_records(config.data, "train").digest
    except (UserError, ReadFailed) as error:
        console.print(f"not compared with data.train: {error}", markup=False)
        return 0
    if digest != last.data[0]:
        raise UserError(
            f"check-data: data.train does not hold the records that the run read in epoch {last.epoch}, so the record "
            "numbers above do not refer to it."
        )
    console.print("data.train holds what the run read")
    return 0
