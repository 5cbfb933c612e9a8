"""Greedy: work-conserving list scheduling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim import Dag, greedy, replay
from headway.sim.graph.dag import ORDERS
from tests import oracles, oracles_replayer
from tests.refusals import refused
from tests.strategies import Case, cases

capacities = st.lists(st.integers(1, 3), min_size=4, max_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@given(case=cases(shuffled=True), capacity=capacities)
def test_every_order_holds_edges_and_capacities_and_wastes_no_lane(order: str, case: Case, capacity: list[int]) -> None:
    times = greedy(case.dag(lane_order=False), case.duration_ns, capacity=capacity, order=order)
    start, end = times.start_ns.tolist(), times.end_ns.tolist()
    ready = [
        max([end[source] + lag for source, target, lag in case.edges if target == op], default=0)
        for op in range(case.n)
    ]

    assert all(start[op] >= ready[op] for op in range(case.n))
    assert all(end[op] == start[op] + case.duration_ns[op] for op in range(case.n))
    for on in set(case.lane) - {-1}:
        members = [op for op in range(case.n) if case.lane[op] == on]
        for instant in {t + half for t in start + end for half in (0, 0.5)}:
            running = sum(start[op] <= instant < end[op] for op in members)
            waiting = any(ready[op] <= instant < start[op] for op in members)
            assert running <= capacity[on]
            assert running == capacity[on] or not waiting


@given(cases())
def test_with_index_as_priority_on_chained_lanes_greedy_is_replay(case: Case) -> None:
    edges = case.all_edges
    dag = Dag.from_edges(
        case.n, [a for a, _, _ in edges], [b for _, b, _ in edges], lane=case.lane, lag_ns=[lag for _, _, lag in edges]
    )

    assert greedy(dag, case.duration_ns).start_ns.tolist() == replay(dag, case.duration_ns).start_ns.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@given(case=cases(shuffled=True, longest=5), capacity=capacities)
def test_every_order_equals_the_pure_python_twin(order: str, case: Case, capacity: list[int]) -> None:
    times = greedy(case.dag(lane_order=False), case.duration_ns, capacity=capacity, order=order)

    assert (times.start_ns.tolist(), times.end_ns.tolist()) == oracles.list_schedule(
        case.n, case.edges, case.lane, capacity, case.priority, case.duration_ns, order
    )


@given(cases(shuffled=True), capacities)
def test_float_durations_give_the_same_schedule(case: Case, capacity: list[int]) -> None:
    dag = case.dag(lane_order=False)
    exact = greedy(dag, case.duration_ns, capacity=capacity)
    floats = greedy(dag, [float(d) for d in case.duration_ns], capacity=capacity)

    assert floats.start_ns.dtype == float
    assert floats.start_ns.tolist() == exact.start_ns.tolist()


def test_an_operation_ready_at_the_same_instant_competes_by_priority() -> None:
    dag = Dag.from_edges(4, [0, 1], [2, 3], lane=[0, 1, 2, 2], priority=[0, 0, 5, 1])

    assert greedy(dag, [4, 4, 1, 1]).start_ns.tolist() == [0, 0, 5, 4]


test_bad_capacities_are_refused = refused(
    ([1], r"capacity has 1 entries, but operations use lane 1; pass 2"),
    ([1, 0], r"lane 1 has capacity 0 but operations to run; give it at least 1"),
    ([1, 1.5], r"pass one integer per lane"),
    by=lambda capacity: greedy(Dag.from_edges(2, [], [], lane=[0, 1]), [1, 1], capacity=capacity),
)


def test_an_unknown_order_and_negative_durations_are_refused() -> None:
    with pytest.raises(InputError, match=r"unknown order 'ready,index'.*priority,ready,index"):
        greedy(Dag.from_edges(1, [], []), [1], order="ready,index")
    with pytest.raises(InputError, match=r"operation 0 is -1"):
        greedy(Dag.from_edges(1, [], []), [-1])


def test_an_empty_dag_takes_no_time() -> None:
    assert greedy(Dag.from_edges(0, [], []), []).makespan_ns == 0


# List scheduling is what the published event-driven replayer does: one clock and one ready queue per device.


def positive(case: Case) -> Case:
    """A device that takes no time has no clock to compare: every operation takes at least 1 ns."""
    return replace(case, duration_ns=[d + 1 for d in case.duration_ns])


@given(cases(most=20, shuffled=True))
def test_first_come_first_served_starts_every_operation_when_the_published_replayer_does(case: Case) -> None:
    case = positive(case)
    start, end = oracles_replayer.replay(case.n, case.edges, case.lane, case.duration_ns)

    times = greedy(case.dag(lane_order=False), case.duration_ns, order="priority,ready,index")
    fifo = greedy(replace_priority(case), case.duration_ns, order="ready,priority,index")

    assert fifo.start_ns.tolist() == start
    assert fifo.makespan_ns == max(end)
    assert times.makespan_ns >= max(case.duration_ns)


@given(cases(most=20, shuffled=True))
def test_queues_served_by_kind_and_then_ready_time_agree_too(case: Case) -> None:
    case = positive(case)
    start, _ = oracles_replayer.replay(case.n, case.edges, case.lane, case.duration_ns, case.priority)

    assert greedy(case.dag(lane_order=False), case.duration_ns).start_ns.tolist() == start


@pytest.mark.parametrize("seed", range(3))
def test_large_random_dags_have_equal_makespans_in_floating_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, lanes = 600, 12
    dst = np.repeat(np.arange(1, n), 2)
    src = np.maximum(0, dst - rng.integers(1, 60, dst.size))
    lane, duration = rng.integers(0, lanes, n), rng.uniform(1, 1e6, n)
    _, end = oracles_replayer.replay(
        n, [(int(a), int(b), 0) for a, b in zip(src, dst, strict=True)], lane.tolist(), duration.tolist()
    )

    ours = greedy(Dag.from_edges(n, src, dst, lane=lane, lane_order=False), duration, order="ready,priority,index")

    assert ours.makespan_ns == pytest.approx(max(end), rel=1e-9)


def test_an_idle_device_does_not_promise_itself_to_what_is_not_ready() -> None:
    # 2 is ready at 9 and waits in the queue of device 1; 3 arrives at 5 and goes first.
    edges = [(0, 2, 8), (1, 3, 4)]

    assert oracles_replayer.replay(4, edges, [0, 2, 1, 1], [1, 1, 1, 1])[0] == [0, 0, 9, 5]


def replace_priority(case: Case) -> Dag:
    """Build the Dag without priorities: the published queue of a FIFO replay knows none."""
    return replace(case, priority=[0] * case.n).dag(lane_order=False)
