"""The command `slurm`: prints a batch script for a config, ready for sbatch, and says what it chose. No TensorFlow.

python -m horovod_train.main slurm --config A.yaml --nodes 4 --gpus-per-node 8 --time 04:00:00 > a.sbatch
sbatch a.sbatch

The script, slurm.sbatch, starts a run, is told in time to save, and requeues itself until the run is done. A site sets
options for all its users in slurm.yaml in $XDG_CONFIG_HOME/horovod_train (~/.config/horovod_train): `option: value`, as
on the command line. What the command line gives wins; options for sbatch are merged by name.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from horovod_train.commands.cli import (
    Parser,
    add_config_arguments,
    at_least_0,
    config_parts,
    count,
    like,
    load_config,
    require_output_dir,
    require_resume,
)
from horovod_train.config.loader import CLOCK, compose, plain_value, seconds_of
from horovod_train.config.registry import suggest
from horovod_train.config.rules import resolve
from horovod_train.config.settings import Config
from horovod_train.errors import UserError, reading
from horovod_train.output.console import to_stderr

TEMPLATE = Path(__file__).with_name("slurm.sbatch")
NOTICE_S = 300
"""A checkpoint of some GB to a busy file server takes minutes. SLURM sends the signal up to 60 s earlier."""
CPUS_PER_GPU = 8
"""Default number of threads that read and decode for one GPU: what eight-GPU hosts can spare for each."""
IMAGE_ENDING = ".sif"
"""By which an image is known that exists on the cluster only."""
LAUNCHES = ("srun", "srun-pmix", "mpirun", "horovodrun")
GIVE_HERE = {"array", "nodes", "gpus-per-node", "cpus-per-task", "gres", "mem", "time", "partition", "account"}
"""Options of sbatch that are options of this command too."""
OTHER_GPUS = {"gpus", "gpus-per-task", "gpus-per-socket"}
"""Options of sbatch that ask for GPUs in a way from which neither ranks nor `--nv` follow."""
FIXED = {"ntasks", "ntasks-per-node", "tasks-per-node", "export", "signal", "requeue", "no-requeue"}
"""Options of sbatch that the script depends on."""


def add_arguments(parser: Parser) -> None:
    add_config_arguments(parser)
    for name, option in OPTIONS.items():
        action = "append" if option.many else "store"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            action=action,
            type=option.parse,
            metavar=option.metavar,
            help=option.help.replace("%", "%%"),
        )
    parser.passes_on = "--sbatch"


def run(arguments: argparse.Namespace) -> int:
    """Print the script on standard output and the choices on standard error."""
    files, overrides = config_parts(arguments)
    output_dir = arguments.output_dir
    config, _ = load_config(_as_first_task(arguments))
    given = [word.partition("=")[2] for word in overrides if word.startswith("output_dir=")]
    if not output_dir and given and "%a" in given[-1]:  # each task has its own; the config is that of the first
        output_dir = given[-1]
    output_dir = output_dir or require_output_dir(config)
    require_resume(config)
    of_site = merge_site_options(arguments, site_file())
    job = choose(arguments, output_dir, config.device.per_rank)
    if arguments.array and "%a" not in output_dir:
        raise UserError(
            f"--array {arguments.array}: all tasks would be one run, in {output_dir}; each task needs its own: "
            "--output-dir runs/NAME-%a."
        )
    config = resolve(config, job.nodes * job.tasks_per_node)
    head = [
        f"{job.nodes * job.tasks_per_node} ranks of horovod_train on {job.nodes} host(s); submit it with sbatch.",
        "SLURM tells it to save before its time is over, and it requeues itself until the run is done.",
        *(["Its tasks, each a run of its own, have their number in place of %a."] if arguments.array else []),
        *([f"From {site_file()}: {', '.join(of_site)}"] if of_site else []),
    ]
    # Use an environment by its absolute path, so that the script can be submitted from any folder.
    venv = ".venv" if sys.prefix == sys.base_prefix and os.path.exists(".venv") else sys.prefix
    train_arguments = ["--config", *files, *overrides, "--output-dir", output_dir]
    print(render(job, head=head, arguments=train_arguments, folder=str(Path.cwd()), venv=venv), end="")
    for line in [*_explain(job, config, output_dir), *_defaults(arguments, job, of_site)]:
        to_stderr(line)
    return 0


def _as_first_task(options: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with %a as the first task of the array has it, so that their values can be checked."""
    if options.array is None:
        if any("%a" in word for word in config_parts(options)[1]):
            raise UserError("%a is the number of a task of a job array; give --array, such as --array 1-5.")
        return options
    first = re.split(r"\D", options.array, maxsplit=1)[0]
    replaced = {
        "config": [word.replace("%a", first) for word in options.config],
        "overrides": [word.replace("%a", first) for word in options.overrides],
        "output_dir": options.output_dir and options.output_dir.replace("%a", first),
    }
    return argparse.Namespace(**{**vars(options), **replaced})


