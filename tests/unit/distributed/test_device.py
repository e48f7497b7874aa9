"""The decisions that need no ranks: which GPU and whose, how many threads of which cores."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from conftest import rank_environment, run_process
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from horovod_train.config.settings import DeviceConfig
from horovod_train.distributed import device, start
from horovod_train.distributed.device import (
    Device,
    choose_gpus,
    pin,
    share_of_cores,
)
from horovod_train.distributed.launch import key_value_store, local
from horovod_train.errors import RunError, UserError


@pytest.mark.parametrize(
    ("gpu_count", "local_rank", "local_size", "per_rank", "expected"),
    [
        (0, 3, 4, 1, []),  # no GPUs
        (4, 3, 4, 1, [3]),  # all processes see all GPUs
        (8, 1, 2, 1, [1]),  # more GPUs than ranks
        (1, 3, 4, 1, [0]),  # the scheduler shows each process its own GPU only
        (0, 1, 2, 2, []),
        (4, 1, 2, 2, [2, 3]),
        (8, 0, 2, 3, [0, 1, 2]),
        (2, 3, 4, 2, [0, 1]),  # the scheduler shows each process its own two
    ],
)
def test_each_local_rank_gets_gpus_of_its_own(
    gpu_count: int, local_rank: int, local_size: int, per_rank: int, expected: list[int]
) -> None:
    assert list(choose_gpus(gpu_count, local_rank, local_size, per_rank)) == expected


SETS = """
import os
import tensorflow as tf
from horovod_train.distributed.device import chosen_before
print(chosen_before())
os.environ |= {"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "3"}
tf.config.threading.set_intra_op_parallelism_threads(7)
tf.config.set_soft_device_placement(False)
tf.debugging.set_log_device_placement(True)
print(chosen_before())
os.environ["TF_NUM_INTEROP_THREADS"] = "many"
print(chosen_before())
"""


@pytest.mark.long
def test_what_a_script_has_set_before_it_pins_stays() -> None:
    """In a process of its own, because TensorFlow takes such settings before its first op only."""
    environment = {name: value for name, value in rank_environment().items() if not name.startswith("TF_NUM_")}
    finished = run_process([sys.executable, "-c", SETS], environment=environment)
    assert finished.returncode == 0, finished.text
    chosen = DeviceConfig(intra_op_threads=7, inter_op_threads=3, soft_placement=False, log_placement=True)
    share_of_the_hosts_cores = replace(chosen, inter_op_threads=None)
    assert finished.stdout.splitlines() == list(map(str, (DeviceConfig(), chosen, share_of_the_hosts_cores)))


@pytest.mark.parametrize(
    ("gpu_count", "local_size", "per_rank", "message"),
    [
        (2, 4, 1, "4 ranks on this host see 2 GPUs; expected one GPU for each rank. Start at most 2 ranks on a host"),
        (2, 4, 1, "ask the scheduler for more (srun --gpus-per-node=4), or"),
        (3, 2, 2, "2 ranks on this host see 3 GPUs; expected 2 GPUs (device.per_rank) for each rank. Start at most 1"),
        (1, 1, 2, "1 ranks on this host see 1 GPUs; expected 2 GPUs (device.per_rank) for each rank. Lower device.per"),
    ],
)
def test_too_few_gpus_on_a_host_are_refused(gpu_count: int, local_size: int, per_rank: int, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        choose_gpus(gpu_count, 0, local_size, per_rank)


GPUS = ["GPU-aa", "GPU-bb", "GPU-cc", "GPU-dd"]


def test_a_rank_takes_the_gpus_of_its_own_and_their_memory_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(6)]
    asked: dict[str, list[tuple]] = {}

    def note(owner: object, name: str) -> None:
        monkeypatch.setattr(owner, name, lambda *words: asked.setdefault(name, []).append(words))

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: seen if kind == "GPU" else [])
    for name in ("set_visible_devices", "set_soft_device_placement"):
        note(tf.config, name)
    for name in ("set_intra_op_parallelism_threads", "set_inter_op_parallelism_threads"):
        note(tf.config.threading, name)
    note(tf.config.experimental, "set_memory_growth")
    limited, growing = {seen[4]: "so many MB"}, {seen[5]: True}  # by the script; a limited one may not grow
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", limited.get)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", growing.get)
    note(tf.debugging, "set_log_device_placement")
    config = DeviceConfig(per_rank=3, memory_growth=False, soft_placement=False, log_placement=True)
    device = pin(config, local_rank=1, local_size=2, host_cores=16)
    assert asked == {
        "set_visible_devices": [(seen[3:], "GPU")],
        "set_memory_growth": [(seen[3], False)],
        "set_intra_op_parallelism_threads": [(8,)],
        "set_inter_op_parallelism_threads": [(8,)],
        "set_soft_device_placement": [(False,)],
        "set_log_device_placement": [(True,)],
    }
    assert device.logical == ("GPU:0", "GPU:1", "GPU:2")
    assert device.host_summary == "6 GPUs; 16 cores for 2 ranks of this host"


@pytest.mark.parametrize(
    ("local_rank", "visible", "words"),
    [
        (0, "", ""),
        (0, "0,1", "TensorFlow sees none of the 2 GPUs, so ranks compute on CPU here. Install with TENSORFLOW="),
        (1, "0,1", ""),
        (
            0,
            "7",
            "CUDA_VISIBLE_DEVICES=7 names none of the 4 GPUs here, so ranks compute on CPU here. `nvidia-smi -L` lists",
        ),
        (1, "7", ""),
    ],
)
@pytest.mark.usefixtures("driver_of_four")
def test_gpus_that_tensorflow_does_not_see_are_missed_on_one_rank_of_the_host(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], local_rank: int, visible: str, words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for owner, name in (
        (tf.config.threading, "set_intra_op_parallelism_threads"),  # this process has begun to compute
        (tf.config.threading, "set_inter_op_parallelism_threads"),
        (tf.config, "set_soft_device_placement"),
        (tf.debugging, "set_log_device_placement"),
    ):
        monkeypatch.setattr(owner, name, lambda _: None)
    assert pin(DeviceConfig(), local_rank, 2, 2).gpu_keys == ()
    said = capfd.readouterr().err
    assert said.count("\n") == bool(words)
    assert words in said


@pytest.mark.parametrize(
    ("visible", "has_gpus", "driver", "problem"),
    [
        (
            None,
            True,
            "echo Failed to initialize NVML; exit 9",
            "in /dev, but nvidia-smi says: Failed to initialize NVML",
        ),
        (None, True, None, "there are GPUs in /dev, but nvidia-smi is missing or does not answer"),
        ("0,1", False, None, "CUDA_VISIBLE_DEVICES=0,1 names GPUs, but there is none here"),
        ("-1", True, None, ""),
        ("", True, "exit 9", ""),
        (None, False, "exit 9", ""),
        (None, True, "echo No devices were found; exit 6", ""),
        (None, True, "echo 0, GPU-aa", ""),
    ],
)
@pytest.mark.usefixtures("fresh_driver")
def test_a_driver_that_lists_no_gpus_where_there_should_be_some_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    has_gpus: bool,
    driver: str | None,
    problem: str,
) -> None:
    """As in a container without its GPUs, or after the driver was updated: all ranks would compute on CPUs."""
    if driver is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(local, "sees_gpu", lambda: has_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert problem in local.driver_problem()
    assert bool(local.driver_problem()) == bool(problem)


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        ("1", "GPU-bb"),
        ("4", None),
        ("GPU-cc", "GPU-cc"),
        ("GPU-d", "GPU-dd"),  # CUDA takes the beginning of a UUID
        ("GPU-", None),
        ("MIG-7", None),
    ],
)
def test_gpu_is_known_by_its_uuid(name: str, uuid: str | None) -> None:
    assert local.find_uuid(name, dict(enumerate(GPUS))) == uuid


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("0,2", ["0", "2"]),
        ("0,-1,1", ["0"]),
        ("GPU-aa, 1", ["GPU-aa", "1"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_gpus_end_where_cuda_stops_reading(
    monkeypatch: pytest.MonkeyPatch, value: str | None, names: list[str] | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert local.visible_gpus() == names


def test_uuids_are_read_off_the_drivers_list() -> None:
    assert local.parse_gpus("1, GPU-bb\n0, GPU-aa\n") == {0: "GPU-aa", 1: "GPU-bb"}
    assert local.parse_gpus("No devices were found\n") == {}


def test_a_lost_gpu_does_not_keep_the_others_from_starting() -> None:
    said = "0, GPU-aa\n[Unknown Error], GPU-bb\n2, [GPU is lost]\n3, GPU-dd\nUnable to reach it, try again\n"
    assert local.parse_gpus(said) == {0: "GPU-aa", 3: "GPU-dd"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Horovod has been shut down. This was caused by an exception on one of the ranks", True),
        ("ncclCommInitRank failed: remote process exited or there was a network error", True),
        ("ncclAllReduce failed: remote process exited or there was a network error", True),
        ("ncclCommInitRank failed: unhandled system error (run with NCCL_DEBUG=INFO for details)", True),
        ("ncclCommInitRank failed: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", True),
        ("ncclCommInitRank failed: internal error - please report this issue to the NCCL developers", True),
        ("ncclCommInitRank failed: invalid usage (run with NCCL_DEBUG=WARN for details)", True),
        ("ncclAllReduce failed: invalid argument (run with NCCL_DEBUG=WARN for details)", True),
        ("NCCL async error: remote process exited or there was a network error", True),
        ("cudaEventQuery failed: unspecified launch failure", True),
        ("cudaMalloc failed: out of memory", False),
        ("Input is not finite", False),
    ],
)
def test_the_loss_of_another_rank_is_known_by_what_the_libraries_say(text: str, expected: bool) -> None:
    from horovod_train.distributed.group import is_connection_loss, is_of_nccl

    error = tf.errors.UnknownError(None, None, text)
    assert is_connection_loss(error) is expected
    assert is_of_nccl(error) == text.lower().startswith("nccl")


def test_a_host_whose_gpus_are_not_seen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_train.distributed import start
    from horovod_train.distributed.group import WorkerGroup

    seen, unseen = Device("GPU 0", "", ("GPU-aa",), ("GPU:0",)), Device("CPU", "", (), ("CPU:0",))
    group = WorkerGroup(0, 3, 0, 1, "srun", "NCCL", "MPI", ("a", "b", "c"), (seen, unseen, seen))
    monkeypatch.setattr(hvd, "nccl_built", lambda: 22005)
    with pytest.raises(UserError, match=r"^1 of 3 ranks see no GPU, though the others do: rank 1 \(b\)\. "):
        start.check_devices(group)
    monkeypatch.setattr(hvd, "nccl_built", lambda: 0)
    start.check_devices(group)


Sight = tuple[Sequence[int], int, Sequence[str], Sequence[str]]
"""What a rank sees: its GPUs by its own numbers, how many there are, which are named as visible, the driver's list."""


@pytest.mark.parametrize(
    ("sights", "shared"),
    [
        # Each task sees its own GPU only, and calls it 0: with ConstrainDevices the driver lists no other.
        ([([0], 1, ["0"], ["GPU-aa"]), ([0], 1, ["0"], ["GPU-bb"])], None),
        ([([0], 1, ["0"], ["GPU-aa"]), ([0], 1, ["0"], ["GPU-aa"])], "GPU-aa"),
        ([([0], 1, ["0"], []), ([0], 1, ["0"], [])], None),  # no UUIDs: nothing can be said
        ([([0, 1], 2, [], []), ([0, 1], 2, [], [])], None),
        # Each task's own is named by the host's number: the driver lists all.
        ([([0], 1, ["2"], GPUS), ([0], 1, ["3"], GPUS)], None),
        ([([0], 1, ["2"], GPUS), ([0], 1, ["2"], GPUS)], "GPU-cc"),
        ([([0], 1, ["MIG-7"], GPUS), ([0], 1, ["MIG-7"], GPUS)], "MIG-7"),
        ([([0], 1, ["GPU-aa"], []), ([0], 1, ["GPU-aa"], [])], "GPU-aa"),
        # All see all.
        ([([0], 4, [], GPUS), ([1], 4, [], GPUS)], None),
        ([([0], 2, ["2", "3"], GPUS), ([1], 2, ["2", "3"], GPUS)], None),
        ([([0], 2, ["2", "3"], GPUS), ([1], 2, ["3", "2"], GPUS)], "GPU-cc"),
        ([([0, 1], 4, [], []), ([1, 2], 4, [], [])], "1"),
    ],
)
def test_two_ranks_with_one_gpu_are_refused_and_no_others(sights: list[Sight], shared: str | None) -> None:
    from horovod_train.distributed.group import WorkerGroup
    from horovod_train.distributed.start import check_devices

    devices = [
        Device("GPU", "", device.host_keys(mine, seen, rank, visible, dict(enumerate(listed))), ("GPU:0",))
        for rank, (mine, seen, visible, listed) in enumerate(sights)
    ]
    group = WorkerGroup(0, 2, 0, 2, "srun", "gloo", "gloo", ("a", "a"), tuple(devices))
    if shared is None:
        check_devices(group)
    else:
        with pytest.raises(UserError, match=f"ranks 0 and 1 on a would both use GPU {shared}; expected one GPU"):
            check_devices(group)
        of_script = tuple(dataclasses.replace(each, is_pinned=False) for each in devices)
        check_devices(dataclasses.replace(group, devices=of_script))  # exchanges in main memory


SLICES = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa)
  MIG 3g.20gb     Device  0: (UUID: MIG-a0)
  MIG 3g.20gb     Device  1: (UUID: MIG-a1)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb)
  MIG 7g.40gb     Device  0: (UUID: MIG-b0)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-cc)
