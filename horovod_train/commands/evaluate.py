"""The command `evaluate`: loss and metrics of a trained model over data.eval, on any number of ranks.

python -m horovod_train.main evaluate runs/digits_convnet --checkpoint best
horovodrun -np 4 python -m horovod_train.main evaluate runs/digits_convnet data.eval=data/other/eval --out figures.json
"""

from __future__ import annotations

import argparse

from horovod_train.commands.cli import add_run_arguments, check_out, choose_run, chosen_weights, write_out
from horovod_train.data.dataset import look_before_start
from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError
from horovod_train.output import logs
from horovod_train.output.console import to_stdout
from horovod_train.output.files import Artifact, json_text, read_json

_FACTS = {"step", "epoch", "records", "ranks", "weights", "checkpoint"}
FIGURES = Artifact("a file that evaluate wrote", ".+", content_matches=lambda path: read_json(path).keys() >= _FACTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--out", metavar="FILE.json", help="also write the figures there")


def run(arguments: argparse.Namespace) -> int:
    config, checkpoint = choose_run(arguments)
    if not (config.data.eval or config.data.dataset):
        raise UserError("data.eval: is required: the records to evaluate.")
    if arguments.out:
        check_out("--out", arguments.out, FIGURES)
    look_before_start(config.data, "eval", ranks=launcher.detect().size)
    logs.load_tensorflow()
    from horovod_train.inference.run import evaluate

    figures = evaluate(config, checkpoint, chosen_weights(arguments, as_evaluated=True))
    if figures is not None:
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in figures.items()}
        to_stdout("  ".join(f"{name} {value}" for name, value in shown.items()))
        if arguments.out:
            write_out("--out", arguments.out, json_text(figures, indent=2) + "\n", FIGURES)
    return 0
