"""Compares data sets: whether they hold the same records in the same order, and if not, which file differs.

A part of a source, such as a file, is identified by its base name, its size, its number of records and a digest of what
they hold. Its folder and time do not matter, so copies on other disks and hosts are equal. Opens no files.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Sequence

from horovod_train.data.source import Part

_SHORT = 8  # hex digits: enough to tell which file differs once it is known that one does


Names = list[tuple[str, str]]
"""For each part in order, its base name and a short digest of all that identifies it."""


def digest_of(parts: Sequence[Part]) -> str:
    """Return the SHA-256, in hex, of all that identifies the parts, in their order."""
    total = hashlib.sha256()
    for part in parts:
        total.update(_identity(part))
    return total.hexdigest()


def names_of(parts: Sequence[Part]) -> Names:
    return [(os.path.basename(part.path), hashlib.sha256(_identity(part)).hexdigest()[:_SHORT]) for part in parts]


def pack(names: Names) -> str:
    """Return the names as short text for a checkpoint: about 9 bytes a file if names are numbered."""
    texts = "\0".join(name for name, _ in names).encode(errors="surrogateescape")
    digests = bytes.fromhex("".join(digest for _, digest in names))
    return base64.b64encode(zlib.compress(len(texts).to_bytes(8, "little") + texts + digests, 9)).decode()


def unpack(text: str) -> Names | None:
    """Return what was packed; None for anything else."""
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True))
        end = 8 + int.from_bytes(data[:8], "little")
        names = data[8:end].decode(errors="surrogateescape").split("\0")
        digests = data[end:].hex()
        return list(zip(names, (digests[at : at + _SHORT] for at in range(0, len(digests), _SHORT)), strict=True))
    except (binascii.Error, zlib.error, ValueError):
        return None


def difference(names: Names, reference: Names, owner: str) -> str:
    """Return how the names differ from the reference, beginning with a verb: "lacks 3.tfrecord, which rank 0 has".

    owner: whose reference it is, in the sentence.
    """
    counts, reference_counts = Counter(name for name, _ in names), Counter(name for name, _ in reference)
    if missing := sorted((reference_counts - counts).elements()):
        return f"lacks {_abbreviate(missing)}, which {owner} has"
    if added := sorted((counts - reference_counts).elements()):
        return f"has {_abbreviate(added)}, which {owner} lacks"
    if changed := sorted(name for name, _ in (Counter(names) - Counter(reference)).elements()):
        return f"has other content in {_abbreviate(changed)} than {owner}"
    pairs = enumerate(zip(names, reference, strict=True), 1)
    number, name = next((number, part[0]) for number, (part, expected) in pairs if part != expected)
    return f"has the same files as {owner} in another order, from file {number} on ({name})"


def _abbreviate(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])} and {len(names) - 3} more files" if len(names) > 3 else ", ".join(names)


def _identity(part: Part) -> bytes:
    facts = [os.path.basename(part.path), str(part.size), str(part.records), part.digest, ""]
    return "\0".join(facts).encode(errors="surrogateescape")
