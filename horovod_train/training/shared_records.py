"""Opens the records of a run on all ranks and checks that all see the same. Does not read them; see data.pipeline.

Ranks whose files differ (an incomplete node-local copy, a stale listing) would take different numbers of steps and wait
for each other, or train on records that other ranks use too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import Records, Split, check_counts, scan_records, with_inputs_of
from horovod_train.data.identity import difference, names_of
from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import RanksStartApart

_SHOWN = 3

log = logging.getLogger(__name__)


def open_on_all_ranks(
    config: DataConfig, splits: Sequence[Split], group: WorkerGroup, *, needs_labels: bool = True
) -> dict[Split, Records]:
    """Collective: return the records of each split, the same on every rank. needs_labels: as of open_records.

    Root scans files without a fresh index while the others wait; then one rank of each host that still finds none does.
    This works even where files cannot be locked.

    Raises UserError for any problem with the data, RanksStartApart where ranks see different records.
    """
    opened: dict[Split, Records] = {}
    for is_my_turn in (group.is_root, group.local_rank == 0, True):
        with group.heartbeat.phase("index"), group.raise_together():
            if is_my_turn and not opened:
                opened = _scan(config, splits, needs_labels=needs_labels)
                if "train" in opened:
                    opened["train"].find_buckets(config)  # reads all records, unless that was done before
    for records in opened.values():
        _check_equal(group, records)
    with group.raise_together():
        for split, records in opened.items():
            check_counts(records, config.paths(split))
    for note in dict.fromkeys(note for records in opened.values() for note in records.notes):
        log.warning(note)
    for records in opened.values():
        _warn(records)
    return opened


def _scan(config: DataConfig, splits: Sequence[Split], *, needs_labels: bool) -> dict[Split, Records]:
    """Return the records of each split; the inputs are those of the first one."""
    opened: dict[Split, Records] = {}
    for split in splits:
        opened[split] = scan_records(config, split, needs_labels=needs_labels)
        config = with_inputs_of(config, opened[split].schema)
    return opened


def _check_equal(group: WorkerGroup, records: Records) -> None:
    """Collective: raise RanksStartApart, naming a file and the ranks on which it differs or is missing."""
    try:
        consistency.check(group, records.facts, "at the start", RanksStartApart)
    except RanksStartApart as error:
        # All ranks are here, so they can communicate again. File lists make long messages, sent only in this case.
        local_files = names_of(records.source.parts)
        sent = group.broadcast_object([list(entry) for entry in local_files])
        root_files = [(str(name), str(digest)) for name, digest in sent]
        local_difference = difference(local_files, root_files, group.name(0)) if local_files != root_files else ""
        differences = group.gather(local_difference)
        if any(differences):
            raise RanksStartApart(_sentence(group, records.setting, differences)) from error
        raise


def _sentence(group: WorkerGroup, setting: str, differences: Sequence[str]) -> str:
    different = [rank for rank, text in enumerate(differences) if text]
    shown = "; ".join(f"{group.name(rank)} {differences[rank]}" for rank in different[:_SHOWN])
    more = f"; {len(different) - _SHOWN} more ranks differ" if len(different) > _SHOWN else ""
    equal = group.size - len(different)
    return (
        f"{setting}: ranks see different records: {shown}{more}; {equal} of {group.size} ranks see the same as rank 0. "
        "Give every rank the same files."
    )


def _warn(records: Records) -> None:
    problems = records.problems
    for problem in problems[:_SHOWN]:
        log.warning(f"{problem} What comes after is left out, as data.on_bad_record says.")
    if len(problems) > _SHOWN:
        log.warning(f"{records.setting}: {len(problems) - _SHOWN} more files are damaged; check-data names them")
