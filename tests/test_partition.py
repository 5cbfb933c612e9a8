"""The split of a cache against a brute-force grid of both models; the partition map against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.data.caches.cache import TieredCache
from headway.data.caches.partition import (
    CACHE_MODELS,
    FORMS,
    RATES,
    PartitionMap,
    form_rates,
    partition_cache,
    repaced,
    resource_costs,
)

RATE = {
    "storage_bytes_per_s": 2e8, "storage_network_bytes_per_s": 1.2e9, "cache_bytes_per_s": 5e9,
    "network_bytes_per_s": 1.2e9, "pcie_bytes_per_s": 1.6e10, "augment_per_s": 3000.0,
    "decode_augment_per_s": 1000.0, "accelerator_per_s": 12000.0,
}  # fmt: skip
SIZE = {"encoded": 1.1e5, "decoded": 6e5}


def published(rate, size, n, bytes, split):
    """The published objective for one split (encoded, decoded, augmented), as the specification states it."""
    stored, encoded, decoded = size.get("stored", size["encoded"]), size["encoded"], size["decoded"]
    rest, counts = n, []
    for share, each in ((split[2], 2 * decoded), (split[1], decoded), (split[0], encoded)):
        counts.append(min(rest, share * bytes / each))
        rest -= counts[-1]
    cache, network, pcie = rate["cache_bytes_per_s"], rate["network_bytes_per_s"], rate["pcie_bytes_per_s"]
    both, augment, device = rate["decode_augment_per_s"], rate["augment_per_s"], rate["accelerator_per_s"]
    speeds = (
        min(cache / decoded, network / decoded, device),
        min(cache / decoded, network / decoded, augment, pcie / decoded, device),
        min(cache / encoded, network / encoded, both, pcie / decoded, device),
        min(
            rate["storage_bytes_per_s"] / stored, rate["storage_network_bytes_per_s"] / stored,
            network / encoded, both, pcie / decoded, device,
        ),
    )  # fmt: skip
    return sum(count / n * speed for count, speed in zip((*counts, rest), speeds, strict=True))


def bottleneck(rate, size, n, bytes, split):
    """Examples/s when the busiest resource sets the pace, for one split."""
    rest, counts = n, []
    for share, each in ((split[2], 2 * size["decoded"]), (split[1], size["decoded"]), (split[0], size["encoded"])):
        counts.append(min(rest, share * bytes / each))
        rest -= counts[-1]
    augmented, decoded, encoded, stored = counts[0], counts[1], counts[2], rest
    read = encoded * size["encoded"] + (decoded + augmented) * size["decoded"]
    seconds = (
        stored * size["encoded"] / min(rate["storage_bytes_per_s"], rate["storage_network_bytes_per_s"]),
        read / rate["cache_bytes_per_s"],
        (read + stored * size["encoded"]) / rate["network_bytes_per_s"],
        n * size["decoded"] / rate["pcie_bytes_per_s"],
        (encoded + stored) / rate["decode_augment_per_s"] + decoded / rate["augment_per_s"],
        n / rate["accelerator_per_s"],
    )
    return n / max(seconds)


OBJECTIVES = {"seneca": published, "bottleneck": bottleneck}
GRID = [(e / 20, d / 20, (20 - e - d) / 20) for e in range(21) for d in range(21 - e)]

setups = st.builds(
    lambda rates, encoded, inflation, n, cached: (
        dict(zip(RATES, rates, strict=True)),
        {"encoded": encoded, "decoded": encoded * inflation},
        n,
        max(cached * n * encoded * inflation, 2 * encoded),
    ),
    st.tuples(*[st.floats(1e7, 1e10)] * 5, *[st.floats(100, 20000)] * 3),
    st.floats(1e4, 1e6),
    st.floats(1.0, 12.0),
    st.integers(1, 2_000_000),
    st.floats(0.001, 3.0),
)


@pytest.mark.parametrize("model", CACHE_MODELS)
@settings(max_examples=40)
@given(setup=setups)
def test_no_split_of_a_grid_beats_the_program(model, setup):
    rate, size, n, bytes = setup
    split = partition_cache(rates=rate, sizes=size, n=n, bytes=bytes, model=model)
    best = max(OBJECTIVES[model](rate, size, n, bytes, point) for point in GRID)

    assert split.examples_per_s >= best * (1 - 1e-9)
    assert sum(split.fractions) <= 1 + 1e-9
    assert sum(split.counts) == pytest.approx(n)
    held = split.counts[0] * size["encoded"] + (split.counts[1] + 2 * split.counts[2]) * size["decoded"]
    assert held <= bytes * (1 + 1e-9)
    assert min(*split.fractions, *split.counts) >= 0


def configuration(seed: int) -> tuple[dict[str, float], dict[str, float], int, float]:
    """Return rates, sizes, examples and bytes of one of 200 machines."""
    rng = np.random.default_rng(seed)
    rates = dict(zip(RATES, [*10 ** rng.uniform(7, 10, 5), *10 ** rng.uniform(2, 4.3, 3)], strict=True))
    encoded, n = 10 ** rng.uniform(4, 6), int(10 ** rng.uniform(3, 6))
    sizes = {"encoded": encoded, "decoded": encoded * rng.uniform(1, 12)}
    return rates, sizes, n, float(rng.uniform(0.01, 3.0) * n * encoded)


@pytest.mark.parametrize("model", CACHE_MODELS)
def test_a_cache_that_is_filled_by_the_fractions_reaches_the_promised_rate(model):
    """200 machines: each form takes examples until its bytes are used, the most prepared form first."""
    reached = []
    for seed in range(200):
        rates, sizes, n, bytes = configuration(seed)
        split = partition_cache(rates=rates, sizes=sizes, n=n, bytes=bytes, model=model)
        reached.append(OBJECTIVES[model](rates, sizes, n, bytes, split.fractions) / split.examples_per_s)

    assert min(reached) >= 1 - 1e-6


def test_a_cache_of_examples_that_is_filled_by_the_fractions_holds_the_counts():
    """Where reading the cache sets the pace, room stays empty: a tiered cache holds what the split counted."""
    rates = {**RATE, "storage_bytes_per_s": 1e8, "cache_bytes_per_s": 5e7, "decode_augment_per_s": 1e5}
    split = partition_cache(rates=rates, sizes=SIZE, n=500, bytes=6e7, num_jobs=1, whole=True)
    cache = TieredCache(60_000_000, split)
    for item in range(500):
        cache.put(item, "encoded", bytes(int(SIZE["encoded"])))

    assert 0 < len(cache) == split.counts[0] < 6e7 // SIZE["encoded"]
    assert sum(split.fractions) < 0.9


@pytest.mark.parametrize("model", CACHE_MODELS)
@settings(max_examples=30)
@given(setup=setups, times=st.floats(1, 5))
def test_more_cache_or_faster_parts_never_lower_the_prediction(model, setup, times):
    rate, size, n, bytes = setup

    def predicted(rate, bytes):
        return partition_cache(rates=rate, sizes=size, n=n, bytes=bytes, model=model).examples_per_s

    base = predicted(rate, bytes)
    assert predicted(rate, bytes * times) >= base * (1 - 1e-9)
    assert predicted({name: value * times for name, value in rate.items()}, bytes) == pytest.approx(base * times)


@settings(max_examples=100)
@given(
    rates=st.tuples(*[st.floats(1e7, 1e10)] * 5, *[st.floats(100, 20000)] * 3),
    encoded=st.integers(10_000, 1_000_000),
    times=st.integers(1, 12),
    n=st.integers(1, 200),
    room=st.integers(1, 600),
)
def test_no_full_cache_of_whole_examples_is_faster(rates, encoded, times, n, room):
    rate, bytes = dict(zip(RATES, rates, strict=True)), room * encoded
    size = {"stored": encoded, "encoded": encoded, "decoded": times * encoded, "augmented": 2 * times * encoded}
    split = partition_cache(rates=rate, sizes=size, n=n, bytes=bytes, num_jobs=1, whole=True)
    seconds = np.stack(list(resource_costs(rate, size, 1.0).values())) / n
    decoded = np.arange(min(n, room // times) + 1)
    held = np.minimum(room - times * decoded, n - decoded)
    every = seconds @ np.stack([held, decoded, 0 * held, n - held - decoded])

    assert all(count == pytest.approx(round(count), abs=1e-6) for count in split.counts)
    assert sum(split.counts) == pytest.approx(n)
    best = every.max(axis=0).min()
    assert 1 / split.examples_per_s <= best * (1 + 1e-9)
    # Where no more encoded examples than fit would be slower, this is the optimum.
    if sum(split.fractions) == pytest.approx(1):
        assert 1 / split.examples_per_s == pytest.approx(best)
    assert np.dot(split.counts[:3], [size[form] for form in FORMS]) <= bytes * (1 + 1e-9)


def test_a_split_at_other_rates_keeps_its_examples_and_changes_its_speed():
    common = {"rates": RATE, "sizes": SIZE, "n": 1000, "bytes": 1e8}
    split = partition_cache(**common, num_jobs=1)
    slow = repaced(split, rates={**RATE, "storage_bytes_per_s": 1e6}, sizes=SIZE)

    assert repaced(split, rates=RATE, sizes=SIZE) == split
    assert (slow.fractions, slow.counts) == (split.fractions, split.counts)
    assert (slow.examples_per_s, slow.bottleneck) == (
        pytest.approx(1000 / (split.counts[3] * SIZE["encoded"] / 1e6)), "storage",
    )  # fmt: skip
    with pytest.raises(InputError, match="no rate that limits"):
        repaced(split, rates={}, sizes=SIZE)


def test_what_a_part_of_a_decoded_example_would_take_holds_encoded_ones():
    common = {"rates": {**RATE, "storage_bytes_per_s": 1e7}, "sizes": SIZE, "n": 64, "bytes": 14e6}
    part, whole = partition_cache(**common, num_jobs=1), partition_cache(**common, num_jobs=1, whole=True)

    assert part.counts[1] % 1 > 0.05
    assert whole.counts[1] == math.floor(part.counts[1])
    assert whole.counts[0] == math.floor((14e6 - whole.counts[1] * SIZE["decoded"]) / SIZE["encoded"])


def test_a_small_set_beside_a_slow_cpu_is_kept_augmented():
    """The specification's example: 7177 examples/s augmented, 3000 decoded, 1000 encoded."""
    rate = {**RATE, "cache_bytes_per_s": 2e10, "network_bytes_per_s": 7177 * SIZE["decoded"]}
    split = partition_cache(rates=rate, sizes=SIZE, n=33_000, bytes=115e9, model="seneca")

    assert form_rates(rate, {"stored": 1.1e5, **SIZE}).tolist() == [1000, 3000, 7177, 1000]
    assert split.counts == (0, 0, 33_000, 0)
    assert (split.examples_per_s, split.bottleneck) == (pytest.approx(7177), "augmented")


