"""Trains frozen weights after so many epochs, as model.unfreeze says."""

from __future__ import annotations

import logging

from horovod_train.training.parts.fine_tuning import listed
from horovod_train.training.run_record import Run

log = logging.getLogger(__name__)


def unfreeze(run: Run, step: int) -> None:
    """Unfreeze what is due at the end of this epoch, and compile the training step again."""
    epoch = int(run.state.epoch)
    run.parts.freezing.apply(epoch)
    run.parts.train_step.retrace()
    names = run.parts.freezing.unfrozen_at(epoch)
    log.info(f"after epoch {epoch}: {len(names)} more weights are trained: {listed(names)}")
