"""Weights after a few uneven steps in ways of which steps.py has one of a kind."""

from __future__ import annotations

import modes
from facts import leave
from sparse_steps import error_of
from uneven import group, rank

errors = {name: error_of(name) for name in ("sparse_accumulated", "sparse_as_dense", "sparse_clipped", "sparse_adam")}
leave(rank, {"errors": errors, "modes": {"local_1": modes.local_at_every_step()}})
group.close()