"""


def test_slices_are_read_with_their_gpus() -> None:
    assert local.parse_slices(SLICES) == {"MIG-a0": "GPU-aa", "MIG-a1": "GPU-aa", "MIG-b0": "GPU-bb"}
    assert local.parse_slices("No devices found.\n") == {}


@pytest.mark.parametrize(
    ("keys", "hosts", "nccl", "is_refused"),
    [
        (("MIG-a0", "MIG-a1"), "aa", 23203, True),
        (("MIG-a0", "MIG-b0"), "aa", 23203, False),
        (("MIG-a0", "MIG-a1"), "ab", 23203, False),
        (("MIG-a0", "MIG-a1"), "aa", 0, False),
        (("MIG-x", "MIG-y"), "aa", 23203, False),  # the driver does not list them
    ],
)
def test_two_slices_of_one_gpu_are_refused_for_nccl(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[str, str], hosts: str, nccl: int, is_refused: bool
) -> None:
    from horovod_train.distributed.group import WorkerGroup

    monkeypatch.setattr(start, "list_slices", lambda: local.parse_slices(SLICES))
    monkeypatch.setattr(hvd, "nccl_built", lambda: nccl)
    devices = tuple(Device("GPU", "", (key,), ("GPU:0",)) for key in keys)
    group = WorkerGroup(0, 2, 0, 2, "srun", "NCCL", "MPI", tuple(hosts), devices)
    if is_refused:
        with pytest.raises(UserError, match=r"ranks 0 and 1 on a have slices \(MIG\) of one GPU, GPU-aa, between"):
            start.check_slices(group)
    else:
        start.check_slices(group)


@pytest.mark.parametrize(("cores", "local_size", "expected"), [(2, 1, 2), (2, 2, 1), (16, 4, 4), (2, 4, 1), (7, 2, 3)])
def test_ranks_share_the_cores_of_their_host(cores: int, local_size: int, expected: int) -> None:
    assert share_of_cores(cores, local_size) == expected


def test_a_process_starts_with_the_cores_of_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_train.host.cpu_quota", lambda: 4.0)
    monkeypatch.setattr("horovod_train.distributed.launch.tuning.choose", lambda *_, **__: [])
    monkeypatch.setattr(start, "initialise", lambda *_: set(range(64)))
    monkeypatch.setattr(start, "_check_rank_and_size", lambda _: None)
    assert start.start_process().host_cores == 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RendezvousHTTPServer]:
    """A rendezvous server, and the variables by which a launcher says where it is."""
    started = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    threading.Thread(target=started.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(started.server_address[1]))
    yield started
    started.shutdown()
    started.server_close()


def threads_of_host(bound: list[set[int]]) -> list[int]:
    """What the ranks of a host that are bound to these cores choose, all at once."""

    def choose(rank: int) -> int:
        return share_of_cores(len(key_value_store.cores_of_host(bound[rank], rank, len(bound))), len(bound))

    with ThreadPoolExecutor(len(bound)) as ranks:
        return list(ranks.map(choose, range(len(bound))))


def test_ranks_bound_to_cores_of_their_own_use_all_of_them(
    server: RendezvousHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_HOSTNAME", "a")
    assert threads_of_host([set(range(8 * rank, 8 * rank + 8)) for rank in range(4)]) == [8] * 4
    monkeypatch.setenv("HOROVOD_HOSTNAME", "b")  # another host of the run: cores of the same numbers, but others
    assert threads_of_host([set(range(16))] * 4) == [4] * 4


@pytest.mark.parametrize("said", [b"", b"all of them", b"1,", b"-1", b"9" * 100_000, "٣".encode(), b"\xff"])
def test_what_no_rank_says_of_its_cores_counts_for_nothing(
    server: RendezvousHTTPServer, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """horovodrun's server takes words from anyone."""
    monkeypatch.setenv("HOROVOD_HOSTNAME", "a")
    server.cache = {key_value_store.NAME: {"cores.a.1": said}}
    assert key_value_store.cores_of_host({0, 3}, 0, 2) == {0, 3}


def test_a_neighbour_that_says_nothing_is_named(server: RendezvousHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_store, "VALUES_WITHIN_S", 0.1)
    monkeypatch.setenv("HOROVOD_HOSTNAME", "a")
    with pytest.raises(RunError, match="local rank 1 on a has not said which cores it may use"):
        key_value_store.cores_of_host({0}, 0, 2)


def test_without_a_server_a_rank_knows_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    assert key_value_store.cores_of_host({0, 1}, 0, 2) == {0, 1}
