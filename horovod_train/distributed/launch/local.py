"""Start ranks on this host, in the way that exchanges fastest here. Imports neither Horovod nor TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import takewhile
from pathlib import Path
from typing import Literal

from horovod_train.host import answer_of, sees_gpu

Way = Literal["mpirun", "horovodrun"]

_ALLOCATION = ("SLURM_JOBID", "SLURM_TASKS_PER_NODE", "PBS_ENVIRONMENT", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE")
"""By these Open MPI, horovodrun and launcher find the hosts of an allocation. Names and ends of jobs are in others."""

_HIDES = re.compile(r"-\d+|none|void|NoDevFiles", re.IGNORECASE)
"""What a name in CUDA_VISIBLE_DEVICES is that hides GPUs on purpose."""

_TRY_WITHIN_S = 20.0
_END_WITHIN_S = 5.0
# In one write: mpirun may interleave the output of the processes.
_PRINT_SIZE = "import sys; from mpi4py import MPI; sys.stdout.write(f'size={MPI.COMM_WORLD.size};')"


def launch_command(way: Way, ranks: int) -> list[str]:
    """Return the command that starts `ranks` processes on this host; append the program and its arguments.

    The ranks are not bound to cores: mpirun would bind a rank with all its threads to one core. More ranks than cores
    are allowed. Over MPI they meet in shared memory only, so that no rank listens on the host's network.
    """
    if way == "horovodrun":
        return [*_of_this_host(), "horovodrun", "--gloo", "-np", str(ranks)]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    own = ["--mca", "btl", "self,vader", "--bind-to", "none", "--oversubscribe", "-np", str(ranks)]
    return [*_of_this_host(), "mpirun", *as_root, *own]


def _of_this_host() -> list[str]:
    """Return the words before a command by which it starts its processes here, with a home folder.

    In an allocation of several hosts, mpirun and horovodrun would ask the scheduler where to start them. A user in a
    container may have neither HOME nor a passwd entry: Open MPI 4.1's mpirun ends by a segmentation fault there, and
    horovodrun makes a folder that is called ~ in the current one.
    """
    words = [word for name in _ALLOCATION if name in os.environ for word in ("-u", name)]
    if os.path.expanduser("~") == "~":
        folder = users_folder()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        words += [f"HOME={folder}"] if folder.lstat().st_uid == os.geteuid() else []
    return ["env", *words] if words else []


def users_folder() -> Path:
    """Return the path of a folder that this user's processes on this host share; it may not exist."""
    return Path(tempfile.gettempdir()) / f"horovod_train-{os.geteuid()}"


def best_way() -> tuple[Way, str]:
    """Return how to start ranks on this host, and why: MPI if it works, because it exchanges in shared memory.

    With GPUs both are equal, because NCCL exchanges. Measured by benchmarks/exchange.py; see docs/tools.md.
    """
    problem = mpi_problem()
    if problem is None:
        return "mpirun", "MPI works here, and exchanges in shared memory"
    return "horovodrun", f"gloo, because {problem}"


def mpi_problem() -> str | None:
    """Return why MPI cannot start ranks of Horovod here, or None if it can. Starts two processes for a moment."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun on PATH"
    library = horovod_library()
    if library is None or not is_linked_with_mpi(library):
        return "Horovod was built without MPI"
    try:
        finished = run_ranks("mpirun", 2, [sys.executable, "-c", _PRINT_SIZE], {}, _TRY_WITHIN_S)
    except subprocess.TimeoutExpired:
        return f"mpirun did not start two processes within {_TRY_WITHIN_S:.0f} s"
    sizes = re.findall(r"size=(\d+);", finished.stdout)
    if sizes == ["2", "2"]:
        return None
    if sizes == ["1", "1"]:
        return "mpirun and mpi4py are of different MPIs: two processes each believe that they are alone"
    lines = [line for line in finished.stderr.splitlines() if line.strip(" -")]
    return f"mpirun cannot start two processes: {lines[-1].strip() if lines else f'exit {finished.returncode}'}"


def run_ranks(
    way: Way, ranks: int, program: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks of this host until it ends; `environment` is added to this process's.

    Raises subprocess.TimeoutExpired, after all processes that it started have ended.
    """
    process = start_program([*launch_command(way, ranks), *program], environment, own_session=True)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException:
        _end_session(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _end_session(process: subprocess.Popen[str]) -> None:
    """End the leader of a session, which may clean up, and then kill every process that is left in the session.

    mpirun puts each rank in a separate process group, so a signal to mpirun's group does not reach the ranks.
    """
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_WITHIN_S)
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.communicate()


def horovod_library() -> Path | None:
    """Return the path of Horovod's compiled part for TensorFlow, found without importing it."""
    spec = importlib.util.find_spec("horovod")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in Path(folder, "tensorflow").glob("mpi_lib*.so")), None)


