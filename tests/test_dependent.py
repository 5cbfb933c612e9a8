"""Joader's coupling: the chain of the paper, exactly; as many common items as a coupling allows; the table of loads."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.cached.tiered import TieredCache
from headway.data.orders.random_orders import Dependent
from headway.data.orders.strategies import ORDERS
from tests.chi_square import p_value
from tests.coupling import chain


def outcomes(sets):
    """Exact law of a step: {frozenset of (job, item): probability}, by following every branch of the chain."""
    found, trails = Counter(), [()]
    while trails:
        trail, place, odds = trails.pop(), 0, Fraction(1)

        def branch(choices):
            """Follow the trail; beyond its end queue every choice of this place and take the first."""
            nonlocal trail, place, odds
            if place == len(trail):
                trails.extend((*trail, index) for index in range(1, len(choices)))
                trail = (*trail, 0)
            value, part = choices[trail[place]]
            place, odds = place + 1, odds * part
            return value

        given = chain(
            sets,
            lambda a, b: branch([(yes, p) for yes, p in ((True, Fraction(a, b)), (False, 1 - Fraction(a, b))) if p]),
            lambda items: branch([(item, Fraction(1, len(items))) for item in sorted(items)]),
        )
        found[frozenset((job, item) for item, jobs in given for job in jobs)] += odds
    return found


SETS = [
    {"a": {0, 1, 2}, "b": {1, 2, 3, 4}},
    {"a": {0, 1}, "b": {1, 2, 3}, "c": {1, 2, 4, 5}},
    {"a": {0, 1, 2}, "b": {0, 1, 3}, "c": {0, 2, 3}},
    {"a": {0}, "b": {0, 1}, "c": {2, 3}, "d": {0, 1, 2}},
]


@pytest.mark.slow
@pytest.mark.parametrize("sets", SETS)
def test_a_step_has_the_law_of_the_chain(sets):
    """Joint law of all jobs' items, at the first step and after others with a mask."""
    law = outcomes(sets)
    jobs = {job: sorted(items) for job, items in sets.items()}
    counts = Counter()
    for seed in range(2000):
        given = Dependent(jobs, seed).step()
        counts[frozenset((job, item) for item, receivers in given.items() for job in receivers)] += 1

    assert counts.keys() <= law.keys()
    outcome = sorted(law, key=sorted)
    assert p_value([counts[x] for x in outcome], [2000 * float(law[x]) for x in outcome]) > 1e-3


def test_a_later_step_has_the_law_of_the_chain_on_what_is_left():
    """Incremental bags after four steps, a job's end and a mask, against the exact law of the sets then."""
    jobs = {"a": [0, 1, 2], "b": [0, 1, 2, 3, 4, 5], "c": [1, 2, 3, 4, 5, 6, 7]}
    scores, variance = 0.0, 0.0
    for seed in range(900):
        order = Dependent(jobs, seed)
        for mask in ((), (), ("c",), ()):
            order.step(mask)
        left = {job: set(order.needed(job).tolist()) for job in jobs if order.remaining(job)}
        both = sum(odds for outcome, odds in outcomes(left).items() if len({item for _, item in outcome}) == 1)
        scores += (len(order.step()) == 1) - float(both)
        variance += float(both * (1 - both))

    assert abs(scores) < 3.3 * variance**0.5


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 99))
def test_jobs_of_equal_size_load_exactly_the_union(common, more, other_seed, seed):
    """Without any cache: an item of both is drawn by both in the same step."""
    order = Dependent({"a": range(common + more), "b": [*range(common), *range(100, 100 + more)]}, seed)
    loads = [item for _ in range(common + more) for item in order.step()]

    assert len(loads) == len(set(loads)) == common + 2 * more


def test_two_jobs_agree_as_often_as_any_coupling_allows():
    jobs = {"a": range(60), "b": range(30, 130)}
    same = sum(len(Dependent(jobs, seed).step()) == 1 for seed in range(3000))

    assert abs(same - 3000 * 30 / 100) < 3.3 * (3000 * 0.3 * 0.7) ** 0.5


def test_jobs_that_are_left_are_coupled_as_if_a_masked_one_were_not_there():
    order = Dependent({"a": range(50), "b": range(50), "c": range(40, 60)}, 1)

    assert all(len(order.step(["c"])) == 1 for _ in range(50))
    assert order.remaining("c") == 20


@given(st.integers(0, 99))
def test_a_step_gives_each_job_one_item_and_loads_at_most_one_per_job(seed):
    rng = np.random.default_rng(seed)
    order = Dependent({f"j{i}": rng.permutation(40)[: rng.integers(1, 41)] for i in range(5)}, seed)
    while given := order.step():
        receivers = [job for jobs in given.values() for job in jobs]
        assert len(given) <= len(receivers) == len(set(receivers)) <= 5


def chain_loads(sets, rng):
    """Loads of an epoch without a cache, on plain sets."""
    loads = 0
    while sets := {job: items for job, items in sets.items() if items}:
        given = chain(sets, lambda a, b: rng.random() < a / b, lambda items: int(rng.choice(sorted(items))))
        loads += len({item for item, _ in given})
        for item, jobs in given:
            for job in jobs:
                sets[job].remove(item)
    return loads


def test_loads_without_a_cache_are_those_of_the_chain_on_plain_sets():
    rng = np.random.default_rng(1)
    ours, theirs = [], []
    for seed in range(25):
        jobs = {f"j{i}": rng.permutation(60)[:45] for i in range(4)}
        order = Dependent(jobs, seed)
        ours.append(sum(len(order.step()) for _ in range(45)))
        theirs.append(chain_loads({job: set(items.tolist()) for job, items in jobs.items()}, rng))

    spread = np.std(np.array(ours) - theirs) / 5
    assert abs(np.mean(ours) - np.mean(theirs)) < 3.3 * spread
    assert abs(np.mean(ours) / np.mean(theirs) - 1) < 0.02


PUBLISHED = {0: (3992, 3992, 2260, 2260, 3739), 66: (3851, 3657, 2185, 2035, 1330), 533: (2797, 2068, 1708, 1330, 1330)}
"""Cache items -> loads of 4 jobs with 1000 of 1333 items each, out of 4000 (specification of this project, 1.1)."""

COLUMNS = [
    ("independent", "lru"), ("independent", "refcount"), ("dependent", "lru"), ("dependent", "refcount"),
    ("shared", "refcount"),
]  # fmt: skip


@pytest.mark.parametrize("cache_items", PUBLISHED)
def test_the_table_of_the_specification_is_met_or_beaten_and_its_ranking_holds(cache_items):
    rng = np.random.default_rng(3)
    jobs = {f"j{i}": rng.permutation(1333)[:1000] for i in range(4)}
    found = []
    for name, policy in COLUMNS:
        order, cache, loads = ORDERS[name](jobs, 1), TieredCache(cache_items, policies=policy), 0
        for items in jobs.values():
            cache.expect(items)
        while given := order.step():
            found_here = {item: [cache.get(item, job) for job in group] for item, group in given.items()}
            missed = [item for item, views in found_here.items() if None in views]
            loads += len(missed)
            for item in missed:
                cache.put(item, "encoded", b"x")
        found.append(loads)

    # One draw of the sets: 4 %. RefCnt with correct counts loads up to 8 % less than the prototype of that table.
    for ours, published in zip(found, PUBLISHED[cache_items], strict=True):
        assert 0.9 * published <= ours <= 1.04 * published
    assert found[0] >= found[1] >= found[3]
    assert found[0] >= found[2] >= found[3]
