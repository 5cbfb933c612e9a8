"""Collectives on a lane: never mixed, failures reach every future, groups are made by all ranks or none."""

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

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


def _in_callbacks() -> list[float]:
    """What `then()` does: the second collective follows as the first ones end, in another order on each rank."""
    group, ended = separate_group("test"), [Future[None]() for _ in range(BUCKETS)]
    sums = [torch.full((4,), 100.0 * bucket + dist.get_rank()) for bucket in range(BUCKETS)]
    for values in sums:
        dist.all_reduce(values, group=group)

    def second(bucket: int) -> float:
        gathered = torch.empty(4 * dist.get_world_size())
        dist.all_gather_into_tensor(gathered, sums[bucket], group=group)
        return float(gathered.sum())

    chained = [ended[bucket].then(lambda _, bucket=bucket: second(bucket)) for bucket in range(BUCKETS)]
    for bucket in range(BUCKETS) if dist.get_rank() == 0 else reversed(range(BUCKETS)):
        ended[bucket].set_result(None)
    return [future.wait() for future in chained]


EXPECTED = [8 * (2 * 100.0 * bucket + 0 + 1) for bucket in range(BUCKETS)]


def test_two_collectives_of_two_buckets_never_mix():
    assert on_ranks(_on_the_lane, 2) == [[EXPECTED] * DELAYS] * 2


def test_the_same_collectives_launched_in_callbacks_do_mix():
    assert on_ranks(_in_callbacks, 2) != [EXPECTED] * 2


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


def _hooked(compressed: bool) -> list[float]:
    """Train a DDP model whose gradients are summed on the lane, as float32 or in int8 blocks of each rank."""
    from torch.nn.parallel import DistributedDataParallel

    from headway.runtime.quantize import decode, encode

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    lane, draws = CollectiveLane(separate_group("headway-hook")), torch.Generator().manual_seed(dist.get_rank())

    def reduced(gradient: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if not compressed:
            dist.all_reduce(gradient, group=group)
            return gradient / 2
        small = encode(gradient)
        codes, scales = [torch.empty_like(small.codes) for _ in "01"], [torch.empty_like(small.scales) for _ in "01"]
        dist.all_gather(codes, small.codes, group=group)
        dist.all_gather(scales, small.scales, group=group)
        both = zip(codes, scales, strict=True)
        return (
            sum(
                (decode(type(small)(c, s, small.shape, small.dtype, "int8", small.block)) for c, s in both),
                torch.zeros_like(gradient),
            )
            / 2
        )

    def hook(state, bucket):  # torch refuses an annotation that is a string
        return lane.submit(lambda group: reduced(bucket.buffer(), group))

    model.register_comm_hook(None, hook)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(20):
        inputs = torch.randn(16, 8, generator=draws)
        loss = (model(inputs)[:, 0] - inputs.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    lane.close()
    return [*losses, *(float(parameter.detach().sum()) for parameter in net.parameters())]


def test_a_ddp_hook_in_int8_on_the_lane_trains_like_one_in_float32():
    plain, small = on_ranks(_hooked, 2, False), on_ranks(_hooked, 2, True)

    for answers in (plain, small):
        assert answers[0][20:] == answers[1][20:]  # the ranks' parameters stay equal
    assert small[0][20:] != plain[0][20:]
    assert small[0][19] < 0.5 * small[0][0]
    assert small[0][19] == pytest.approx(plain[0][19], rel=0.05)


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
