#!/usr/bin/env bash
# The first day with a GPU, on a machine that has an NVIDIA driver but no network: brings the project there
# in pieces, and runs what gpu_day.py lists.
#
#   gpu_day.sh pack [--cpu] DIR      where there is a network: downloads wheels, compiles Horovod with NCCL, and writes
#                                    DIR: pieces, their checksums, and these scripts. Carry DIR to the machine.
#   gpu_day.sh pack DIR FOLDER       the same with what is already in FOLDER; downloads and compiles nothing
#   DIR/benchmarks/gpu_day.sh install DIR      there: checks and joins the pieces, and makes DIR/venv from them
#   DIR/benchmarks/gpu_day.sh --out OUT        there: runs the steps, in at most 25 minutes; results in OUT/results.json
#   gpu_day.sh --cpu --out OUT       the same steps, tiny, without a GPU. gpu_day.py --help lists further options
#
# Settings of pack: PYTHON (python3; it travels too, for a machine that has another version), PIECE_MIB (50: at most so
# much in a file), HOROVOD_BUILD_CUDA_CC_LIST (90: compute capabilities to compile for). --cpu packs neither CUDA nor
# NCCL.
# Ask the machine before you pack: nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader
# It prints 9.0 for 90. Where a command may take 10 minutes there: --minutes 9, then again with the same OUT.
# The Horovod of pack needs a driver of branch 580 and 7.5 or later; TensorFlow needs less.
# Horovod is compiled without MPI: ranks meet over gloo.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
BUILT_FOR=built_for.json

fail() {
    echo "error: gpu_day: $*" >&2
    exit 2
}

pack() {
    local cpu='' dir folder work
    if [[ ${1:-} == --cpu ]]; then
        cpu=--cpu
        shift
    fi
    dir=${1:?gpu_day.sh pack DIR: the folder to write} folder=${2:-}
    [[ ! -e $dir ]] || fail "$dir exists; name a folder that does not."
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf '$work'" EXIT
    if [[ -z $folder ]]; then
        folder=$work/wheels
        collect "$cpu" "$folder" "$work"
    fi
    mkdir -p "$dir/benchmarks"
    cp -r "$here"/* "$dir/benchmarks/"
    tar -C "$folder" -cf - . | split --bytes="${PIECE_MIB:-50}M" --numeric-suffixes --suffix-length=3 - "$dir/piece-"
    (cd "$dir" && sha256sum piece-* > SHA256SUMS)
    echo "$dir: $(find "$dir" -name 'piece-*' | wc -l) pieces, $(du -sh "$dir" | cut -f 1)"
}

collect() { # --cpu FOLDER WORK: put into FOLDER all wheels that the machine needs
    local cpu=$1 wheels=$2 work=$3 python=$3/venv/bin/python cuda
    local pip=("$python" -m pip --quiet) tensorflow=tensorflow
    [[ -n $cpu ]] || tensorflow='tensorflow[and-cuda]'
    "${PYTHON:-python3}" -m venv "$work/venv"
    "${pip[@]}" install --constraint "$root/constraints.txt" pip 'cmake>=3.26,<4' setuptools wheel
    # From a copy: setuptools builds in place.
    mkdir "$work/source"
    cp -r "$root"/{horovod_train,configs,pyproject.toml,README.md,LICENSE} "$work/source/"
    "${pip[@]}" wheel --no-deps --wheel-dir "$wheels" "$work/source"
    carry_interpreter "$python" "$wheels/python"
    "${pip[@]}" download --no-deps --constraint "$root/constraints.txt" --dest "$wheels" tensorflow
    oldest_cuda "$python" "$wheels"/tensorflow-*.whl > "$work/cuda.txt"
    "${pip[@]}" download --constraint "$root/constraints.txt" --constraint "$work/cuda.txt" --dest "$wheels" --prefer-binary \
        "$(echo "$wheels"/horovod_train-*.whl)[images,profile]" "$tensorflow" cloudpickle packaging pip
    "${pip[@]}" install --no-index --find-links "$wheels" "$tensorflow" horovod_train cloudpickle packaging
    if [[ -z $cpu ]]; then # see docs/install.md
        "${pip[@]}" install --target "$work/cuda" --no-deps \
            'nvidia-cuda-nvcc<14' 'nvidia-cuda-crt<14' 'nvidia-nvvm<14' 'nvidia-cuda-runtime<14' 'nvidia-cuda-cccl<14'
        cuda=$work/cuda/nvidia/cu13
        ln -s lib "$cuda/lib64"
        ln -s libcudart.so.13 "$cuda/lib/libcudart.so"
        export HOROVOD_CUDA_HOME=$cuda HOROVOD_GPU_OPERATIONS=NCCL
        export HOROVOD_BUILD_CUDA_CC_LIST=${HOROVOD_BUILD_CUDA_CC_LIST:-90}
    fi
    (cd "$work" && "$python" -m horovod_train.main build-horovod --mpi none --cache "$work/cache")
    cp "$work"/cache/horovod-*/*.whl "$wheels/"
    # CUDA 13 needs a driver of branch 580. gpu_day.py compares with the machine.
    [[ -n $cpu ]] ||
        echo "{\"driver\": 580, \"compute_capabilities\": [$HOROVOD_BUILD_CUDA_CC_LIST]," \
            "\"compiled_with\": $("${pip[@]}" list --path "$work/cuda" --format json)}" > "$wheels/$BUILT_FOR"
}

