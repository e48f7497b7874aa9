#!/usr/bin/env bash
# For `make test-trackers`: the clients of MLflow and W&B, which runs import, and an MLflow server in an environment of its
# own, in build/trackers. When they are there, says nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.17.2
here=build/trackers
[[ -e $here/done ]] && exit
mkdir -p "$here"
.venv/bin/python -m pip install --quiet --constraint constraints.txt --target "$here/clients" "mlflow-skinny==$version" wandb
.venv/bin/python -m venv "$here/server"
"$here/server/bin/pip" install --quiet "mlflow==$version"
touch "$here/done"
