"""Writes a dataset folder completely or not at all: shards of each split, their indexes, dataset.json.

Everything goes to a hidden folder next to the final one, which is renamed when the last byte is on disk. A folder with
the final name is therefore complete. Does not know where records come from.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_train import tfrecord_framing
from horovod_train.data import counter_rng
from horovod_train.data.files import INDEX_NAME, hold_lock
from horovod_train.data.schema import DATASET_NAME, Schema, dump_schema
from horovod_train.data.tfrecord_index import DRAFT_NAME, write_index
from horovod_train.errors import UserError
from horovod_train.host import usable_cores
from horovod_train.output import logs
from horovod_train.output.console import to_stdout, track
from horovod_train.output.files import Artifact, check, draft_of, remove, rename, replace

Values = Mapping[str, bytes | str | int | float | np.ndarray]
Encode = Callable[[int], Values]
"""The values of one record, by its number in the source."""
Splits = Mapping[str, np.ndarray]
"""The numbers of the records of each split, in their order."""
_IN_SPLIT = rf"\d+-of-\d+\.tfrecord|{re.escape(INDEX_NAME)}(\.lock)?|{DRAFT_NAME}"
_INSIDE = (re.escape(DATASET_NAME), "train|eval", f"(train|eval)/({_IN_SPLIT})")
DATASET = Artifact("a prepared dataset", ".+", "folder", _INSIDE, lambda path: (path / DATASET_NAME).is_file())
_DRAFT = Artifact("an unfinished dataset", r"\..+\.[0-9a-f]{8}\.partial", "folder", _INSIDE)
DEFAULT_SEED = 1
_SHARD_BYTES = 128 << 20
_MIN_SHARDS = 4
_SAMPLED_RECORDS = 16
_WAIT_S = 60.0
"""How long `write_once` waits for another process, which may hang."""


class Kind(NamedTuple):
    """What `prepare` makes records from."""

    about: str
    """The text of its --help, of which the first line is in the list of kinds."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def write_dataset(arguments: argparse.Namespace, schema: Schema, splits: Splits, encode: Encode) -> None:
    """Write the records that `splits` names, in that order, to the folder --out.

    --shards: files of each split; None: of about 128 MiB, at least 4. Raises UserError if --out exists, unless --force.
    """
    out, shards = arguments.out, arguments.shards
    if shards is not None and shards < 1:
        raise UserError(f"--shards must be at least 1; received {shards}.")
    if os.path.lexists(out) and not arguments.force:
        raise UserError(f"--out {out}: exists already. Give another folder, or --force to replace it.")
    place = Path(os.path.abspath(out))
    for draft in sorted(place.parent.glob(f".{glob.escape(place.name)}.*.partial")):
        with contextlib.suppress(OSError):  # of what is not ours, too
            check(draft, _DRAFT)
            to_stdout(f"note: {draft} is left of a prepare that was killed, or one is running; remove it if none is.")
    try:
        check(place, DATASET)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}, and stays as it is. Give another folder.") from error
    logs.load_tensorflow(on_cpu=True)
    try:
        with _new_draft(place) as draft:
            counts = _write_splits(draft, schema, splits, encode, shards)
            replace(draft, place, DATASET)
    except OSError as error:
        about = f": {error.filename}" if error.filename else ""
        raise UserError(f"--out {out}: cannot be made: {error.strerror or error}{about}.") from error
    to_stdout(f"{out}: " + ", ".join(f"{count} records in {split}" for split, count in counts.items()))


def write_once(folder: Path, schema: Schema, read: Callable[[], tuple[Splits, Encode]], shards: int) -> None:
    """Write the folder unless it is complete. Processes of one or several hosts may call this at the same time.

    One of them writes, and the others wait until it has ended, however it ends. Where files cannot be locked, and after
    a minute's wait, each writes a draft, and the first complete one stays. read: called by a process that writes.
    Raises OSError.
    """
    if _is_complete(folder):
        return
    check(folder, DATASET)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock([folder.with_name(f"{folder.name}.dataset")], limit_s=_WAIT_S):
        if _is_complete(folder):
            return
        with _new_draft(folder) as draft:  # first, because it fails immediately if nothing can be written
            logs.load_tensorflow()
            _write_splits(draft, schema, *read(), shards)
            try:
                rename(draft, folder)
            except OSError:
                if not _is_complete(folder):
                    raise


def encode_rows(schema: Schema, arrays: Mapping[str, np.ndarray]) -> Encode:
    """Return what encodes the rows of arrays, one for each feature."""

    def value(name: str, row: Any) -> bytes | np.ndarray:
        row = np.asarray(row)  # an array of texts gives str
        if schema.features[name].decode == "raw":
            return np.ascontiguousarray(row, row.dtype.newbyteorder("<")).tobytes()
        return row.astype(np.int64) if row.dtype.kind == "b" else row

    return lambda record: {name: value(name, array[record]) for name, array in arrays.items()}


