"""Chains of stages: equal to list scheduling on the Dag with an operation per stage, to the nanosecond."""

import numpy as np
import pytest

from headway.comm.compression.options import StageChains
from headway.core.errors import InputError
from headway.sim.graph.dag import Dag, greedy
from tests.refusals import refused


def expanded(chains, plan):
    """Return the Dag of one plan, an operation per segment and stage, and its durations."""
    lane, duration, priority, src, dst = [], [], [], [], []

    def add(on, took, tensor, after):
        if after is not None:
            src.append(after)
            dst.append(len(lane))
        lane.append(on)
        duration.append(took)
        priority.append(tensor)
        return len(lane) - 1

    before = None
    for tensor, option in enumerate(plan):
        before = last = add(0, chains.segment_ns[tensor], tensor, before)
        stages = zip(chains.lane[tensor, option], chains.duration_ns[tensor, option], strict=True)
        for number, (on, took) in enumerate(stage for stage in stages if stage[0] >= 0):
            last = add(on, took, tensor, last)
            if number == 0 and on == 0:
                before = last
    dag = Dag.from_edges(len(lane), src, dst, lane=lane, priority=priority, lane_order=False)
    return dag, np.array(duration)


def drawn(rng):
    """Return chains with few distinct times, so that many are ready at once, some of them zero."""
    num, options, stages = (int(x) for x in rng.integers(1, [12, 6, 7]))
    lanes = rng.integers(0, 4, (num, options, stages))
    lanes[np.arange(stages)[None, None] >= rng.integers(0, stages + 1, (num, options, 1))] = -1
    longest = int(rng.choice([3, 1_000_000]))
    return StageChains(rng.integers(0, longest, num), lanes, rng.integers(0, longest, lanes.shape))


def test_scores_equal_list_scheduling_of_the_expanded_dag():
    rng = np.random.default_rng(0)
    for _ in range(200):
        chains = drawn(rng)
        plans = rng.integers(0, chains.lane.shape[1], (3, chains.segment_ns.size))
        scores, _ = chains.score(plans)

        for plan, score in zip(plans, scores, strict=True):
            assert score == greedy(*expanded(chains, plan), order="ready,priority,index").end_ns.max()


def test_the_gap_is_the_last_time_that_the_link_waited():
    # Lane 3 carries results 0 and 1 without a pause, waits for result 2, and has 3 wait for it.
    chains = StageChains(np.array([5, 5, 50, 5]), np.full((4, 1, 1), 3), np.full((4, 1, 1), 20))

    makespan, gap = chains.score(np.zeros((1, 4)))

    assert (makespan.tolist(), gap.tolist()) == ([100], [2])


test_invalid_chains_are_named = refused(
    (([1, 2], [[[0]]], [[[1]]]), "do not fit"),
    (([1], [[[0]]], [[[-1]]]), "negative"),
    (([1], [[[-1, 0]]], [[[1, 1]]]), "follows the end"),
    by=lambda arrays: StageChains(*map(np.array, arrays)),
)


def test_plans_with_unknown_options_are_named():
    with pytest.raises(InputError, match=r"option 0\.\.0"):
        StageChains(np.array([1]), np.array([[[0]]]), np.array([[[1]]])).score(np.array([[1]]))
