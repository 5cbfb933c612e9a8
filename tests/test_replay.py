"""Replay: longest path, one scenario or many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim import Dag, replay
from tests import oracles
from tests.strategies import Case, cases


@given(cases(), st.data())
def test_raising_a_duration_never_lowers_an_end_and_moves_the_makespan_by_no_more(
    case: Case, data: st.DataObject
) -> None:
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


@pytest.mark.parametrize(
    ("duration", "message"),
    [
        ([1, 2], r"duration_ns has shape \[2\]; pass \[3\] or \[3, k\]"),
        ([[[1]], [[2]], [[3]]], r"shape \[3, 1, 1\]"),
        ([1, -2, 3], r"operation 1 is -2; durations must be >= 0"),
        ([[1, 1], [2, 2], [3, -3]], r"operation 2 is -3"),
        ([1.0, float("nan"), 3.0], r"operation 1 is not finite"),
        ([1.0, 2.0, float("inf")], r"operation 2 is not finite"),
        ([2**61, 2**61, 2**61], r"past 4611686018427387904 ns. Check its unit"),
        (["a", "b", "c"], r"pass integers \(ns, exact\) or floats"),
    ],
)
def test_bad_durations_are_refused(duration: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replay(Dag.from_edges(3, [0, 1], [1, 2]), duration)