def add_split_arguments(parser: argparse.ArgumentParser, of: str) -> None:
    """Add --eval-fraction and --shards. `of` says what the fraction is drawn from."""
    parser.add_argument("--eval-fraction", type=float, default=0.0, help=f"drawn from {of}; default %(default)s")
    parser.add_argument("--shards", type=int, metavar="N", help="files a split; default: of about 128 MB, at least 4")


def split_by_fraction(records: int, arguments: argparse.Namespace, extra: int | None = None) -> dict[str, np.ndarray]:
    """Draw --eval-fraction of 0 … records - 1 for evaluation and leave the others for training, both shuffled.

    A fraction above 0 is at least one record. Raises UserError if none is left to train.

    extra: the number of records from `records` on that were given for evaluation; then none are drawn.
    """
    if extra is not None and arguments.eval_fraction:
        raise UserError("--eval-fraction: records for evaluation are given too; give one of them.")
    if not 0 <= arguments.eval_fraction < 1:
        raise UserError(f"--eval-fraction must be at least 0 and below 1; received {arguments.eval_fraction}.")
    eval_records = math.floor(arguments.eval_fraction * records) or int(arguments.eval_fraction > 0)
    if eval_records == records:
        raise UserError(f"--eval-fraction: {arguments.eval_fraction:g} of 1 record leaves none to train.")
    splits = split_by_count(records, eval_records, arguments.seed)
    return splits if extra is None else {**splits, "eval": np.arange(records, records + extra)}


def split_by_count(records: int, eval_records: int, seed: int) -> dict[str, np.ndarray]:
    """Draw `eval_records` of 0 … records - 1 for evaluation and leave the others for training, both shuffled."""
    order = counter_rng.permutation(counter_rng.key(seed), np.arange(records))
    return {"train": order[eval_records:], "eval": order[:eval_records]}


def _write_splits(folder: Path, schema: Schema, splits: Splits, encode: Encode, shards: int | None) -> dict[str, int]:
    """Write all files of a dataset; return the number of records of each split."""
    counts = {
        split: _write_split(os.path.join(folder, split), records, encode, shards)
        for split, records in splits.items()
        if len(records)
    }
    with open(os.path.join(folder, DATASET_NAME), "x", encoding="utf-8") as file:
        file.write(dump_schema(dataclasses.replace(schema, counts=counts)))
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the data does
    return counts


def _write_split(folder: str, records: np.ndarray, encode: Encode, shards: int | None) -> int:
    """Write one split's files and index; return its number of records."""
    os.mkdir(folder)
    files = min(shards or _choose_shards(records, encode), len(records))
    names = [f"{shard:05}-of-{files:05}.tfrecord" for shard in range(files)]
    parts = np.array_split(records, files)
    with ThreadPoolExecutor(min(8, usable_cores())) as threads:

        def write(shard: int) -> None:
            with open(os.path.join(folder, names[shard]), "xb") as file:
                for record in parts[shard].tolist():
                    file.write(tfrecord_framing.frame(_example(encode(record))))
                file.flush()
                os.fsync(file.fileno())

        try:
            for _ in track(threads.map(write, range(files)), files, f"writing {os.path.basename(folder)}"):
                pass
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return write_index(folder, names)


def _choose_shards(records: np.ndarray, encode: Encode) -> int:
    sample = records[:: max(len(records) // _SAMPLED_RECORDS, 1)][:_SAMPLED_RECORDS]
    size = sum(len(_example(encode(record))) for record in sample.tolist()) / len(sample) * len(records)
    return max(math.ceil(size / _SHARD_BYTES), _MIN_SHARDS)


def _example(values: Values) -> bytes:
    from tensorflow.train import BytesList, Example, Feature, Features, FloatList, Int64List

    features = {}
    for name, value in values.items():
        if isinstance(value, bytes):  # not through numpy, which would cut off zeros at the end
            features[name] = Feature(bytes_list=BytesList(value=[value]))
            continue
        array = np.asarray(value)
        if array.dtype.kind in "SU":
            texts = array.ravel().tolist()
            # A file's name may be any bytes.
            texts = [text.encode(errors="surrogateescape") if isinstance(text, str) else text for text in texts]
            features[name] = Feature(bytes_list=BytesList(value=texts))
        elif np.issubdtype(array.dtype, np.floating):
            features[name] = Feature(float_list=FloatList(value=array.ravel()))
        else:
            features[name] = Feature(int64_list=Int64List(value=array.ravel()))
    return Example(features=Features(feature=features)).SerializeToString(deterministic=True)


def _is_complete(folder: Path) -> bool:
    return os.path.isfile(folder / DATASET_NAME)


@contextlib.contextmanager
def _new_draft(place: Path) -> Iterator[Path]:
    """Make a draft of the folder `place`; at the end of the block remove it if it was not renamed. Raises OSError."""
    draft = draft_of(place)
    os.makedirs(draft)
    try:
        yield draft
    finally:
        with contextlib.suppress(OSError):
            remove(draft, _DRAFT)
