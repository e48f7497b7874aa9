"""Fills in job.sbatch: a batch script that starts a run, is told in time to save, and requeues itself until it is done.

Does not choose what is requested; see command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

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
