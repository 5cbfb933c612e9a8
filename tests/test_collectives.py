"""Collectives: closed forms against the algorithms themselves, played message by message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._hops import Network
from headway.cost.collectives import COLLECTIVES, collective_seconds
from headway.cost.specs import LinkSpec
from headway.sim import Dag, replay
from tests.refusals import refused
from tests.steps_made import WIRE, networks

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
def test_every_form_grows_with_bytes_and_never_beats_the_wire(kind, algorithm, num_bytes, more, num_ranks):
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


test_bad_input_is_refused = refused(
    (lambda: collective_seconds("allreduce", 1, num_ranks=2, link=LINK), r"Did you mean 'all_reduce'"),
    (
        lambda: collective_seconds("all_reduce", 1, num_ranks=2, link=LINK, algorithm="rings"),
        r"unknown algorithm of all_reduce 'rings'. Did you mean 'ring'",
    ),
    (lambda: collective_seconds("send", -1, num_ranks=2, link=LINK), r"num_bytes is -1; pass a finite size >= 0"),
    (lambda: collective_seconds("send", 1, num_ranks=0, link=LINK), r"num_ranks is 0; give at least 1"),
)


# Collectives on a network: the closed form's time, growth with size and parts.


@given(num_ranks=st.integers(2, 64), num_bytes=st.integers(1, 10**9))
def test_an_idle_ring_takes_the_closed_form(num_ranks: int, num_bytes: int) -> None:
    padded = -(-num_bytes // num_ranks) * num_ranks
    seconds = collective_seconds("all_reduce", padded, num_ranks=num_ranks, link=WIRE, algorithm="ring")

    ours = int(Network("ring", num_ranks, WIRE).sync_ns(num_bytes)) / 1e9

    assert ours == pytest.approx(seconds, abs=2 * num_ranks * 1e-9)


@given(network=networks(), num_bytes=st.integers(0, 10**6), parts=st.integers(1, 9))
def test_sync_time_grows_with_size_and_each_part_costs_its_latency(network, num_bytes, parts):
    assert network.sync_ns(num_bytes + 1000, parts) >= network.sync_ns(num_bytes, parts)
    assert (np.diff(network.sync_ns(0, np.arange(1, 9))) >= 0).all()
