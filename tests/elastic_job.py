"""Jobs of horovodrun whose hosts may be lost and come: what a test starts, waits for, kills and finds at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest import HANGS_AFTER_S


def elastic_words(out: Path, hosts: Sequence[str], *options: str) -> list[str]:
    """The words before `python …`: a job on one rank a host, which hold out while two are there.

    A host that has failed is tried again after 1 s. OUT/hosts is the list of hosts, for the script that tells them.
    """
    _list_hosts(out, hosts)
    script = out / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {out}/hosts\n")
    script.chmod(0o755)
    least, most = ("--min-np", "2"), ("-np", str(len(hosts)), "--max-np", str(len(hosts)))
    words = ["horovodrun", "--gloo", *least, *most, "--host-discovery-script", str(script)]
    return [*words, "--blacklist-cooldown-range", "1", "2", *options]


def _list_hosts(out: Path, hosts: Sequence[str]) -> None:
    (out / "hosts.new").write_text("".join(f"{host}:1\n" for host in hosts))
    (out / "hosts.new").replace(out / "hosts")


@dataclass
class ElasticJob:
    """A job of programs/elastic_rank.py. hosts: by the names that Horovod has for them."""

    out: Path
    process: subprocess.Popen[bytes]
    hosts: Sequence[str]

    def said(self) -> str:
        return (self.out / "said").read_text(errors="replace")

    def at(self, host: str) -> tuple[int, int, int]:
        """Process id, number of ranks and steps done, as the rank of this host told last."""
        process, size, steps = (self.out / f"at-{host}").read_text().split()
        return int(process), int(size), int(steps)

    def wait_until(self, condition: Callable[[], bool], what: str) -> float:
        """Returns the seconds that it took."""
        began = time.monotonic()
        while True:
            try:
                if condition():
                    return time.monotonic() - began
            except FileNotFoundError:
                pass
            if self.process.poll() is not None or time.monotonic() - began > HANGS_AFTER_S:
                pytest.fail(f"{what}: not so; exit code {self.process.poll()}\n{self.said()[-6000:]}")
            time.sleep(0.02)

    def wait_until_trains(self, hosts: Sequence[str], more: int = 8) -> float:
        """Until these hosts, as so many ranks, have done a few more steps than any has now."""
        done = max((self.at(host)[2] for host in self.hosts if (self.out / f"at-{host}").exists()), default=0)

        def trains() -> bool:
            told = [self.at(host) for host in hosts]
            return all(size == len(hosts) and steps >= done + more for _, size, steps in told)

        return self.wait_until(trains, f"{', '.join(hosts)} train")

    def fail_next_start(self, host: str) -> None:
        (self.out / f"fails-{host}").touch()

    def has_failed_to_start(self, host: str) -> bool:
        return (self.out / f"has-failed-{host}").exists()

    def die_in(self, place: Literal["commit", "sync"], host: str) -> None:
        (self.out / f"dies-in-{place}-{host}").touch()

    def has_died(self, host: str) -> bool:
        return (self.out / f"has-died-{host}").exists()

    def list_hosts(self, hosts: Sequence[str]) -> None:
        _list_hosts(self.out, hosts)

    def kill(self, host: str) -> None:
        os.kill(self.at(host)[0], signal.SIGKILL)

    def finish(self) -> list[dict[str, Any]]:
        """Ends the job as it ends by itself. Returns what each host found."""
        (self.out / "enough").touch()
        try:
            code = self.process.wait(HANGS_AFTER_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job does not end\n{self.said()[-6000:]}")
        assert code == 0, self.said()
        return [json.loads((self.out / f"end-{host}.json").read_text()) for host in self.hosts]
