"""Critical path and slack."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given

from headway.core.errors import InputError
from headway.sim import Dag, critical_path, replay, slack
from tests import oracles
from tests.strategies import Case, cases


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


def test_the_lane_order_is_part_of_the_path() -> None:
    dag = Dag.from_edges(3, [0], [2], lane=[0, 0, 1])

    assert critical_path(dag, [5, 7, 3]).tolist() == [0, 1]
    assert slack(dag, [5, 7, 3]).tolist() == [0, 0, 4]


def test_an_empty_dag_has_an_empty_path() -> None:
    dag = Dag.from_edges(0, [], [])

    assert critical_path(dag, []).size == slack(dag, []).size == 0


def test_scenarios_are_refused_one_at_a_time_is_meant() -> None:
    with pytest.raises(InputError, match=r"shape \[1, 2\]; pass \[1\]"):
        critical_path(Dag.from_edges(1, [], []), np.ones((1, 2), int))
