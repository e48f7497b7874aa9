"""Records a second of sources that are read by number, against plain readers of the same files, taking turns.

python benchmarks/sources.py --records 60000 --rounds 3

Makes records of grey images 28×28 with a label, and for some forms a list of 0 to 11 numbers. All give batches of the
same tensors, drained inside TensorFlow, on one rank. `plan` is this project's order. `library` reads batches in the
file's order by the format's own library, for tf.data's from_generator. `shuffled` does the same by 4096 records, which
tf.data then takes apart, shuffles in a window of 10 000 and batches. `slices` is from_tensor_slices of arrays in
memory, shuffled in the same way. `class` reads one record at a time in Python, and so do its readers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tensorflow as tf

from horovod_train.commands.cli import build_table, open_screen
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.dataset import open_records
from horovod_train.data.pipeline import Ranks, build_pipeline

BATCH, CHUNK, WINDOW, LONGEST = 128, 4096, 10_000, 11

Arrays = dict[str, np.ndarray]
Read = Callable[[Path, int], Iterator[Arrays]]
"""(file, records at a time) → their arrays."""
Contender = Callable[[], tf.data.Dataset]


def make(records: int, has_lists: bool) -> tuple[Arrays, list[np.ndarray]]:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (records, 28, 28, 1), np.uint8)
    lists = [np.arange(n % (LONGEST + 1)) for n in range(records)] if has_lists else []
    return {"x": images, "y": rng.integers(0, 10, records)}, lists


def pad(lists: Iterable[np.ndarray], rows: int) -> np.ndarray:
    padded = np.zeros((rows, LONGEST), np.int64)
    for row, values in zip(padded, lists, strict=True):
        row[: len(values)] = values
    return padded


# --- npy --------------------------------------------------------------------------------------------------------------


def write_npy(folder: Path, arrays: Arrays, lists: list[np.ndarray]) -> Path:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def read_npy(path: Path, step: int) -> Iterator[Arrays]:
    opened = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in ("x", "y")}
    for first in range(0, len(opened["y"]), step):
        yield {name: np.array(array[first : first + step]) for name, array in opened.items()}


# --- HDF5 -------------------------------------------------------------------------------------------------------------


def write_hdf5(folder: Path, arrays: Arrays, lists: list[np.ndarray]) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
        if lists:
            words = np.empty(len(lists), object)
            words[:] = lists
            file.create_dataset("words", data=words, dtype=h5py.vlen_dtype(np.int64))
    return folder / "a.h5"


def read_hdf5(path: Path, step: int) -> Iterator[Arrays]:
    with h5py.File(path) as file:
        for first in range(0, len(file["y"]), step):
            found = {name: dataset[first : first + step] for name, dataset in file.items()}
            yield {name: pad(values, len(values)) if name == "words" else values for name, values in found.items()}


# --- Parquet ----------------------------------------------------------------------------------------------------------


def write_parquet(folder: Path, arrays: Arrays, lists: list[np.ndarray]) -> Path:
    images = pa.FixedSizeListArray.from_arrays(pa.array(arrays["x"].ravel()), 28 * 28)
    columns = {"x": images, "y": pa.array(arrays["y"])} | ({"words": pa.array(lists)} if lists else {})
    pa.parquet.write_table(pa.table(columns), folder / "a.parquet", row_group_size=2000)
    return folder / "a.parquet"


def read_parquet(path: Path, step: int) -> Iterator[Arrays]:
    for batch in pa.parquet.ParquetFile(path).iter_batches(step):
        found = {"x": batch.column("x").flatten().to_numpy().reshape(-1, 28, 28, 1), "y": batch.column("y").to_numpy()}
        if "words" in batch.schema.names:
            words = batch.column("words")
            ends = np.cumsum(words.value_lengths().to_numpy())
            found["words"] = pad(np.split(words.flatten().to_numpy(), ends[:-1]), len(words))
        yield found


# --- a class of one's own --------------------------------------------------------------------------------------------


class Rows:
    """Records of npy files, one at a time; `data.source` names it as sources:Rows."""

    def __init__(self, path: str) -> None:
        self.opened = {name: np.load(f"{path}/{name}.npy", mmap_mode="r") for name in ("x", "y")}

    def __len__(self) -> int:
        return len(self.opened["y"])

    def __getitem__(self, record: int) -> Arrays:
        return {name: array[record] for name, array in self.opened.items()}

    def fingerprint(self) -> str:
        return "made"


def read_singly(path: Path, step: int) -> Iterator[Arrays]:
    rows = Rows(str(path))
    for first in range(0, len(rows), step):
        found = [rows[record] for record in range(first, min(first + step, len(rows)))]
        yield {name: np.stack([row[name] for row in found]) for name in found[0]}


FORMS: dict[str, tuple[Callable[[Path, Arrays, list[np.ndarray]], Path], Read, bool]] = {
    "npy": (write_npy, read_npy, False),
    "HDF5": (write_hdf5, read_hdf5, False),
    "HDF5 with lists": (write_hdf5, read_hdf5, True),
    "Parquet": (write_parquet, read_parquet, False),
    "Parquet with lists": (write_parquet, read_parquet, True),
    "class": (write_npy, read_singly, False),
}


# --- contenders -------------------------------------------------------------------------------------------------------


def contenders(path: Path, read: Read, arrays: Arrays, has_lists: bool) -> dict[str, Contender]:
    spec = {"x": tf.TensorSpec([None, 28, 28, 1], tf.uint8), "y": tf.TensorSpec([None], tf.int64)}
    if has_lists:
        spec["words"] = tf.TensorSpec([None, LONGEST], tf.int64)

    def generated(step: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(lambda: read(path, step), output_signature=spec)

    def shuffle(data: tf.data.Dataset) -> tf.data.Dataset:
        return data.shuffle(WINDOW, reshuffle_each_iteration=True).batch(BATCH).prefetch(tf.data.AUTOTUNE)

    lists = {"words": {"max_length": LONGEST}} if has_lists else {}
    shape = {"x": {"shape": [28, 28, 1]}} if path.suffix != ".parquet" else {"x": {"shape": [784]}}
    source = Spec("sources:Rows") if read is read_singly else None
    config = DataConfig(train=(str(path),), source=source, targets=("y",), features=lists | shape)
    records = open_records(config, "train")
    made = build_pipeline(records, config, Ranks(0, 1), seed=1, training=True, global_batch_size=BATCH)
    epochs = itertools.count()
    found = {
        "plan": lambda: made.chunks(next(epochs), epochs=1).unbatch(),
        "library": lambda: generated(BATCH).prefetch(tf.data.AUTOTUNE),
        "shuffled": lambda: shuffle(generated(CHUNK).unbatch()),
    }
    return found if has_lists else found | {"slices": lambda: shuffle(tf.data.Dataset.from_tensor_slices(arrays))}


def drain(build: Contender, records: int) -> float:
    started = time.perf_counter()
    batches = int(build().reduce(0, lambda count, *_: count + 1))
    seconds = time.perf_counter() - started
    assert batches == -(-records // BATCH), "a contender left records out"
    return seconds


def measure(form: str, folder: Path, records: int, rounds: int) -> list[tuple[str, ...]]:
    """Return a row for each contender: median, slowest, fastest, and the plan's speed as a multiple of its own."""
    write, read, has_lists = FORMS[form]
    arrays, lists = make(records, has_lists)
    ways = contenders(write(folder, arrays, lists), read, arrays, has_lists)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, build in ways.items():
            taken = drain(build, records)
            if turn:  # the first is a warm-up
                seconds[name].append(taken)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        (
            form if name == "plan" else "",
            name,
            *(f"{records / value:,.0f}" for value in (median[name], max(times), min(times))),
            f"{median[name] / median['plan']:.2f}",
        )
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=60_000, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; default %(default)s")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    arguments = parser.parse_args()
    rows = []
    for form in arguments.forms:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(form, Path(folder), arguments.records, arguments.rounds)
        print(f"{form}: measured", file=sys.stderr, flush=True)
    columns = ("", "reader", "records/s", "slowest", "fastest", "plan / reader")
    open_screen().print(build_table(columns, rows, left=columns[:2]))


if __name__ == "__main__":
    main()
