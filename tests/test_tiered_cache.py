"""The tiered cache: budgets hold, policies keep their laws, counts are right, views outlive their entries."""

import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.bytes.order import permute
from headway.data.cached.partition import FORMS, partition_cache
from headway.data.cached.tiered import CACHE_POLICIES, TieredCache
from headway.data.orders.strategies import ORDERS
from tests.refusals import refused

calls = st.lists(
    st.tuples(
        st.sampled_from(["get", "put", "expect", "forget", "discard"]), st.integers(0, 12), st.sampled_from(FORMS),
        st.integers(0, 40), st.sampled_from("ab"),
    ),
    max_size=80,
)  # fmt: skip


def put(cache, item, refs, payload=b"x"):
    """Offer an item that so many jobs need."""
    cache.expect([item], refs - cache.refs(item))
    return cache.put(item, "encoded", payload)


@pytest.mark.parametrize("policy", CACHE_POLICIES)
@settings(max_examples=60)
@given(calls=calls, bytes=st.integers(0, 120))
def test_budgets_hold_payloads_are_what_was_put_and_nothing_is_counted_wrong(policy, calls, bytes):
    cache = TieredCache(bytes, (0.5, 0.3, 0.2), policies=policy, num_jobs=2)
    present = set()
    cache.watch(present.add, present.discard)
    refs, taken = Counter(), 0
    for call, item, form, size, job in calls:
        if call == "get":
            found = cache.get(item, job)
            taken += 1
            refs[item] = max(refs[item] - 1, 0)
            assert found is None or set(found[1]) <= {item}
        elif call == "put":
            cache.put(item, form, b"%c" % item * size)
        elif call == "discard":
            cache.discard(item, form)
        else:
            delta = 1 if call == "expect" else -1
            cache.expect([item], delta)
            refs[item] = max(refs[item] + delta, 0)
        assert all(cache.used_bytes[f] <= cache.capacity_bytes[f] for f in FORMS)
        assert cache.items() == present == {i for i in range(13) if i in cache}
        assert all(cache.refs(i) == refs[i] for i in range(13))
        assert policy != "refcount" or all(refs[i] for i in present)

    assert cache.hits + cache.misses == taken


def hits_of_a_pass(cache, num, epoch):
    """Read all items once in an order of this epoch; return how many were there."""
    before = cache.hits
    for item in permute(num, 5, epoch)(np.arange(num)).tolist():
        if cache.get(item) is None:
            cache.put(item, "encoded", b"x")
    return cache.hits - before


@pytest.mark.parametrize("cached", [0.2, 0.35, 0.5, 0.65, 0.8])
@pytest.mark.parametrize("policy", ["static", "lru"])
def test_hits_follow_the_closed_law(policy, cached):
    num = 4000
    cache = TieredCache(int(cached * num), policies=policy)
    hits = [hits_of_a_pass(cache, num, epoch) for epoch in range(4)]

    assert hits[0] == 0
    if policy == "static":
        assert hits[1:] == [math.floor(cached * num)] * 3
    else:
        assert np.mean(hits[1:]) / num == pytest.approx(cached + (1 - cached) * math.log1p(-cached), abs=0.01)


@given(st.lists(st.integers(0, 9), max_size=100), st.integers(0, 5))
def test_lru_is_an_ordered_dictionary(items, capacity):
    cache, oracle, hits = TieredCache(capacity, policies="lru"), OrderedDict(), 0
    for item in items:
        if item in oracle:
            hits += 1
            oracle.move_to_end(item)
        elif capacity:
            oracle[item] = None
            if len(oracle) > capacity:
                oracle.popitem(last=False)
        if cache.get(item) is None:
            cache.put(item, "encoded", b"x")
        assert cache.items() == set(oracle)

    assert cache.hits == hits


