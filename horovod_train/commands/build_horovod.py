"""The command `build-horovod`: compiles Horovod for this environment's TensorFlow and MPI, and installs it there.

python -m horovod_train.main build-horovod

Keeps each compiled wheel, named by everything that shaped it, and installs that one the next time. How it is compiled:
see build_horovod.sh.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from horovod_train.commands.cli import installed_version, needed_cache
from horovod_train.errors import RunError, UserError
from horovod_train.host import answer_of
from horovod_train.output.files import Artifact, NotOurs, remove, write_atomically

SCRIPT = Path(__file__).with_name("build_horovod.sh")
CACHED = Artifact("a compiled Horovod", r"horovod-cp\d+-.+", "folder", (r"horovod-.+\.whl",))
PREFIX_FILE = Artifact("openmpi_prefix.pth", r"openmpi_prefix\.pth")
SETTINGS_FILE = Artifact("the settings of make install", r"install-settings")
FOR_GPUS = r"HOROVOD_(GPU|CUDA|NCCL|BUILD)\w*"
SHAPES_THE_BUILD = re.compile(rf"{FOR_GPUS}|CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS")

# The libmpi of the openmpi package was built for another folder, and looks for its parts where OPAL_PREFIX says. Its
# mpirun sets that; a rank that srun starts, or no launcher, would abort in MPI_Init. mpirun also sets
# PMIX_INSTALL_PREFIX, to its own folder with links resolved, and a rank in which the two differ hangs in MPI_Init. This
# mpirun must also come before the system's, which does not fit. And without ssh on PATH it refuses to start even ranks
# of this host, for which it calls no program. Each Python of the environment then sets these, activated or not.
PREFIX_LINES = """\
import os, sys; os.environ["OPAL_PREFIX"] = os.path.realpath(sys.prefix)
import os; "PMIX_INSTALL_PREFIX" in os.environ and os.environ.update(PMIX_INSTALL_PREFIX=os.environ["OPAL_PREFIX"])
import os, sys; b = f"{sys.prefix}/bin:"; os.environ["PATH"] = b + os.environ.get("PATH", os.defpath).removeprefix(b)
import os; any(map(os.path.exists, [f"{d}/ssh" for d in os.get_exec_path()])) or \
os.environ.setdefault("OMPI_MCA_plm_rsh_agent", "false")
"""

NEEDS = """\
needs, to compile: a C++17 compiler and make (apt-get install g++ make); cmake, setuptools and wheel, which
  pip install 'horovod_train[build]' brings; 2 to 4 minutes on 2 cores. To install a cached wheel: none of these.
MPI is optional: the package openmpi (pip install 'horovod_train[openmpi]'), else the mpicxx and mpirun on PATH, else
  Horovod gets none, and ranks exchange over gloo.
GPUs: --gpu-operations NCCL needs nvcc, on PATH or in HOROVOD_CUDA_HOME, and NCCL: that of tensorflow[and-cuda],
  libnccl-dev, or HOROVOD_NCCL_HOME. Horovod's other build settings are read from the environment.
cache: $XDG_CACHE_HOME/horovod_train (~/.cache/horovod_train), a folder for each Python, platform, TensorFlow, MPI and
  build setting."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = NEEDS, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--mpi", choices=("wheel", "system", "none"), help="the MPI to build with; default: the first that is here"
    )
    parser.add_argument(
        "--gpu-operations",
        choices=("NCCL", "MPI"),
        help="exchange between GPUs; default: HOROVOD_GPU_OPERATIONS, else by CPUs",
    )
    parser.add_argument("--cache", metavar="DIR", help="where compiled wheels are kept; default: see below")


def run(arguments: argparse.Namespace) -> int:
    mpi = arguments.mpi or _find_mpi()
    gpu = arguments.gpu_operations or os.environ.get("HOROVOD_GPU_OPERATIONS", "")
    environment = {**os.environ, "MPI": "wheel" if mpi == "wheel" else "system", "HOROVOD_GPU_OPERATIONS": gpu}
    if mpi == "none":
        environment["HOROVOD_WITHOUT_MPI"] = "1"
    if cuda := os.environ.get("HOROVOD_CUDA_HOME"):  # Horovod asks the nvcc on PATH what this one compiles for
        environment["PATH"] = f"{cuda}/bin:{os.environ.get('PATH', os.defpath)}"
    _provide(mpi, environment, arguments.cache)
    _remember(environment)
    return 0


