"""The command `predict`: a trained model's outputs for each record, in the records' order, on any number of ranks.

python -m horovod_train.main predict runs/digits_convnet --out digits.npz
horovodrun -np 4 python -m horovod_train.main predict runs/digits_convnet --data data/new --out new.csv
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import os
import re

from horovod_train.commands.cli import add_run_arguments, check_out, choose_run, chosen_weights
from horovod_train.config.paths import record_path_problem, text_problem
from horovod_train.config.settings import Config
from horovod_train.data.dataset import find_records, look_before_start
from horovod_train.data.random_access.images import are_images
from horovod_train.distributed.launch import launcher
from horovod_train.errors import ReadFailed, UserError
from horovod_train.inference.predictions import PREDICTIONS
from horovod_train.output import logs
from horovod_train.output.console import to_stdout

SUFFIXES = (".npz", ".csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        type=str,
        metavar="PATH",
        help="records, with targets or without; images: a folder, a glob or files; default: data.eval",
    )
    parser.add_argument("--out", required=True, metavar="FILE.npz|FILE.csv", help="where to write the outputs")


def run(arguments: argparse.Namespace) -> int:
    for word in arguments.data or ():
        if _is_setting(word):
            raise UserError(f"--data: {word} is a setting, and no such file exists; give settings before --data.")
    config, checkpoint = choose_run(arguments)
    for path in () if config.data.source else arguments.data or ():
        if problem := text_problem("data.eval", path) or record_path_problem("data.eval", path):
            raise UserError(f"--data: {problem}")
    paths = tuple(arguments.data or config.data.eval)
    if not paths:
        instead = "" if config.data.dataset else ", or data.eval"
        raise UserError(f"predict: of which records? Give --data PATH{instead}.")
    if os.path.splitext(arguments.out)[1] not in SUFFIXES:
        raise UserError(f"--out {arguments.out}: expected a name that ends in {' or '.join(SUFFIXES)}.")
    check_out("--out", arguments.out, PREDICTIONS)
    if arguments.data:  # how data.train is parted, and data.dataset, are of training
        data = dataclasses.replace(config.data, fold=None, eval_fraction=None, dataset=None)
        config = dataclasses.replace(config, data=data)
    data = dataclasses.replace(config.data, eval=paths)
    try:
        if are_images(paths):  # the checkpoint says how to decode them
            find_records(data, "eval", needs_labels=False)
        else:
            look_before_start(data, "eval", ranks=launcher.detect().size, needs_labels=False)
    except (UserError, ReadFailed) as error:
        raise type(error)(str(error).replace("data.eval", "--data") if arguments.data else str(error)) from error
    logs.load_tensorflow()
    from horovod_train.inference.run import predict

    weights = chosen_weights(arguments, as_evaluated=arguments.checkpoint == "best")
    written = predict(config, checkpoint, weights, paths, arguments.out)
    if launcher.detect().rank == 0:
        to_stdout(f"{arguments.out}: {written} records")
    return 0


def _is_setting(word: str) -> bool:
    """Return whether a word that argparse took for a path is section.key=value: --data takes all words after it."""
    section = re.match(r"(\w+)(\.\w+)*=", word)
    sections = {field.name for field in dataclasses.fields(Config)}
    return bool(section and section[1] in sections and not os.path.exists(word) and not glob.glob(word))
