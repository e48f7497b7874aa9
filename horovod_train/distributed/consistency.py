"""Check that all ranks have the same weights, settings and code; report the first difference and its ranks.

Does not repair anything: ranks that disagree have already computed something wrong.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import horovod_train
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import RanksDisagree
from horovod_train.shown_text import listed


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def code_digest() -> str:
    """Return the SHA-256 of this package's source files; it differs between hosts with different checkouts."""
    root = Path(__file__).parent.parent
    sha256 = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sha256.update(str(path.relative_to(root)).encode())
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of the packages that a run depends on, by name."""
    return {
        "horovod_train": horovod_train.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "horovod": version("horovod"),
    }


def check(group: WorkerGroup, facts: Mapping[str, str], when: str, error: type[RanksDisagree] = RanksDisagree) -> None:
    """Collective: raise `error` on every rank if any fact differs between ranks.

    facts: name → digest or short text. The error names the first fact that differs and the ranks that do not agree with
    the majority. when: for the message, such as "at step 300".
    """
    # Gather one digest per rank first: with hundreds of ranks the names of all weights are megabytes.
    if len(set(group.gather(digest(repr(sorted(facts.items())).encode())))) == 1:
        return
    all_facts = group.gather(dict(facts))
    names = list(dict.fromkeys(name for rank_facts in all_facts for name in rank_facts))
    for name in names:
        values = [rank_facts.get(name, "absent") for rank_facts in all_facts]
        if len(set(values)) > 1:
            raise error(_describe(group, name, values, when))


def of_equal_rows(digests: Sequence[Any]) -> str | None:
    """Return what to say if all ranks seem to train on the same rows; None if not, or on one rank.

    digests: by rank, of what only these rows make; 0 or "" where that says nothing.
    """
    if len(digests) < 2 or not digests[0] or len(set(digests)) > 1:
        return None
    return f"all {len(digests)} ranks seem to train on the same rows"


def _describe(group: WorkerGroup, name: str, values: list[str], when: str) -> str:
    ((majority, _),) = Counter(values).most_common(1)  # of equally frequent ones the first: root's, if it is one
    dissenters = [rank for rank, value in enumerate(values) if value != majority]
    examples = listed((f"{group.name(rank)} has {_short(values[rank])}" for rank in dissenters), 4, "ranks")
    agreement = f"{values.count(majority)} of {group.size} have {_short(majority)}"
    return f"ranks disagree {when} on {name}: {examples}; {agreement}."


def _short(value: str) -> str:
    is_digest = len(value) in (32, 64) and set(value) <= set("0123456789abcdef")
    return value[:12] if is_digest else repr(value)
