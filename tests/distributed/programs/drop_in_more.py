"""Twenty steps through the ways of which drop_in.py has one of a kind."""

from __future__ import annotations

from drop_in import CASES, MORE, facts_of
from facts import leave
from twenty_steps import rank

import horovod_train.keras as hvd

leave(rank, facts_of(name for name in CASES if name in MORE))
hvd.shutdown()
