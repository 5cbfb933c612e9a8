"""A step over all ranks: identities, critical path, stragglers, list scheduling, steady state, many ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._step_dag import OUT, RECV, SEND, expand_step
from headway.core.errors import InputError
from headway.cost.specs import LinkSpec
from headway.sim.graph.attribution import slack
from headway.sim.graph.hops import Network
from headway.sim.graph.replay import greedy, replay
from headway.sim.training.moves import send_first
from headway.sim.training.step_dag import steady_ns
from headway.sim.training.step_view import StepView
from headway.sim.training.training_step import UPDATE, Block, StepProfile, TrainingStep
from tests import oracles_replayer
from tests.steps_made import WIRE, few, networks, steps

small = steps(network=networks(ranks=st.integers(1, 3)))


@few
@given(small)
def test_the_critical_path_over_all_ranks_adds_up_to_the_makespan_and_has_no_slack(step: TrainingStep) -> None:
    whole = expand_step(step)
    makespan = replay(whole.dag, whole.duration_ns).makespan_ns
    spare = slack(whole.dag, whole.duration_ns)

    assert sum(whole.path_ns().values()) == makespan
    assert (spare[whole.path()] == 0).all()
    assert (spare >= 0).all()


@few
@given(step=small, slow=st.lists(st.sampled_from([0.5, 1.0, 1.7]), min_size=7, max_size=7))
def test_scheduling_wastes_nothing_that_the_fixed_order_needs(step: TrainingStep, slow: list[float]) -> None:
    factor = slow[: step.network.num_ranks]
    free = expand_step(step, factor=factor, lane_order=False)
    makespan = greedy(free.dag, free.duration_ns).makespan_ns
    loads = np.bincount(free.dag.lane[free.dag.lane >= 0], free.duration_ns[free.dag.lane >= 0])

    assert makespan >= replay(free.dag, free.duration_ns).makespan_ns
    assert makespan >= loads.max()


@settings(max_examples=15)
@given(step=steps(network=networks(ranks=st.integers(1, 2))))
def test_the_published_replayer_finishes_a_step_at_the_same_time(step: TrainingStep) -> None:
    # Its devices need positive durations: virtual operations have none, and no lane either.
    free = expand_step(step, lane_order=False)
    dag, duration = free.dag, np.where(free.dag.lane >= 0, free.duration_ns + 1, free.duration_ns)
    src = np.repeat(np.arange(dag.n), np.diff(dag.indptr))
    edges = [(int(a), int(b), 0) for a, b in zip(src, dag.indices, strict=True)]
    _, end = oracles_replayer.replay(dag.n, edges, dag.lane.tolist(), duration.tolist(), dag.priority.tolist())

    assert greedy(dag, duration).makespan_ns == max(end)


@few
@given(step=small)
def test_no_rank_updates_before_every_sum_has_reached_it(step: TrainingStep) -> None:
    whole = expand_step(step)
    times = replay(whole.dag, whole.duration_ns)

    for rank in range(step.network.num_ranks):
        updates = (whole.kind == UPDATE) & (whole.rank == rank)
        outs = (whole.kind == OUT) & (whole.rank == rank)
        assert times.start_ns[updates].min() >= times.end_ns[outs].max(initial=0)


@few
@given(step=small)
def test_a_receive_begins_when_its_send_has_ended(step: TrainingStep) -> None:
    whole = expand_step(step)
    times = replay(whole.dag, whole.duration_ns)
    send, receive = np.flatnonzero(whole.kind == SEND), np.flatnonzero(whole.kind == RECV)

    assert (times.start_ns[receive] == times.end_ns[send]).all()
    assert (whole.rank[receive] == whole.hops.dst).all()


@few
@given(step=small, slower=st.floats(1, 3))
def test_a_straggler_delays_all_by_what_it_is_slower_and_no_more(step: TrainingStep, slower: float) -> None:
    ranks = step.network.num_ranks
    factor = np.ones(ranks)
    factor[-1] = slower
    base, late = (expand_step(step, factor=f) for f in (None, factor))

    extra = replay(late.dag, late.duration_ns).makespan_ns - replay(base.dag, base.duration_ns).makespan_ns

    before, takes = step.op_ns()
    assert -ranks <= extra <= (slower - 1) * (before + takes.sum()) + takes.size + 1


@few
@given(step=small)
def test_without_overlap_steady_steps_take_as_long_as_one(step: TrainingStep) -> None:
    assert steady_ns(step) == int(StepView.of(step).score([step])[0])


def overlapping(sizes: tuple[int, int] = (4_000_000, 4_000_000)) -> TrainingStep:
    """Two blocks on parameter servers, of which the next forward pass needs the one that is ready last first."""
    profile = StepProfile.of(
        [Block((800_000,), (800_000,), (sizes[0],)), Block((800_000,), (800_000,), (sizes[1],))],
        update_ns=2000,
        overlaps_forward=True,
    )
    return TrainingStep.of(profile, Network("parameter_server", 2, WIRE, num_servers=2))


def test_what_forward_needs_first_overtakes_and_shortens_the_steady_step() -> None:
    step = overlapping()
    cut = replace(step, parts=np.array([8, 8]))

    ready, forward = steady_ns(cut), steady_ns(send_first(cut, "forward"))

    assert forward < 0.95 * ready
    assert forward >= max(3_202_000, 2 * 4_000_000)  # compute, and what each lane carries


def test_overlapped_forward_passes_are_faster_than_waiting_for_all_updates() -> None:
    step = replace(send_first(overlapping(), "forward"), parts=np.array([8, 8]))
    waiting = replace(step, profile=replace(step.profile, overlaps_forward=False))

    assert steady_ns(step) < 0.95 * steady_ns(waiting)


def test_a_ring_of_256_ranks_compiles_hop_by_hop_and_takes_the_closed_form() -> None:
    link = LinkSpec("wire", 12.5e9, 5e-6, "made up")
    network = Network("ring", 256, link)
    step = TrainingStep.of(StepProfile.of([Block((1_000_000,), (2_000_000,), (25_000_000,))]), network)

    whole = expand_step(step)

    assert whole.hops.src.size == 2 * 255 * 256
    assert replay(whole.dag, whole.duration_ns).makespan_ns == 3_000_000 + int(network.sync_ns(25_000_000))


def test_operations_are_described_by_rank_block_and_identity() -> None:
    whole = expand_step(
        TrainingStep.of(StepProfile.of([Block((5,), (9,), (400,), name="fc")]), Network("ring", 2, WIRE))
    )

    assert whole.describe(1) == "rank 0: forward of fc"
    assert whole.describe(int(np.argmax(whole.kind == SEND))) == (
        "send: group 0, seq 0, round 0, chunk 0, src 0, dst 1"
    )
    assert whole.path_ns() == {"forward": 5, "backward": 9, "send": 2 * 1200}


@pytest.mark.parametrize("factor", [[1.0], [1.0, -1.0], [1.0, np.nan]])
def test_a_wrong_straggler_factor_is_refused(factor: list[float]) -> None:
    step = TrainingStep.of(StepProfile.of([Block((5,), (9,), (400,))]), Network("ring", 2, WIRE))

    with pytest.raises(InputError, match=r"pass one finite number >= 0 for each of 2 ranks"):
        expand_step(step, factor=factor)


def test_a_steady_state_needs_three_steps() -> None:
    with pytest.raises(InputError, match=r"num_steps is 2; a steady state needs at least 3"):
        steady_ns(overlapping(), num_steps=2)
