"""The command `index`: finds where the records of TFRecord files start and stores it, so that no run has to scan.

python -m horovod_train.main index data/foreign
"""

from __future__ import annotations

import argparse
import time

from horovod_train.config.settings import DataConfig
from horovod_train.data.files import list_files, record_folders
from horovod_train.data.tfrecord import open_tfrecords
from horovod_train.output.console import to_stdout

_PATTERNS = ["*.tfrecord*"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a folder of records or of splits, or a glob")
    parser.add_argument("--index-dir", metavar="DIR", help="folder for index files; default: with the records")


def run(arguments: argparse.Namespace) -> int:
    config = DataConfig(index_dir=arguments.index_dir)
    folders = [folder for path in arguments.paths for folder in record_folders(path, _PATTERNS)]
    for folder in folders:
        started = time.perf_counter()
        files = list_files([folder], "index", _PATTERNS).files
        blocks = open_tfrecords(files, config).blocks
        to_stdout(
            f"{folder}: {blocks.num_records} records in {len(files)} files, {len(blocks.records)} blocks, "
            f"{time.perf_counter() - started:.1f} s"
        )
    return 0
