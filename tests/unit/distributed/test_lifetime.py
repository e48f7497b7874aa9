"""What `init` of a script tells Horovod, and what a rank says that waits for others before the watch begins."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.device import Device
from horovod_train.errors import RunError
from horovod_train.tensorflow import lifetime


@pytest.mark.parametrize(("watch_ranks", "seconds"), [(True, "60"), (WatchConfig(warn_after_s=7.5), "8")])
def test_horovod_names_waiting_ranks_until_the_watch_does(
    monkeypatch: pytest.MonkeyPatch, watch_ranks: Any, seconds: str
) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr("horovod.tensorflow.is_initialized", lambda: False)
    monkeypatch.setattr(lifetime, "start_process", lambda environment, process_sets: given.update(environment))
    monkeypatch.setattr(lifetime, "_Watch", lambda *_: None)
    monkeypatch.setattr(lifetime, "_started", None)
    lifetime.init(watch_ranks=watch_ranks, pin_device=False)
    assert given["HOROVOD_STALL_CHECK_TIME_SECONDS"] == seconds


def test_a_rank_that_waits_for_one_that_has_ended_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: Any) -> None:
        raise tf.errors.UnknownError(None, None, "Horovod has been shut down. This was caused by")

    monkeypatch.setattr(lifetime, "form_group", meet)
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr("atexit.register", lambda function: None)
    started: Any = SimpleNamespace(started_by=SimpleNamespace(is_elastic=False, size=2), rendezvous=nullcontext())
    watch = lifetime._Watch(started, Device("", "", (), ()), lifetime.LIMITS)
    with pytest.raises(RunError, match=r"^another rank ended before its first broadcast; .* outside a process set\.$"):
        watch.begin()
