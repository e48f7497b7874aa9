"""horovodrun's elastic driver starts ranks again on a host that comes back, however long it had too few hosts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver


class NoRendezvous:
    def init(self, assignments: Sequence[Any]) -> None:
        """Take what the server would answer ranks with."""

    def stop(self) -> None:
        """Nothing listens."""


@pytest.mark.long
def test_a_host_that_failed_and_is_needed_gets_new_ranks() -> None:
    """With only as many hosts as the job needs: it waits until the failed one may be used again."""
    started: list[str] = []
    failed, again, ended = threading.Event(), threading.Event(), threading.Event()

    def run_rank(slot: Any, _: Sequence[threading.Event]) -> tuple[int, float]:
        started.append(slot.hostname)
        if started.count("two") == 2:
            again.set()
        elif slot.hostname == "two":
            failed.wait()
            return 1, 0.0
        ended.wait()
        return 0, 0.0

    driver = ElasticDriver(NoRendezvous(), FixedHosts({"one": 1, "two": 1}), 2, 2, cooldown_range=(1, 2))
    driver.start(2, run_rank)
    try:
        failed.set()
        threading.Thread(target=driver.record_ready, args=("one", 0), daemon=True).start()  # it meets the others anew
        assert again.wait(60), started
        assert sorted(started) == ["one", "two", "two"]
    finally:
        driver.stop()
        ended.set()
