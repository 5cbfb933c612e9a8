"""Collectives: closed forms against the algorithms themselves, played message by message."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.cost.collectives import (
    COLLECTIVES,
    bus_bytes_per_s,
    collective_form,
    collective_seconds,
    fastest_algorithm,
    fit,
    two_level_all_reduce_seconds,
)
from headway.cost.specs import LinkSpec
from headway.sim import Dag, replay

LINK = LinkSpec("test", bytes_per_s=1e9, latency_s=1e-5, source="made up")
EVERY = [(kind, algorithm) for kind, table in COLLECTIVES.items() for algorithm in table]
sizes = st.floats(1, 1e10)


def rounds_dag(num_ranks: int, pairs_of_round: list[list[tuple[int, int]]]) -> Dag:
    """Each sender sends when it has received what it was sent in the round before, on its own link."""
    lane, src, dst = [], [], []
    received: dict[int, int] = {}
    for pairs in pairs_of_round:
        now = {}
        for sender, receiver in pairs:
            op = len(lane)
            lane.append(sender)
            if sender in received:
                src.append(received[sender])
                dst.append(op)
            now[receiver] = op
        received = now
    return Dag.from_edges(len(lane), src, dst, lane=lane)


@pytest.mark.parametrize(("kind", "algorithm"), EVERY)
@given(num_bytes=sizes, more=sizes, num_ranks=st.integers(2, 300))
def test_every_form_grows_with_bytes_and_never_beats_the_wire(
    kind: str, algorithm: str, num_bytes: float, more: float, num_ranks: int
) -> None:
    def seconds(size: float) -> float:
        return collective_seconds(kind, size, num_ranks=num_ranks, link=LINK, algorithm=algorithm)

    # Whatever the algorithm, a rank must pass on its part of the buffer (Thakur et al., lower bounds).
    least = {"all_reduce": 2 * (num_ranks - 1) / num_ranks, "broadcast": 1.0, "send": 1.0}
    bound = least.get(kind, (num_ranks - 1) / num_ranks)

    assert seconds(num_bytes + more) > seconds(num_bytes)
    assert seconds(num_bytes) >= bound * num_bytes / LINK.bytes_per_s
    assert seconds(0) >= LINK.latency_s


@pytest.mark.parametrize(("kind", "algorithm"), [pair for pair in EVERY if pair[0] != "send"])
def test_one_rank_takes_no_time(kind: str, algorithm: str) -> None:
    assert collective_seconds(kind, 1e6, num_ranks=1, link=LINK, algorithm=algorithm) == 0.0


@given(num_bytes=sizes, num_ranks=st.integers(2, 64))
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_bytes: float, num_ranks: int) -> None:
    parts = [
        collective_seconds(kind, num_bytes, num_ranks=num_ranks, link=LINK) for kind in ("reduce_scatter", "all_gather")
    ]

    assert collective_seconds("all_reduce", num_bytes, num_ranks=num_ranks, link=LINK) == pytest.approx(sum(parts))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 16])
def test_the_ring_form_equals_the_ring_played_chunk_by_chunk(num_ranks: int) -> None:
    size = 3e6
    around = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    dag = rounds_dag(num_ranks, [around] * (2 * (num_ranks - 1)))
    played = replay(dag, [LINK.seconds(size / num_ranks)] * dag.n).makespan_ns

    assert collective_seconds("all_reduce", size, num_ranks=num_ranks, link=LINK) == pytest.approx(played)


@pytest.mark.parametrize("num_ranks", [2, 4, 16, 64])
def test_the_halving_form_equals_the_exchange_played_round_by_round(num_ranks: int) -> None:
    size, distances, distance = 3e6, [], num_ranks // 2
    while distance:
        distances.append(distance)
        distance //= 2
    rounds = [[(rank, rank ^ d) for rank in range(num_ranks)] for d in distances]
    dag = rounds_dag(num_ranks, rounds)
    share = [LINK.seconds(size * d / num_ranks) for d in distances for _ in range(num_ranks)]
    played = replay(dag, share).makespan_ns

    form = collective_seconds("reduce_scatter", size, num_ranks=num_ranks, link=LINK, algorithm="halving")
    assert form == pytest.approx(played)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 9])
def test_the_broadcast_tree_equals_the_tree_played_hop_by_hop(num_ranks: int) -> None:
    holders, lane, src, dst, got = [0], [], [], [], {}
    while len(holders) < num_ranks:
        for sender in list(holders):
            if len(holders) == num_ranks:
                break
            op = len(lane)
            lane.append(sender)
            if sender in got:
                src.append(got[sender])
                dst.append(op)
            got[len(holders)] = op
            holders.append(len(holders))
    dag = Dag.from_edges(len(lane), src, dst, lane=lane)
    played = replay(dag, [LINK.seconds(1e6)] * dag.n).makespan_ns

    form = collective_seconds("broadcast", 1e6, num_ranks=num_ranks, link=LINK, algorithm="tree")
    assert form == pytest.approx(played)


@pytest.mark.parametrize(("kind", "algorithm"), EVERY)
@given(latency=st.floats(1e-7, 1e-3), rate=st.floats(1e6, 1e12), num_ranks=st.integers(2, 64))
def test_a_fit_recovers_the_link_that_made_the_times(
    kind: str, algorithm: str, latency: float, rate: float, num_ranks: int
) -> None:
    link = LinkSpec("truth", bytes_per_s=rate, latency_s=latency, source="drawn")
    knee = latency * rate
    assume(knee > 1)
    measured = [
        (size, collective_seconds(kind, size, num_ranks=num_ranks, link=link, algorithm=algorithm))
        for size in (knee / 10, knee, knee * 10, knee * 100)
    ]
    found = fit(measured, kind=kind, algorithm=algorithm, num_ranks=num_ranks)

    assert found.link.latency_s == pytest.approx(latency, rel=1e-6)
    assert found.link.bytes_per_s == pytest.approx(rate, rel=1e-6)
    assert found.error_fraction < 1e-6


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-6, 1)), min_size=3, max_size=8))
def test_a_fit_is_never_negative(measured: list[tuple[float, float]]) -> None:
    assume(len({size for size, _ in measured}) > 1)
    try:
        link = fit(measured).link
    except InputError:  # times that do not grow with the size
        return

    assert link.latency_s >= 0
    assert link.bytes_per_s > 0


def test_small_buffers_prefer_few_messages_and_large_ones_little_volume() -> None:
    assert fastest_algorithm("all_reduce", 8, num_ranks=64, link=LINK)[0] == "direct"
    assert fastest_algorithm("all_reduce", 1e9, num_ranks=60, link=LINK)[0] in {"ring", "halving"}


@pytest.mark.parametrize(("kind", "factor"), [("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("broadcast", 1.0)])
def test_bus_bandwidth_has_the_factors_of_nccl_tests(kind: str, factor: float) -> None:
    ring = {"broadcast": "pipeline"}.get(kind)
    volume = collective_form(kind, ring).volume(8)

    assert volume == pytest.approx(factor)
    if ring is None:
        assert bus_bytes_per_s(kind, 1e9, 1.0, num_ranks=8) == pytest.approx(factor * 1e9)


def test_two_levels_are_worth_it_when_the_network_is_slow() -> None:
    inside = LinkSpec("inside", bytes_per_s=3e11, latency_s=4e-6, source="made up")
    two = two_level_all_reduce_seconds(1e9, ranks_per_host=8, num_hosts=16, inside=inside, between=LINK)
    flat = collective_seconds("all_reduce", 1e9, num_ranks=128, link=LINK)

    assert two < flat / 4
    assert two_level_all_reduce_seconds(
        1e9, ranks_per_host=1, num_hosts=16, inside=inside, between=LINK
    ) == pytest.approx(collective_seconds("all_reduce", 1e9, num_ranks=16, link=LINK))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collective_seconds("allreduce", 1, num_ranks=2, link=LINK), r"Did you mean 'all_reduce'"),
        (
            lambda: collective_seconds("all_reduce", 1, num_ranks=2, link=LINK, algorithm="rings"),
            r"unknown algorithm of all_reduce 'rings'. Did you mean 'ring'",
        ),
        (lambda: collective_seconds("send", -1, num_ranks=2, link=LINK), r"num_bytes is -1; pass a finite size >= 0"),
        (lambda: collective_seconds("send", 1, num_ranks=0, link=LINK), r"num_ranks is 0; give at least 1"),
        (lambda: fit([(1, 1.0), (1, 2.0)]), r"cannot be told apart from one size; measure at least two"),
        (lambda: fit([(1, 1.0), (2, 0.0)]), r"measurement \(2 B, 0.0 s\) is not positive and finite; leave it out"),
        (lambda: fit([(1, 1.0), (2, 1.0)], num_ranks=1), r"one rank sends nothing; measure with num_ranks"),
        (lambda: fit([(1, 5.0), (100, 1.0)]), r"the times do not grow with the size; measure larger"),
        (lambda: bus_bytes_per_s("send", 1, 0.0, num_ranks=2), r"seconds is 0.0; pass a measured time > 0"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
