"""Trains twice in one process, the second time on from the first, and evaluates: twice.py OUT WORDS…"""

from __future__ import annotations

import sys

import keras

from horovod_train.main import main

out, words = sys.argv[1], sys.argv[2:]
for epochs in (1, 2):
    print("exit code", main([*words, f"train.epochs={epochs}", "--output-dir", out]))
    made_between = [keras.layers.Dense(1), keras.layers.Conv2D(1, 1), keras.optimizers.Adam(), keras.optimizers.SGD()]
print("exit code", main(["evaluate", out]))
