#!/usr/bin/env bash
# Trains on N ranks of this host, started in the way that exchanges gradients fastest here: MPI where it works, else gloo.
#
#   scripts/run_local.sh -np 2 configs/digits_convnet.yaml [more.yaml …] [section.key=value …]
#   scripts/run_local.sh -np 2 --dry-run configs/digits_convnet.yaml          only shows the command
#
# What follows the config is passed to `python -m horovod_train.main`. The exit code is the run's.
set -euo pipefail

fail() {
    echo "error: $*; see the head of $0." >&2
    exit 2
}

np=
dry_run=
while [[ $# -gt 0 ]]; do
    case $1 in
        -np | --np | -n) np=${2:-}; shift 2 || fail "-np: expected the number of ranks" ;;
        --dry-run) dry_run=1; shift ;;
        *) break ;;
    esac
done
[[ $np =~ ^[1-9][0-9]*$ ]] || fail "-np: expected the number of ranks; received '$np'"
[[ $# -gt 0 ]] || fail "expected a config after -np $np"

root=$(cd "$(dirname "$0")/.." && pwd)
command -v horovodrun > /dev/null || PATH="$root/.venv/bin:$PATH" # not activated
export PATH PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
launch=$(python -m horovod_train.distributed.launch.local "$np")
# shellcheck disable=SC2206  # words without spaces
command=($launch python -m horovod_train.main --config "$@")
if [[ -n $dry_run ]]; then
    echo "${command[*]}"
    exit
fi
exec "${command[@]}"
