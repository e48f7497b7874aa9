"""What `init` of a script tells Horovod, and what a rank says that waits for others before the watch begins."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from horovod_train.config.settings import DeviceConfig, WatchConfig
from horovod_train.distributed import device
from horovod_train.distributed.device import Device
from horovod_train.errors import RunError
from horovod_train.tensorflow import lifetime


@pytest.mark.parametrize(
    ("watch_ranks", "seconds"),
    [(True, "60"), (WatchConfig(warn_after_s=7.5), "8"), (WatchConfig(warn_after_s=3e9), "2147483647")],
)
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
    monkeypatch.setattr("horovod.tensorflow.local_rank", lambda: 0)
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr("atexit.register", lambda function: None)
    started: Any = SimpleNamespace(started_by=SimpleNamespace(is_elastic=False, size=2), rendezvous=nullcontext())
    watch = lifetime._Watch(started, lifetime.LIMITS)
    with pytest.raises(RunError, match=r"^another rank ended before its first broadcast; .* outside a process set\.$"):
        watch.begin()


SEEN = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(2)]


def has_started(config: DeviceConfig) -> Device:
    """Stands for what pins, where TensorFlow has started."""
    raise RuntimeError("Visible devices cannot be modified after being initialized")


@pytest.mark.parametrize("when", ["before", "after", "never"])
@pytest.mark.parametrize("pin_device", [True, False])
def test_a_gpu_that_the_script_chooses_is_known_when_the_watch_begins(
    monkeypatch: pytest.MonkeyPatch, when: str, pin_device: bool
) -> None:
    """By its UUID, so that a GPU of two ranks is noticed, and Horovod's sums on it are checked."""
    visible, devices = list(SEEN), list[Device]()

    def meet(_: Any, rank_device: Device) -> None:
        devices.append(rank_device)
        raise RunError("no other rank is here")

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: SEEN)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
    monkeypatch.setattr("horovod.tensorflow.is_initialized", lambda: False)
    monkeypatch.setattr("horovod.tensorflow.local_rank", lambda: 0)
    started_by = SimpleNamespace(is_elastic=False, size=2)
    started: Any = SimpleNamespace(started_by=started_by, rendezvous=nullcontext(), pin=has_started)
    monkeypatch.setattr(lifetime, "start_process", lambda environment, process_sets: started)
    monkeypatch.setattr(lifetime, "form_group", meet)
    monkeypatch.setattr(lifetime, "_started", None)
    monkeypatch.setattr(lifetime, "_watch", None)
    monkeypatch.setattr(device, "list_gpus", lambda: {0: "GPU-aa", 1: "GPU-bb"})
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr("atexit.register", lambda function: None)
    if when == "before":
        visible[:] = SEEN[1:]
    lifetime.init(pin_device=pin_device)
    if when == "after":
        visible[:] = SEEN[1:]
    with pytest.raises(RunError, match="no other rank"):
        lifetime.begin_watch()
    assert devices[0].gpu_keys == (("GPU-aa", "GPU-bb") if when == "never" else ("GPU-bb",))
