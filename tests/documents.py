"""The pages for people, README and docs, as tests read them: blocks between fences, links, headings.

A fence names what it holds: `bash` is commands that a test runs, `console` is commands after `$ ` with what they print,
`text` is what a program prints, and python, yaml, … are what they say. A block that no test can run here has this line
above it:

    <!-- not run: the reason -->
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from conftest import PROJECT

NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*$")
_FENCE = re.compile(r"^( *)```(.*)$")


@dataclass(frozen=True)
class Block:
    """What stands between two fences. line: of the first fence, from 1; not_run: the reason, or ''."""

    page: str
    line: int
    language: str
    text: str
    not_run: str

    @property
    def commands(self) -> str:
        """The shell script that it holds; '' if it holds none."""
        if self.language == "bash":
            return self.text
        if self.language == "console":
            return "\n".join(line[2:] for line in self.text.splitlines() if line.startswith("$ "))
        return ""

    @property
    def words(self) -> list[list[str]]:
        """Its commands as a shell would split them, without comments, redirections and what is piped from them."""
        joined = self.commands.replace("\\\n", " ")
        split = [shlex.split(line, comments=True) for line in joined.splitlines()]
        return [_first_command(words) for words in split if words]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All Markdown files that people read."""
    return sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").glob("*.md")])


def blocks(page: Path) -> list[Block]:
    found, opened, before = [], None, ""
    name = str(page.relative_to(PROJECT))
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            opened = (number, len(fence[1]), fence[2])
            above = NOT_RUN.search(before)
            reason = above[1] if above else ""
        elif fence and opened is not None:
            start, indent, language = opened
            text = "\n".join(inner[indent:] for inner in lines[start : number - 1])
            found.append(Block(name, start, language, text, reason))
            opened = None
        elif opened is None and line.strip():
            before = line
        if fence:
            before = ""
    assert opened is None, f"{name}:{opened}: a fence without an end"
    return found


def _first_command(words: list[str]) -> list[str]:
    ends = [i for i, word in enumerate(words) if word in (">", "2>", "|", "<", "&&", ";") or word.endswith(">")]
    return words[: ends[0]] if ends else words
