"""How long a record occupies Python: CPU time of the threads of a rank that run Python, for each record.

    python benchmarks/record_bytes.py --bytes 100000

Only one thread of a process can run Python, so a rank reads at most 1 s / this time records a second, however many
cores it has. Reading from a file and TensorFlow's ops do not hold the interpreter's lock: the time that threads spend
in the kernel, and that of parse_example, are subtracted. What remains is an upper bound of the time under the lock. It
is CPU time, so that other programs on the machine change it little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.output import logs

ROLES = ("read-blocks", "read-chunks", "parse-chunks", "feed")
"""What the names of the pipeline's threads begin with."""
_BATCH = 64
_TICKS = os.sysconf("SC_CLK_TCK")


def _write(folder: Path, records: int, size: int) -> None:
    import tensorflow as tf

    from horovod_train.tfrecord_framing import frame

    rng = np.random.default_rng(0)
    lengths = rng.integers(size * 9 // 10, size * 11 // 10, records)
    (folder / "train").mkdir()
    with (folder / "train/0.tfrecord").open("wb") as file:
        for number, length in enumerate(lengths.tolist()):
            data = tf.train.BytesList(value=[rng.bytes(length)])
            label = tf.train.Int64List(value=[number])
            features = {"data": tf.train.Feature(bytes_list=data), "label": tf.train.Feature(int64_list=label)}
            file.write(frame(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()))
    schema = {"features": {"data": "bytes", "label": "int64"}, "inputs": ["data"], "targets": ["label"]}
    (folder / "dataset.json").write_text(json.dumps(schema))


def _thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of the pipeline's threads outside the kernel, by role."""
    found = dict.fromkeys(ROLES, 0.0)
    for thread in threading.enumerate():
        role = next((role for role in ROLES if thread.name.startswith(role)), None)
        if role and thread.ident is not None:
            stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(") ")[2].split()
            total = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            found[role] += total - int(stat[12]) / _TICKS
    return found


def _parse_seconds(records: Any) -> float:
    """Return the CPU seconds that parse_example takes for a record, without the conversion from Python."""
    import tensorflow as tf

    path = records.source.parts[0].path
    rows = tf.stack(list(tf.data.TFRecordDataset(path).take(160)))
    specs = {"data": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}
    times = []
    for _ in range(10):
        began = time.thread_time()
        tf.io.parse_example(rows, specs)
        times.append(time.thread_time() - began)
    return min(times) / 160


def _measure(folder: Path, rounds: int) -> Iterator[dict[str, float]]:
    """Yield the seconds a record in each round, by role."""
    from horovod_train.config.settings import DataConfig
    from horovod_train.data.dataset import open_records
    from horovod_train.data.pipeline import Ranks, build_pipeline

    config = DataConfig(train=(str(folder / "train"),), shuffle_window=500)  # so that every epoch reads every block
    records = open_records(config, "train")
    made = build_pipeline(records, config, Ranks(0, 1), seed=1, training=True, global_batch_size=_BATCH)
    batches, parse = made.batches(0), _parse_seconds(records)
    for number in range(rounds + 1):
        before = _thread_seconds()
        for _ in range(made.steps_per_epoch):
            next(batches)
        after = _thread_seconds()
        if number:  # the first warms up
            took = {role: (after[role] - before[role]) / records.num_records for role in ROLES}
            yield took | {"parse-chunks": took["parse-chunks"] - parse}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=100_000, help="mean size of a record; default %(default)s")
    parser.add_argument("--records", type=int, default=3000, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    arguments = parser.parse_args()
    logs.load_tensorflow()
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), arguments.records, arguments.bytes)
        rounds = list(_measure(Path(folder), arguments.rounds))
    for name in (*ROLES, "together"):
        values = [sum(took.values()) if name == "together" else took[name] for took in rounds]
        least, middle, most = (f"{1e6 * value:.0f}" for value in (min(values), statistics.median(values), max(values)))
        print(f"{name:13} {middle:>4} µs a record, median of {len(values)}; {least} to {most}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
