"""The ranks that train together: the methods in which all ranks take part.

All ranks must call every method whose docstring begins with "Collective:", in the same order. Does not exchange
gradients (see optimizer) and does not decide anything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.distributed import device, objects
from horovod_train.distributed.allreduce import in_turn, is_alone, over_ranks, sum_over_ranks
from horovod_train.distributed.launch import tuning
from horovod_train.distributed.objects import HOST
from horovod_train.distributed.watchdog.heartbeat import Heartbeat
from horovod_train.errors import FailedElsewhere, RunError, UserError

T = TypeVar("T")

_OF_NCCL = re.compile(r"\bnccl\w+ failed|NCCL async error")
# After Horovod's message, those of the libraries below it; gloo names its source file.
_CONNECTION_LOSS = re.compile(
    rf"Horovod has been shut down|/gloo/|\bMPI_\w+ failed|{_OF_NCCL.pattern}|\bcudaEventQuery failed"
)


@dataclass(frozen=True)
class WorkerGroup:
    """This process and the other ranks. `hosts` and `devices` are indexed by rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    exchange: str
    """What carries gradients: MPI, gloo, or NCCL."""
    controller: str
    """What the ranks agree over, and exchange what lies on the CPU: MPI or gloo."""
    hosts: tuple[str, ...]
    devices: tuple[device.Device, ...]
    settings: tuple[tuning.Setting, ...] = ()
    """The settings that Horovod and MPI found in this rank's environment."""
    deterministic: bool = False
    """Whether sums over ranks have the same bits in each run, over gloo and over MPI."""
    keeps_horovod: bool = False
    """Whether `close` leaves Horovod running, because the caller had started it."""
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
        # With an element more: an empty exchange would not synchronise the ranks.
        packed = np.concatenate([*(part.ravel() for part in parts), [0.0]])
        with self.heartbeat.phase("exchange"), tf.device(HOST):
            total = self.sum_in_step(tf.constant(packed), "group.sum").numpy()
        *pieces, _ = np.split(total, np.cumsum([part.size for part in parts], dtype=int))
        return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    def sum_in_step(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Collective: return the sum over all ranks, in a compiled step. name: unique among the exchanges under way."""
        return sum_over_ranks(value, name, deterministic=self.deterministic)

    def average_in_step(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """Collective: return the mean over all ranks, in a compiled step. name: as in `sum_in_step`."""
        return over_ranks(self.sum_in_step(tf.convert_to_tensor(value), name))

    def average(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Collective: return element-wise means over all ranks, in float64. Shapes as in `sum`."""
        return [total / self.size for total in self.sum(arrays)]

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Collective: set the variables on every rank to root's. variables: tf or Keras ones, the same on each rank.

        Raises UserError for a dtype that Horovod cannot send.
        """
        with self.heartbeat.phase("exchange"):
            check_sendable(variables)
            if not is_alone():
                run_as_graph(lambda: broadcast_by_position(list(map(as_tf_variable, variables)), 0, "group.broadcast"))

    def broadcast_object(self, value: T) -> T:
        """Collective: return root's value on every rank. For small values of the types that objects.dump takes."""
        with self.heartbeat.phase("exchange"):
            return cast(T, objects.broadcast(value, "group.broadcast_object"))

    def gather(self, value: T) -> list[T]:
        """Collective: return the values of all ranks, by rank, on every rank. For small ones, see `broadcast_object`"""
        with self.heartbeat.phase("exchange"):
            return cast(list[T], objects.gather(value, "group.gather"))

    def union(self, numbers: Set[int]) -> set[int]:
        """Collective: return the numbers that any rank has, on every rank."""
        return set().union(*self.gather(sorted(numbers)))

    def to_root(self, rows: np.ndarray) -> np.ndarray:
        """Collective: return on root the rows of all ranks, in the order of the ranks; elsewhere no rows.

        rows: [n, ...] of any dtype of fixed size, n at least 1; the same shape and dtype on every rank. Sent in pieces
        of at most MAX_BYTES over all ranks: Horovod counts them over MPI in int32, and would write elsewhere.
        """
        sent = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        most = objects.MAX_BYTES // self.size
        pieces = []
        with self.heartbeat.phase("exchange"), tf.device(HOST):
            for piece in np.split(sent, range(most, len(sent), most)):
                splits = [len(piece), *[0] * (self.size - 1)]
                received, _ = hvd.alltoall(tf.constant(piece), splits=splits, name="group.to_root")
                pieces.append(received.numpy().reshape(-1, len(piece)))
        joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
        return joined.reshape(-1).view(rows.dtype).reshape(-1, *rows.shape[1:])

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
        failed_ranks = {rank: exit_code for rank, exit_code in enumerate(exit_codes) if exit_code is not None}
        if not failed_ranks:
            return
        first_rank = min(failed_ranks)
        if self.rank == first_rank:
            assert failure is not None
            prefix = "" if len(failed_ranks) == self.size else f"{self.name(first_rank)}: "
            raise type(failure)(f"{prefix}{failure}") from failure
        raise FailedElsewhere(f"{self.name(first_rank)} failed", failed_ranks[first_rank])

    def call_in_turns(self, function: Callable[[], T], detail: str, phase: str = "start") -> T:
        """Collective: return what `function` returns on this rank; root calls it first, then one rank of each host.

        So what a user's function downloads or unpacks is there, whole, when the other ranks of a host, or of a shared
        home folder, look for it. Raises as `raise_together`, before the next ones call it. A function that exchanges
        itself waits for the others for ever: the watchdog's lines say `detail`, and that ranks take turns.
        """
        results: list[T] = []
        with self.heartbeat.phase(phase, f"{detail}, one rank after the other"):
            for is_my_turn in (self.is_root, self.local_rank == 0, True):
                with self.raise_together():
                    if is_my_turn and not results:
                        results.append(function())
        return results[0]

    def close(self) -> None:
        """Collective: synchronise for the last time."""
        self.barrier()
        if not self.keeps_horovod:
            hvd.shutdown()


BROADCASTS = "broadcasts"
"""The name under which broadcasts take turns; see in_turn."""


def broadcast_by_position(
    variables: Sequence[tf.Variable],
    root_rank: int,
    prefix: str,
    process_set: hvd.ProcessSet = hvd.global_process_set,
) -> None:
    """Collective, in a graph: set the variables to root_rank's values, under names by position after `prefix`.

    Keras numbers the names of variables in each process separately. prefix: unique among the exchanges under way.
    """

    def exchange(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return [
            hvd.broadcast(value, root_rank, name=f"{prefix}.{number}", ignore_name_scope=True, process_set=process_set)
            for number, value in enumerate(values)
        ]

    values = in_turn(BROADCASTS, list(map(tf.convert_to_tensor, variables)), exchange, process_set)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def run_as_graph(exchanges: Callable[[], Any]) -> Any:
    """Run exchanges in a new graph, in which they overlap; return their result.

    Not as a tf.function that is called: TensorFlow would warn of retracing. Without autograph, which would first
    rewrite Horovod's functions.
    """
    return tf.function(exchanges, autograph=False).get_concrete_function()()


def as_tf_variable(variable: Any) -> tf.Variable:
    """Return the tf.Variable behind a Keras 3 variable, or a tf.Variable unchanged.

    Under mixed precision `.value` of a Keras variable is a view that casts (AutoCastVariable). `.value` is therefore
    read outside any autocast scope, where it is the variable itself.
    """
    return variable if isinstance(variable, tf.Variable) else variable.value


def key_of(variable: Any) -> Any:
    """Return the dictionary key of a variable or tensor: equal for a Keras variable and the tf.Variable behind it."""
    return (variable if isinstance(variable, tf.Tensor) else as_tf_variable(variable)).ref()


def name_of(variable: Any) -> str:
    """Return a variable's name for messages, whether Keras' or TensorFlow's: "dense/kernel"."""
    return str(getattr(variable, "path", variable.name))


_SENDABLE = ["float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16"]
"""The dtypes that Horovod's broadcast takes."""
_TO_SEND_FLOATS = "Keep variables in float32; the policy mixed_bfloat16 (precision) computes in bfloat16 all the same."
_TO_SEND_OTHERS = "Keep whole numbers in int64, complex ones as two variables."


def check_sendable(variables: Sequence[Any]) -> None:
    """Raise UserError for a variable of a dtype that Horovod cannot send, such as bfloat16, uint32 and complex64."""
    for variable in variables:
        dtype = as_tf_variable(variable).dtype
        if dtype.name not in _SENDABLE:
            advice = _TO_SEND_FLOATS if dtype.is_floating else _TO_SEND_OTHERS
            raise UserError(f"variable {name_of(variable)} is {dtype.name}, which Horovod cannot exchange. {advice}")


def check_have_gradients(variables: Sequence[Any]) -> None:
    """Raise UserError for a variable that becomes its gradient, as a scale of float8; no mean is right."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UserError(
                f"variable {variable.path} is overwritten with its gradient (float8 quantization), which cannot be "
                'averaged over ranks. Train without quantize("float8").'
            )


def is_connection_loss(error: BaseException) -> bool:
    """Return whether the error may only say that another rank has gone: Horovod shuts down; the cause is elsewhere.

    Where none has gone, an error of NCCL is of this rank's own GPU, network or settings; see `is_of_nccl`.
    """
    return _is_from_horovod(error) and bool(_CONNECTION_LOSS.search(str(error)))


def is_of_nccl(error: BaseException) -> bool:
    """Return whether the error is NCCL's, whose texts do not tell a lost rank from a fault of this one."""
    return _is_from_horovod(error) and bool(_OF_NCCL.search(str(error)))


def _is_from_horovod(error: BaseException) -> bool:
    return isinstance(error, tf.errors.OpError | hvd.elastic.HorovodInternalError)
