"""Weights after a few uneven steps in ways of which steps.py has one of a kind."""

from __future__ import annotations

import modes
from facts import leave, rel_error
from sparse_steps import error_of
from uneven import build_model, group, rank, train, train_alone, weights

from horovod_train.optim.lars import LARS


def error_of_lars() -> float:
    step, alone = train(build_lars(), build_model()), build_model()
    train_alone(build_lars(), alone)
    return rel_error(weights(step.state.model), weights(alone))


def build_lars() -> LARS:
    return LARS(0.5, momentum=0.9, weight_decay=0.01, trust_coefficient=0.1)


errors = {name: error_of(name) for name in ("sparse_accumulated", "sparse_as_dense", "sparse_clipped", "sparse_adam")}
errors["lars"] = error_of_lars()
leave(rank, {"errors": errors, "modes": {"local_1": modes.local_at_every_step()}})
group.close()
