"""Makes text of others fit to be shown: without secrets, without control characters, and short.

Names, values and messages of files and libraries reach terminals, logs and pages. Does not know where they are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NOT_PRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""C0 and C1 (escape sequences of terminals), ends of lines besides \\n, changes of direction, halves of pairs, and what
XML has not. Not tab and \\n."""
_MOST_IN_A_WORD, _MOST_IN_A_LINE = 200, 2000
_LONG_WORD = re.compile(rf"\S{{{_MOST_IN_A_WORD + 1},}}")

# Texts may be long, such as a cell of a file: no search here begins anew at each character and reads on from there.
_AFTER_SCHEME = re.compile(r"://\S+")
_USER = re.compile(
    # A name and a password, but not a host and a port; or a key alone. Some passwords hold / or @.
    r"(?<=://)(?:[^\s/?#@:]*:(?!\d+/)|(?=[^\s/?#@:]{20,}@))(?:[^\s/?#]*@|[^\s@]*@)"
)
_IN_QUERY = re.compile(
    r"([?&;#](?:[\w.-]*(?:key(?:_?id)?|token|secret|passw(?:or)?d|pwd|signature|credentials?)|auth|sig|pass)=)"
    r"[^&;\s'\"]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return a text with … for the user, password and keys of each address in it."""
    return _AFTER_SCHEME.sub(lambda url: _IN_QUERY.sub(r"\1…", _without_user(url[0])), text)


def printable(text: str) -> str:
    """Return a text with escapes, such as \\x1b, for control characters. Keeps tabs and \\n, the only end of a line."""
    return _NOT_PRINTABLE.sub(_escape, text)


def error_line(text: str) -> str:
    """Return the text of an error as one line to show; long values in it, such as paths, lose their middle."""
    line = " ".join(printable(without_secrets(text)).split("\n"))
    line = _LONG_WORD.sub(lambda word: _shorten(word[0], _MOST_IN_A_WORD), line)
    return _shorten(line, _MOST_IN_A_LINE)


def listed(names: Iterable[object], most: int = 6, noun: str = "") -> str:
    """Return names in a row: all of them, or the first `most` and how many more there are. noun: of them, a plural."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most} more {noun}".rstrip() if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 fault, 2 faults."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _without_user(url: str) -> str:
    before, at, after = url.rpartition("@")
    return _USER.sub("…@", before + at) + after  # without the rest, in which each :// would look for an @


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _shorten(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 1]}…{text[-end:]}"
