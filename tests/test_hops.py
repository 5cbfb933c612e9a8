"""Collectives on a network: the closed form's time, growth with size and parts, bad networks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.cost.collectives import collective_seconds
from headway.sim.graph.hops import Network
from tests.steps_made import WIRE, networks


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
