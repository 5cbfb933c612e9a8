"""Collectives on a lane: never mixed, failures reach every future, groups are made by all ranks or none."""

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from headway.core.errors import BackgroundError, InputError
from headway.core.rng import derived_seed
from headway.runtime.lane import CollectiveLane, separate_group
from tests.spawn import on_ranks

DELAYS = 50
BUCKETS = 2


def _two_collectives(bucket: int, group: dist.ProcessGroup, pause: Callable[[], None]) -> float:
    """Sum over the ranks, then gather: rank r puts 100 * bucket + r in."""
    values = torch.full((4,), 100.0 * bucket + dist.get_rank())
    pause()
    dist.all_reduce(values, group=group)
    pause()
    gathered = torch.empty(4 * dist.get_world_size())
    dist.all_gather_into_tensor(gathered, values, group=group)
    return float(gathered.sum())


def _on_the_lane() -> list[list[float]]:
    answers = []
    with CollectiveLane(separate_group("test")) as lane:
        for number in range(DELAYS):
            draws = random.Random(derived_seed(3, dist.get_rank(), number))

            def pause(draws: random.Random = draws) -> None:
                time.sleep(draws.random() * 2e-3)

            def work(bucket: int, pause: Callable[[], None]) -> Callable[[dist.ProcessGroup], float]:
                return lambda group: _two_collectives(bucket, group, pause)

            futures = []
            for bucket in range(BUCKETS):
                pause()
                futures.append(lane.submit(work(bucket, pause)))
            answers.append([future.wait() for future in futures])
    return answers


EXPECTED = [8 * (2 * 100.0 * bucket + 0 + 1) for bucket in range(BUCKETS)]


def test_two_collectives_of_two_buckets_never_mix():
    assert on_ranks(_on_the_lane, 2) == [[EXPECTED] * DELAYS] * 2


def _failing() -> list[str]:
    lane, started = CollectiveLane(separate_group("test")), threading.Event()

    def fail(group: dist.ProcessGroup) -> None:
        started.wait()
        raise OSError("the link is down")

    futures = [lane.submit(lambda group: 1), lane.submit(fail), lane.submit(lambda group: 2)]
    started.set()
    seen = [str(futures[0].wait())]
    for call in (futures[1].wait, futures[2].wait, lambda: lane.submit(lambda group: 3), lane.close):
        try:
            call()
        except (OSError, BackgroundError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_a_failure_reaches_every_pending_future_and_later_calls():
    first, own, behind, later, closing = on_ranks(_failing, 1)[0]

    assert first == "1"
    assert own == "OSError: the link is down"
    for words in (behind, later, closing):
        assert words.startswith("BackgroundError: ")
        assert "the link is down" in words


def _asked(names: list[str | None], ranks: list[int] | None = None, timeout_s: float = 20.0) -> str:
    name, answer = names[dist.get_rank()], "not asked"
    try:
        if name is not None:
            answer = str(dist.get_world_size(separate_group(name, ranks=ranks, timeout_s=timeout_s)))
    except (InputError, BackgroundError) as error:
        answer = f"{type(error).__name__}: {error}"
    dist.barrier()
    return answer


def test_a_group_that_some_ranks_ask_for_names_the_others_at_the_time_out():
    first, second = on_ranks(_asked, 2, ["a", None], None, 0.3)

    assert first.startswith("BackgroundError: ranks [1] did not ask for group 'a' within 0.3 s, rank 0 did.")
    assert second == "not asked"


def test_ranks_that_ask_in_unlike_orders_are_shown_both():
    assert [
        answer.startswith("InputError: ranks ask for unlike groups: {0: 'a', 1: 'b'}")
        for answer in on_ranks(_asked, 2, ["a", "b"])
    ] == [True, True]


def test_a_part_of_the_ranks_makes_its_group_alone():
    assert on_ranks(_asked, 3, ["a", None, "a"], [0, 2]) == ["2", "not asked", "2"]
    assert "call it on those ranks only" in on_ranks(_asked, 2, [None, "a"], [0])[1]


def test_without_a_process_group_there_is_nothing_to_make_one_from():
    with pytest.raises(InputError, match=r"no process group to make 'a' from. Call init_process_group"):
        separate_group("a")