@pytest.mark.parametrize("model", CACHE_MODELS)
def test_without_a_cache_everything_stays_in_storage(model):
    split = partition_cache(rates=RATE, sizes=SIZE, n=1000, bytes=0, model=model)

    assert split.counts == (0, 0, 0, 1000)
    assert split.fractions == (1, 0, 0)
    assert split.examples_per_s == pytest.approx(1000)
    assert split.bottleneck == {"seneca": "stored", "bottleneck": "cpu"}[model]


def test_symbols_of_the_publication_and_several_links_are_understood():
    plain = partition_cache(rates=RATE, sizes=SIZE, n=1000, bytes=1e8, model="seneca")
    rates = {RATES[name]: value for name, value in RATE.items()} | {"NIC": [4e8, 8e8]}

    assert partition_cache(rates=rates, sizes={"enc": 1.1e5, "dec": 6e5}, n=1000, bytes=1e8, model="seneca") == plain


@settings(max_examples=40)
@given(
    num=st.integers(0, 300), hosts=st.integers(1, 6), seed=st.integers(0, 99), capacity=st.none() | st.integers(0, 80)
)
def test_a_partition_map_is_disjoint_covers_what_fits_and_is_the_same_on_every_host(num, hosts, seed, capacity):
    names = [f"host{i}" for i in range(hosts)]
    owners = PartitionMap(num, names, seed=seed, capacity=capacity)
    other = PartitionMap(num, names[::-1], seed=seed, capacity=capacity)
    held = [owners.items(name).tolist() for name in names]
    flat = list(itertools.chain.from_iterable(held))

    assert len(flat) == len(set(flat))
    assert all(owners.owner(item) == name for name, items in zip(names, held, strict=True) for item in items)
    assert [other.items(name).tolist() for name in names] == held
    if capacity is None:
        assert sorted(flat) == list(range(num))
    else:
        whole = PartitionMap(num, names, seed=seed)
        assert [len(items) for items in held] == [min(capacity, whole.items(name).size) for name in names]
        assert all(owners.owner(item) is None for item in set(range(num)) - set(flat))


