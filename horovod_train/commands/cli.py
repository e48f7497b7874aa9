"""What commands share: parser, choice of a config or a run, tables on the screen, and files that they write.

The parser refuses remote paths and reports errors in one line. Does not know any single command. At the end: what is
trained without --config.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.table import Table

from horovod_train.checkpoint.layout import (
    BEST,
    CHECKPOINTS,
    open_checkpoint,
    read_manifest,
    step_name,
    step_of,
    steps_in,
)
from horovod_train.config.loader import BUILT_IN, Origins, is_number, load, seconds_of, setting_like
from horovod_train.config.paths import link_to_nothing, missing_paths, path_problem, remote_problem, text_problem
from horovod_train.config.settings import Config
from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError
from horovod_train.host import cache_folder
from horovod_train.output import lease
from horovod_train.output.console import Screen, check_written, plain
from horovod_train.output.files import Artifact, check, write_atomically
from horovod_train.output.rank_log import FOLDER
from horovod_train.shown_text import listed

T = TypeVar("T")
ConfigParts = tuple[list[str], list[str]]
"""Arguments that make up a config: files and overrides, in the order of `config.loader.load`."""
_OF_THE_MODEL = (
    *("model.name", "model.options", "model.lora"),
    *("data.features", "data.inputs", "data.preprocess", "data.parse"),
)
"""Settings on which the model and what it is given depend."""
LEFT_BY_A_RUN = ("config.yaml", "metrics.jsonl", "summary.json", FOLDER, lease.NAME)

log = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit. Subcommands get a parser of the same class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # For every argument without another type, so that no path escapes the check.
        self.register("type", None, _local)
        self.register("type", float, _finite)
        self.passes_on: str | None = None
        """The argument whose value is another program's option, such as --qos=long."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._joined(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_intermixed_args(self._joined(args), namespace)

    def _joined(self, args: Sequence[str] | None) -> list[str]:
        """Join such a value to its argument by `=`; else argparse would take it for an option of ours."""
        command_line = iter(sys.argv[1:] if args is None else args)
        joined = []
        for word in command_line:
            value = next(command_line, None) if word == self.passes_on else None
            joined.append(word if value is None else f"{word}={value}")
        return joined

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        setting = setting_like(unknown[0].partition("=")[0]) if unknown else None
        if setting:
            message = f"{unknown[0]}: settings are written without dashes, with =: {setting}=VALUE"
        command = self.prog.partition(" ")[2]
        raise UserError(f"{command}: " * bool(command) + f"{message.rstrip('.')}. See --help.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the program after --help. Raises RunError if that could not be written."""
        check_written()
        super().exit(status, message)

    def add_subparsers(self, **options: Any) -> Any:
        action = super().add_subparsers(**options)
        action.type = str  # the subcommand's own parser checks its arguments and knows their names
        return action


def _local(text: str) -> str:
    if problem := remote_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return text


def _finite(text: str) -> float:
    if not is_number(text):
        raise argparse.ArgumentTypeError(f"expected a number; received {text!r}")
    return float(text)


def count(text: str) -> int:
    """Parse a whole number of at least 1: the `type` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; received {text!r}")
    return int(text)


def at_least_0(text: str) -> int:
    """Parse 0, or a whole number as `count` does."""
    return 0 if text == "0" else count(text)


def above_0(text: str) -> float:
    """Parse a finite number above 0: the `type` of an argument."""
    if not is_number(text) or not float(text) > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0; received {text!r}")
    return float(text)


def duration(text: str) -> float:
    """Parse seconds or [D-]HH:MM:SS, above 0: the `type` of an argument."""
    try:
        value = seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0; received {text}")
    return value


def like(pattern: str, expected: str) -> Callable[[str], str]:
    """Return the `type` of an argument that matches a pattern as a whole."""

    def parse(word: str) -> str:
        if not re.fullmatch(pattern, word):
            raise argparse.ArgumentTypeError(f"expected {expected}; received {word!r}")
        return word

    return parse


def several(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the `type` of an argument that holds several values of another type, such as 1,2,4."""
    return lambda text: [parse(word) for word in text.split(",")]


def add_config(parser: argparse.ArgumentParser, help_line: str, *, required: bool = False) -> None:
    parser.add_argument("--config", nargs="+", action="extend", required=required, metavar="YAML", help=help_line)


def add_config_arguments(
    parser: argparse.ArgumentParser, help_line: str = "config files; later ones win", *, required: bool = True
) -> None:
    add_config(parser, help_line, required=required)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings; they win over the files")
    parser.add_argument("--output-dir", metavar="DIR", help="the run directory; the same as output_dir=DIR")


def config_parts(arguments: argparse.Namespace) -> ConfigParts:
    """Return the files and overrides of `add_config_arguments`. Raises UserError for a stray argument."""
    files, overrides = split_overrides(arguments.config)
    stray, more_overrides = split_overrides(arguments.overrides)
    if stray:
        raise UserError(f"argument {stray[0]!r}: expected section.key=value, or --config before the name of a config.")
    return files, [*overrides, *more_overrides]


def split_overrides(arguments: Iterable[str]) -> ConfigParts:
    """Separate overrides from files: argparse adds overrides that follow `--config FILE` to the files.

    An argument that is an existing path is a file, even if it has a = in it, as runs/lr=0.1 has.
    """
    files: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        (overrides if "=" in argument and not os.path.exists(argument) else files).append(argument)
    return files, overrides


def load_config(arguments: argparse.Namespace) -> tuple[Config, Origins]:
    """Read the config that the arguments of `add_config_arguments` make up. Raises UserError."""
    config, origins = load(*config_parts(arguments))
    if arguments.output_dir is not None:
        path = arguments.output_dir
        if problem := text_problem("output_dir", path) or path_problem("output_dir", path):
            raise UserError(f"--output-dir: {problem}")
        config = dataclasses.replace(config, output_dir=path)
        origins["output_dir"] = "--output-dir"
    return config, origins


def load_from_arguments(arguments: Iterable[str]) -> Config:
    """Read the config that the arguments after --config make up. Raises UserError."""
    config, _ = load(*split_overrides(arguments))
    return config


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest one above it that exists."""
    return next((place for place in (path, *path.parents) if os.path.exists(place)), path)


def installed_version(package: str) -> str | None:
    """Return a package's version, without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def needed_cache() -> Path:
    """Return the user's cache folder for this package. Raises UserError if there is no place for one."""
    if folder := cache_folder():
        return folder
    raise UserError("no place for the cache: there is no home folder. Set XDG_CACHE_HOME, or HOME.")


def missing_data(config: Config, origins: Origins) -> list[str]:
    """Return a sentence for each path of the data that does not exist, with the command that the config's head gives.

    origins: says which file named the data.
    """
    return list(missing_paths(config.data, _command_in_head(origins.get("data.train", "").rpartition(":")[0])))


def _command_in_head(name: str) -> str:
    """Return the command `prepare …` in the comments of a config; "" if it has none."""
    path = Path(name) if os.path.isfile(name) else BUILT_IN / f"{name}.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    lines = re.sub(r" \\\n#\s*", " ", text).splitlines()
    commands = [re.search(r"^#\s*(python -m horovod_train\.main prepare .*?)(\s{2,}#.*)?$", line) for line in lines]
    return next((match[1] for match in commands if match), "")


def require_output_dir(config: Config) -> str:
    if not config.output_dir:
        raise UserError("output_dir: is required: the folder that the run writes to. Give --output-dir DIR.")
    return config.output_dir


def config_of_a_copy(config: Config, origins: Origins) -> str:
    """Return a line if output_dir is said by the config.yaml of another run directory, as of a copy; else ""."""
    file = Path(origins.get("output_dir", "").rpartition(":")[0])
    folder, output_dir = file.parent, config.output_dir or ""
    is_of_a_run = file.name == "config.yaml" and (folder / CHECKPOINTS).is_dir()
    if not is_of_a_run or (os.path.exists(output_dir) and os.path.samefile(folder, output_dir)):
        return ""
    return (
        f"warning: {file}: output_dir: the run is that in {output_dir}, and {folder} stays as it is. To go on there "
        f"instead: --output-dir {folder}"
    )


def require_resume(config: Config) -> None:
    """Raise UserError if a job that is started again would not go on from its checkpoints."""
    if config.checkpoint.resume == "never":
        raise UserError(
            "checkpoint.resume: never would refuse each later start of the job. Leave it out, and choose a new "
            "--output-dir."
        )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="RUN_DIR | section.key=value", help="the run; settings that differ from its own"
    )
    add_config(parser, "config files, in place of RUN_DIR")
    parser.add_argument(
        "--checkpoint",
        default="auto",
        metavar="auto|best|STEP|PATH",
        help="auto: the newest of the run; STEP: of the run, like 460; default %(default)s",
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "trained", "ema", "evaluated"),
        default="auto",
        help="ema: moving averages; evaluated: those of the two that the run evaluated; auto: that for figures of the "
        "run and its best checkpoint, else averages if it kept any",
    )


