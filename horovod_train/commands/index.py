"""The command `index`: finds where the records of TFRecord files start and stores it, so that no run has to scan.

python -m horovod_train.main index data/foreign
"""

from __future__ import annotations

import argparse
import itertools
import time

from horovod_train.data.files import list_files, record_folders
from horovod_train.data.tfrecord.index import open_index


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a folder of records or of splits, or a glob")
    parser.add_argument("--index-dir", metavar="DIR", help="where to keep it; default: beside the records")


def run(arguments: argparse.Namespace) -> int:
    for path in itertools.chain.from_iterable(map(record_folders, arguments.paths)):
        started = time.perf_counter()
        index = open_index(list_files([path], "index"), arguments.index_dir)
        print(
            f"{path}: {index.num_records} records in {len(index.files)} files, {len(index.file)} blocks, "
            f"{time.perf_counter() - started:.1f} s"
        )
    return 0