@settings(max_examples=20)
@given(num=st.integers(1, 60), hosts=st.integers(1, 5), seed=st.integers(0, 99))
def test_the_hosts_of_an_item_are_ranked_as_they_would_own_it_one_after_the_other_without_those_before(
    num, hosts, seed
):
    names = [f"host{i}" for i in range(hosts)]
    owners = PartitionMap(num, names, seed=seed)
    for item in {0, num // 2, num - 1}:
        left, expected = list(names), []
        while left:
            expected.append(PartitionMap(num, left, seed=seed).owner(item))
            left.remove(expected[-1])

        assert owners.ranked(item) == expected


def test_room_that_is_left_holds_a_sample_of_what_other_hosts_hold():
    owners = PartitionMap(1000, ["a", "b", "c"], seed=1, capacity=250)
    copies = owners.copies("a", 100)

    assert copies.size == np.unique(copies).size == 100
    assert {owners.owner(int(item)) for item in copies} == {"b", "c"}
    assert copies.tolist() != owners.copies("b", 100).tolist()
    assert owners.copies("a", 10_000).size == owners.items("b").size + owners.items("c").size
    assert owners.copies("a", 0).size == 0


def test_an_augmented_example_that_serves_one_job_only_is_not_worth_its_room():
    fast = {**RATE, "cache_bytes_per_s": 2e10, "network_bytes_per_s": 2e10}
    setup = {"rates": fast, "sizes": SIZE, "n": 30_000, "bytes": 3e10}
    alone, four, free = (partition_cache(**setup, num_jobs=jobs) for jobs in (1, 4, None))

    assert alone.counts[2] == 0
    assert free.counts[2] > 0
    assert alone.examples_per_s <= four.examples_per_s <= free.examples_per_s


def test_hosts_hold_nearly_equal_parts_and_one_that_leaves_moves_its_own_only():
    full = PartitionMap(30_000, ["a", "b", "c"], seed=4)
    less = PartitionMap(30_000, ["a", "c"], seed=4)

    assert all(abs(full.items(name).size - 10_000) < 400 for name in "abc")
    for name in "ac":
        assert set(full.items(name).tolist()) <= set(less.items(name).tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": {**RATE, "augment_per_s": 0}}, "augment_per_s is 0; give a finite rate above 0"),
        ({"rates": {**RATE, "T_GPU": -3}}, "T_GPU is -3"),
        ({"rates": {**RATE, "pcie_bytes_per_s": math.inf}}, "pcie_bytes_per_s is inf"),
        ({"rates": {"storage": 3}}, "unknown rate 'storage'.*storage_bytes_per_s"),
        ({"rates": {}}, "give 'accelerator_per_s' at least"),
        ({"rates": {"T_DA": 100, "T_A": 300, "Bsto": 1e6}}, "give 'accelerator_per_s' at least"),
        ({"sizes": {"decoded": 3}}, "no 'encoded'"),
        ({"sizes": {"raw": 3, "encoded": 1, "decoded": 2}}, "unknown size 'raw'"),
        ({"sizes": {"encoded": math.nan, "decoded": 2}}, "encoded is nan"),
        ({"bytes": 1e4}, "an encoded example takes 110000.0"),
        ({"bytes": -1}, "bytes is -1"),
        ({"n": 0}, "n is 0"),
        ({"num_jobs": 0}, "num_jobs is 0"),
        ({"whole": True, "model": "seneca"}, "whole is True with model 'seneca'"),
        ({"model": "senica"}, "Did you mean 'seneca'"),
    ],
)
@pytest.mark.parametrize("model", CACHE_MODELS)
def test_bad_input_is_one_clear_error_that_names_the_field(change, message, model):
    arguments = {"rates": RATE, "sizes": SIZE, "n": 1000, "bytes": 1e8, "model": model, **change}
    with pytest.raises(InputError, match=message):
        partition_cache(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartitionMap(5, []), "at least 1 host"),
        (lambda: PartitionMap(5, ["a", "a"]), "each once"),
        (lambda: PartitionMap(-1, ["a"]), "-1 items"),
        (lambda: PartitionMap(5, ["a"], capacity=-1), "capacity is -1"),
        (lambda: PartitionMap(5, ["a"]).owner(5), "item 5 lies outside"),
        (lambda: PartitionMap(5, ["host1"]).items("host2"), "Did you mean 'host1'"),
    ],
)
def test_a_bad_map_is_one_clear_error(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_the_map_does_not_follow_the_order_of_items():
    owners = PartitionMap(1000, ["a", "b"], seed=1).items("a")

    assert abs(np.corrcoef(np.arange(owners.size), np.diff(owners, prepend=0))[0, 1]) < 0.15
