"""What optimizers.py has one of a kind of, what stock Horovod makes of it, and a file that has the trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as stock
import keras
from facts import leave
from in_model_fit import data, facts_of, fit, fit_with, group, rank, sha

facts: dict[str, Any] = facts_of(fit_with(("momentum", "adamw", "lars")))
facts["unwrapped"] = sha(fit(keras.optimizers.SGD(0.01)))
facts["stock_horovod"] = sha(fit(stock.DistributedOptimizer(keras.optimizers.SGD(0.01))))

saved = fit_with(["adam"])["adam"]
facts["saved_model"] = str(Path(sys.argv[1]) / f"model-{rank}.keras")
saved.save(facts["saved_model"])
facts["saved_prediction"] = saved(data(0)[0]).numpy().ravel()
leave(rank, facts)
group.close()