def chosen_weights(arguments: argparse.Namespace, *, as_evaluated: bool) -> Any:
    """Return which inference.run.Weights --weights means. as_evaluated: auto means those evaluated."""
    return "evaluated" if arguments.weights == "auto" and as_evaluated else arguments.weights


def choose_run(arguments: argparse.Namespace) -> tuple[Config, str]:
    """Return the config and the checkpoint that the arguments mean. Raises UserError. Reads at most a manifest.

    The checkpoint is its folder, or a folder above, whose newest checkpoint is used.
    """
    files, overrides = split_overrides(arguments.config or [])
    folders, more_overrides = split_overrides(arguments.words)
    if len(folders) > 1 or bool(folders) == bool(files):
        received = " ".join([*(arguments.config or []), *arguments.words]) or "neither"
        raise UserError(f"expected either the directory of a run or --config; received {received}.")
    if folders:
        saved = Path(folders[0]) / "config.yaml"
        if not saved.is_file():
            raise UserError(
                link_to_nothing(folders[0])
                or f"{folders[0]}: is no run's directory: it has no config.yaml. Name another, or use --config."
            )
        files = [str(saved)]
    config, origins = load(files, [*overrides, *more_overrides])
    checkpoint = _checkpoint(arguments.checkpoint, folders[0] if folders else config.output_dir)
    if folders and launcher.detect().rank == 0:
        _name_changes(config, origins, checkpoint)
    return config, checkpoint


