"""The command line: arguments → Config → training.run, and the other commands. Imports TensorFlow only to train.

horovodrun -np 4 python -m horovod_train.main           trains a built-in example; see commands/cli.py
python -m horovod_train.main --config A.yaml [B.yaml ...] [section.key=value ...] [--output-dir DIR]
horovodrun -np 4 python -m horovod_train.main --config ...
python -m horovod_train.main prepare digits --out DIR
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from horovod_train import __version__
from horovod_train.commands.cli import (
    EXAMPLE,
    Parser,
    add_config_arguments,
    config_of_a_copy,
    describe_example,
    installed_version,
    load_config,
    missing_data,
    place_digits,
    prepare_digits,
    require_output_dir,
)
from horovod_train.config.loader import dump, left_out_options
from horovod_train.config.registry import raised_at, suggest
from horovod_train.config.settings import Config
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.launch.conventions import Meeting
from horovod_train.errors import (
    AlreadySaid,
    FailedElsewhere,
    ReadFailed,
    RunError,
    UserError,
    failure_of_path,
    one_line,
)
from horovod_train.output import logs
from horovod_train.output.console import (
    check_written,
    let_go,
    make_streams_unfailing,
    path_to_stdout,
    to_stderr,
    to_stdout,
    traceback_to_stderr,
)
from horovod_train.shown_text import listed

COMMANDS = {
    "init": ("horovod_train.commands.init", "look at your data and write a config for it, to begin with"),
    "launch": ("horovod_train.commands.launch", "start ranks here, and again when one is lost: launch -np 4 -- …"),
    "prepare": ("horovod_train.data.prepare", "make TFRecords from digits, idx files, csv, images and more"),
    "settings": ("horovod_train.commands.settings", "every setting of a config: type, default, meaning; JSON Schema"),
    "plan": ("horovod_train.commands.plan", "what a config comes to on N ranks; builds its model to check it"),
    "doctor": ("horovod_train.commands.doctor", "is this machine, or this job, fit to train on?"),
    "index": ("horovod_train.commands.index", "find where the records of foreign files start, once"),
    "check-data": ("horovod_train.commands.check_data", "read everything and name what is wrong; audit a run"),
    "evaluate": ("horovod_train.commands.evaluate", "loss and metrics of a trained model, on any number of ranks"),
    "predict": ("horovod_train.commands.predict", "its outputs for each record, as npz or csv, on any number of ranks"),
    "export": ("horovod_train.commands.export", "a .keras file or SavedModel that needs none of this to load"),
    "explain": ("horovod_train.commands.explain", "what happened to a run, and what to do next"),
    "watch": ("horovod_train.commands.watch", "look at a run while it trains: progress, metrics, what each rank does"),
    "report": ("horovod_train.commands.report", "one page of what runs were: curves, starts, settings"),
    "slurm": ("horovod_train.commands.slurm", "print a batch script for a config, ready for sbatch"),
    "kubernetes": ("horovod_train.commands.kubernetes", "print a manifest for a config, ready for kubectl"),
    "build-horovod": ("horovod_train.commands.build_horovod", "compile Horovod for this TensorFlow, and install it"),
    "bench": ("horovod_train.commands.bench", "measure how fast your records are read and your config trains"),
}
"""name → (module with add_arguments(parser) and run(arguments) → exit code, one line of help)."""

ON_RANKS = {"doctor", "evaluate", "predict"}
"""Commands whose ranks meet, as those of a training run."""

IMPORT_USERS_CODE = {"bench", "check-data", "evaluate", "export", "plan", "predict"}
"""Commands that import what a config names: models, and sources of records before TensorFlow is loaded."""


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        exit_code = _main(argv)
    except Exception as error:
        traceback_to_stderr(error)
        exit_code = 1
    ranks_wait = not argv or argv[0] not in COMMANDS or argv[0] in ON_RANKS
    if exit_code and ranks_wait and (step := _step()) is not None:
        from horovod_train.distributed.launch.rendezvous import report_failure

        report_failure(step, exit_code)  # plain srun lets others wait for a rank that fails alone before the ranks meet
    return exit_code


def _main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code after showing why it is not 0."""
    try:
        if argv and argv[0] in COMMANDS:
            return _run_command(argv[0], argv[1:])
        if argv and argv[0][:1].isalpha() and argv[0].replace("-", "_").isidentifier():
            suggestion = suggest(argv[0], list(COMMANDS))
            raise UserError(f"there is no command {argv[0]!r}; {suggestion} To train: --config FILE, no command.")
        return _train(argv)
    except FailedElsewhere as error:
        time.sleep(launcher.ROOT_REPORTS_FIRST_S)  # mpirun kills all when the first ends, also the one that says why
        return error.exit_code
    except AlreadySaid as error:
        return error.exit_code
    except RunError as error:
        to_stderr(f"error: {error}")
        return error.exit_code
    except ImportError as error:
        library = _library_of(error)
        if library is None:
            raise
        problem = f"error: rank {_rank()} ({socket.gethostname()}): {library} cannot be imported: {one_line(error)}."
        if library == "horovod" and isinstance(error, ModuleNotFoundError):
            problem = "error: Horovod is not installed. Run: horovod-train build-horovod"
        to_stderr(problem)
        return UserError.exit_code