carry_interpreter() { # PYTHON FOLDER: copy it, its standard library and libpython. The machine must have libssl and libffi
    local python=$1 folder=$2 program library shared
    program=$("$python" -c 'import sys; print(sys._base_executable)')
    library=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    shared=$("$python" -c 'from sysconfig import get_config_var as of; print(of("LIBDIR") + "/" + of("INSTSONAME"))')
    mkdir -p "$folder/bin" "$folder/lib"
    [[ $shared != *.so* || ! -f $shared ]] || cp -L "$shared" "$folder/lib/"
    cp -L "$program" "$folder/bin/$(basename "$library")"
    tar -C "$(dirname "$library")" --exclude site-packages --exclude dist-packages --exclude __pycache__ \
        --exclude test --exclude 'config-*' -cf - "$(basename "$library")" | tar -C "$folder/lib" -xf -
}

oldest_cuda() { # PYTHON WHEEL: the oldest libraries of CUDA that TensorFlow takes, as constraints: they are the smallest
    "$1" - "$2" << 'PROGRAM'
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    text = wheel.read(name).decode()
for package, version in re.findall(r"^Requires-Dist: (nvidia-[\w-]+)<[\d.]+,>=([\d.]+);", text, re.M):
    print(f"{package}=={version}")
PROGRAM
}

unpack() { # DIR: check the pieces, and join them into DIR/wheels
    local dir=$1 damaged
    [[ -f $dir/SHA256SUMS ]] || fail "$dir/SHA256SUMS is missing; name the folder that pack has written."
    damaged=$(cd "$dir" && sha256sum --check --quiet SHA256SUMS 2> /dev/null | cut -d : -f 1 | paste -s -d ' ') || true
    [[ -z $damaged ]] || fail "$dir: damaged or missing: $damaged. Carry again what is named."
    mkdir -p "$dir/wheels"
    cat "$dir"/piece-* | tar -C "$dir/wheels" -xf -
}

find_libpython() { # DIR: let the Python that was carried there find its library
    export LD_LIBRARY_PATH=$1/wheels/python/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

install() { # DIR
    local dir=${1:?gpu_day.sh install DIR: the folder that pack has written} tensorflow=tensorflow version python
    unpack "$dir"
    version=$(echo "$dir"/wheels/horovod-*.whl | sed -E 's/.*-cp3([0-9]+)-.*/3.\1/')
    for python in "python$version" python3 "$dir/wheels/python/bin/python$version"; do
        [[ $python != "$dir"/* ]] || find_libpython "$dir"
        [[ $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) != "$version" ]] || break
        python=''
    done
    [[ -n $python ]] || fail "no Python $version is on PATH, for which the wheels are, and the one carried does not run."
    compgen -G "$dir/wheels/nvidia_nccl*" > /dev/null && tensorflow='tensorflow[and-cuda]'
    "$python" -m venv --without-pip "$dir/venv" # Debian has ensurepip in a package of its own
    "$dir/venv/bin/python" "$(echo "$dir"/wheels/pip-*.whl)/pip" install --quiet --no-index --no-compile \
        --find-links "$dir/wheels" pip "$tensorflow" 'horovod_train[images,profile]' horovod
    "$dir/venv/bin/python" -m horovod_train.main --version
}

case ${1:-} in
    pack | unpack | install | carry_interpreter | oldest_cuda) "$@" ;;
    *)
        for python in "$root/venv/bin/python" "$root/.venv/bin/python" "$(command -v python3)"; do
            if [[ -x $python ]]; then break; fi
        done
        if grep -qs "$root/wheels/python" "$root/venv/pyvenv.cfg"; then find_libpython "$root"; fi
        # TensorFlow's own libraries of CUDA come first: another CUDA of the machine may have some of the same names.
        packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        for library in "$packages"/nvidia/*/lib; do
            [[ ! -d $library ]] || export LD_LIBRARY_PATH=$library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        done
        PATH=$(dirname "$python"):$PATH exec "$python" "$here/gpu_day.py" "$@"
        ;;
esac
