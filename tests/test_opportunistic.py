"""Seneca's order: one storage read per item for all jobs, exactly once, nobody meets one augmented tensor twice."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.cached.tiered import TieredCache
from headway.data.orders.random_orders import Opportunistic
from headway.data.service.flights import Flights


def epoch(order, cache, form, payload):
    """Run until nobody needs anything; return (loads, job -> [(item, payload)])."""
    loads, received = 0, {job: [] for job in order.jobs}
    while given := order.step():
        for item, jobs in sorted(given.items()):
            lost = []
            for job in sorted(jobs):
                found = cache.get(item, job)
                received[job].append((item, bytes(found[1]) if found else None))
                lost += [] if found else [job]
            if lost:
                loads += 1
                made = payload()
                for job in lost:
                    received[job][-1] = (item, made)
                order.store(item, form, made, served=lost)
    return loads, received


def fresh():
    """Return a maker of payloads that never repeats one."""
    count = iter(range(1 << 30))
    return lambda: next(count).to_bytes(4, "little")


@pytest.mark.parametrize("cached", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("num_jobs", [2, 4])
def test_jobs_of_one_dataset_read_each_item_from_storage_once_together(num_jobs, cached):
    """A miss rate of 1 / J at any size of cache (Seneca's law)."""
    num, payload = 600, fresh()
    cache = TieredCache(int(cached * num) * 4, (0, 0, 1))
    order = Opportunistic({f"j{i}": range(num) for i in range(num_jobs)}, 3, cache=cache)
    for _ in range(2):
        loads, received = epoch(order, cache, "augmented", payload)

        assert num <= loads <= 1.03 * num
        for job, items in received.items():
            assert sorted(item for item, _ in items) == list(range(num))
            assert order.substituted_fraction(job) == pytest.approx(1 - 1 / num_jobs, abs=0.1)
            order.restart(job)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), num_jobs=st.integers(1, 4), capacity=st.integers(0, 20))
def test_no_job_meets_one_augmented_tensor_twice_over_epochs_subsets_and_departures(seed, num_jobs, capacity):
    rng, payload = np.random.default_rng(seed), fresh()
    cache = TieredCache(4 * capacity, (0, 0, 1))
    jobs = {f"j{i}": rng.permutation(25)[: rng.integers(1, 26)] for i in range(num_jobs)}
    order = Opportunistic(jobs, seed, cache=cache)
    tensors = {job: Counter() for job in jobs}
    for turn in range(3):
        _, received = epoch(order, cache, "augmented", payload)
        for job, items in received.items():
            assert sorted(item for item, _ in items) == sorted(jobs[job].tolist())
            tensors[job].update(tensor for _, tensor in items)
            order.restart(job)
        if turn == 1 and num_jobs > 1:
            order.remove("j0")

    assert all(max(count.values()) == 1 for count in tensors.values())


@pytest.mark.parametrize("form", ["encoded", "decoded"])
@settings(max_examples=20)
@given(num=st.integers(1, 80), capacity=st.integers(0, 80), seed=st.integers(0, 99))
def test_one_job_has_the_hits_of_a_static_cache(form, num, capacity, seed):
    cache = TieredCache(capacity, (1, 0, 0) if form == "encoded" else (0, 1, 0))
    order = Opportunistic({"only": range(num)}, seed, cache=cache)
    for turn in range(3):
        loads, _ = epoch(order, cache, form, lambda: b"x")
        assert loads == (num - min(capacity, num) if turn else num)
        order.restart("only")


@pytest.mark.parametrize("num_jobs", [1, 3])
@pytest.mark.parametrize("form", ["encoded", "decoded"])
def test_what_is_cached_for_good_comes_at_its_own_turn(form, num_jobs):
    """Substitution would win no load over a static form, and open every epoch with the same items."""
    cache = TieredCache(20, (1, 0, 0) if form == "encoded" else (0, 1, 0))
    order = Opportunistic({f"j{i}": range(100) for i in range(num_jobs)}, 1, cache=cache)
    opened = []
    for _ in range(4):
        held = cache.items()
        loads, received = epoch(order, cache, form, lambda: b"x")
        opened.append(len(held & {item for item, _ in received["j0"][:20]}))
        # Once the cache is full, each job reads from storage what it does not hold, and no more.
        assert loads <= num_jobs * (100 - len(held))
        for job in received:
            assert order.substituted_fraction(job) == 0
            order.restart(job)

    assert max(opened) <= 12


def test_an_item_that_is_kept_for_good_after_it_was_offered_is_offered_no_more():
    cache = TieredCache(10, (0, 0.5, 0.5))
    order = Opportunistic({"a": range(50), "b": range(50)}, 1, cache=cache)
    cache.put(3, "augmented", b"x")
    cache.put(3, "decoded", b"x")
    order.step()

    assert order.num_substituted.get("a", 0) == order.num_substituted.get("b", 0) == 0


def test_what_is_cached_goes_first_and_the_bias_is_counted():
    cache = TieredCache(10, (0, 1, 0), policies="lru")
    order = Opportunistic({"a": range(100)}, 1, cache=cache)
    for item in range(20, 30):
        cache.put(item, "decoded", b"x")
    first = [next(iter(order.step())) for _ in range(10)]

    assert sorted(first) == list(range(20, 30))
    assert order.substituted_fraction("a") >= 0.8


def test_an_item_that_leaves_the_cache_is_not_offered_any_more():
    cache = TieredCache(2, (0, 1, 0), policies="lru")
    order = Opportunistic({"a": range(50)}, 1, cache=cache)
    order.step()
    cache.put(3, "decoded", b"x")
    cache.put(4, "decoded", b"x")
    cache.discard(3)

    assert next(iter(order.step())) == 4
    assert order.num_substituted["a"] == 1


def test_a_state_carries_the_counts_and_what_each_job_still_needs():
    cache = TieredCache(10, (0, 0, 1))
    order = Opportunistic({"a": range(30), "b": range(20)}, 1, cache=cache)
    for _ in range(7):
        order.step()
    again = Opportunistic({}, 0, cache=TieredCache(10, (0, 0, 1)))
    again.load_state_dict(order.state_dict())

    assert again.num_given == order.num_given
    assert {job: again.needed(job).tolist() for job in "ab"} == {job: order.needed(job).tolist() for job in "ab"}


def test_what_is_on_its_way_for_another_job_counts_as_cached():
    flights = Flights(random=True)
    order = Opportunistic({"a": range(50), "b": range(50)}, 1, cache=TieredCache(0), nearby=flights)
    order.draw("b")
    mine = order.draw("a")
    flight = flights.launch(mine, draw=0, start=None, payload=None, due=0)
    flight.jobs.add("a")
    assert order.draw("b") == mine
    other = next(item for item in range(50) if item in order.needed("a") and item in order.needed("b"))
    flight = flights.launch(other, draw=0, start=None, payload=None, due=0)
    flights.land(flight.number)
    flights.gone(other)
    before = order.num_substituted["b"]
    order.draw("b")
    assert order.num_substituted["b"] == before


def test_nothing_is_kept_of_a_job_that_left():
    order = Opportunistic({"a": range(9), "b": range(9)}, 1, cache=TieredCache(0))
    order.step()
    order.remove("a")

    assert list(order.num_given) == ["b"]
    assert "a" not in order.num_substituted
