"""Dag: compiling an order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import CycleError, InputError
from headway.sim import Dag, replay
from headway.sim.graph.kernels import csr
from tests import oracles
from tests.refusals import refused
from tests.strategies import Case, cases


@given(cases(shuffled=True))
def test_the_compiled_order_is_topological_or_the_oracle_finds_a_cycle_too(case: Case) -> None:
    expected = oracles.topological(case.n, case.all_edges)
    if expected is None:
        with pytest.raises(CycleError):
            case.dag()
        return
    position = {int(op): i for i, op in enumerate(case.dag().compiled.order)}

    assert sorted(position) == list(range(case.n))
    assert all(position[source] < position[target] for source, target, _ in case.all_edges)


@given(cases(shuffled=True))
def test_a_cycle_error_names_one_cycle_that_exists(case: Case) -> None:
    if oracles.topological(case.n, case.all_edges) is not None:
        return
    with pytest.raises(CycleError, match=r"wait for each other.*[Dd]rop") as caught:
        case.dag()
    circle = caught.value.operations
    pairs = {(source, target) for source, target, _ in case.all_edges}

    assert len(set(circle)) == len(circle) > 0
    assert all((a, b) in pairs for a, b in zip(circle, circle[1:] + circle[:1], strict=True))


@given(cases(), st.integers(1, 4))
def test_tiling_gives_the_same_as_separate_runs(case: Case, copies: int) -> None:
    one = replay(case.dag(), case.duration_ns)
    many = replay(case.dag().tile(copies), case.duration_ns * copies)

    assert many.end_ns.tolist() == one.end_ns.tolist() * copies
    assert case.dag().tile(copies).lane.max() <= case.dag().num_lanes * copies - 1


@given(cases(shuffled=True))
def test_without_lane_order_only_edges_can_contradict_each_other(case: Case) -> None:
    dag = case.dag(lane_order=False)

    assert replay(dag, case.duration_ns).end_ns.tolist() == oracles.replay(case.n, case.edges, case.duration_ns)[1]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99))))
def test_the_counting_sort_is_stable(rows: list[tuple[int, int]]) -> None:
    row = np.array([r for r, _ in rows], np.int64)
    value = np.array([v for _, v in rows], np.int64)
    indptr, indices, lag = csr(5, row, value, 2 * value)

    assert [indices[a:b].tolist() for a, b in itertools.pairwise(indptr)] == oracles.grouped(5, row, value)
    assert (lag == 2 * indices).all()


def test_parallel_edges_keep_their_own_lags() -> None:
    dag = Dag.from_edges(2, [0, 0], [1, 1], lag_ns=[3, 8])

    assert replay(dag, [1, 1]).start_ns.tolist() == [0, 9]


def test_an_empty_dag_is_allowed() -> None:
    assert replay(Dag.from_edges(0, [], []), []).makespan_ns == 0


test_bad_input_is_refused_with_value_rule_and_fix = refused(
    ({"n": -1, "src": [], "dst": []}, r"n is -1; pass a number of operations"),
    ({"n": 2, "src": [0], "dst": []}, r"src has 1 edges, dst has 0; pass one target per source"),
    ({"n": 2, "src": [0], "dst": [2]}, r"dst\[0\] is 2, but there are 2 operations; use indices 0\.\.1"),
    ({"n": 2, "src": [-1], "dst": [0]}, r"src\[0\] is -1"),
    ({"n": 2, "src": [0.5], "dst": [1]}, r"src is float64 of shape \[1\]; pass a flat array of integers"),
    ({"n": 2, "src": [], "dst": [], "lane": [0]}, r"lane has 1 entries; pass 2"),
    ({"n": 2, "src": [], "dst": [], "lane": [0, -2]}, r"lane\[1\] is -2; number the lanes from 0"),
    ({"n": 2, "src": [], "dst": [], "lane": [0, 2**31]}, r"lane\[1\] is 2147483648; number the lanes from 0"),
    ({"n": 2, "src": [0], "dst": [1], "lag_ns": [-1]}, r"lag_ns\[0\] is -1; it must be >= 0"),
    ({"n": 2, "src": [0], "dst": [1], "lag_ns": [1, 2]}, r"lag_ns has 2 entries; pass 1"),
    ({"n": 2, "src": [], "dst": [], "priority": [1]}, r"priority has shape \[1\]; pass one number"),
    ({"n": 2, "src": [], "dst": [], "priority": [1, float("nan")]}, r"priority\[1\] is NaN; pass numbers"),
    by=lambda arguments: Dag.from_edges(**arguments),
)


def test_a_lane_that_contradicts_an_edge_says_how_to_resolve_it() -> None:
    with pytest.raises(CycleError, match=r"operations 0 -> 1 -> 0 wait.*Reorder the lane.*lane_order=False"):
        Dag.from_edges(2, [1], [0], lane=[0, 0])


def test_an_operation_cannot_wait_for_itself() -> None:
    with pytest.raises(CycleError, match=r"operations 1 -> 1 wait") as caught:
        Dag.from_edges(2, [1], [1])

    assert caught.value.operations == (1,)


def test_a_long_cycle_is_cut_in_the_message_but_whole_in_the_error() -> None:
    n = 1000
    with pytest.raises(CycleError, match=r"0 -> 1 -> .* -> \.\.\. -> 0 wait") as caught:
        Dag.from_edges(n, range(n), [*range(1, n), 0])

    assert caught.value.operations == tuple(range(n))


def test_asking_for_no_copies_is_refused() -> None:
    with pytest.raises(InputError, match=r"copies is 0; ask for at least 1"):
        Dag.from_edges(1, [], []).tile(0)
