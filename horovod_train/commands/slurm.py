"""The command `slurm`: prints a batch script for a config, ready for sbatch, and says what it chose. No TensorFlow.

python -m horovod_train.main slurm --config A.yaml --nodes 4 --gpus-per-node 8 --time 04:00:00 > a.sbatch
sbatch a.sbatch
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from horovod_train.commands.slurm_script import LAUNCHES, Job, render
from horovod_train.config.loader import load
from horovod_train.config.settings import Config, resolve
from horovod_train.errors import UserError

CPUS_PER_GPU = 8
"""Default number of threads that read and decode for one GPU: what eight-GPU hosts can spare for each."""

NOTICE_S = 300
"""A checkpoint of some GB to a busy file server takes minutes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", nargs="+", required=True, metavar="YAML", help="files, as in training")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as in training")
    parser.add_argument("--output-dir", metavar="DIR", help="as in training")
    parser.add_argument("--nodes", type=_count, default=1, help="hosts (1)")
    parser.add_argument("--gpus-per-node", type=_count_or_0, default=0, help="GPUs of a host, all used (0: on CPUs)")
    parser.add_argument("--tasks-per-node", type=_count, help="ranks on a host; default: GPUs / device.per_rank, or 1")
    parser.add_argument("--cpus-per-task", type=_count, help=f"default: {CPUS_PER_GPU} for a GPU, else 1")
    parser.add_argument("--time", required=True, metavar="[D-]HH:MM:SS", help="how long the job may take")
    parser.add_argument("--partition", type=_name, help="default: the cluster's")
    parser.add_argument("--account", type=_name, help="default: yours")
    parser.add_argument("--launch", choices=LAUNCHES, default="srun", help="what starts the ranks (srun)")
    parser.add_argument("--container", type=_line, metavar="COMMAND", help='such as "apptainer exec --nv image.sif"')


def run(arguments: argparse.Namespace) -> int:
    """Print the script on standard output and the choices on standard error."""
    files = [word for word in arguments.config if "=" not in word]
    overrides = [word for word in [*arguments.config, *arguments.overrides] if "=" in word]
    config, _ = load(files, overrides)
    output_dir = arguments.output_dir or config.output_dir
    if output_dir is None:
        raise UserError("output_dir: is required: the folder that the run writes to. Give --output-dir DIR.")
    job = _choose(arguments, output_dir, config.device.per_rank)
    config = resolve(config, job.nodes * job.tasks_per_node)
    words = ["--config", *files, *overrides, "--output-dir", output_dir]
    head = [
        f"{job.nodes * job.tasks_per_node} ranks of horovod_train on {job.nodes} host(s); submit it with sbatch.",
        "It is asked to save before its time is over, and puts itself in the queue again until the run is done.",
    ]
    # Use an environment by its absolute path, so that the script can be submitted from any folder.
    venv = sys.prefix if sys.prefix != sys.base_prefix else ".venv"
    print(render(job, head=head, words=words, folder=str(Path.cwd()), venv=venv), end="")
    for line in _explain(job, config, arguments, output_dir):
        print(line, file=sys.stderr)
    return 0


def _choose(arguments: argparse.Namespace, output_dir: str, per_rank: int) -> Job:
    gpus, time_s = arguments.gpus_per_node, _seconds(arguments.time)
    if gpus % per_rank:
        raise UserError(f"--gpus-per-node must be a multiple of device.per_rank ({per_rank}); received {gpus}.")
    tasks = arguments.tasks_per_node or gpus // per_rank or 1
    if gpus and tasks * per_rank != gpus:
        raise UserError(
            f"--tasks-per-node must be --gpus-per-node / device.per_rank ({gpus} / {per_rank} = {gpus // per_rank}), "
            f"since each rank takes {per_rank} GPU(s); received {tasks}. Leave it out, or ask for other GPUs."
        )
    container = f"{arguments.container} python" if arguments.container else "python"
    return Job(
        name=re.sub(r"[^\w.-]", "_", Path(output_dir).name) or "horovod_train",
        nodes=arguments.nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        cpus_per_task=arguments.cpus_per_task or (CPUS_PER_GPU * per_rank if gpus else 1),
        time=arguments.time,
        notice_s=max(60, min(NOTICE_S, time_s // 10)),
        launch=arguments.launch,
        run=container,
        partition=arguments.partition,
        account=arguments.account,
    )


def _explain(job: Job, config: Config, arguments: argparse.Namespace, output_dir: str) -> list[str]:
    ranks, batch = job.nodes * job.tasks_per_node, config.data.global_batch_size
    assert batch is not None
    own = "a GPU" if config.device.per_rank == 1 else f"{config.device.per_rank} GPUs"
    device = own if job.gpus_per_node else f"{job.cpus_per_task} CPU(s)"
    lines = [
        f"ranks: {job.nodes} host(s) × {job.tasks_per_node} = {ranks}, each with {device}",
        f"batch: {batch} records over all ranks, {batch / ranks:g} on each",
        f"start: {job.launch}" + (" (neither ssh nor MPI)" if job.launch == "srun" else ""),
        f"time: {job.time}; asked to save {job.notice_s} s before, then in the queue again",
        f"output: {output_dir}; what ranks print: slurm-{job.name}-JOB.out in {Path.cwd()}",
    ]
    if arguments.cpus_per_task is None:
        lines.append(f"cpus-per-task: {job.cpus_per_task}, not asked for; hosts with more to spare: --cpus-per-task")
    return lines


def shipped(gpus_per_node: int, nodes: int) -> str:
    """Return one of the scripts in scripts/slurm, for any config; they differ only in what they request."""
    name = ("gpu" if gpus_per_node else "cpu") + ("_nodes" if nodes > 1 else "_node")
    job = Job(
        name=name,
        nodes=nodes,
        tasks_per_node=gpus_per_node or 4,
        gpus_per_node=gpus_per_node,
        cpus_per_task=CPUS_PER_GPU if gpus_per_node else 4,
        time="04:00:00",
        notice_s=NOTICE_S,
    )
    kind = "one rank for each GPU" if gpus_per_node else "ranks on CPUs"
    head = [
        f"horovod_train on {'several hosts' if nodes > 1 else 'one host'}, {kind}. From the project's folder:",
        "",
        f"  sbatch scripts/slurm/{name}.sbatch --config configs/a.yaml [section.key=value …] [--output-dir DIR]",
        f"  sbatch --array=1-3 scripts/slurm/{name}.sbatch --config configs/a.yaml seed=%a --output-dir runs/sweep-%a",
        "",
        "Options before the script's name win over the lines below: sbatch --nodes=8 --time=1-00:00:00 …; also",
        "--export=VENV=/path. `python -m horovod_train.main slurm` prints a script for a config of yours.",
    ]
    return render(job, head=head, words=None, folder=None, venv=".venv")


def _name(word: str) -> str:
    """Parse a partition or an account: what an #SBATCH line accepts as one word."""
    if not re.fullmatch(r"[\w.,:@/+-]+", word):
        raise argparse.ArgumentTypeError(f"expected a name without spaces and quotes; received {word!r}")
    return word


def _line(word: str) -> str:
    if not word.strip() or not word.isprintable():
        raise argparse.ArgumentTypeError(f"expected a command on one line; received {word!r}")
    return word


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; received {word!r}")
    return int(word)


def _count_or_0(word: str) -> int:
    return 0 if word == "0" else _count(word)


def _seconds(time: str) -> int:
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", time)
    if found is None:
        raise UserError(f"--time must be [D-]HH:MM:SS; received {time!r}.")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
