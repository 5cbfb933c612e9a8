"""Stripes: every byte is covered once, nothing twice with one rank, and losses are counted right."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.storage.redundancy.erasure import MAX_MEMBERS, Stripes, circle, scheme_of

schemes = st.tuples(st.integers(1, 10), st.integers(1, 4), st.integers(1, 14))


def made(k, m, world_size):
    return Stripes(k, m, tuple(range(world_size)), 4096)


@given(schemes)
def test_every_segment_is_in_exactly_one_stripe(scheme):
    stripes = made(*scheme)
    places = [place for stripe in range(scheme[2]) for place in stripes.data(stripe)]
    parity = [place for stripe in range(scheme[2]) for place in stripes.parity(stripe)]

    assert Counter(places) == {(rank, segment): 1 for rank in range(scheme[2]) for segment in range(scheme[0])}
    assert Counter(parity) == {(rank, slot): 1 for rank in range(scheme[2]) for slot in range(scheme[1])}
    assert all(place in stripes.data(stripes.stripe_of_data(*place)) for place in places)
    assert all(place in stripes.parity(stripes.stripe_of_parity(*place)) for place in parity)


@given(schemes)
def test_members_of_a_stripe_are_with_as_many_ranks_as_there_are(scheme):
    k, m, world_size = scheme
    stripes = made(*scheme)
    for stripe in range(world_size):
        ranks = Counter(rank for rank, _ in (*stripes.data(stripe), *stripes.parity(stripe)))

        assert len(ranks) == min(k + m, world_size)
        assert max(ranks.values()) == -(-(k + m) // world_size)


@given(schemes, st.integers(0, 10**6))
def test_the_tolerated_losses_are_what_trying_all_of_them_says(scheme, seed):
    k, m, world_size = scheme
    stripes = made(k, m, min(world_size, 7))
    ranks = range(min(world_size, 7))
    domains = {rank: (seed >> 2 * rank) % 4 for rank in ranks}

    told = stripes.tolerated(domains)

    def survives(lost):
        return all(sum(domains[rank] in lost for rank, _ in (*stripes.data(s), *stripes.parity(s))) <= m for s in ranks)

    names = sorted(set(domains.values()))
    most = max(count for count in range(len(names) + 1) if all(map(survives, combinations(names, count))))
    assert told == most


@given(schemes)
def test_guardians_are_other_ranks(scheme):
    _, m, world_size = scheme
    stripes = made(*scheme)
    for rank in range(world_size):
        guardians = stripes.guardians(rank, m)

        assert len(set(guardians)) == len(guardians) == max(1, min(m, world_size - 1))
        assert world_size == 1 or rank not in guardians


def test_six_ranks_that_tolerate_two_hold_four_data_and_two_parity_segments_each():
    k, m = scheme_of("+2", 6)
    stripes = made(k, m, 6)

    assert (k, m, stripes.tolerated({rank: rank for rank in range(6)})) == (4, 2, 2)


@given(st.integers(1, 5), st.integers(1, 4))
def test_neighbours_in_the_circle_are_on_different_hosts(num_hosts, per_host):
    domains = {rank: f"host{rank // per_host}" for rank in range(num_hosts * per_host)}

    around = circle(domains)

    assert sorted(around) == sorted(domains)
    for start in range(len(around)):
        window = [domains[around[(start + step) % len(around)]] for step in range(num_hosts)]
        assert len(set(window)) == num_hosts


def test_racks_come_before_hosts():
    domains = {rank: f"rack{rank // 4}/host{rank // 2}" for rank in range(8)}

    around = circle(domains)

    assert [domains[rank].split("/")[0] for rank in around] == ["rack0", "rack1"] * 4
    assert len({domains[rank] for rank in around[:4]}) == 4


def test_unequal_hosts_are_spread_as_evenly_as_can_be():
    domains = {0: "a", 1: "a", 2: "a", 3: "a", 4: "b", 5: "c"}

    assert [domains[rank] for rank in circle(domains)] == ["a", "a", "b", "c", "a", "a"]


@pytest.mark.parametrize(
    ("text", "world_size", "scheme"),
    [("none", 4, None), ("xor", 4, (3, 1)), ("+1", 1, (1, 1)), ("+2", 100, (MAX_MEMBERS - 2, 2)), ("8+2", 3, (8, 2))],
)
def test_redundancy_is_read(text, world_size, scheme):
    assert scheme_of(text, world_size) == scheme


@pytest.mark.parametrize("text", ["", "+", "2", "4+0", "0+2", "a+b", "-1+2", "200+100", "4+2 "])
def test_a_redundancy_that_is_none_is_told(text):
    with pytest.raises(InputError, match=r"is none. Write none, xor, \+m"):
        scheme_of(text, 4)
