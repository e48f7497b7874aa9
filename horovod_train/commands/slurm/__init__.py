"""The command `slurm`: prints a batch script for a config, ready for sbatch, and says what it chose. No TensorFlow.

The command `slurm`: prints a batch script for a config, ready for sbatch, and says what it chose. No TensorFlow.

python -m horovod_train.main slurm --config A.yaml --nodes 4 --gpus-per-node 8 --time 04:00:00 > a.sbatch
sbatch a.sbatch

Chooses the numbers and says so on standard error. options: parses; script: fills in the template.

Fills in job.sbatch: a batch script that starts a run, is told in time to save, and requeues itself until it is done.

Does not choose what is requested; see command.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from horovod_train.commands.cli import Parser, add_config_arguments, config_parts, load_config, require_output_dir
from horovod_train.commands.slurm.options import CPUS_PER_GPU, add_options, gpus_in, merge_site_options, site_file
from horovod_train.config.loader import parse_clock
from horovod_train.config.rules import resolve
from horovod_train.config.settings import Config
from horovod_train.errors import UserError
from horovod_train.output.console import to_stderr

NOTICE_S = 300
"""A checkpoint of some GB to a busy file server takes minutes."""


def add_arguments(parser: Parser) -> None:
    add_config_arguments(parser)
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the script on standard output and the choices on standard error."""
    files, overrides = config_parts(arguments)
    config, _ = load_config(arguments)
    output_dir = require_output_dir(config)
    of_site = merge_site_options(arguments, site_file())
    job = _choose(arguments, output_dir, config.device.per_rank)
    config = resolve(config, job.nodes * job.tasks_per_node)
    head = [
        f"{job.nodes * job.tasks_per_node} ranks of horovod_train on {job.nodes} host(s); submit it with sbatch.",
        "SLURM tells it to save before its time is over, and it requeues itself until the run is done.",
        *([f"From {site_file()}: {', '.join(of_site)}"] if of_site else []),
    ]
    # Use an environment by its absolute path, so that the script can be submitted from any folder.
    venv = sys.prefix if sys.prefix != sys.base_prefix else ".venv"
    train_arguments = ["--config", *files, *overrides, "--output-dir", output_dir]
    print(render(job, head=head, arguments=train_arguments, folder=str(Path.cwd()), venv=venv), end="")
    for line in [*_explain(job, config, output_dir), *_defaults(arguments, job, of_site)]:
        to_stderr(line)
    return 0


def _choose(options: argparse.Namespace, output_dir: str, per_rank: int) -> Job:
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
    return Job(
        name=re.sub(r"[^\w.-]", "_", Path(output_dir).name) or "horovod_train",
        nodes=options.nodes or 1,
        tasks_per_node=tasks,
        cpus_per_task=options.cpus_per_task or (CPUS_PER_GPU * per_rank if gpus else 1),
        time=options.time,
        notice_s=max(60, min(NOTICE_S, int(parse_clock(options.time) or 0) // 10)),
        gpus_per_node=options.gpus_per_node or None,
        gres=options.gres,
        mem=options.mem,
        partition=options.partition,
        account=options.account,
        sbatch=options.sbatch or (),
        launch=options.launch or "srun",
        run=[*container, "python"],
        modules=options.modules or (),
    )


def _explain(job: Job, config: Config, output_dir: str) -> list[str]:
    ranks, batch = job.nodes * job.tasks_per_node, config.data.global_batch_size
    assert batch is not None
    options = job.options()
    printed = options["output"].replace("%x", options["job-name"]).replace("%j", "JOB")
    gpus = "a GPU" if config.device.per_rank == 1 else f"{config.device.per_rank} GPUs"
    device = gpus if job.gpus_per_node or gpus_in(job.gres) else f"{job.cpus_per_task} CPU(s)"
    return [
        f"ranks: {job.nodes} host(s) × {job.tasks_per_node} = {ranks}, each with {device}",
        f"batch: {batch} records over all ranks, {batch / ranks:g} on each",
        f"start: {job.launch}" + (" (neither ssh nor MPI)" if job.launch == "srun" else ""),
        f"time: {job.time}; asked to save {job.notice_s} s before, then requeued",
        f"output: {output_dir}; what ranks print: {Path.cwd() / printed}",
    ]


def _defaults(options: argparse.Namespace, job: Job, of_site: list[str]) -> list[str]:
    """Return a line for each value that neither the command line nor the config has chosen."""
    lines = [f"from {site_file()}: {', '.join(of_site)}"] if of_site else []
    if options.cpus_per_task is None:
        lines.append(f"cpus-per-task: {job.cpus_per_task}, not asked for; hosts with more to spare: --cpus-per-task")
    return lines


TEMPLATE = resources.files("horovod_train.commands.slurm") / "job.sbatch"


@dataclass(frozen=True)
class Job:
    """What is requested from SLURM, and how the ranks are started."""

    name: str
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    time: str
    notice_s: int
    """Seconds before the end of the job at which it is told to save."""

    gpus_per_node: int | None = None
    """None: no GPUs, or those of `gres`."""

    gres: str | None = None
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    sbatch: Sequence[str] = ()
    """Further options of sbatch: --NAME or --NAME=VALUE."""

    launch: str = "srun"
    run: Sequence[str] = ("python",)
    """The interpreter, or a container's command line that ends with it."""

    modules: Sequence[str] = ()

    def options(self) -> dict[str, str]:
        """Return the options of sbatch by name; "" for one without a value."""
        options = {
            "job-name": self.name,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "gpus-per-node": self.gpus_per_node,
            "gres": self.gres,
            "cpus-per-task": self.cpus_per_task,
            "mem": self.mem,
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            "output": "slurm-%x-%j.out",
            "open-mode": "append",
            "export": "NONE",
            "signal": f"B:USR1@{self.notice_s}",
            "requeue": "",
        }
        further = dict(option.removeprefix("--").partition("=")[::2] for option in self.sbatch)
        return {name: str(value) for name, value in (options | further).items() if value is not None}


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
    options = [f"#SBATCH --{name}" + f"={quote(value)}" * bool(value) for name, value in job.options().items()]
    filled = {
        "# @HEAD@\n": "".join(f"{f'# {line}'.rstrip()}\n" for line in head),
        "#SBATCH @OPTIONS@\n": "".join(f"{option}\n" for option in options),
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
