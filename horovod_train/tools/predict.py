"""The command `predict`: a trained model's outputs for each record, in the records' order, on any number of ranks.

python -m horovod_train.main predict runs/digits_convnet --out digits.npz
horovodrun -np 4 python -m horovod_train.main predict runs/digits_convnet --data data/new --out new.csv
"""

from __future__ import annotations

import argparse
import dataclasses
import os

from horovod_train import quiet
from horovod_train.data.records import look_before_start
from horovod_train.distributed import launch
from horovod_train.errors import UserError
from horovod_train.made import PREDICTIONS
from horovod_train.tools import trained_run

SUFFIXES = (".npz", ".csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained_run.add_arguments(parser)
    parser.add_argument(
        "--data", nargs="+", metavar="PATH", help="records, with targets or without; default: data.eval"
    )
    parser.add_argument("--out", required=True, metavar="FILE.npz|FILE.csv", help="where to write the outputs")


def run(arguments: argparse.Namespace) -> int:
    config, checkpoint = trained_run.choose(arguments)
    paths = tuple(arguments.data or config.data.eval)
    if not paths:
        raise UserError("predict: of which records? Give --data PATH, or data.eval.")
    if os.path.splitext(arguments.out)[1] not in SUFFIXES:
        raise UserError(f"--out {arguments.out}: expected a name that ends in {' or '.join(SUFFIXES)}.")
    trained_run.check_out(arguments.out, PREDICTIONS)
    data = dataclasses.replace(config.data, eval=paths, targets=())
    look_before_start(data, "eval", ranks=launch.detect().size)
    quiet.load_tensorflow()
    from horovod_train.inference import predict

    written = predict(config, checkpoint, arguments.weights, paths, arguments.out)
    if launch.detect().rank == 0:
        print(f"{arguments.out}: {written} records")
    return 0