def choose(options: argparse.Namespace, output_dir: str, per_rank: int) -> Job:
    """Return what these options, with those of the site, ask for. Raises UserError."""
    if options.time is None:
        raise UserError("slurm: --time [D-]HH:MM:SS is required: how long the job may take.")
    if options.gpus_per_node and gpus_in(options.gres):
        raise UserError(
            f"--gpus-per-node {options.gpus_per_node} and --gres {options.gres}: both ask for GPUs; give one."
        )
    if options.image and options.container:
        raise UserError("--image and --container: both name a container; give one.")
    gpus = options.gpus_per_node or gpus_in(options.gres)
    flag = "--gpus-per-node" if options.gpus_per_node else "--gres"
    if gpus % per_rank:
        raise UserError(f"{flag}: GPUs of a host must be a multiple of device.per_rank ({per_rank}); received {gpus}.")
    tasks = options.tasks_per_node or gpus // per_rank or 1
    if gpus and tasks * per_rank != gpus:
        raise UserError(
            f"--tasks-per-node must be {flag} / device.per_rank ({gpus} / {per_rank} = {gpus // per_rank}), "
            f"since each rank takes {per_rank} GPU(s); received {tasks}. Leave it out, or ask for other GPUs."
        )
    container = list(options.container or [])
    if options.image:
        container = ["apptainer", "exec", *["--nv"] * bool(gpus), options.image]
    nodes, time_s = options.nodes or 1, int(seconds_of(options.time))
    notice_s = max(1, min(NOTICE_S, max(60, time_s // 10), time_s // 4))
    of_sbatch = {
        "job-name": re.sub(r"[^\w.-]", "_", Path(output_dir).name.replace("%a", "").strip("-_.")) or "horovod_train",
        "nodes": nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": options.gpus_per_node or None,
        "gres": options.gres,
        "cpus-per-task": options.cpus_per_task or (CPUS_PER_GPU * per_rank if gpus else 1),
        "mem": options.mem,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "array": options.array,
        "output": "slurm-%x-%A_%a.out" if options.array else "slurm-%x-%j.out",
        "open-mode": "append",
        "export": "NONE",
        "signal": f"B:USR1@{notice_s}",
        "requeue": "",
        **dict(option.removeprefix("--").partition("=")[::2] for option in options.sbatch),
    }
    return Job(
        nodes,
        tasks,
        gpus,
        notice_s,
        {name: str(value) for name, value in of_sbatch.items() if value is not None},
        options.launch or "srun",
        [*container, "python"],
        options.modules or (),
    )


def _explain(job: Job, config: Config, output_dir: str) -> list[str]:
    ranks = job.nodes * job.tasks_per_node
    batch = config.data.global_batch(ranks)
    options = job.options
    printed = options["output"].replace("%x", options["job-name"]).replace("%j", "JOB").replace("%A", "JOB")
    gpus = "a GPU" if config.device.per_rank == 1 else f"{config.device.per_rank} GPUs"
    device = gpus if job.gpus else f"{options['cpus-per-task']} CPU(s)"
    return [
        f"ranks: {job.nodes} host(s) × {job.tasks_per_node} = {ranks}, each with {device}",
        f"batch: {batch} records over all ranks, {batch / ranks:g} on each",
        f"start: {job.launch}" + (" (neither ssh nor MPI)" if job.launch == "srun" else ""),
        f"time: {options['time']}; asked to save {job.notice_s} s before, then requeued if it has saved a checkpoint",
        f"output: {output_dir}; what ranks print: {printed}"
        + ", in the folder where sbatch is called" * (not os.path.isabs(printed)),
    ]


def _defaults(options: argparse.Namespace, job: Job, of_site: list[str]) -> list[str]:
    """Return a line for each value that neither the command line nor the config has chosen."""
    lines = [f"from {site_file()}: {', '.join(of_site)}"] if of_site else []
    if options.image and not os.path.isfile(options.image):
        lines.append(f"image: {options.image} is not on this host; it must be on those of the job")
    if options.cpus_per_task is None:
        cpus = job.options["cpus-per-task"]
        lines.append(f"cpus-per-task: {cpus}, not asked for; hosts with more to spare: --cpus-per-task")
    return lines


@dataclass(frozen=True)
class Job:
    """What is requested from SLURM, and how the ranks are started."""

    nodes: int
    tasks_per_node: int
    gpus: int
    """Of a host."""
    notice_s: int
    """Seconds before the end of the job at which it is told to save."""
    options: Mapping[str, str]
    """Of sbatch, by name; "" for one without a value."""
    launch: str
    run: Sequence[str]
    """The interpreter, or a container's command line that ends with it."""
    modules: Sequence[str]


def render(job: Job, *, head: Sequence[str], arguments: Sequence[str] | None, folder: str | None, venv: str) -> str:
    """Return the script. head: its first comment.

    arguments: those of `python -m horovod_train.main`; None: what follows the script's name in the call of sbatch.
    folder: where to run; None: where sbatch was called. venv: the folder of the virtual environment.
    """
    load = [
        "# Login shells define `module`; this is none.",
        "command -v module > /dev/null || source /etc/profile",
        f"module load {shlex.join(job.modules)} || exit 2",
    ]
    options = [f"#SBATCH --{name}" + f"={quote(value)}" * bool(value) for name, value in job.options.items()]
    filled = {
        "# @HEAD@\n": "".join(f"{f'# {line}'.rstrip()}\n" for line in head),
        "#SBATCH @OPTIONS@\n": "".join(f"{option}\n" for option in options),
        "@NOTICE_S@": str(job.notice_s),
        "@LAUNCH@": job.launch,
        "@RUN@": shlex.join(job.run),
        "set -- @WORDS@\n": "" if arguments is None else f"set -- {shlex.join(arguments)}\n",
        "@MODULES@\n": "".join(f"{line}\n" for line in load) if job.modules else "",
        "@FOLDER@": '"$SLURM_SUBMIT_DIR"' if folder is None else shlex.quote(folder),
        "@VENV@": shlex.quote(venv),
    }
    # In one pass, because a path may contain text that looks like another placeholder.
    return re.sub("|".join(filled), lambda match: filled[match.group()], TEMPLATE.read_text(encoding="utf-8"))


def quote(value: str) -> str:
    """Quote a value for an #SBATCH line, in which sbatch splits words, as printable text on one line.

    sbatch removes quotes and backslashes as a shell does, except that a backslash escapes inside single quotes too.
    """
    if re.fullmatch(r"[\w.,:@/+=%-]+", value, re.ASCII):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _line(word: str) -> str:
    if not word.strip() or not word.isprintable():
        raise argparse.ArgumentTypeError(f"expected text on one line; received {word!r}")
    return word


_name = like(r"[\w.,:@/+-]+", "a name without spaces and quotes")


def _command(word: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(_line(word)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a command on one line; received {word!r}: {error}") from error


def _image(word: str) -> str:
    if not word.endswith(IMAGE_ENDING) and not Path(word).is_file():
        raise argparse.ArgumentTypeError(f"expected a container's image, FILE{IMAGE_ENDING}; received {word!r}")
    return _line(word)


def _sbatch(word: str) -> str:
    option = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.+)?", word)
    if not option or not word.isprintable():
        raise argparse.ArgumentTypeError(f"expected one option of sbatch, --NAME or --NAME=VALUE; received {word!r}")
    if option[1] in GIVE_HERE:
        raise argparse.ArgumentTypeError(f"give {word} to this command itself, not through --sbatch")
    if option[1] in OTHER_GPUS:
        raise argparse.ArgumentTypeError(f"in place of {word}, give --gpus-per-node or --gres to this command")
    if option[1] in FIXED:
        raise argparse.ArgumentTypeError(f"must not set --{option[1]}, because the script depends on its own")
    return word


class Option(NamedTuple):
    parse: Callable[[str], Any]
    metavar: str
    help: str
    many: bool = False


OPTIONS = {
    "nodes": Option(count, "N", "hosts (1)"),
    "gpus_per_node": Option(at_least_0, "N", "GPUs of a host, all used (0: on CPUs)"),
    "tasks_per_node": Option(count, "N", "ranks on a host; default: GPUs / device.per_rank, or 1"),
    "cpus_per_task": Option(count, "N", f"default: {CPUS_PER_GPU} for a GPU, else 1"),
    "gres": Option(_name, "NAME[:TYPE]:N", "in place of --gpus-per-node, such as gpu:a100:4; also others"),
    "mem": Option(
        like(r"\d+[KMGT]?", "a size such as 64G"), "SIZE", "memory of a host, such as 64G; default: the cluster's"
    ),
    "time": Option(like(CLOCK, "[D-]HH:MM:SS"), "[D-]HH:MM:SS", "how long the job may take; required"),
    "partition": Option(_name, "NAME", "default: the cluster's"),
    "account": Option(_name, "NAME", "default: yours"),
    "array": Option(
        like(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", "numbers of tasks such as 1-5 or 1,3%2"),
        "1-5",
        "a job array; each task has its number for %a, as in seed=%a --output-dir runs/sweep-%a",
    ),
    "sbatch": Option(_sbatch, "OPTION", "further option of sbatch, such as '--qos=long'; can be repeated", many=True),
    "modules": Option(_name, "MODULE", "environment module to load, such as cuda/12; can be repeated", many=True),
    "launch": Option(
        like("|".join(LAUNCHES), f"one of {', '.join(LAUNCHES)}"),
        "LAUNCHER",
        f"what starts the ranks: {', '.join(LAUNCHES)} (srun)",
    ),
    "image": Option(_image, "FILE.sif", "run in this container, by apptainer exec"),
    "container": Option(_command, "COMMAND", 'the same with a command of yours: "podman run … image"'),
}
"""By their names in the site's file; on the command line with dashes."""


def site_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.config"), "horovod_train", "slurm.yaml")


def merge_site_options(options: argparse.Namespace, file: Path) -> list[str]:
    """Set options that the command line leaves open to the site's; return these as `name=value`. Raises UserError."""
    site = _read_site(file)
    if options.image or options.container:
        site = {name: value for name, value in site.items() if name not in ("image", "container")}
    if options.gpus_per_node is not None or gpus_in(options.gres):
        site.pop("gpus_per_node", None)
        if gpus_in(site.get("gres")):
            del site["gres"]
    sbatch = options.sbatch or []
    names = {option.partition("=")[0] for option in sbatch}
    site_sbatch = [option for option in site.pop("sbatch", []) if option.partition("=")[0] not in names]
    used = {name: value for name, value in site.items() if getattr(options, name) is None}
    for name, value in used.items():
        setattr(options, name, value)
    options.sbatch = [*site_sbatch, *sbatch]
    used |= {"sbatch": site_sbatch} if site_sbatch else {}
    return [f"{name}={shlex.join(value) if isinstance(value, list | tuple) else value}" for name, value in used.items()]


def gpus_in(gres: str | None) -> int:
    """Return the GPUs of a host that --gres asks for: `gpu:4`, `gpu:a100:4` and `gpu` are 4, 4 and 1."""
    parts = [part.split(":") for part in (gres or "").split(",")]
    return sum(int(part[-1]) if part[-1].isdecimal() else 1 for part in parts if part[0] == "gpu")


def _read_site(file: Path) -> dict[str, Any]:
    with reading(str(file), text=True):
        try:
            text = file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):  # the latter of users whose home is /dev/null
            return {}
    node = compose(text, str(file))
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{file}:1: expected `option: value` lines; received {plain_value(node)!r}.")
    options: dict[str, Any] = {}
    for key, value in node.value:
        where, name = f"{file}:{key.start_mark.line + 1}", str(key.value).replace("-", "_")
        if name not in OPTIONS:
            raise UserError(f"{where}: {key.value}: unknown option; {suggest(name, list(OPTIONS))}")
        if name in options:  # with - and with _
            raise UserError(f"{where}: {key.value} is given twice.")
        try:
            options[name] = _parse(OPTIONS[name], value)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{where}: {key.value}: {error}.") from error
    return options


def _parse(option: Option, node: yaml.Node) -> Any:
    """Parse the text of a value as the command line does: YAML takes 12:00:00 for a number."""
    items = node.value if option.many and isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        raise argparse.ArgumentTypeError(f"expected {'a list of values' if option.many else 'one value'}")
    values = [option.parse(item.value) for item in items]
    return values if option.many else values[0]