@settings(max_examples=30)
@given(seed=st.integers(0, 99), name=st.sampled_from(["independent", "shared", "dependent"]))
def test_counts_sum_to_what_all_jobs_still_need_as_jobs_come_and_go(seed, name):
    rng = np.random.default_rng(seed)
    order, cache = ORDERS[name]({}, seed), TieredCache(8, policies="refcount")
    for turn in range(60):
        job = f"j{turn // 12}"
        if turn % 12 == 0:
            order.add(job, rng.permutation(30)[:12])
            cache.expect(order.needed(job))
        if turn == 40:
            cache.expect(order.needed("j2"), -1)
            order.remove("j2")
        for item, jobs in order.step().items():
            for receiver in jobs:
                cache.get(item, receiver)
            cache.put(item, "encoded", b"x")
        assert sum(cache.refs(item) for item in range(30)) == sum(order.remaining(job) for job in order.jobs)


def test_refcount_evicts_one_entry_of_the_lowest_count_and_never_a_higher_one():
    cache = TieredCache(2, policies="refcount")
    assert put(cache, 0, 1)
    assert put(cache, 1, 3)
    assert put(cache, 2, 2)
    assert cache.items() == {1, 2}
    assert not put(cache, 3, 2)
    assert not put(cache, 4, 0)
    assert (cache.evictions, cache.refused) == (1, 2)
    for _ in range(3):
        cache.get(1)
    assert cache.items() == {2}


def test_one_large_payload_evicts_no_more_than_it_needs_and_nothing_if_that_is_not_enough():
    cache = TieredCache(10, policies="refcount")
    for item, refs in enumerate((1, 2, 9)):
        put(cache, item, refs, b"xxx")
    assert not put(cache, 5, 99, b"x" * 11)
    assert not put(cache, 6, 5, b"x" * 8)
    assert cache.items() == {0, 1, 2}
    assert put(cache, 7, 5, b"x" * 4)
    assert cache.items() == {1, 2, 7}


def test_what_counts_uses_is_handed_to_each_job_once_and_then_leaves():
    cache = TieredCache(1, (0, 0, 1), num_jobs=3)
    assert cache.put(4, "augmented", b"x", served=["a"])
    assert cache.get(4, "a") is None
    assert [cache.usable(4, job) for job in "ab"] == [False, True]
    assert cache.get(4, "b") is not None
    assert cache.get(4, "c") is not None
    assert 4 not in cache


def test_a_job_that_goes_is_not_waited_for():
    cache = TieredCache(3, (0, 0, 1), num_jobs=2)
    for item in range(3):
        cache.put(item, "augmented", b"x", served=["a"])
    cache.get(0, "b")
    cache.release(range(3), "b")

    assert len(cache) == 0


def test_the_most_prepared_form_is_handed_out():
    cache = TieredCache(300, (0.4, 0.3, 0.3), num_jobs=2)
    for form in FORMS:
        cache.put(1, form, form.encode())
    assert [cache.get(1, job)[0] for job in "aabb"] == ["augmented", "decoded", "augmented", "decoded"]
    assert cache.form_hits == {"encoded": 0, "decoded": 2, "augmented": 2}
    cache.discard(1, "decoded")
    assert cache.get(1)[0] == "encoded"
    cache.discard(1)
    assert cache.get(1) is None


def test_a_view_is_read_only_and_outlives_its_entry():
    source = bytearray(b"abc")
    cache = TieredCache(3, policies="lru")
    cache.put(0, "encoded", memoryview(source))
    source[:] = b"xyz"
    _, view = cache.get(0)
    cache.put(1, "encoded", b"new")

    assert 0 not in cache
    assert (view.readonly, bytes(view)) == (True, b"abc")


def test_a_split_of_the_planner_divides_the_cache():
    rates = {"decode_augment_per_s": 10, "augment_per_s": 100, "accelerator_per_s": 1000}
    cache = TieredCache(10_000, partition_cache(bytes=10_000, rates=rates, sizes={"encoded": 10, "decoded": 50}, n=100))

    assert sum(cache.capacity_bytes.values()) <= 10_000
    assert cache.capacity_bytes["augmented"] >= 5000


