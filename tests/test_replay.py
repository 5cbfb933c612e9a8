"""Replay: longest path, one scenario or many."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim import Dag, critical_path, replay, slack
from headway.sim.graph.intervals import Z_NOMINAL, ModelError, speedup_interval
from tests import oracles
from tests.refusals import refused
from tests.strategies import Case, cases


@given(cases(), st.data())
def test_raising_a_duration_never_lowers_an_end_and_moves_the_makespan_by_no_more(case, data):
    op = data.draw(st.integers(0, case.n - 1))
    longer = list(case.duration_ns)
    longer[op] += 7
    was, now = replay(case.dag(), case.duration_ns), replay(case.dag(), longer)

    assert (now.end_ns >= was.end_ns).all()
    assert 0 <= now.makespan_ns - was.makespan_ns <= 7


@given(cases(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_column_j_of_a_batch_is_the_single_run_j_bit_for_bit(case: Case, k: int, random) -> None:
    for kind in (np.int64, np.float64):
        batch = np.array([[d * random.random() * 3 for _ in range(k)] for d in case.duration_ns]).astype(kind)
        many = replay(case.dag(), batch)
        alone = [replay(case.dag(), batch[:, j]) for j in range(k)]

        assert many.start_ns.dtype == many.end_ns.dtype == kind
        assert all((many.end_ns[:, j] == alone[j].end_ns).all() for j in range(k))
        assert all((many.start_ns[:, j] == alone[j].start_ns).all() for j in range(k))
        assert many.makespan_ns.tolist() == [one.makespan_ns for one in alone]


@given(cases(), st.integers(1, 10**15))
def test_scaling_all_times_scales_the_result_exactly(case: Case, factor: int) -> None:
    edges = [(source, target, lag * factor) for source, target, lag in case.edges]
    scaled = Case(case.n, edges, case.lane, case.priority, [d * factor for d in case.duration_ns])
    was, now = replay(case.dag(), case.duration_ns), replay(scaled.dag(), scaled.duration_ns)

    assert now.end_ns.tolist() == [end * factor for end in was.end_ns.tolist()]


@given(cases())
def test_replay_equals_the_pure_python_twin(case: Case) -> None:
    times = replay(case.dag(), case.duration_ns)

    assert (times.start_ns.tolist(), times.end_ns.tolist()) == oracles.replay(case.n, case.all_edges, case.duration_ns)


@given(cases(most=9))
def test_the_makespan_is_the_longest_of_all_walks(case: Case) -> None:
    assert replay(case.dag(), case.duration_ns).makespan_ns == oracles.longest_walk(
        case.n, case.all_edges, case.duration_ns
    )


@given(cases())
def test_float_replay_equals_the_twin_in_the_same_arithmetic(case: Case) -> None:
    durations = [d / 7 for d in case.duration_ns]

    assert replay(case.dag(), durations).end_ns.tolist() == oracles.replay(case.n, case.all_edges, durations)[1]


def test_nanoseconds_beyond_a_double_stay_exact() -> None:
    big = 2**53 + 1

    assert replay(Dag.from_edges(2, [0], [1]), [big, big]).makespan_ns == 2 * big


test_bad_durations_are_refused = refused(
    ([1, 2], r"duration_ns has shape \[2\]; pass \[3\] or \[3, k\]"),
    ([[[1]], [[2]], [[3]]], r"shape \[3, 1, 1\]"),
    ([1, -2, 3], r"operation 1 is -2; durations must be >= 0"),
    ([[1, 1], [2, 2], [3, -3]], r"operation 2 is -3"),
    ([1.0, float("nan"), 3.0], r"operation 1 is not finite"),
    ([1.0, 2.0, float("inf")], r"operation 2 is not finite"),
    ([2**61, 2**61, 2**61], r"past 4611686018427387904 ns. Check its unit"),
    (["a", "b", "c"], r"pass integers \(ns, exact\) or floats"),
    by=lambda duration: replay(Dag.from_edges(3, [0, 1], [1, 2]), duration),
)


# Critical path and slack.


@given(cases())
def test_the_critical_path_follows_the_order_and_adds_up_to_the_makespan(case: Case) -> None:
    path = critical_path(case.dag(), case.duration_ns).tolist()
    lags: dict[tuple[int, int], int] = {}
    for source, target, lag in case.all_edges:
        lags[source, target] = max(lag, lags.get((source, target), 0))
    length = sum(case.duration_ns[op] for op in path) + sum(lags[a, b] for a, b in itertools.pairwise(path))

    assert length == replay(case.dag(), case.duration_ns).makespan_ns


@given(cases())
def test_slack_is_never_negative_and_zero_on_the_critical_path(case: Case) -> None:
    for durations in (case.duration_ns, [d / 7 for d in case.duration_ns]):
        spare = slack(case.dag(), durations)

        assert (spare >= 0).all()
        assert (spare[critical_path(case.dag(), durations)] == 0).all()


@given(cases())
def test_slack_equals_what_trying_longer_durations_gives(case: Case) -> None:
    assert slack(case.dag(), case.duration_ns).tolist() == oracles.slack(case.n, case.all_edges, case.duration_ns)


def test_an_empty_dag_has_an_empty_path() -> None:
    dag = Dag.from_edges(0, [], [])

    assert critical_path(dag, []).size == slack(dag, []).size == 0


def test_scenarios_are_refused_one_at_a_time_is_meant() -> None:
    with pytest.raises(InputError, match=r"shape \[1, 2\]; pass \[1\]"):
        critical_path(Dag.from_edges(1, [], []), np.ones((1, 2), int))


# Intervals of predictions: they hold what they should, and widen with what the model is known to miss.


@given(
    speedup=st.floats(0.2, 20), noise=st.floats(0, 0.5), floor=st.floats(0, 0.05), slope=st.floats(0, 0.4),
    discrepancy=st.floats(0, 0.05), seed=st.integers(0, 99),
)  # fmt: skip
def test_an_interval_holds_the_prediction_and_is_no_narrower_than_the_models_error(
    speedup: float, noise: float, floor: float, slope: float, discrepancy: float, seed: int
) -> None:
    after = np.random.default_rng(seed).lognormal(0.0, noise, 60)
    base = speedup * after
    model = ModelError(floor, slope)
    low, high = speedup_interval(base, after, discrepancy=discrepancy, model=model, seed=seed)

    own = Z_NOMINAL * model.deviation(speedup)
    assert low <= speedup * math.exp(-own) * (1 + 1e-9)
    assert high >= speedup * math.exp(own) * (1 - 1e-9)
    narrow = speedup_interval(base, after, discrepancy=discrepancy, model=ModelError(0, 0), seed=seed)
    assert low <= narrow[0] * (1 + 1e-9)
    assert high >= narrow[1] * (1 - 1e-9)


@pytest.mark.parametrize("speedup", [1.05, 2.0, 6.0])
def test_of_outcomes_that_err_as_the_model_says_nine_in_ten_lie_inside(speedup: float) -> None:
    rng, model = np.random.default_rng(3), ModelError(0.02, 0.1)
    low, high = speedup_interval(np.full(50, speedup), np.ones(50), model=model)
    outcomes = speedup * np.exp(rng.normal(0.0, model.deviation(speedup), 20_000))

    assert ((low <= outcomes) & (outcomes <= high)).mean() == pytest.approx(0.9, abs=0.01)


def test_other_costs_that_may_be_assumed_widen_the_side_they_shift() -> None:
    base, after, exact = np.full(50, 2.0), np.ones(50), ModelError(0, 0)

    assert speedup_interval(base, after, shifts=[0.8, 1.1], model=exact) == pytest.approx((1.6, 2.2))
