"""The ranks that train together: start(), and the methods in which all ranks take part.

All ranks must call every method whose docstring begins with "Collective:", in the same order. Does not exchange
gradients (see optimizer) and does not decide anything.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.config.settings import DeviceConfig, HorovodConfig
from horovod_train.distributed import device, objects
from horovod_train.distributed.allreduce import sum_over_ranks
from horovod_train.distributed.launch import initialize, launcher, tuning
from horovod_train.distributed.watchdog.heartbeat import Heartbeat
from horovod_train.errors import FailedElsewhere, RunError, UserError

T = TypeVar("T")

# The last three are the libraries' own errors below Horovod: gloo names its source file.
_CONNECTION_LOSS = re.compile(r"Horovod has been shut down|/gloo/|\bMPI_\w+ failed|\bnccl\w+ failed")


@dataclass(frozen=True)
class WorkerGroup:
    """This process and the other ranks. `hosts` and `devices` are indexed by rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    exchange: str
    hosts: tuple[str, ...]
    devices: tuple[device.Device, ...]
    settings: tuple[tuning.Setting, ...] = ()
    """The settings that Horovod and MPI found in this rank's environment."""
    deterministic: bool = False
    """Whether sums over ranks have the same bits in each run, over gloo and over MPI."""
    heartbeat: Heartbeat = dataclasses.field(default_factory=Heartbeat, compare=False, repr=False)
    """What this rank is doing, for the watchdog; all collectives here run in its phase `exchange`."""

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def sum(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Collective: return element-wise sums over all ranks, in float64.

        arrays: numbers or arrays of any shape; the same shapes on every rank.
        """
        parts = [np.asarray(array, dtype=np.float64) for array in arrays]
        packed = np.concatenate([part.ravel() for part in parts]) if parts else np.zeros(0)
        # At least one element: an empty exchange would not synchronise the ranks.
        with self.heartbeat.phase("exchange"):
            total = self.sum_in_step(tf.constant(np.append(packed, 0.0)), "group.sum").numpy()
        ends = np.cumsum([part.size for part in parts])
        pieces = np.split(total[:-1], ends[:-1]) if parts else []
        return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    def sum_in_step(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Collective: return the sum over all ranks, in a compiled step. name: unique among the exchanges under way."""
        return sum_over_ranks(value, name, deterministic=self.deterministic)

    def average_in_step(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Collective: return the mean over all ranks, in a compiled step. name: as in `sum_in_step`."""
        return self.sum_in_step(tf.convert_to_tensor(value), name) / self.size

    def average(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Collective: return element-wise means over all ranks, in float64. Shapes as in `sum`."""
        return [total / self.size for total in self.sum(arrays)]

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Collective: set the variables on every rank to root's. variables: tf or Keras ones, the same on each rank."""
        with self.heartbeat.phase("exchange"):
            broadcast_variables(variables, root_rank=0)

    def broadcast_object(self, value: T) -> T:
        """Collective: return root's value on every rank. For small values of the types that serialize.dump takes."""
        with self.heartbeat.phase("exchange"):
            return cast(T, objects.broadcast(value, "group.broadcast_object"))

    def gather(self, value: T) -> list[T]:
        """Collective: return the values of all ranks, by rank, on every rank. For small ones, see `broadcast_object`"""
        with self.heartbeat.phase("exchange"):
            return cast(list[T], objects.gather(value, "group.gather"))

    def to_root(self, rows: np.ndarray) -> np.ndarray:
        """Collective: return on root the rows of all ranks, in the order of the ranks; elsewhere no rows.

        rows: [n, ...] of any dtype of fixed size, n at least 1; the same dtype and row shape on every rank.
        """
        words = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
        with self.heartbeat.phase("exchange"):
            splits = [len(rows), *[0] * (self.size - 1)]
            found, _ = hvd.alltoall(tf.constant(words), splits=splits, name="group.to_root")
        return found.numpy().view(rows.dtype).reshape(-1, *rows.shape[1:])

    def barrier(self) -> None:
        """Collective: return when every rank has called it."""
        self.sum([])

    def name(self, rank: int) -> str:
        """Return a rank's name for messages: "rank 3 (node12)"."""
        return f"rank {rank} ({self.hosts[rank]})"

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Collective: if the block fails on one rank, raise on all ranks.

        The block must not contain collectives. If it raises a RunError on some ranks, all ranks raise: the first such
        rank its own error, the others FailedElsewhere, so that one line is shown.
        """
        failure: RunError | None = None
        try:
            yield
        except RunError as error:
            failure = error
        exit_codes = self.gather(None if failure is None else failure.exit_code)
        failed = {rank: exit_code for rank, exit_code in enumerate(exit_codes) if exit_code is not None}
        if not failed:
            return
        first = min(failed)
        if self.rank == first:
            assert failure is not None
            only_some = "" if len(failed) == self.size else f"{self.name(first)}: "
            raise type(failure)(f"{only_some}{failure}") from failure
        raise FailedElsewhere(f"{self.name(first)} failed", failed[first])

    def close(self) -> None:
        """Collective: synchronise for the last time."""
        self.barrier()
        hvd.shutdown()


@dataclass(frozen=True)
class StartedProcess:
    """This process once Horovod runs in it; no TensorFlow operation has run yet."""

    started_by: launcher.Launch
    settings: tuple[tuning.Setting, ...]
    host_cores: int
    """Cores that the ranks of this host may use together."""
    rendezvous: ExitStack
    """To be left open until the group is formed: ranks that come late still look for it."""

    def pin(self, devices: DeviceConfig) -> device.Device:
        """Pin this process to its device, see device.pin."""
        return device.pin(devices, hvd.local_rank(), hvd.local_size(), self.host_cores)


def start_process(
    horovod: HorovodConfig | None = None,
    *,
    deterministic: bool = False,
    environment: Mapping[str, str] | None = None,
    process_sets: Sequence[hvd.ProcessSet] | None = None,
) -> StartedProcess:
    """Collective: initialise Horovod, as the first part of `start`. process_sets: further sets of ranks."""
    started_by = launcher.detect()
    started_by.check(may_be_elastic=True)
    settings = tuning.choose(
        horovod or HorovodConfig(),
        os.environ,
        library=_library(started_by),
        has_gpu=tuning.sees_gpu(),
        deterministic=deterministic,
        more=environment,
    )
    # Horovod and MPI read these when they initialise.
    os.environ |= {setting.name: setting.value for setting in settings}
    with ExitStack() as rendezvous:
        rendezvous.enter_context(initialize.rendezvous_if_needed(started_by))
        cores = initialize.initialise(started_by, process_sets)
        initialize.check_rank_and_size(started_by)
        return StartedProcess(started_by, tuple(settings), len(cores), rendezvous.pop_all())


@contextmanager
def horovod_alone() -> Iterator[None]:
    """Run Horovod for this process alone inside the block: what is built there may ask for the rank and the size.

    Does nothing if Horovod runs already. Raises UserError under a launcher, whose ranks would have to take part.
    """
    if hvd.is_initialized():
        yield
        return
    started_by = launcher.detect()
    if started_by.launcher != "none":
        raise UserError(f"this command is for one process; {started_by.launcher} started {started_by.size}.")
    initialize.initialise(started_by)
    try:
        yield
    finally:
        hvd.shutdown()


def _library(started_by: launcher.Launch) -> tuning.Library:
    if started_by.launcher == "none":
        return "alone"
    return "MPI" if started_by.uses_mpi else "elastic" if started_by.is_elastic else "gloo"


def form_group(started: StartedProcess, mine: device.Device, *, deterministic: bool = False) -> WorkerGroup:
    """Collective: learn which ranks there are, as the last part of `start`.

    mine: this rank's device. Raises UserError if ranks of one host would share a GPU.
    """
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    facts = objects.gather((socket.gethostname(), dataclasses.astuple(mine)), "group.start")
    group = WorkerGroup(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        launcher=started.started_by.launcher,
        exchange="NCCL" if mine.gpu_keys and hvd.nccl_built() else "MPI" if hvd.mpi_enabled() else "gloo",
        hosts=tuple(host for host, _ in facts),
        devices=tuple(device.Device(*found) for _, found in facts),
        settings=started.settings,
        deterministic=deterministic,
    )
    with group.raise_together():
        check_devices(group)
    return group


def start(
    horovod: HorovodConfig | None = None,
    devices: DeviceConfig | None = None,
    *,
    deterministic: bool = False,
    environment: Mapping[str, str] | None = None,
) -> WorkerGroup:
    """Collective: initialise Horovod, pin this process to its device and learn which ranks there are.

    horovod, devices: None means the defaults of the config. environment: variables for Horovod and TensorFlow, such as
    stall limits; those that the user has set win.

    Raises UserError if the processes would not find each other, if ranks of one host would share a GPU, and if the
    launcher may change the number of ranks.
    """
    launcher.detect().check()
    started = start_process(horovod, deterministic=deterministic, environment=environment)
    with started.rendezvous:
        return form_group(started, started.pin(devices or DeviceConfig()), deterministic=deterministic)


def as_tf_variable(variable: Any) -> tf.Variable:
    """Return the tf.Variable behind a Keras 3 variable, or a tf.Variable unchanged.

    Under mixed precision `.value` of a Keras variable is a view that casts (AutoCastVariable). `.value` is therefore
    read outside any autocast scope, where it is the variable itself.
    """
    return variable if isinstance(variable, tf.Variable) else variable.value


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Collective: set the variables on every rank to one rank's. Raises UserError for one that Horovod cannot send."""
    check_sendable(variables)
    hvd.broadcast_variables([as_tf_variable(variable) for variable in variables], root_rank=root_rank)


def check_sendable(variables: Sequence[Any]) -> None:
    """Raise UserError for a variable of a dtype that Horovod can neither send nor add up: bfloat16 and narrower."""
    for variable in variables:
        own = as_tf_variable(variable)
        if own.dtype.is_floating and own.dtype not in (tf.float16, tf.float32, tf.float64):
            raise UserError(
                f"variable {getattr(variable, 'path', own.name)} is {own.dtype.name}, which Horovod cannot exchange. "
                "Keep variables in float32; the policy mixed_bfloat16 (precision) computes in bfloat16 all the same."
            )


def is_connection_loss(error: BaseException) -> bool:
    """Return whether the error only says that another rank has gone: Horovod shuts down; the cause is elsewhere."""
    is_horovods = isinstance(error, tf.errors.OpError | hvd.elastic.HorovodInternalError)
    return is_horovods and bool(_CONNECTION_LOSS.search(str(error)))


def check_devices(group: WorkerGroup) -> None:
    """Raise UserError if ranks of one host have a GPU in common."""
    holders: dict[tuple[str, str], int] = {}
    for rank, (host, found) in enumerate(zip(group.hosts, group.devices, strict=True)):
        for key in found.gpu_keys:
            other = holders.setdefault((host, key), rank)
            if other != rank:
                raise UserError(
                    f"ranks {other} and {rank} on {host} would both use GPU {key}; expected one GPU for "
                    "each rank. Ask the scheduler for one GPU a task, or start fewer ranks there."
                )