def _library_of(error: ImportError) -> str | None:
    """Return which of the libraries that every rank needs could not be imported; None if another module could not."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [str(module).partition(".")[0] for module in [*modules, error.name or ""]]
    return next((name for name in reversed(packages) if name in ("horovod", "tensorflow", "keras", "mpi4py")), None)


def _root_has_failed() -> bool:
    """Return whether root has let this rank know that it failed before the ranks met."""
    if (step := _step()) is None:
        return False
    from horovod_train.distributed.launch.rendezvous import root_has_failed

    return root_has_failed(step)


def _step() -> Meeting | None:
    """Return what the ranks meet by, if their launcher neither brings them together nor ends all when one ends."""
    try:
        step = launcher.detect().step
    except UserError:
        return None
    return step if find_spec("horovod") else None


def _run_command(name: str, argv: Sequence[str]) -> int:
    module_name, description = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = Parser(prog=f"horovod_train.main {name}", description=description)
    module.add_arguments(parser)
    with _root_speaks_first():
        try:
            arguments = parser.parse_intermixed_args(argv)
        except TypeError:  # a command of subcommands, each with its own arguments
            arguments = parser.parse_args(argv)
        if name in IMPORT_USERS_CODE:
            logs.choose_backend()
    with _root_speaks_first(), logs.to_console(_rank() == 0, show=to_stderr):
        exit_code = int(module.run(arguments))
    if exit_code == 0:
        check_written()
    return exit_code


def _train(argv: Sequence[str]) -> int:
    launch = launcher.detect()
    with _root_speaks_first():
        arguments = _parser().parse_args(argv)
        if arguments.resume is not None:
            arguments.overrides.append(f"checkpoint.resume={json.dumps(arguments.resume, ensure_ascii=False)}")
        only_prints = arguments.print_config or arguments.print_output_dir
        if not only_prints:
            launch.check()
            logs.choose_backend()
        is_first_run = not arguments.config
        if is_first_run:
            arguments.config = [EXAMPLE]
        config, origins = load_config(arguments)
        if is_first_run:
            config, data_folder = place_digits(config, origins)
        if only_prints:
            if arguments.print_config:
                to_stdout(dump(config, origins).rstrip("\n"))
            else:
                path_to_stdout(require_output_dir(config))
            check_written()
            return 0
        output_dir = require_output_dir(config)
        if is_first_run:
            if launch.rank == 0:
                to_stdout(describe_example(config))
            if data_folder is not None:
                prepare_digits(data_folder)
        if missing := missing_data(config, origins):
            raise UserError(missing[0])
        check_paths(config, output_dir, launch)
    if launch.rank == 0 and (line := config_of_a_copy(config, origins)):
        to_stderr(line)
    for line in left_out_options(config, origins) if launch.rank == 0 else ():
        to_stderr(f"warning: {line}")
    return _run(config, launch)


@contextmanager
def _root_speaks_first() -> Iterator[None]:
    """Let root report an error first that all ranks have, such as bad arguments: the launcher ends the others.

    A rank whose arguments differ from root's reports later.
    """
    try:
        with _paths_in_one_line():
            yield
    except (UserError, ReadFailed) as error:
        rank = _rank()
        if rank == 0:
            raise
        time.sleep(launcher.ROOT_REPORTS_FIRST_S)
        if _root_has_failed():
            raise AlreadySaid(str(error), error.exit_code) from error
        raise type(error)(f"rank {rank} ({socket.gethostname()}): {error}") from error


@contextmanager
def _paths_in_one_line() -> Iterator[None]:
    """Raise UserError or ReadFailed for a path that the system refuses, such as a folder that may not be entered.

    An error that the user's code has met keeps its traceback.
    """
    try:
        yield
    except OSError as error:
        failure = failure_of_path(error)
        if failure is None or raised_at(error):
            raise
        raise failure from error


def _rank() -> int:
    """Return the rank of this process; 0 where the launcher's variables contradict each other."""
    try:
        return launcher.detect().rank
    except UserError:
        return 0


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<14} {line}" for name, (_, line) in COMMANDS.items())
    parser = Parser(
        prog="horovod_train.main",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Trains a Keras model with one process per device.\n"
        "For N of them: horovodrun -np N, mpirun -np N or srun before the command.\n"
        "Without --config: a small convnet on handwritten digits.",
        epilog=f"other commands (each has --help):\n{commands}",
    )
    add_config_arguments(parser, "config files; later ones win; default: a built-in example", required=False)
    parser.add_argument("--resume", metavar="WHAT", help="auto, never or a path; the same as checkpoint.resume=WHAT")
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument("--print-config", action="store_true", help="show each value and where it came from, and end")
    parser.add_argument("--print-output-dir", action="store_true", help="show the run directory, for scripts, and end")
    return parser