def _provide(mpi: str, environment: Mapping[str, str], cache: str | None) -> None:
    """Have this Horovod installed: it is, or was compiled before, or is compiled now. Raises UserError, RunError."""
    name = _name(mpi, environment)
    if _is_installed(name):
        _write_prefix(mpi)
        print(f"Horovod is installed: {name}")
        return
    folder = Path(cache or needed_cache()).absolute() / name
    wheel = _wheel_in(folder)
    if wheel and (problem := _writable_by_others(folder, wheel)):
        print(f"{wheel} is not installed, because {problem}: compiling Horovod anew", flush=True)
    elif wheel:
        print(f"Horovod was compiled before: installing {wheel}", flush=True)
        problem = _install(folder, mpi)
        if not problem:
            return
        print(f"that one does not load here ({problem}): compiling it anew", flush=True)
    if problem := next(_missing_tools(environment, mpi), ""):
        raise UserError(f"build-horovod: {problem}")
    _make_room(folder)
    _compile(folder, environment)
    if problem := _install(folder, mpi):
        raise RunError(f"build-horovod: the compiled Horovod does not load: {problem}. It is in {folder}.")


def _find_mpi() -> str:
    if installed_version("openmpi"):
        return "wheel"
    return "system" if shutil.which("mpicxx") and shutil.which("mpirun") else "none"


def _name(mpi: str, environment: Mapping[str, str]) -> str:
    """Return the name of the cached wheel's folder: equal if everything that shapes the wheel is equal."""
    libc, libc_version = platform.libc_ver()
    if libc != "glibc":
        raise UserError("build-horovod: expected Linux with glibc, which TensorFlow's packages need.")
    tensorflow = installed_version("tensorflow")
    if tensorflow is None:
        raise UserError(
            "build-horovod: tensorflow is not installed here, which Horovod is built against: pip install it."
        )
    interpreter = f"cp{sys.version_info.major}{sys.version_info.minor}-{sysconfig.get_platform()}"
    mpi_name = {"wheel": f"openmpi{installed_version('openmpi')}", "none": "no-mpi"}.get(mpi) or f"mpi-{_system_mpi()}"
    return f"horovod-{interpreter}-{libc}{libc_version}-tensorflow{tensorflow}-{mpi_name}-{_shape(environment)}"


def _shape(environment: Mapping[str, str]) -> str:
    """Return a digest of the build's script, without comments, and of the variables that it and Horovod read."""
    lines = [line for line in SCRIPT.read_text(encoding="utf-8").splitlines() if not line.lstrip(" ").startswith("#")]
    lines += sorted(f"{name}={value}" for name, value in environment.items() if SHAPES_THE_BUILD.fullmatch(name))
    return _digest("\n".join(lines) + "\n")


