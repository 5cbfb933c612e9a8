"""The pool: results by rank, tracebacks of those that fail, nothing left running."""

from __future__ import annotations

import os
import time

import pytest

from headway.core.errors import InputError
from tests.made.pool import RankFailedError
from tests.spawn import on_ranks


def rank_times(factor: int) -> int:
    """Return rank x factor."""
    return int(os.environ["RANK"]) * factor


def sum_of_ranks() -> float:
    """Return the all-reduced sum of the ranks."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return float(value)


def ddp_weight() -> list[float]:
    """Return a weight after one DDP step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    return [float(x) for x in model.module.weight.grad.flatten()]


def fail_on(rank: int) -> None:
    """Raise on one rank, wait on the others."""
    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"rank {rank} fails on purpose")
    time.sleep(60)


def die() -> None:
    """End the process without a word."""
    os._exit(9)


def hang() -> None:
    """Never return."""
    time.sleep(600)


def test_results_come_back_by_rank():
    assert on_ranks(rank_times, 3, 10, group=False) == [0, 10, 20]


def test_ranks_share_a_process_group():
    assert on_ranks(sum_of_ranks, 2) == [1.0, 1.0]


def test_ddp_averages_gradients_over_the_ranks():
    assert on_ranks(ddp_weight, 2) == [[0.5, 0.5], [0.5, 0.5]]


def test_the_traceback_of_the_failing_rank_is_raised_and_nobody_is_waited_for():
    with pytest.raises(RankFailedError, match="rank 1 fails on purpose"):
        on_ranks(fail_on, 2, 1, group=False)


def test_a_rank_that_dies_is_named_with_its_exit_code():
    with pytest.raises(RankFailedError, match="rank 0: the process ended with exit code 9"):
        on_ranks(die, 1, group=False)


def test_a_rank_that_hangs_is_ended_after_its_time():
    with pytest.raises(RankFailedError, match="ranks 0 did not finish within"):
        on_ranks(hang, 1, group=False, timeout_s=0.5)


def test_functions_that_no_rank_can_import_and_empty_pools_are_refused():
    with pytest.raises(InputError, match="Define it at module level"):
        on_ranks(lambda: 1, 1)
    with pytest.raises(InputError, match="at least 1"):
        on_ranks(rank_times, 0, 1)
