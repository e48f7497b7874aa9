"""`horovod_train.train`: a training run from Python, in this process or on ranks that it starts. No command line.

Imports TensorFlow only to train, so that a wrong config is refused at once.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod_train.config.loader import as_dict, dump, load
from horovod_train.config.registry import edited_modules, note_loaded_code
from horovod_train.config.settings import Config
from horovod_train.distributed.launch import launcher
from horovod_train.errors import SAVED, AlreadySaid, RunError, UserError
from horovod_train.host import environment_kept
from horovod_train.output.console import to_stdout

if TYPE_CHECKING:
    import keras

_calls = itertools.count()
"""Numbers the times that Keras and TensorFlow get a seed after a run, so that no two get the same."""


class Trained(NamedTuple):
    """What `train` returns."""

    summary: dict[str, Any]
    """What summary.json says: `steps`, `epochs`, the last `train` and `eval`, `finished`, …; {} except on root."""
    model: keras.Model | None
    """The trained model, to predict with; None except on root."""


def train(
    config: Mapping[str, Any] | str | os.PathLike[str] | Config, *overrides: str, np: int | None = None
) -> Trained:
    """Train as a config says; return its summary and the trained model.

    config: a path, the name of a built-in config, a dict of sections, or a Config. overrides: "section.key=value". np:
    the number of ranks to start on this machine.

    Without np this process is one rank: alone, or one of its launcher, whose ranks must all make this call. The first
    SIGINT, as of an interrupted cell, stops the run; the second ends the process, or raises KeyboardInterrupt in a
    notebook and in Python's shell. Outside the main thread no signal reaches the run. Horovod is shut down afterwards,
    unless the caller had started it, with hvd.init.

    With np it waits for other processes, and shows what they print: for notebooks, and for scripts that use the model.
    They import what the config names, from this folder or sys.path, and run none of the caller's code.

    The model has the weights of the last checkpoint, or their moving averages if the run keeps any, and is not
    compiled. A run that is asked to stop returns with `finished: false`; called again, it resumes. The environment, the
    dtype policy of Keras and the random states of Python and NumPy are then what they were before. Keras and TensorFlow
    have another seed than before, a new one after each call that follows from Python's random state.

    Raises UserError for what must be fixed in config or data; RunError if the run fails.
    """
    source = as_dict(config) if isinstance(config, Config) else config
    loaded, _ = load([source if isinstance(source, Mapping) else os.fspath(source)], overrides)
    if not loaded.output_dir:
        raise UserError("output_dir: is required: the folder that the run writes to.")
    for name in edited_modules(as_dict(loaded)):
        ranks = "" if np is None else ", and not as its ranks import it"
        warnings.warn(
            f"train: {name} has been edited since this process imported it, and is used as it was then{ranks}. "
            f"Call importlib.reload({name}) first.",
            stacklevel=2,
        )
    with environment_kept():  # another run would take what is set for Horovod for the user's own
        if np is not None:
            _train_on_ranks(loaded, np)
        elif not _train_here(loaded, loaded.output_dir):
            return Trained({}, None)
        result = _result(loaded, loaded.output_dir, by_other_processes=np is not None)
    note_loaded_code(as_dict(loaded))
    return result


def _train_here(config: Config, output_dir: str) -> bool:
    """Train in this process, as one rank; return whether it is root."""
    from horovod_train.main import check_paths
    from horovod_train.output import logs

    launch = launcher.detect()
    launch.check()
    logs.choose_backend()
    check_paths(config, output_dir, launch)
    logs.load_tensorflow()
    from horovod_train.training import run

    with _settings_kept():
        try:
            run.run(config)
        except RuntimeError as error:
            if "cannot be modified after" not in str(error):  # initialization, or being initialized
                raise
            raise UserError(
                "train: this process has used TensorFlow already, so its threads and devices cannot be set any more. "
                "Train first, or in other processes: np=1."
            ) from error
        except AlreadySaid as error:
            kind = UserError if error.exit_code == UserError.exit_code else RunError
            raise kind(str(error)) from (error.__cause__ or error)
    return launch.rank == 0


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Undo what building a model sets in this process: the dtype policy, and the random states of Python and NumPy.

    Keras and TensorFlow do not tell their states: they get a seed that follows from Python's state, another after each
    call, so that the caller's program draws neither a run's numbers nor the same ones twice. No two layers of the
    caller get the same name. TensorFlow is loaded.
    """
    import keras
    import numpy

    from horovod_train.keras_seams import names_continued

    policy, python_state, numpy_state = keras.config.dtype_policy(), random.getstate(), numpy.random.get_state()
    try:
        with names_continued():
            yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(random.Random(f"{next(_calls)} {python_state}").getrandbits(31))
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _train_on_ranks(config: Config, ranks: int) -> None:
    """Start ranks with the command `launch`, and show what they print, until they have ended."""
    started_by = launcher.detect()
    if started_by.size > 1:
        raise UserError(f"train: np={ranks} would start ranks from each rank of {started_by.launcher}; leave np out.")
    if ranks < 1:
        raise UserError(f"train: np must be at least 1; received {ranks}.")
    with tempfile.TemporaryDirectory(prefix="horovod_train-") as folder:
        path = Path(folder, "config.yaml")
        with path.open("x", encoding="utf-8") as file:
            file.write(dump(config))
        words = ["launch", "-np", str(ranks), "--max-restarts", "0", "--", "--config", str(path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
        exit_code, errors = _shown([sys.executable, "-m", "horovod_train.main", *words], environment)
    if exit_code not in SAVED:
        said = errors[0] if errors else f"the run ended with exit code {exit_code}; what it printed says why"
        raise (UserError if exit_code == UserError.exit_code else RunError)(said)


def _shown(command: list[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a program and print its lines, in a notebook too; return its exit code and what it reported as errors."""
    errors = []
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                to_stdout(line.rstrip("\n"))
                if line.startswith("error: "):
                    errors.append(line.removeprefix("error: ").rstrip())
        except BaseException:  # of an interrupted cell, whose ranks save and end; a second one leaves them
            process.terminate()
            for line in process.stdout:  # a rank that prints where nobody reads would fail before it has saved
                to_stdout(line.rstrip("\n"))
            raise
    return process.returncode, errors


def _result(config: Config, output_dir: str, *, by_other_processes: bool) -> Trained:
    """Read what the run has left: its summary, and the weights of its newest checkpoint."""
    from horovod_train.output import logs

    logs.load_tensorflow()
    from horovod_train.checkpoint.layout import open_checkpoint
    from horovod_train.inference.run import build_bare_model, load_weights
    from horovod_train.models import names_numbered_as_in_a_new_process

    def load() -> keras.Model:
        model = build_bare_model(config)
        load_weights(model, open_checkpoint(output_dir, "output_dir"), "auto")
        return model

    summary = json.loads(Path(output_dir, "summary.json").read_text(encoding="utf-8"))
    with _settings_kept():
        if by_other_processes:
            # Ranks have built no other model. That fails if the config's module has layers of its own, which this
            # process has numbered before; then its own numbers are right, if it has built no other model either.
            with suppress(UserError), names_numbered_as_in_a_new_process():
                return Trained(summary, load())
        return Trained(summary, load())
