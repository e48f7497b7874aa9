"""Finds names by the patterns of a config: regular expressions that may match anywhere in a name (re.search)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from horovod_train.errors import UserError


def find(pattern: str, names: Iterable[str], where: str) -> list[str]:
    """Return the names that a pattern matches. Raises UserError for no regular expression, or if it matches nothing.

    where: the key of the config, for the error.
    """
    names = list(names)
    try:
        matching = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise UserError(f"{where}: {pattern!r} is no regular expression: {error}.") from error
    if not matching:
        raise UserError(f"{where}: {pattern!r} is in none of {', '.join(names) or 'nothing'}.")
    return matching