def _versions() -> str:
    """Return the versions that a bug report needs, without importing any package."""
    found = ((package, installed_version(package)) for package in ("tensorflow", "keras", "horovod"))
    packages = ", ".join(f"{package} {version}" if version else f"no {package}" for package, version in found)
    return f"horovod_train {__version__} (Python {platform.python_version()}, {packages})"


def check_paths(config: Config, output_dir: str, launch: launcher.Launch) -> None:
    """Check what can be checked before TensorFlow is loaded."""
    from horovod_train.data.dataset import look_before_start

    for split in ("train", "eval"):
        if getattr(config.data, split):
            look_before_start(config.data, split, ranks=launch.size)
    if launch.rank == 0:
        from horovod_train.output.run_dir import check_writable  # brings NumPy, which most commands do not need

        check_writable(output_dir)


def _run(config: Config, launch: launcher.Launch) -> int:
    # TensorFlow takes seconds to load, so check the config first.
    logs.load_tensorflow()
    from horovod_train.distributed.group import is_connection_loss
    from horovod_train.training import run

    try:
        return run.run(config)
    except RunError as error:
        # Raised before the watchdog runs. A UserError is the same on all ranks; another error may be this rank's alone.
        if launch.rank == 0 or isinstance(error, UserError | AlreadySaid):
            raise
        to_stderr(f"error: rank {launch.rank}: {error}")
        return error.exit_code
    except Exception as error:
        if not is_connection_loss(error):
            raise
        to_stderr(f"rank {launch.rank}: stopped, because another rank has gone; its message says why.")
        return 1


def entry() -> None:
    """Run as a program: `horovod-train`, `python -m horovod_train` and `python -m horovod_train.main` are the same.

    A failed program ends before Python frees its objects: an iterator of tf.data that a traceback refers to waits
    there for its thread, up to a minute, with the interpreter locked. Registered first, so called after Horovod's end.
    """
    exit_code = 0
    make_streams_unfailing()

    @atexit.register
    def end() -> None:
        if exit_code:
            os._exit(exit_code)
        # Last of all, after multiprocessing's wait: what limit_exit has set is over.
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        sys.unraisablehook = sys.__unraisablehook__

    try:
        exit_code = main()
    except KeyboardInterrupt:  # of a command, or while TensorFlow loads: a run in progress saves instead
        # Not caught, so that a shell's loop sees the signal, and ends too.
        sys.excepthook = lambda *_: to_stderr("interrupted by SIGINT.") if _rank() == 0 else None
        raise
    # Schedulers repeat signals. Another one would replace the exit code, which says that the run is saved.
    for number in {*launcher.STOP_SIGNALS} - {signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)
    let_go()
    limit_exit()
    sys.exit(exit_code)


def _is_alone() -> bool:
    try:
        return launcher.detect().launcher == "none"
    except UserError:
        return False


class _StillRuns(BaseException):
    """Ends Python's wait for a thread."""


def limit_exit() -> None:
    """Let the exit of this process, which follows, wait a limited time for the user's threads.

    Python itself would wait for ever for each thread that is no daemon, and for each process of multiprocessing.
    """
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0]:
        return  # the watchdog ends a run that has failed sooner
    limit_s = launcher.ALONE_END_WITHIN_S if _is_alone() else launcher.THREADS_END_WITHIN_S
    waits_for_threads, show = True, sys.unraisablehook

    @atexit.register  # so called first, after the wait for threads
    def have_ended() -> None:
        nonlocal waits_for_threads
        waits_for_threads = False

    def end_the_wait(_number: int, _frame: object) -> None:
        threads = [thread for thread in threading.enumerate() if not thread.daemon] if waits_for_threads else []
        left = [f"thread {thread.name!r}" for thread in threads if thread is not threading.main_thread()]
        if "multiprocessing" in sys.modules:
            for process in sys.modules["multiprocessing"].active_children():
                if not (process.daemon and waits_for_threads):  # Python will end daemons itself, if they let it
                    left.append(f"process {process.name!r}")
                    process.kill()
        if left:
            to_stderr(
                f"rank {_rank()} ({socket.gethostname()}): all was done {limit_s:.0f} s ago, but {listed(left, 4)} of "
                "your code still runs, and is ended unfinished. Join it before your code returns."
            )
        if waits_for_threads:
            raise _StillRuns  # which Python reports, and goes on

    sys.unraisablehook = lambda failure: None if failure.exc_type is _StillRuns else show(failure)
    signal.signal(signal.SIGALRM, end_the_wait)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)  # again for what Python waits for after the threads


if __name__ == "__main__":
    entry()
