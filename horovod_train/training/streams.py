"""Opens the user's stream of a run on all ranks, and decides how many steps its epochs have. Reads it to count it only.

Ranks whose streams differ in length would take different numbers of steps and wait for each other.
"""

from __future__ import annotations

import functools
import logging

from horovod_train.config.settings import Config
from horovod_train.data.dataset import Split
from horovod_train.data.pipeline.loader import Ranks
from horovod_train.data.stream.pipeline import StreamPipeline
from horovod_train.data.stream.users import open_stream
from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import RanksStartApart, UserError

_SHOWN = 8

log = logging.getLogger(__name__)


def open_streams(config: Config, group: WorkerGroup) -> dict[Split, StreamPipeline]:
    """Collective: return each split's batches of the stream that data.dataset names, with the same steps on all ranks.

    `config` is resolved. Raises UserError for a stream that cannot be used, RanksStartApart where records differ in
    kind between ranks.
    """
    _describe(config, group)
    train = _open(config, group, is_training=True)
    assert train is not None, "None is refused"
    opened: dict[Split, StreamPipeline] = {"train": train}
    is_evaluated = config.eval.every_epochs or config.eval.every_steps
    if is_evaluated and (eval_ := _open(config, group, is_training=False)):
        opened["eval"] = eval_
    elif config.checkpoint.best or config.early_stopping.patience or config.early_stopping.target is not None:
        raise UserError("data.dataset: checkpoint.best and early_stopping need an evaluation, and there is none.")
    return opened


def _open(config: Config, group: WorkerGroup, *, is_training: bool) -> StreamPipeline | None:
    """Collective: open one split; None if the function gives no records to evaluate."""
    ranks = Ranks(group.rank, group.size, group.local_size, group.devices[group.rank].logical[0])
    open_split = functools.partial(open_stream, config.data, ranks, seed=config.seed, training=is_training)
    stream = group.call_in_turns(open_split, "opening data.dataset")
    elements = str(stream.elements) if stream else "None"
    consistency.check(group, {"records of data.dataset": elements}, "at the start", RanksStartApart)
    if stream is None:
        return None
    steps_per_epoch = config.data.steps_per_epoch if is_training else None
    lengths = None
    if steps_per_epoch is None:
        with group.heartbeat.phase("index"), group.raise_together():
            length = stream.count()
        lengths = group.gather(length)
        if not any(lengths):
            raise UserError(f"data.dataset: with training={is_training} no rank has a record.")
        listed = ", ".join(f"{length:,}" for length in lengths[:_SHOWN]) + (", …" if len(lengths) > _SHOWN else "")
        log.info(f"data.dataset: {'training' if is_training else 'evaluation'} records by rank: {listed}")
    data = config.data
    assert data.global_batch_size is not None
    rows = -(-data.global_batch_size // group.size)
    if not is_training:
        rows = config.eval.batch_size_per_rank or rows
    steps = steps_per_epoch or -(-max(lengths or [0]) // rows)
    return StreamPipeline(stream, rows, steps, lengths, prefetch_batches=data.prefetch_batches)


def _describe(config: Config, group: WorkerGroup) -> None:
    """Log what a stream keeps of a run's promises, and what it does not."""
    assert config.data.dataset is not None
    name, steps = config.data.dataset.name, config.data.steps_per_epoch
    log.info(
        f"{name} is a stream: ranks end each epoch together, and a run resumes inside an epoch on as many ranks, "
        "by reading up to where it stopped. The stream decides whether each record comes once, and in the same order."
    )
    if steps:
        log.info(f"an epoch of {name} has {steps} steps: longer streams are cut, shorter ones are filled by weight 0")