def is_linked_with_mpi(library: Path) -> bool:
    """Return whether a compiled library is linked with an MPI library."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"libmpi") >= 0


def visible_gpus() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names, indices or UUIDs; None if it is not set: then all GPUs are visible.

    CUDA reads it up to the first name that is none, such as -1. SLURM gives NoDevFiles to a job without GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else named_gpus(visible)


def named_gpus(visible: str) -> list[str]:
    """Return what a value of CUDA_VISIBLE_DEVICES names; nothing if it hides all GPUs."""
    return list(takewhile(lambda name: not _HIDES.fullmatch(name), filter(None, re.split("[, ]+", visible))))


def list_gpus() -> dict[int, str]:
    """Return the UUIDs of the host's GPUs that this process may use, by the driver's index; none without nvidia-smi.

    CUDA reads CUDA_VISIBLE_DEVICES up to the first name that no GPU has, and takes one slice (MIG), which counts as its
    GPU.
    """
    names = visible_gpus()
    listed = {} if names == [] else driver_gpus()  # all hidden: ranks are to compute on CPU
    if not names:
        return listed
    if names[0].startswith("MIG-"):
        visible = {gpu for uuid, gpu in list_slices().items() if uuid.startswith(names[0])}
    else:
        visible = set(filter(None, takewhile(bool, (find_uuid(name, listed) for name in names))))
    return {index: uuid for index, uuid in listed.items() if uuid in visible}


def naming_problem() -> str:
    """Return what is wrong if CUDA_VISIBLE_DEVICES is to name GPUs, and names none of those here; "" if nothing is."""
    if not visible_gpus() or list_gpus() or not (here := driver_gpus()):
        return ""
    named = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
    return f"{named} names none of the {len(here)} GPU{'s' * (len(here) > 1)} here"


def driver_problem() -> str:
    """Return why the driver lists no GPUs where there are some or the environment names some; "" if it is not so."""
    if visible_gpus() == [] or driver_gpus():
        return ""
    if sees_gpu():
        answer = _ask_driver("-L")
        said = "" if answer is None else (answer.stdout + answer.stderr).strip().rpartition("\n")[2]
        if said.startswith("No devices were found"):  # the job was given none
            return ""
        return f"there are GPUs in /dev, but nvidia-smi {f'says: {said}' if said else 'is missing or does not answer'}"
    if visible_gpus():
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} names GPUs, but there is none here"
    return ""


def driver_gpus() -> dict[int, str]:
    """Return the UUIDs of the host's GPUs by the driver's index, also of those that CUDA_VISIBLE_DEVICES hides.

    A scheduler's cgroups may hide further ones.
    """
    answer = _ask_driver("--query-gpu=index,uuid", "--format=csv,noheader")
    return parse_gpus(answer.stdout) if answer is not None and answer.returncode == 0 else {}


@functools.cache
def _ask_driver(*options: str) -> subprocess.CompletedProcess[str] | None:
    """Run nvidia-smi, once in a process; None if it is not there, or does not end."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        return answer_of(["nvidia-smi", *options], within_s=20)
    except (OSError, subprocess.SubprocessError):
        return None


def find_uuid(name: str, uuids: Mapping[int, str]) -> str | None:
    """Return the UUID for an index, a UUID or the beginning of one; None if the driver lists no such GPU."""
    if name.isdigit():
        return uuids.get(int(name))
    matches = [uuid for uuid in uuids.values() if uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def parse_gpus(text: str) -> dict[int, str]:
    """Parse nvidia-smi's lines `0, GPU-5a…` into UUIDs by index; leave out others, such as those of a lost GPU."""
    rows = re.findall(r"^\s*(\d+)\s*,\s*(GPU-\S+)\s*$", text, re.MULTILINE)
    return {int(index): uuid for index, uuid in rows}


def list_slices() -> dict[str, str]:
    """Return the UUID of its GPU for each slice (MIG) that this process may use, by the slice's UUID."""
    answer = _ask_driver("-L")
    return {} if answer is None else parse_slices(answer.stdout)


def parse_slices(text: str) -> dict[str, str]:
    """Parse the lines of `nvidia-smi -L`: `GPU 0: … (UUID: GPU-5a…)`, each before those of its slices, `MIG …`."""
    slices, gpu = {}, ""
    for kind, uuid in re.findall(r"^\s*(GPU|MIG) .*\(UUID: (\S+)\)\s*$", text, re.MULTILINE):
        if kind == "GPU":
            gpu = uuid
        else:
            slices[uuid] = gpu
    return slices


def start_program(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, own_session: bool = False
) -> subprocess.Popen[str]:
    """Start a program whose output is collected; `environment` is added to this process's."""
    return subprocess.Popen(
        list(command),
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=own_session,
    )


def wait_for_all(programs: Sequence[subprocess.Popen[str]], limit_s: float) -> str | None:
    """Wait for programs of start_program; return the output of the first that fails, or None if none does.

    After a failure, or after `limit_s` seconds, end the other programs: they may wait for the failed one for ever.
    """
    with ThreadPoolExecutor(len(programs)) as threads:
        outputs = {threads.submit(program.communicate, timeout=limit_s): program for program in programs}
        try:
            for output in as_completed(outputs):
                text = "".join(output.result())[-2000:]
                if code := outputs[output].returncode:
                    return f"exit code {code}: {text}"
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s:.0f} s"
        finally:
            for program in programs:
                if program.poll() is None:
                    program.terminate()
    return None
