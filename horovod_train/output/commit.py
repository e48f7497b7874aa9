"""Which commit of the user's code a run is of, as git says."""

from __future__ import annotations

import subprocess
from pathlib import Path

_TIMEOUT_S = 10.0
"""How long git may take, which on a shared disk reads the state of every file."""


def describe_commit(folder: Path) -> str | None:
    """Return `commit 1a2b3c of FOLDER`, and whether files differ from it; None outside a repository or without git."""
    head = _git(folder, "rev-parse", "HEAD")
    top = _git(folder, "rev-parse", "--show-toplevel")
    if not head or not top:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    state = {None: ", perhaps with changes", "": ""}.get(changed, ", with changes that are not committed")
    return f"commit {head} of {top}{state}"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails or takes too long."""
    try:
        answer = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else answer.stdout.strip()