def _system_mpi() -> str:
    """Return a digest of which MPI is on PATH. Raises UserError if there is none."""
    for tool in ("mpicc", "mpicxx", "mpirun"):
        if not shutil.which(tool):
            raise UserError(
                f"build-horovod: --mpi system: {tool} is not on PATH: apt-get install libopenmpi-dev openmpi-bin, or "
                "take --mpi wheel."
            )
    outputs = [answer_of(command).stdout for command in (["mpirun", "--version"], ["mpicxx", "-show"])]
    return _digest("\n".join([str(shutil.which("mpicxx")), *outputs]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _is_installed(name: str) -> bool:
    """Return whether the installed Horovod came from the cached folder of this name: pip notes where from."""
    try:
        noted = metadata.distribution("horovod").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    return f"/{name}/" in (noted or "")


def _wheel_in(folder: Path) -> Path | None:
    return min(folder.glob("*.whl"), default=None)


def _writable_by_others(*paths: Path) -> str:
    """Return which path other users could have written, and why; "" if none. A wheel is code that is run here."""
    for path in paths:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            return f"{path} is a link"
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH:
            return f"{path} can be written by every user"
    return ""


def _missing_tools(environment: Mapping[str, str], mpi: str) -> Iterator[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    if mpi == "wheel" and not installed_version("openmpi"):
        yield "--mpi wheel: the package openmpi is not installed: pip install 'horovod_train[openmpi]'."
    if re.search(r"\s", sys.prefix):
        yield f"Horovod does not compile in an environment whose path holds a space: {sys.prefix}."
    if not shutil.which("make"):
        yield "make is not on PATH: apt-get install make."
    compiler = environment.get("CXX") or "c++"
    if not _compiles("#include <filesystem>", compiler, "-std=c++17"):
        yield f"{compiler} is no C++17 compiler: apt-get install g++."
    cmake = shutil.which("cmake", path=path)
    version = answer_of([cmake, "--version"]).stdout if cmake else ""
    if not re.search(r"version 3\.", version):
        first_line = version.splitlines()[0] if version else "none"
        yield f"expected cmake 3.26 or later, before 4; found {first_line}: pip install 'horovod_train[build]'."
    for module in ("setuptools", "wheel"):
        if importlib.util.find_spec(module) is None:
            yield f"{module} is not installed here: pip install 'horovod_train[build]'."
    if environment["HOROVOD_GPU_OPERATIONS"]:
        yield from _missing_gpu_tools(environment, compiler)


def _missing_gpu_tools(environment: Mapping[str, str], compiler: str) -> Iterator[str]:
    cuda = environment.get("HOROVOD_CUDA_HOME", "/usr/local/cuda")
    if not (os.access(f"{cuda}/bin/nvcc", os.X_OK) or shutil.which("nvcc")):
        yield (
            "nvcc is neither on PATH nor in HOROVOD_CUDA_HOME: install NVIDIA's CUDA toolkit, or pip install "
            "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl and set "
            "HOROVOD_CUDA_HOME, as docs/install.md shows."
        )
    if environment["HOROVOD_GPU_OPERATIONS"] != "NCCL" or environment.get("HOROVOD_NCCL_HOME"):
        return
    of_pip = Path(sysconfig.get_path("purelib"), "nvidia", "nccl")
    if not of_pip.is_dir() and not _compiles("#include <nccl.h>", compiler, "-I", f"{cuda}/include"):
        yield "NCCL is missing: pip install 'tensorflow[and-cuda]' brings it; or apt-get install libnccl-dev."


def _compiles(source: str, compiler: str, *options: str) -> bool:
    command = [compiler, *options, "-x", "c++", "-fsyntax-only", "-"]
    try:
        return not answer_of(command, given=source).returncode
    except OSError:
        return False


def _make_room(folder: Path) -> None:
    """Remove a wheel that does not load, and make the cache. Raises UserError."""
    try:
        remove(folder, CACHED)
        folder.parent.mkdir(parents=True, exist_ok=True)
    except NotOurs as error:
        raise UserError(f"build-horovod: {folder}: {error.strerror}. Remove it.") from error
    except OSError as error:
        raise UserError(f"build-horovod: cannot make {folder}: {error.strerror}. Give --cache DIR.") from error
    if not os.access(folder.parent, os.W_OK):
        raise UserError(f"build-horovod: cannot write to {folder.parent}. Give --cache DIR.")


def _compile(folder: Path, environment: Mapping[str, str]) -> None:
    began = time.monotonic()
    log = folder.with_name(f"{folder.name}.log")
    print(f"compiling Horovod (2 to 4 minutes on 2 cores); its output: {log}", flush=True)
    with log.open("a", encoding="utf-8") as output:
        command = ["bash", str(SCRIPT), sys.executable, str(folder)]
        code = subprocess.run(command, env=dict(environment), stdout=output, stderr=output, check=False).returncode
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong = [line for line in lines if re.search(r"(^| )(error|ERROR): |CMake Error", line)]
        print("\n".join([*wrong[-15:], "…", *lines[-5:]]), file=sys.stderr)
        raise RunError(
            f"build-horovod: compiling failed with exit code {code}; the lines above are from {log}. If they say that "
            "the compiler refuses Horovod's code, name another: CXX=g++-12 (12 and 14 have compiled it)."
        )
    print(f"compiled in {time.monotonic() - began:.0f} s: {_wheel_in(folder)}", flush=True)


def _write_prefix(mpi: str) -> None:
    if mpi == "wheel":
        write_atomically(Path(sysconfig.get_path("purelib"), PREFIX_FILE.what), PREFIX_LINES, PREFIX_FILE)


def _remember(environment: Mapping[str, str]) -> None:
    """Note the settings for GPUs of the Horovod that is installed now, if scripts/install.sh has made this environment.

    It would build another one after an update of the project, and install that in its place.
    """
    file = Path(sysconfig.get_path("data"), "install-settings")
    if not file.exists():
        return
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("HOROVOD_")]
    pattern = FOR_GPUS if environment["HOROVOD_GPU_OPERATIONS"] else "HOROVOD_GPU_OPERATIONS"
    lines += [f"{name}={value}" for name, value in environment.items() if re.fullmatch(pattern, name)]
    write_atomically(file, "\n".join(lines) + "\n", SETTINGS_FILE)


def _install(folder: Path, mpi: str) -> str:
    """Install the wheel and what it needs; return what went wrong, "" if nothing did."""
    _write_prefix(mpi)
    wheel = str(_wheel_in(folder))
    # By force, because another build has the same version. The second call installs what Horovod needs.
    for options in (["--force-reinstall", "--no-deps"], []):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options, wheel]
        if problem := _problem(command):
            return problem
    built = "gloo_built() and hvd.mpi_built()" if mpi != "none" else "gloo_built()"
    return _problem([sys.executable, "-c", f"import horovod.tensorflow as hvd; assert hvd.{built}"])


def _problem(command: list[str]) -> str:
    """Return the last line of a program that fails; "" if it succeeds."""
    completed = answer_of(command)
    return (completed.stderr.strip().splitlines() or ["no message"])[-1] if completed.returncode else ""
