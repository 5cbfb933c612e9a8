"""Allocation programs: laws, against programs per job and nested ones, and the policies on one state each."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster import POLICIES, Cluster, fit_rates, leximin, maxmin
from headway.cluster.max_min import JobGroups, class_pairs, hand_down, solve
from headway.cluster.model import QueueState
from headway.cluster.policies import bubbles, fill, hadar, price
from headway.core.errors import InputError
from headway.core.linear import minimise


def instance(rng, num_kinds, copies, num_types=3):
    """Kinds of jobs, some of them several times: rates, scale, capacity, shared rates of kinds, kind of each job."""
    kinds = rng.uniform(0.2, 2.0, (num_kinds, num_types)) * (rng.random((num_kinds, num_types)) > 0.2)
    kinds[:, 0] = np.maximum(kinds[:, 0], 0.3)
    scale = rng.choice([1, 2], num_kinds)
    part = rng.uniform(0.2, 1.0, (num_kinds, num_kinds, num_types))
    shared = part * kinds[:, None]
    kind = np.repeat(np.arange(num_kinds), rng.integers(1, copies + 1, num_kinds))
    return kinds, scale, rng.integers(2, 5, num_types).astype(float), shared, kind


def state_of(rates, scale, *, shared=None, kind=None, seed=0, **columns):
    """A state of jobs that all came at time 0."""
    m, num_types = np.shape(rates)
    zeros = np.zeros(m)
    given = {
        "left": np.full(m, 1000.0), "weight": np.ones(m), "entity": np.arange(m) % 2, "arrival_s": zeros,
        "deadline_s": np.full(m, np.inf), "isolated_s": zeros, "restart_s": zeros, **columns,
    }  # fmt: skip
    return QueueState(
        index=np.arange(m), rates=np.asarray(rates, float), kind=np.arange(m) if kind is None else kind,
        shared=np.zeros((0, 0, num_types)) if shared is None else shared, scale=np.asarray(scale),
        previous=np.zeros((m, num_types)), partner=np.full(m, -1), rng=np.random.default_rng(seed), **given,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("packed", [False, True])
def test_classes_reach_the_objective_of_jobs(seed, packed):
    kinds, scale, capacity, shared, kind = instance(np.random.default_rng(seed), 4, 3)
    pairs = {
        (int(a), int(b)): (shared[kind[a], kind[b]], shared[kind[b], kind[a]])
        for a, b in itertools.combinations(range(len(kind)), 2)
        if packed and scale[kind[a]] == scale[kind[b]]
    }
    one = np.ones(len(kind))
    per_job = JobGroups(
        kinds[kind], scale[kind].astype(float), one, one,
        np.array(list(pairs), np.int64).reshape(-1, 2), np.array(list(pairs.values())).reshape(-1, 2, 3),
    )  # fmt: skip
    truth = solve(per_job, capacity).value

    count = np.bincount(kind).astype(float)
    two, rates = class_pairs(kinds, shared, scale, count) if packed else (np.zeros((0, 2), int), np.zeros((0, 2, 3)))
    groups = JobGroups(kinds, scale.astype(float), count, np.ones(4), two, rates)
    best = solve(groups, capacity)
    assert best.value == pytest.approx(truth, rel=1e-6)
    assert maxmin(kinds[kind], scale[kind], capacity, pairs=pairs or None)[1] == pytest.approx(truth, rel=1e-6)

    rows, times = hand_down(groups, kind, best.q)
    assert times.sum(axis=0) == pytest.approx(best.q.sum(axis=0))
    alone = (best.y / count[:, None])[kind]
    busy = alone.sum(axis=1)
    for (a, b), time in zip(rows, times, strict=True):
        assert a != b
        assert scale[kind[a]] == scale[kind[b]]
        busy[[a, b]] += time.sum()
    assert busy.max() <= 1 + 1e-6


@given(st.integers(0, 10_000), st.integers(1, 8))
@settings(max_examples=40)
def test_maxmin_is_feasible_and_as_good_as_one_group_per_job(seed, num_jobs):
    rng = np.random.default_rng(seed)
    unit = rng.uniform(0.1, 1.0, (2, 3))[rng.integers(0, 2, num_jobs)]
    rates, scale = unit * rng.uniform(0.1, 10.0, (num_jobs, 1)), rng.integers(1, 4, num_jobs)
    capacity, weights = rng.integers(3, 6, 3).astype(float), rng.uniform(0.5, 2.0, num_jobs)
    x, value = maxmin(rates, scale, capacity, weights=weights)
    no_pairs = np.zeros((0, 2), int), np.zeros((0, 2, 3))
    truth = solve(JobGroups(rates, scale.astype(float), np.ones(num_jobs), weights, *no_pairs), capacity).value

    assert value == pytest.approx(truth, rel=1e-6)
    assert (x >= 0).all()
    assert x.sum(axis=1).max() <= 1 + 1e-6
    assert (scale @ x <= capacity * (1 + 1e-6)).all()
    assert ((rates * x).sum(axis=1) / weights).min() >= value * (1 - 1e-5)

    # A device more harms nobody, and rates and weights in other units are the same problem.
    assert maxmin(rates, scale, np.add(capacity, [1, 0, 0]), weights=weights)[1] >= value * (1 - 1e-6)
    unit = rng.uniform(0.1, 10.0, num_jobs)
    other = maxmin(rates * unit[:, None], scale, capacity, weights=weights * unit)[1]
    assert other == pytest.approx(value, rel=1e-6)


def nested(rates, scale, capacity):
    """Leximin by its definition: raise the least of all, then ask of each job whether it can rise above."""
    num_jobs, num_types = rates.shape
    level = np.full(num_jobs, np.nan)
    while np.isnan(level).any():
        rows = np.zeros((num_jobs * 2 + num_types, num_jobs * num_types + 1))
        for m, j in itertools.product(range(num_jobs), range(num_types)):
            rows[m, m * num_types + j] = 1
            rows[num_jobs + j, m * num_types + j] = scale[m]
            rows[num_jobs + num_types + m, m * num_types + j] = rates[m, j]
        open_ = np.flatnonzero(np.isnan(level))
        rows[num_jobs + num_types + open_, -1] = -1
        high = np.concatenate((np.ones(num_jobs), capacity, np.full(num_jobs, np.inf)))
        low = np.concatenate((np.full(num_jobs + num_types, -np.inf), np.nan_to_num(level) * (1 - 1e-9)))
        cost = np.zeros(rows.shape[1])
        cost[-1] = -1
        z = -minimise(cost, rows=rows, row_low=low, row_high=high).value
        rows[:, -1] = 0
        low[num_jobs + num_types + open_] = z * (1 - 1e-9)
        stuck = [
            m for m in open_ if -minimise(-rows[num_jobs + num_types + m], rows=rows, row_low=low, row_high=high).value
            <= z * (1 + 1e-5)
        ]  # fmt: skip
        level[stuck] = z
    return level


@pytest.mark.parametrize("seed", range(100))
def test_leximin_is_that_of_nested_programs(seed):
    rng = np.random.default_rng(seed)
    num_jobs = int(rng.integers(2, 7))
    rates = rng.uniform(0.2, 2.0, (num_jobs, 2)) * (rng.random((num_jobs, 2)) > 0.25)
    rates[:, 0] = np.maximum(rates[:, 0], 0.1)
    scale, capacity = rng.integers(1, 3, num_jobs), rng.integers(2, 4, 2).astype(float)
    x, level = leximin(rates, scale, capacity)

    assert np.sort(level) == pytest.approx(np.sort(nested(rates, scale, capacity)), rel=1e-4)
    assert ((rates * x).sum(axis=1) >= level * (1 - 1e-4)).all()


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"fifo_released"}))  # which gives types away more than once
@pytest.mark.parametrize("num_jobs", [1, 7, 30])
def test_every_policy_stays_within_jobs_and_devices(name, num_jobs):
    rng = np.random.default_rng(num_jobs)
    kinds, scale, _, shared, _ = instance(rng, 5, 1)
    scale = np.ones(5, int) if name == "allox" else scale
    kind = rng.integers(0, 5, num_jobs)
    cluster = Cluster.of({"v100": 4, "p100": 4, "k80": 4})
    state = state_of(kinds[kind], scale[kind], shared=shared, kind=kind, left=rng.uniform(10, 1000, num_jobs))
    found = POLICIES[name](state, cluster, 100.0)

    if found.devices is not None:
        assert (found.devices.sum(axis=0) <= cluster.count).all()
        assert set(np.unique(found.devices.sum(axis=1) / scale[kind])) <= {0.0, 1.0}
        return
    busy, used = found.x.sum(axis=1), scale[kind] @ found.x
    for (a, b), time in zip(found.pairs, found.pair_x, strict=True):
        busy[[a, b]] += time.sum()
        used = used + scale[kind][a] * time
    assert (found.x >= 0).all()
    assert busy.max() <= 1 + 1e-6
    assert (used <= cluster.count * (1 + 1e-5)).all()
    assert used.sum() > 0


def test_blind_and_aware_are_one_on_one_type_and_a_single_entity_is_flat():
    state = state_of([[1.0], [2.0], [4.0]], [1, 1, 2], entity=np.zeros(3, int))
    cluster = Cluster.of({"v100": 2})
    las, aware, tree = (POLICIES[name](state, cluster, 0.0).x for name in ("las", "las_aware", "hierarchical"))

    assert las == pytest.approx(aware, rel=1e-5)
    assert tree.min(axis=1) == pytest.approx(aware.min(axis=1), rel=1e-4)


def test_packing_is_worth_at_least_taking_turns_and_deadlines_that_cannot_be_met_are_named():
    rng = np.random.default_rng(5)
    kinds, _, _, shared, _ = instance(rng, 3, 1)
    cluster = Cluster.of({"v100": 1, "p100": 1, "k80": 1})
    state = state_of(np.repeat(kinds, 4, axis=0), np.ones(12, int), shared=shared, kind=np.repeat(np.arange(3), 4))
    equal = state.rates @ cluster.share
    alone = (POLICIES["las_aware"](state, cluster, 0.0).x * state.rates).sum(axis=1) / equal
    found = POLICIES["las_packed"](state, cluster, 0.0)
    rate = (found.x * state.rates).sum(axis=1)
    for (a, b), time in zip(found.pairs, found.pair_x, strict=True):
        rate[a] += (shared[state.kind[a], state.kind[b]] * time).sum()
        rate[b] += (shared[state.kind[b], state.kind[a]] * time).sum()
    assert (rate / equal).min() >= alone.min() * (1 - 1e-5)

    tight = state_of([[1.0], [1.0]], [1, 1], deadline_s=np.array([500.0, 2000.0]))
    late = POLICIES["min_cost"](tight, Cluster.of({"v100": 1}), 0.0).late
    assert late.tolist() == [0]
    with pytest.raises(InputError, match=r"device type 'x9' has no price above 0\. Pass --usd-per-h"):
        POLICIES["min_cost"](tight, Cluster.of({"x9": 1}), 0.0)


@pytest.mark.parametrize("num_jobs", [20, 300])
def test_on_one_type_allox_starts_the_shortest_jobs_however_long_the_queue(num_jobs):
    left = np.random.default_rng(0).permutation(np.arange(1.0, num_jobs + 1))
    state = state_of(np.ones((num_jobs, 1)), np.ones(num_jobs, int), left=left)
    found = POLICIES["allox"](state, Cluster.of({"v100": 4}), 0.0)

    assert sorted(left[found.x[:, 0] > 0]) == [1.0, 2.0, 3.0, 4.0]


def test_hadar_mixes_types_at_the_slowest_rate_and_never_admits_without_payoff():
    count = np.array([4.0, 2.0])
    low, high = np.array([0.1, 0.1]), np.array([2.0, 1.0])
    prices = [price(np.array([used, 0.0]), count, low, high)[0] for used in range(5)]

    assert prices[0] == pytest.approx(0.1)
    assert prices[-1] == pytest.approx(2.0)
    assert prices == sorted(prices)
    state = state_of([[3.0, 2.0], [3.0, 2.0]], [6, 4])
    found = hadar(state, Cluster.of({"v100": 4, "p100": 2}), 0.0)
    assert found.devices[0].tolist() == [4, 2] or found.devices[1].sum() == 4


def test_fill_jobs_take_bubbles_only_and_the_shortest_first():
    cluster, rates = bubbles([0.0, 0.5, 0.25], [8e9, 8e9, 8e9], 1.0, [10.0, 10.0], [4e9, 16e9], switch_s=0.005)

    assert rates[0] == pytest.approx([0.0, 4.95, 2.45])
    assert rates[1].tolist() == [0.0, 0.0, 0.0]
    shorter = state_of([[1.0], [1.0]], [1, 1], left=np.array([50.0, 10.0]))
    assert fill(shorter, Cluster.of({"b": 1}), 0.0).x.tolist() == [[0.0], [1.0]]
    with pytest.raises(InputError, match="unknown score 'longest'"):
        fill(shorter, cluster, 0.0, "longest")


def test_rates_of_rank_one_are_completed_exactly():
    speed, size = np.array([1.0, 2.5, 4.0]), np.array([3.0, 0.5, 1.0, 7.0])
    table = size[:, None] * speed
    samples = table.copy()
    samples[[0, 1, 2, 3], [0, 1, 2, 2]] = np.nan
    rates, spread = fit_rates(samples)

    assert rates == pytest.approx(table, rel=0.02)
    assert spread.max() < 0.05
    with pytest.raises(InputError, match=r"job 0 was measured nowhere"):
        fit_rates([[np.nan, np.nan], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": [[np.nan, 1.0]]}, r"rates\[0, 0\] is nan; pass numbers >= 0"),
        ({"weights": [0.0]}, r"weights\[0\] is 0.0; pass numbers above 0"),
        ({"capacity": [1.0]}, r"rates have shape \[1, 2\], capacity \[1\]"),
        ({"pairs": {(0, 3): [[1.0, 1.0], [1.0, 1.0]]}}, r"name two of 0 to 0 each"),
    ],
)
def test_programs_name_what_is_wrong(change, message):
    arguments = {"rates": [[1.0, 1.0]], "scale": [1], "capacity": [1.0, 1.0], **change}

    with pytest.raises(InputError, match=message):
        maxmin(**arguments)


def test_many_unlike_jobs_get_the_same_value_inside_the_set_of_the_best(monkeypatch):
    draw = np.random.default_rng(5)
    rates, scale, capacity = draw.uniform(0.1, 1, (300, 3)), draw.choice([1, 2, 4], 300), np.array([60, 90, 120])
    at_a_vertex, value = maxmin(rates, scale, capacity)
    monkeypatch.setattr("headway.cluster.max_min.MANY", 0)

    x, found = maxmin(rates, scale, capacity)

    assert found == pytest.approx(value, rel=1e-6)
    assert (rates * x).sum(axis=1).min() == pytest.approx(value, rel=1e-5)
    assert (rates * x).sum() == pytest.approx((rates * at_a_vertex).sum(), rel=1e-5)
    assert (x.sum(axis=1) <= 1 + 1e-6).all()
    assert (scale @ x <= capacity * (1 + 1e-6)).all()
