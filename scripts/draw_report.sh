#!/usr/bin/env bash
# Makes docs/report.png: the page of `report` for two short runs, as a browser shows it. Needs chromium on PATH.
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python -m horovod_train.main prepare digits --out data/digits
for rate in 0.05 0.01; do
    horovodrun --gloo -np 2 python -m horovod_train.main --config "$project/configs/digits_convnet.yaml" \
        log.every_steps=20 "lr_schedule.base_lr=$rate" data.audit=true --output-dir "rate-$rate"
done
python -m horovod_train.main report rate-0.05 rate-0.01 --out report.html
chromium --headless --no-sandbox --hide-scrollbars --window-size=1100,2050 --screenshot="$project/docs/report.png" \
    "file://$folder/report.html"
