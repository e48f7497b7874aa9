"""The decisions that need no ranks: which GPU, how many threads."""

from __future__ import annotations

import re

import pytest

from horovod_train.errors import UserError


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
    from horovod_train.distributed.device import choose_gpus

    assert list(choose_gpus(gpu_count, local_rank, local_size, per_rank)) == expected


@pytest.mark.parametrize(
    ("gpu_count", "local_size", "per_rank", "message"),
    [
        (2, 4, 1, "4 ranks on this host see 2 GPUs; expected one GPU for each rank. Start at most 2 ranks on a host"),
        (3, 2, 2, "2 ranks on this host see 3 GPUs; expected 2 GPUs (device.per_rank) for each rank. Start at most 1"),
        (1, 1, 2, "1 ranks on this host see 1 GPUs; expected 2 GPUs (device.per_rank) for each rank. Lower device.per"),
    ],
)
def test_too_few_gpus_on_a_host_are_refused(gpu_count: int, local_size: int, per_rank: int, message: str) -> None:
    from horovod_train.distributed.device import choose_gpus

    with pytest.raises(UserError, match=re.escape(message)):
        choose_gpus(gpu_count, 0, local_size, per_rank)


@pytest.mark.parametrize(("cores", "local_size", "expected"), [(2, 1, 2), (2, 2, 1), (16, 4, 4), (2, 4, 1), (7, 2, 3)])
def test_ranks_share_the_cores_of_their_host(cores: int, local_size: int, expected: int) -> None:
    from horovod_train.distributed.device import share_of_cores

    assert share_of_cores(cores, local_size) == expected