test_bad_input_is_one_clear_error = refused(
    (lambda: TieredCache(-1), "bytes is -1"),
    (lambda: TieredCache(9, (0.5, 0.6, 0)), "sum to 1 at most"),
    (lambda: TieredCache(9, (-0.5, 0.6, 0)), "3 fractions of 0 to 1"),
    (lambda: TieredCache(9, (1.0, 0)), "3 fractions"),
    (lambda: TieredCache(9, policies="lur"), "Did you mean 'lru'"),
    (lambda: TieredCache(9, policies={"raw": "lru"}), "unknown form 'raw'"),
    (lambda: TieredCache(9, num_jobs=0), "num_jobs is 0"),
    (lambda: TieredCache(9).put(0, "encode", b""), "Did you mean 'encoded'"),
    (lambda: TieredCache(9).put(-1, "encoded", b""), "item is -1"),
    (lambda: TieredCache(9).expect([3, -1]), "item -1 is expected"),
    (lambda: TieredCache(9).discard(0, "raw"), "unknown form 'raw'"),
)


def test_what_is_needed_goes_last_and_what_is_in_nobodys_way_stays_for_the_next_epoch():
    """Nobody needs it (first to leave) < nobody had it yet this epoch < some had it and others still need it."""
    cache = TieredCache(3, policies="needed")
    for item in range(3):
        cache.put(item, "encoded", b"x")
    cache.expect([1, 2])
    cache.expect([2])
    cache.get(2)
    assert put(cache, 7, 1)
    assert cache.items() == {1, 2, 7}
    assert put(cache, 8, 2)
    assert cache.items() == {2, 7, 8}
    assert not put(cache, 9, 0)
    assert not put(cache, 9, 1)


@pytest.mark.parametrize("cached", [0.2, 0.5])
def test_one_job_has_the_hits_of_a_static_cache_under_needed(cached):
    num = 500
    cache, hits = TieredCache(int(cached * num), policies="needed"), []
    for epoch in range(3):
        cache.expect(range(num))
        hits.append(hits_of_a_pass(cache, num, epoch))

    assert hits == [0, cached * num, cached * num]


def test_a_cache_that_counts_uses_lets_those_with_the_fewest_left_go():
    cache = TieredCache(2, (0, 0, 1), num_jobs=4)
    assert cache.put(1, "augmented", b"x", served=["a", "b", "c"])
    assert cache.put(2, "augmented", b"x", served=["a"])
    assert cache.put(3, "augmented", b"x", served=["a", "b"])
    assert cache.items() == {2, 3}
    assert not cache.put(4, "augmented", b"x", served=["a", "b"])
    assert cache.served(3) == {"a", "b"}


@given(calls=calls, shares=st.lists(st.floats(0, 0.33), min_size=3, max_size=3))
def test_a_cache_that_is_divided_anew_keeps_its_budgets_and_says_before_what_it_may_keep(calls, shares):
    cache = TieredCache(120, (0.5, 0.3, 0.2), policies="needed", num_jobs=2)
    for turn, (_, item, form, size, _) in enumerate(calls):
        if turn == len(calls) // 2:
            cache.divide(shares)
        may = cache.may_keep(item, form, size)
        here = item in cache and cache.discard(item, form)
        assert not (cache.put(item, form, b"x" * size) and not may) or here is None
        assert all(cache.used_bytes[f] <= cache.capacity_bytes[f] for f in FORMS)


def test_a_get_that_was_not_expected_takes_nobodys_need_away():
    cache = TieredCache(9, policies="refcount")
    put(cache, 1, 2)
    cache.get(1, expected=False)
    assert cache.refs(1) == 2


def test_what_is_kept_for_any_number_of_uses_does_not_note_who_had_it():
    cache = TieredCache(4, (0.5, 0, 0.5), num_jobs=3)
    for item, form in ((0, "encoded"), (1, "augmented")):
        cache.put(item, form, b"x")
        for job in "ab":
            assert cache.get(item, job) is not None

    assert (cache.served(0), cache.served(1)) == (set(), {"a", "b"})