def _name_changes(config: Config, origins: Origins, checkpoint: str) -> None:
    """Warn of settings of the model and its inputs with which a checkpoint was not trained: config.yaml is newer."""
    with suppress(UserError):  # of a checkpoint that cannot be opened, which is said where it is loaded
        saved = open_checkpoint(checkpoint, "--checkpoint", read_manifest)
        given = [key for key, where in origins.items() if where.startswith("command line")]
        changes = [
            f"{path} {change}"
            for path, change in saved.facts.changes(config, _OF_THE_MODEL).items()
            if not any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in given)
        ]
        if changes:
            log.warning(f"config.yaml has other settings than {saved.folder}, and they count: {'; '.join(changes)}")


def _checkpoint(choice: str, run_dir: str | None) -> str:
    """Return the path of a checkpoint. choice: auto, best, a path, or of the run a step or the name of a checkpoint."""
    if choice not in ("auto", "best"):
        if run_dir is None or Path(choice).exists():
            return choice
        name = step_name(int(choice)) if choice.isascii() and choice.isdigit() else choice
        of_run = [path for path in (Path(run_dir, CHECKPOINTS, name), Path(run_dir, choice)) if path.is_dir()]
        if not of_run and step_of(name) is not None and launcher.detect().rank == 0:
            steps = listed(steps_in(Path(run_dir, CHECKPOINTS))) or "none"
            raise UserError(f"--checkpoint {choice}: {run_dir} has no checkpoint of this step. It has: {steps}.")
        return str(of_run[0]) if of_run else choice
    if run_dir is None:
        raise UserError(f"--checkpoint {choice}: of which run? Name its directory, or a checkpoint's path.")
    if choice == "auto":
        return run_dir
    best = Path(run_dir) / CHECKPOINTS / BEST
    if launcher.detect().rank == 0 and not best.is_dir():
        raise UserError(f"--checkpoint best: {run_dir} has none; it keeps one if trained with checkpoint.best.")
    return str(best.resolve())


def is_run_dir(run_dir: Path) -> bool:
    """Return whether the directory has one of the files and folders that runs leave. Raises OSError."""
    return any((run_dir / name).exists() for name in LEFT_BY_A_RUN)


def require_run(run_dir: Path) -> None:
    """Raise UserError if the directory has none of the files and folders that runs leave.

    Raises OSError for one of them that may not be read: what is told of a run without it would be wrong.
    """
    if not is_run_dir(run_dir):
        problem = "a folder without any of these" if run_dir.is_dir() else "no folder"
        raise UserError(
            link_to_nothing(run_dir)
            or f"{run_dir}: expected a run directory, with {', '.join(LEFT_BY_A_RUN)}; found {problem}."
        )
    for path in (run_dir / name for name in LEFT_BY_A_RUN):
        with suppress(FileNotFoundError):  # a lease comes and goes
            if path.is_dir():
                os.listdir(f"{path}/.")  # the point: it must be possible to enter it, too
            elif path.is_file():  # others are left to what reads them: a pipe would be waited for
                path.open("rb").close()


