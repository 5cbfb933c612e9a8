"""Hops: every algorithm sums what it should, in any order that its edges allow, and takes the closed form's time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.cost.collectives import collective_seconds
from headway.cost.specs import LinkSpec
from headway.sim.graph.hops import IDENTITY, PATTERNS, Network, Pattern, expand, fit_links, own_times, pair
from tests.steps_made import WIRE, networks

SERVERS = {"ring": 0, "tree": 0, "parameter_server": 3}


def play(one: Pattern, num_ranks: int, seed: int) -> list[list[Counter[int]]]:
    """Send messages in a random order that the edges allow; return what each worker holds of each chunk, by origin."""
    rng = np.random.default_rng(seed)
    total = int(max(one.src.max(initial=0), one.dst.max(initial=0), num_ranks - 1)) + 1
    held = [[Counter({rank: 1} if rank < num_ranks else {}) for _ in range(one.num_chunks)] for rank in range(total)]
    edges = [
        *zip(*(part.tolist() for part in one.after), strict=True),
        *zip(*(p.tolist() for p in one.then), strict=True),
    ]
    waits = Counter(later for _, later in edges)
    ready = [hop for hop in range(one.src.size) if not waits[hop]]
    while ready:
        hop = ready.pop(int(rng.integers(len(ready))))
        src, dst, chunk = int(one.src[hop]), int(one.dst[hop]), int(one.chunk[hop])
        sent = held[src][chunk]
        # The sum of all is passed on as it is; anything less is added.
        whole = set(sent) == set(range(num_ranks))
        held[dst][chunk] = Counter(sent) if whole else held[dst][chunk] + sent
        for before, later in edges:
            if before == hop:
                waits[later] -= 1
                if not waits[later]:
                    ready.append(later)
    return held[:num_ranks]


@pytest.mark.parametrize("name", PATTERNS)
@given(num_ranks=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_algorithm_brings_every_rank_the_sum_of_all(name: str, num_ranks: int, seed: int) -> None:
    one = PATTERNS[name](num_ranks, SERVERS[name])

    held = play(one, num_ranks, seed)

    assert all(chunk == Counter(range(num_ranks)) for worker in held for chunk in worker)


@pytest.mark.parametrize("name", PATTERNS)
@given(num_ranks=st.integers(1, 12))
def test_no_two_transfers_of_a_collective_have_one_identity(name: str, num_ranks: int) -> None:
    hops = expand([1000, 7], [1, 3], Network(name, num_ranks, WIRE, num_servers=SERVERS[name]))
    rows = np.stack(list(hops.identity().values()), axis=1)

    assert len({tuple(row) for row in rows.tolist()}) == rows.shape[0]


@given(num_ranks=st.integers(2, 64), num_bytes=st.integers(1, 10**9))
def test_an_idle_ring_takes_the_closed_form(num_ranks: int, num_bytes: int) -> None:
    padded = -(-num_bytes // num_ranks) * num_ranks
    seconds = collective_seconds("all_reduce", padded, num_ranks=num_ranks, link=WIRE, algorithm="ring")

    ours = int(Network("ring", num_ranks, WIRE).sync_ns(num_bytes)) / 1e9

    assert ours == pytest.approx(seconds, abs=2 * num_ranks * 1e-9)


@given(network=networks(), num_bytes=st.integers(0, 10**6), parts=st.integers(1, 9))
def test_sync_time_grows_with_size_and_each_part_costs_its_latency(
    network: Network, num_bytes: int, parts: int
) -> None:
    assert network.sync_ns(num_bytes + 1000, parts) >= network.sync_ns(num_bytes, parts)
    assert (np.diff(network.sync_ns(0, np.arange(1, 9))) >= 0).all()


@given(order=st.permutations(range(24)))
def test_sends_and_receives_are_paired_by_identity_whatever_their_order(order: list[int]) -> None:
    identity = expand([4000], [1], Network("ring", 4, WIRE)).identity()
    sends = {name: column[order] for name, column in identity.items()}

    send, receive = pair(sends, identity)

    assert all((sends[name][send] == identity[name][receive]).all() for name in IDENTITY)


@given(late=st.integers(0, 10**6), sender=st.integers(0, 10**6))
def test_waiting_for_the_sender_is_no_time_of_the_receive(late: int, sender: int) -> None:
    # The receive was posted at 0; however late the sender begins, the transfer itself takes 50 + 20.
    begins = sender + late
    takes = own_times([begins], [begins + 50], [0], [begins + 70])

    assert {name: column.tolist() for name, column in takes.items()} == {
        "send_ns": [50], "receive_ns": [70], "recv_ns": [20],
    }  # fmt: skip


def test_a_receive_posted_after_its_send_has_ended_counts_from_its_posting() -> None:
    assert own_times([0], [50], [80], [95])["recv_ns"].tolist() == [15]


def test_links_are_fitted_from_the_transfers_that_crossed_them() -> None:
    hops = expand([4_000, 40_000, 4_000_000], [1, 1, 1], Network("ring", 4, WIRE))

    fits = fit_links(hops.src, hops.dst, hops.bytes, hops.send_ns)

    assert sorted(fits) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    for found in fits.values():
        assert found.link.bytes_per_s == pytest.approx(WIRE.bytes_per_s, rel=1e-3)
        assert found.link.latency_s == pytest.approx(WIRE.latency_s, rel=1e-2)


def test_a_link_of_one_size_or_of_waits_is_no_link() -> None:
    with pytest.raises(InputError, match=r"link 0 -> 1: latency and rate cannot be told apart from one size"):
        fit_links([0, 0], [1, 1], [400, 400], [10, 10])
    rng = np.random.default_rng(0)
    size = np.repeat([1000, 100_000], 50)
    with pytest.raises(InputError, match=r"link 0 -> 1: the fit misses its 100 transfers by \d+%.*without waiting"):
        fit_links(np.zeros(100), np.ones(100), size, size * 10 ** rng.uniform(-2, 2, 100))


def test_a_missing_partner_is_named() -> None:
    rows = expand([4000], [1], Network("ring", 4, WIRE)).identity()
    short = {name: column[1:] for name, column in rows.items()}

    with pytest.raises(InputError, match=r"1 SEND rows have no RECV.*group 0, seq 0, round 0, chunk 0, src 0, dst 1"):
        pair(rows, short)
    with pytest.raises(InputError, match=r"1 RECV rows have no SEND.*Record both ranks"):
        pair(short, rows)


def test_a_transfer_recorded_twice_is_named() -> None:
    rows = expand([4000], [1], Network("ring", 4, WIRE)).identity()
    twice = {name: np.concatenate([column, column[:1]]) for name, column in rows.items()}

    with pytest.raises(InputError, match=r"two SEND rows are group 0.*record each transfer once"):
        pair(twice, rows)
    with pytest.raises(InputError, match=r"RECV rows have no column 'dst'"):
        pair(rows, {name: column for name, column in rows.items() if name != "dst"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "rings"}, r"unknown algorithm 'rings'. Did you mean 'ring'"),
        ({"num_ranks": 0}, r"num_ranks is 0.*at least 1 rank"),
        ({"num_servers": 2}, r"num_servers is 2 with 'ring'; give servers to 'parameter_server'"),
        ({"algorithm": "parameter_server"}, r"num_servers is 0 with 'parameter_server'"),
        ({"recv_ns": -1}, r"recv_ns -1; give.*a time >= 0"),
    ],
)
def test_networks_that_cannot_be_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Network(**{"algorithm": "ring", "num_ranks": 4, "link": WIRE, **arguments})


def test_times_that_run_backwards_ask_for_alignment_and_one_unit() -> None:
    with pytest.raises(InputError, match=r"transfer 1 is received at 4 ns.*Align the clocks.*convert all times to ns"):
        own_times([0, 10], [5, 15], [0, 0], [9, 4])


@pytest.mark.parametrize(("num_bytes", "parts"), [([-1], [1]), ([4], [0]), ([4, 5], [1])])
def test_sizes_and_parts_that_mean_nothing_are_refused(num_bytes: list[int], parts: list[int]) -> None:
    with pytest.raises(InputError, match=r"one size >= 0 and one number of parts >= 1"):
        expand(num_bytes, parts, Network("ring", 2, LinkSpec("w", 1e9, 0.0, "made up")))
