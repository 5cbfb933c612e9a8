"""List scheduling is what the published event-driven replayer does: one clock and one ready queue per device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from headway.sim import Dag, greedy
from tests import oracles_replayer
from tests.strategies import Case, cases


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