def open_screen(*, launched: bool = False) -> Console:
    """Open a console that breaks no line. launched: without colours.

    mpirun gives its ranks a terminal even when its own output is a file.
    """
    return Screen(soft_wrap=True, highlight=False, force_terminal=False if launched else None)


def build_table(titles: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[str]) -> Table:
    """Build a table without lines, whose columns are aligned to the right.

    left: titles of the columns of text, which are aligned to the left and take more lines where there is no room. The
    first column never does: it names the row, so that one finds it with grep.
    """
    cells = [list(map(plain, row)) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, title in enumerate(titles):
        is_text = title in left
        least = None if number else max((row[0].cell_len for row in cells), default=0)
        table.add_column(
            title, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold", min_width=least
        )
    for row in cells:
        table.add_row(*row)
    return table


def files_or_folder(files: int) -> str:
    """Say in how many files records are. A folder of images counts as one."""
    return "1 file or folder" if files == 1 else f"{files} files"


def check_out(option: str, name: str, artifact: Artifact) -> None:
    """Raise UserError, on root, if `artifact` cannot be written under this name or would replace something else."""
    if launcher.detect().rank != 0:
        return
    folder = os.path.dirname(name) or "."
    if not os.access(folder, os.W_OK | os.X_OK):
        problem = f"{folder} is not a folder that can be written to. Make it, or choose another."
        raise UserError(f"{option} {name}: {problem}")
    try:
        check(Path(os.path.abspath(name)), artifact)
    except OSError as error:
        raise UserError(f"{option} {name}: {error.strerror}, and stays as it is. Choose another name.") from error


def check_new(option: str, name: str | None) -> None:
    """Raise UserError if a name is given that is taken, or whose folder is missing."""
    if name and (os.path.lexists(name) or not Path(name).parent.is_dir()):
        raise UserError(f"{option} {name}: expected a new file in a folder that exists.")


def write_out(option: str, name: str, text: str, artifact: Artifact) -> None:
    """Write a file that `check_out` has allowed. Raises UserError if that fails."""
    try:
        write_atomically(Path(name), text, artifact)
    except OSError as error:
        raise UserError(f"{option} {name}: cannot be written: {error.strerror}.") from error


# --- without --config: the built-in config digits_convnet, on data that is made at the first start ---------------

EXAMPLE = str(BUILT_IN / "digits_convnet.yaml")
_DIGITS = "data/digits"
"""The folder of data that the example names, which is there in a checkout after `make train`."""


def place_digits(config: Config, origins: Origins) -> tuple[Config, Path | None]:
    """Return the example's config, and the folder in the user's cache where its data belongs: None for other data.

    Other data is a dataset data/digits that is here, or what overrides name. Raises UserError if there is no cache.
    """
    from horovod_train.data.schema import DATASET_NAME

    splits = [split for split in ("train", "eval") if getattr(config.data, split) == (f"{_DIGITS}/{split}",)]
    if not splits or os.path.isfile(os.path.join(_DIGITS, DATASET_NAME)):
        return config, None
    folder = needed_cache() / "digits"
    origins.update((f"data.{split}", f"no {_DIGITS} here") for split in splits)
    placed: dict[str, Any] = {split: (f"{folder}/{split}",) for split in splits}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **placed)), folder


def prepare_digits(folder: Path) -> None:
    """Make the digits in `folder` if they are missing. Every rank calls this before the ranks meet.

    The first rank that finds them missing makes them, while the other ranks that see the folder wait. A rank that fails
    or dies lets the next one try, and one that hangs holds the others up for a minute. Raises UserError.
    """
    from horovod_train.data.prepare.images import prepare_digits_once

    try:
        prepare_digits_once(folder)
    except OSError as error:
        about = f": {error.filename}" if error.filename else ""
        raise UserError(
            f"{folder}: the data cannot be made there: {error.strerror or error}{about}. Set XDG_CACHE_HOME to another "
            f"folder, or make it here: python -m horovod_train.main prepare digits --out {_DIGITS}"
        ) from error


def describe_example(config: Config) -> str:
    """Return the line that says what is trained and how to train something else."""
    data, out = ", ".join(map(os.path.dirname, config.data.paths("train"))), config.output_dir
    return (
        "no --config: training the built-in config digits_convnet, a small convnet on handwritten digits; data in "
        f"{data}, output in {out}. Started again, it resumes; --output-dir DIR begins another. Your own run: "
        f"--config FILE, for example a changed copy of {out}/config.yaml; --help lists the commands"
    )
