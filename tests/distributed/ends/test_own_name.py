"""Ranks on a host whose own name has no address, or a wrong one: a container's, or Debian's 127.0.1.1."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, launcher_command, run_process

OTHER_NAME = ["unshare", "--uts", "sh", "-c", 'hostname horovod-train.invalid && exec "$@"', "sh"]
"""Runs a command with a name of this host that no resolver knows (RFC 6761). Needs root."""


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="gives the host another name"),
]


def connected(out: Path, launch: list[str]) -> list[dict[str, Any]]:
    """The facts of the ranks, by rank."""
    out.mkdir()
    command = [*OTHER_NAME, *launch, sys.executable, str(PROGRAMS / "connected.py"), str(out)]
    finished = run_process(command)
    assert finished.returncode == 0, finished.text
    return [json.loads(file.read_text()) for file in sorted(out.iterdir())]


def test_the_name_has_no_address() -> None:
    """Else the tests below would show nothing."""
    code = "import socket; socket.gethostbyname(socket.gethostname())"
    assert "socket.gaierror" in run_process([*OTHER_NAME, sys.executable, "-c", code]).stderr


def test_two_ranks_exchange(tmp_path: Path) -> None:
    facts = connected(tmp_path / "out", launcher_command("horovodrun", 2))
    assert [(fact["size"], fact["total"], fact["addresses"]) for fact in facts] == [(2, 3.0, ["127.0.0.1"])] * 2


def test_one_rank_needs_no_name(tmp_path: Path) -> None:
    (fact,) = connected(tmp_path / "out", [])
    assert (fact["size"], fact["total"]) == (1, 1.0)
