"""Tells whether two datasets hold the same records in the same order, and if not, which file differs.

A file is identified by its base name, its size, its number of records and a digest of their lengths and checksums. Its
folder and time do not matter, so copies on other disks and hosts are equal. Opens no files; see scan.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_SHORT = 8  # hex digits: enough to tell which file differs once it is known that one does


class FileFacts(NamedTuple):
    name: str
    size: int
    records: int
    digest: str


Names = list[tuple[str, str]]
"""For each file in order, its base name and a short digest of all that is known about it."""


def digest_of(files: Sequence[FileFacts]) -> str:
    """Return the SHA-256, in hex, of all that is known about all files, in their order."""
    total = hashlib.sha256()
    for file in files:
        total.update(_line(file))
    return total.hexdigest()


def names_of(files: Sequence[FileFacts]) -> Names:
    return [(file.name, hashlib.sha256(_line(file)).hexdigest()[:_SHORT]) for file in files]


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


def difference(here: Names, there: Names, other: str) -> str:
    """Return how `here` differs from `there`, beginning with a verb: "lacks 3.tfrecord, which rank 0 has".

    other: the name of `there` in the sentence.
    """
    inside, outside = Counter(name for name, _ in here), Counter(name for name, _ in there)
    if missing := sorted((outside - inside).elements()):
        return f"lacks {_several(missing)}, which {other} has"
    if added := sorted((inside - outside).elements()):
        return f"has {_several(added)}, which {other} lacks"
    if changed := sorted(name for name, _ in (Counter(here) - Counter(there)).elements()):
        return f"has other content in {_several(changed)} than {other}"
    number, name = next((n, one[0]) for n, (one, its) in enumerate(zip(here, there, strict=True), 1) if one != its)
    return f"has the same files as {other} in another order, from file {number} on ({name})"


def _several(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])} and {len(names) - 3} more files" if len(names) > 3 else ", ".join(names)


def _line(file: FileFacts) -> bytes:
    return "\0".join([file.name, str(file.size), str(file.records), file.digest, ""]).encode(errors="surrogateescape")
