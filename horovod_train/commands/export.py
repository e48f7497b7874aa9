"""The command `export`: a trained model as a file that needs no Horovod, no horovod_train and no checkpoint to load.

python -m horovod_train.main export runs/digits_convnet --out digits.keras     # keras.saving.load_model("digits.keras")
python -m horovod_train.main export runs/digits_convnet --out digits           # tf.saved_model.load("digits")
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

from horovod_train.commands.cli import add_run_arguments, check_out, choose_run, chosen_weights
from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError
from horovod_train.output import logs
from horovod_train.output.console import to_stderr, to_stdout
from horovod_train.output.files import Artifact, draft_of, remove, replace, zip_members

KERAS_FILE = Artifact(
    "a Keras file", r".+\.keras", content_matches=lambda path: {"config.json", "metadata.json"} <= zip_members(path)
)
_KERAS_DRAFT = Artifact("an unfinished Keras file", r"\..+\.[0-9a-f]{8}\.partial\.keras")
_SAVED = (
    "saved_model.pb",
    "fingerprint.pb",
    "variables",
    r"variables/variables\.[^/]+",
    "assets",
    "assets/[^/]+",
    "assets.extra",
    r"assets\.extra/(class_names|inputs)\.json",
)
SAVED_MODEL = Artifact("a SavedModel", ".+", "folder", _SAVED, lambda path: (path / "saved_model.pb").is_file())
_SAVED_MODEL_DRAFT = Artifact(
    "an unfinished SavedModel", r"\..+\.[0-9a-f]{8}\.partial", "folder", (*_SAVED, "variables/.+")
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FILE.keras|DIR", help="a Keras file, or a SavedModel's folder")
    parser.add_argument("--force", action="store_true", help="replace it if it exists")


def run(arguments: argparse.Namespace) -> int:
    if launcher.detect().size > 1:
        raise UserError("export: one process is enough; start it without horovodrun or mpirun.")
    config, checkpoint = choose_run(arguments)
    out = Path(os.path.abspath(arguments.out))
    artifact, unfinished = (KERAS_FILE, _KERAS_DRAFT) if out.suffix == ".keras" else (SAVED_MODEL, _SAVED_MODEL_DRAFT)
    check_out("--out", str(out), artifact)
    if os.path.lexists(out) and not arguments.force:
        raise UserError(f"--out {out}: exists already. Give another name, or --force to replace it.")
    logs.load_tensorflow(on_cpu=True)
    from horovod_train.checkpoint.layout import open_checkpoint
    from horovod_train.data.dataset import class_names
    from horovod_train.inference.run import build_bare_model, known_inputs, load_weights, write_model
    from horovod_train.training.initial_state import check_contents, contents_of_preprocess

    model = build_bare_model(config)
    saved = open_checkpoint(checkpoint, "--checkpoint")
    weights = load_weights(model, saved, chosen_weights(arguments, as_evaluated=arguments.checkpoint == "best"))
    try:
        held = contents_of_preprocess(config.data.preprocess)
    except UserError as error:  # the export itself does not need it
        held = {}
        to_stderr(f"warning: not compared with what the run trained with: {error}")
    check_contents(held, saved)
    inputs = known_inputs(model, config.data, saved)
    draft = draft_of(out).with_suffix(f".partial{out.suffix}" if artifact is KERAS_FILE else ".partial")
    try:
        taken = write_model(model, draft, class_names(config.data, saved.facts.class_names), inputs)
        replace(draft, out, artifact)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            remove(draft, unfinished)
    to_stdout(f"{out}: {weights} weights of {saved.folder}, step {saved.facts.step}, epoch {saved.facts.epoch}")
    for one in taken:
        changes = inputs.changes(one.name) if inputs else "what the run did, which the checkpoint does not say"
        to_stdout(f"takes {one}{changes and f', after {changes}'}")
    return 0
