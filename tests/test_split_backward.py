"""Orders that split the backward: laws, torch's own orders under their memory, closed forms, bad input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.sim.pipeline.lower import lower, peak_activations
from headway.sim.pipeline.orders import PipelineShape, one_f_one_b
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import StageCosts, evaluate, score, simulate
from headway.sim.pipeline.split_backward import rule_orders, zero_bubble
from tests import torch_orders

DURATIONS = [(1, 1, 1), (3, 4, 2), (18, 18, 9)]


@st.composite
def shapes(draw: st.DrawFn) -> PipelineShape:
    times = [draw(st.integers(0, 9)) for _ in range(4)]
    p, m, v = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 2))
    cap = draw(st.none() | st.integers(1, 9))
    return PipelineShape(p, m, v, times[0] + 1, *times[1:], cap=cap)


@pytest.mark.slow
@settings(max_examples=6)
@given(shapes())
def test_the_order_is_complete_within_the_cap_and_the_same_each_time(shape):
    orders = zero_bubble(shape)
    found = score(lower(orders), shape)  # checks the cap

    assert zero_bubble(shape) == orders
    assert found.span_idle_ns >= 0


@pytest.mark.slow
@settings(max_examples=6)
@given(shapes())
def test_more_memory_than_1f1b_needs_never_costs_time_against_1f1b(shape):
    one = PipelineShape(shape.num_ranks, shape.num_microbatches, 1, shape.forward_ns, shape.input_ns, shape.weight_ns,
                        cap=shape.num_ranks)  # fmt: skip

    assert evaluate(zero_bubble, one).makespan_ns <= evaluate(one_f_one_b, one).makespan_ns


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "back", "weight"), DURATIONS)
@pytest.mark.parametrize("p", [4, 8])
def test_one_stage_per_rank_is_no_worse_than_the_closed_forms(p, forward, back, weight):
    for cap, idle in ((p, forward + back - weight), (2 * p - 1, forward + back - 2 * weight)):
        found = evaluate(zero_bubble, PipelineShape(p, 3 * p, 1, forward, back, weight, cap=cap))

        assert found.span_idle_ns <= (p - 1) * idle
        assert max(found.peak_activations) <= cap


@pytest.mark.slow
@pytest.mark.parametrize("durations", DURATIONS)
@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16)])
def test_two_stages_per_rank_are_no_worse_than_torchs_orders_under_their_memory(p, m, durations):
    shape = PipelineShape(p, m, 2, *durations, cap=p)
    ours = evaluate(SCHEDULES["v"], shape)
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
        theirs = score(lower(torch_orders.planned(name, p, m)), shape)  # the cap is their peak, or this raises

        assert ours.makespan_ns <= theirs.makespan_ns
        assert ours.span_ns <= theirs.span_ns


def test_more_stages_per_rank_than_two_are_refused():
    with pytest.raises(InputError, match="1 or 2 stages per rank, not 3"):
        zero_bubble(PipelineShape(2, 4, 3))
    with pytest.raises(InputError, match="v has 2 stages per rank, not 1"):
        SCHEDULES["v"](PipelineShape(2, 4))


@st.composite
def unequal(draw: st.DrawFn) -> tuple[PipelineShape, StageCosts]:
    p = draw(st.integers(2, 6))
    m, cap = draw(st.integers(p, 3 * p)), draw(st.integers(p, 2 * p))
    stages = draw(st.sampled_from((1, p)))
    times = [np.resize(draw(st.lists(st.integers(5, 15), min_size=stages, max_size=stages)), p) for _ in range(3)]
    comm_ns = draw(st.integers(0, 2))
    means = [int(each.mean()) for each in times]
    return PipelineShape(p, m, 1, *means, comm_ns, cap), StageCosts(*times, comm_ns)


@settings(max_examples=5)
@given(unequal())
def test_the_papers_rules_give_whole_orders_under_the_cap_and_the_search_never_has_a_longer_span(case):
    shape, costs = case
    m, cap = shape.num_microbatches, int(shape.cap)
    times = [each.tolist() for each in (costs.forward_ns, costs.input_ns, costs.weight_ns)]
    rules = list(rule_orders(*times, num_microbatches=m, cap=cap, comm_ns=shape.comm_ns))
    whole = sorted(f"{stage}{op}{j}" for stage in range(shape.num_ranks) for op in "FIW" for j in range(m))
    spans = []
    for orders in (zero_bubble(shape, costs), *rules):
        program = lower(orders)
        simulated = simulate(program, costs)
        spans.append(int((simulated.last_ns - simulated.first_ns).max()))

        assert sorted(map(str, sum(orders, ()))) == whole
        assert peak_activations(program).max() <= cap
    assert len(rules) == 8
    assert spans[0] <= min(spans)
