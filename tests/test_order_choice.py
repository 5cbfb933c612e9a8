"""The planner of orders: its simulation against laws and against plain counting; its choice against both candidates."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.rng import stream
from headway.data.cached.tiered import TieredCache
from headway.data.orders.choice import Reader, choose_order, count_loads
from headway.data.orders.strategies import ORDERS
from tests.refusals import refused


def mix(seed, *, of=300, equal=False):
    """Two to four jobs on random subsets; (readers, seconds over which they arrive)."""
    rng = stream(seed, "mix")
    sizes = rng.integers(of // 3, of + 1, int(rng.integers(2, 5)))
    sizes[:] = sizes[0] if equal else sizes
    readers = {f"j{i}": Reader(rng.permutation(of)[:size]) for i, size in enumerate(sizes)}
    return readers, float(rng.choice([0.0, 0.5 * of]))


def union(readers):
    return np.unique(np.concatenate([reader.items for reader in readers.values()])).size


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=12)
@given(seed=st.integers(0, 999), cache_items=st.integers(0, 300))
def test_loads_lie_between_the_union_and_what_all_jobs_take(order, seed, cache_items):
    readers, _ = mix(seed, of=80)
    loads = count_loads(order, readers, cache_items=cache_items, seed=seed)

    assert union(readers) <= loads <= sum(reader.items.size for reader in readers.values())


@pytest.mark.parametrize("order", ["independent", "shared", "dependent"])
@given(seed=st.integers(0, 99), cache_items=st.integers(0, 60))
@settings(max_examples=15)
def test_jobs_in_step_load_what_plain_counting_says(order, seed, cache_items):
    """The event loop against a loop over steps, with the same order and cache."""
    readers, _ = mix(seed, of=60)
    plain, cache, loads = ORDERS[order]({}, seed), TieredCache(cache_items, policies="refcount"), 0
    for job, reader in readers.items():
        plain.add(job, reader.items)
        cache.expect(reader.items)
    while given := plain.step():
        missing = []
        for item, jobs in given.items():
            if None in [cache.get(item, job) for job in jobs]:
                missing.append(item)
        loads += len(missing)
        for item in missing:
            cache.put(item, "encoded", b"x")

    # Within a step the event loop serves jobs in another order than the chain: counts of equal rank may part.
    assert count_loads(order, readers, cache_items=cache_items, seed=seed) == pytest.approx(loads, rel=0.08, abs=4)


def test_a_shared_order_reaches_the_union_with_a_small_cache():
    rng = np.random.default_rng(2)
    readers = {f"j{i}": Reader(rng.permutation(1333)[:1000]) for i in range(4)}

    assert count_loads("shared", readers, cache_items=66, seed=1) <= 1.01 * union(readers)
    assert count_loads("dependent", readers, cache_items=66, seed=1) > 1.3 * union(readers)


def test_a_job_of_half_the_speed_costs_nothing_when_the_cache_holds_what_it_misses():
    readers = {"fast": Reader(range(200)), "slow": Reader(range(200), items_per_s=0.5)}
    for order in ("shared", "dependent"):
        assert count_loads(order, readers, cache_items=100, seed=1) == 200
        assert count_loads(order, readers, cache_items=20, seed=1) > 250


def test_every_epoch_of_every_job_is_simulated():
    readers = {job: Reader(range(50), epochs=3) for job in "ab"}

    assert count_loads("shared", readers, cache_items=5, seed=1) == 150
    # The first job to begin an epoch is one item ahead of the other for the rest of it: a cache of 5 bridges that.
    assert 150 <= count_loads("dependent", readers, cache_items=5, seed=1) <= 160
    assert count_loads("shared", readers, cache_items=50, seed=1, policy="static") == 50


def test_what_is_made_ahead_is_shared_as_a_cache_is():
    readers = {f"j{i}": Reader(np.random.default_rng(i).permutation(800)[:600]) for i in range(3)}
    loads = [
        count_loads("shared", {job: replace(reader, ahead_items=ahead) for job, reader in readers.items()},
                    cache_items=0, seed=1)
        for ahead in (0, 10, 80)
    ]  # fmt: skip

    assert loads[0] > loads[1] > loads[2] == union(readers)


@pytest.mark.parametrize("used", [1, 37, 150])
def test_jobs_that_are_under_way_are_counted_from_now_on(used):
    """In the shared order a job that comes now is beside the first one, and shares also what that has ahead."""
    readers = {"first": Reader(range(200), ahead_items=8, used_items=used), "late": Reader(range(200), ahead_items=8)}
    changed = [
        count_loads(order, readers, cache_items=0, seed=1, before=before)
        for before, order in (("shared", "dependent"), ("dependent", "shared"), ("dependent", "dependent"))
    ]

    assert count_loads("shared", readers, cache_items=0, seed=1) == 200 - 8
    assert min(changed) > 200 - 8
    assert choose_order(readers, cache_items=0, seed=1, before="shared").order == "shared"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_holds_for_other_seeds_and_arrivals(seed):
    readers, spread_s = mix(seed, of=200)
    choice = choose_order(readers, cache_items=30, seed=seed, arrival_spread_s=spread_s)
    judged = {}
    for order in ("shared", "dependent"):
        loads = []
        for trial in range(12 if spread_s else 4):
            late = stream(99, "judge", trial).random(len(readers)) * spread_s
            jobs = {
                job: Reader(reader.items, arrives_s=float(delay))
                for (job, reader), delay in zip(readers.items(), late, strict=True)
            }
            loads.append(count_loads(order, jobs, cache_items=30, seed=1000 + trial))
        judged[order] = np.mean(loads)

    assert judged[choice.order] <= 1.03 * min(judged.values())


def test_a_large_dataset_is_judged_by_a_sample_of_it():
    rng = np.random.default_rng(1)
    readers = {f"j{i}": Reader(rng.permutation(200_000)[: 20_000 * (1 + 3 * i)]) for i in range(3)}
    choice = choose_order(readers, cache_items=10_000, seed=1, most_items=1000)

    assert choice.sampled_fraction == 1000 / 140_000
    assert 0.9 < choice.union * choice.sampled_fraction**-1 / union(readers) < 1.1
    assert choice.order == "dependent"


@pytest.mark.slow
def test_equal_arguments_give_equal_choices():
    readers, spread_s = mix(3)

    assert choose_order(readers, cache_items=20, seed=1, arrival_spread_s=spread_s) == choose_order(
        readers, cache_items=20, seed=1, arrival_spread_s=spread_s
    )


test_bad_input_is_one_clear_error = refused(
    (lambda r: choose_order({}, cache_items=1, seed=0), "0 readers.*give at least 1"),
    (lambda r: choose_order(r, cache_items=1, seed=0, candidates=()), "0 candidates"),
    (lambda r: choose_order(r, cache_items=1, seed=0, candidates=["dependant"]), "Did you mean 'dependent'"),
    (lambda r: count_loads("shared", r, cache_items=1, seed=0, policy="lur"), "Did you mean 'lru'"),
    (lambda r: Reader([1], items_per_s=0), "items_per_s is 0"),
    (lambda r: Reader([1], arrives_s=-1), "arrives_s is -1"),
    (lambda r: Reader([1], epochs=0), "epochs is 0"),
    (lambda r: Reader([1], ahead_items=-1), "ahead_items is -1"),
    (lambda r: Reader([1], used_items=-2), "used_items -2"),
    (
        lambda r: count_loads("shared", {"a": Reader([1, 2], used_items=1)}, cache_items=1, seed=0, before="shard"),
        "Did you mean 'shared'",
    ),
    by=lambda make: make({"a": Reader([1, 2])}),
)
