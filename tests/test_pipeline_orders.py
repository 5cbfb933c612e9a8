"""Orders, lowering, checks and times of pipelines: laws, torch's own orders, closed forms, bad input."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.core.errors import CycleError, FormatError, InputError
from headway.sim.pipeline.actions import RECV, SEND, Action, B, F, I, PipelineProgram, StageGraph, W
from headway.sim.pipeline.lower import check, lower, peak_activations
from headway.sim.pipeline.orders import PipelineShape, gpipe, interleaved, one_f_one_b
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import StageCosts, bubble_sums, bubbles, costs_of, evaluate, simulate
from tests import torch_orders
from tests.launching import headway_here, json_of, refusal
from tests.pipeline_rank import losses_and_gradients
from tests.refusals import refused
from tests.spawn import on_ranks

sizes = st.integers(1, 8)
times = st.integers(0, 50)


@st.composite
def shapes(draw: st.DrawFn, interleave: int = 1) -> PipelineShape:
    """Any shape with free messages; microbatches are a multiple of the ranks where stages interleave."""
    p = draw(sizes)
    m = p * draw(st.integers(1, 4)) if interleave > 1 else draw(st.integers(1, 24))
    return PipelineShape(
        p, m, interleave, forward_ns=draw(st.integers(1, 50)), input_ns=draw(times), weight_ns=draw(times)
    )


@st.composite
def routed(draw: st.DrawFn) -> tuple[tuple[tuple[Action, ...], ...], StageGraph]:
    """Random stage graphs, any rank for any stage and microbatch, any order without a circle."""
    num_stages, m, p = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    preds = [draw(st.sets(st.integers(0, s - 1), min_size=1)) if s else set() for s in range(num_stages)]
    for stage in range(num_stages - 1):
        if not any(stage in sources for sources in preds):
            preds[stage + 1].add(stage)
    split = [[draw(st.booleans()) for _ in range(m)] for _ in range(num_stages)]
    where = [[draw(st.integers(0, p - 1)) for _ in range(m)] for _ in range(num_stages)]
    waiting = {Action(op, s, j) for s in range(num_stages) for j in range(m)
               for op in ((F, I, W) if split[s][j] else (F, B))}  # fmt: skip
    back = {(s, j): Action(I if split[s][j] else B, s, j) for s in range(num_stages) for j in range(m)}
    orders: list[list[Action]] = [[] for _ in range(p)]
    while waiting:
        ready = []
        for op, s, j in waiting:
            needs = [Action(F, q, j) for q in preds[s]] if op == F else [Action(F, s, j)]
            if op in (B, I):
                needs += [back[q, j] for q in range(num_stages) if s in preds[q]]
            if op == W:
                needs = [Action(I, s, j)]
            if not waiting.intersection(needs):
                ready.append(Action(op, s, j))
        chosen = draw(st.sampled_from(sorted(ready)))
        waiting.remove(chosen)
        orders[where[chosen.stage][chosen.microbatch]].append(chosen)
    return tuple(map(tuple, orders)), StageGraph(tuple(tuple(sorted(sources)) for sources in preds))


@given(routed())
def test_any_graph_any_route_any_order_is_lowered_to_what_runs_without_buffers(case):
    orders, graph = case
    program = lower(orders, graph)
    report = check(program)

    assert program.orders() == orders
    assert report.num_messages == int((program.op == SEND).sum()) == int((program.op == RECV).sum())
    assert PipelineProgram.from_json(json.dumps(program.to_json())).text() == program.text()


@given(routed(), st.integers(0, 9))
def test_times_are_those_of_an_obvious_walk(case, comm_ns):
    orders, graph = case
    program = lower(orders, graph)
    ns = np.arange(1, program.num_stages + 1)
    found = simulate(program, StageCosts(ns * 3, ns * 2, ns, comm_ns))

    assert sorted(found.last_ns.tolist()) == sorted(_walk(program, comm_ns))
    assert found.busy_ns.sum() == 6 * ns.sum() * program.num_microbatches


def _walk(program: PipelineProgram, comm_ns: int) -> list[int]:
    """Return the last end of each rank: pass over all actions until none changes (fixed point)."""
    cost = {F: lambda s: 3 * s, I: lambda s: 2 * s, W: lambda s: s, B: lambda s: 3 * s}
    end, arrived = {}, {}
    while True:
        before, link, clock, last = dict(end), {}, {}, [0] * program.num_ranks
        for row in range(program.rank.size):
            rank, op, stage, j = (int(c[row]) for c in (program.rank, program.op, program.stage, program.microbatch))
            peer, other = int(program.peer[row]), int(program.peer_stage[row])
            forward = stage in program.graph.preds[other] if op == SEND else other in program.graph.preds[stage]
            if op == SEND:
                made = (
                    end.get((F, stage, j), 0) if forward else max(end.get((B, stage, j), 0), end.get((I, stage, j), 0))
                )
                go = max(made, link.get((rank, peer, forward), 0))
                link[rank, peer, forward] = arrived[stage, other, j] = go + comm_ns
            elif op != RECV:
                ops = (
                    program.graph.preds[stage]
                    if op == F
                    else [q for q in range(program.num_stages) if stage in program.graph.preds[q]]
                    if op in (B, I)
                    else []
                )
                start = max([clock.get(rank, 0)] + [arrived.get((q, stage, j), 0) for q in ops])
                end[op, stage, j] = clock[rank] = last[rank] = start + cost[op](stage + 1)
        if end == before:
            return last


@settings(max_examples=100)
@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@given(shape=shapes())
def test_one_stage_per_rank_takes_the_closed_form_and_holds_the_closed_form(order, shape):
    p, m = shape.num_ranks, shape.num_microbatches
    each = shape.forward_ns + shape.input_ns + shape.weight_ns
    found = evaluate(order, shape)

    assert found.makespan_ns == (m + p - 1) * each
    assert found.bubble_overhead == pytest.approx((p - 1) / m, rel=1e-12)
    assert found.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert list(found.peak_activations) == [m if order is gpipe else min(m, p - r) for r in range(p)]


@settings(max_examples=50)
@given(shape=shapes())
def test_gaps_are_the_closed_forms_of_their_kinds(shape):
    p, m = shape.num_ranks, max(shape.num_microbatches, shape.num_ranks)
    shape = replace(shape, num_microbatches=m)
    forward, back = shape.forward_ns, shape.input_ns + shape.weight_ns
    for order, gap, rest in ((gpipe, forward + back, 0), (one_f_one_b, back, forward)):
        program = lower(order(shape))
        sums = bubble_sums(bubbles(program, simulate(program, costs_of(shape))), p)

        assert sums["fill_drain"] == [r * (forward + back) for r in range(p)]
        assert sums["forward_backward"] == [(p - 1 - r) * gap for r in range(p)]
        assert sums["scattered"] == [(p - 1 - r) * rest for r in range(p)]


@given(routed(), st.integers(0, 9))
def test_work_and_gaps_of_a_rank_fill_the_step(case, comm_ns):
    program = lower(*case)
    ns = np.arange(program.num_stages)
    times = simulate(program, StageCosts(ns, 2 * ns, ns + 1, comm_ns))
    sums = bubble_sums(bubbles(program, times), program.num_ranks)

    idle = [sum(of_rank) for of_rank in zip(*sums.values(), strict=True)]
    assert (np.array(idle) + times.busy_ns).tolist() == [times.makespan_ns] * program.num_ranks


@settings(max_examples=100)
@given(shape=st.integers(2, 4).flatmap(lambda v: shapes(interleave=v)))
def test_interleaving_divides_the_bubble_and_holds_the_closed_form(shape):
    p, m, v = shape.num_ranks, shape.num_microbatches, shape.interleave
    each = shape.forward_ns + shape.input_ns + shape.weight_ns
    found = evaluate(interleaved, shape)

    assert found.makespan_ns * v == m * each * v + (p - 1) * each
    assert [peak * v for peak in found.peak_activations] == pytest.approx(
        [min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]
    )


@given(shape=shapes(), comm_ns=times, seed=st.randoms())
def test_ranks_renamed_take_as_long_and_hold_as_much(shape, comm_ns, seed):
    orders = one_f_one_b(replace(shape, comm_ns=comm_ns))
    renamed = list(orders)
    seed.shuffle(renamed)
    each = np.ones(shape.num_ranks, np.int64)
    costs = StageCosts(each * shape.forward_ns, each * shape.input_ns, each * shape.weight_ns, comm_ns)
    one, two = lower(orders), lower(tuple(renamed))

    assert simulate(one, costs).makespan_ns == simulate(two, costs).makespan_ns
    assert sorted(peak_activations(one)) == sorted(peak_activations(two))


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 4), (4, 8), (3, 7)])
def test_our_orders_are_those_that_torch_executes(p, m):
    assert gpipe(PipelineShape(p, m)) == torch_orders.executed("ScheduleGPipe", p, m)
    assert one_f_one_b(PipelineShape(p, m)) == torch_orders.executed("Schedule1F1B", p, m)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (4, 8, 2), (4, 12, 3), (2, 8, 4), (8, 16, 2)])
def test_interleaved_is_torchs_order(p, m, v):
    assert interleaved(PipelineShape(p, m, v)) == torch_orders.planned("ScheduleInterleaved1F1B", p, m, v)


def test_torchs_runtime_gives_the_same_losses_and_gradients_under_our_csv(tmp_path):
    shape = PipelineShape(2, 8, cap=3)
    texts = [PipelineProgram.from_orders(SCHEDULES[name](shape)).to_torch_csv() for name in ("1f1b", "zero_bubble")]
    own, *ours = [on_ranks(losses_and_gradients, 2, str(tmp_path), text) for text in ("", *texts)]

    assert len(own[1][0]) == 8
    assert "W" in texts[1]
    assert ours == [own, own]


test_orders_that_cannot_run_are_refused_with_rank_step_and_actions = refused(
    ((((F, 0, 0), (F, 0, 0), (B, 0, 0)),), r"rank 0, step 0: 0F0 is there twice.*\n.*\[0F0\]"),
    ((((F, 0, 0),),), "stage 0, microbatch 0 has F; give it F and B"),
    ((((F, 0, 0), (W, 0, 0), (I, 0, 0)),), r"rank 0, step 1: 0W0 is before its I"),
    ((((F, 0, 0), (I, 0, 0), (W, 0, 0), (B, 0, 0)),), "has F B I W; give it F and B"),
    ((((F, 0, 0),), ((B, 0, 0),)), "0B0 is on another rank than its forward"),
    ((((F, 0, 0), (B, 0, 0)), ((B, 1, 0), (F, 1, 0))), "1B0 is before its F"),
    ((((F, 0, 0), (B, 0, 0), (F, 0, 1), (B, 0, 1)), ((F, 1, 1), (F, 1, 0), (B, 1, 0), (B, 1, 1))), "wait for each"),
    ((((F, 0, -1),),), "give .operation, stage"),
    ((), "no action"),
    by=lambda orders: lower(tuple(tuple(Action(*action) for action in actions) for actions in orders)),
)


def test_graphs_shapes_and_caps_that_cannot_be_are_refused():
    for preds, message in (
        (((1,), (0,)), "stages 0 -> 1 -> 0 feed each other"),
        (((), (), (0,)), "stage 1 is not connected"),
        (((), (0,), (0,)), r"stages \[1, 2\] are all last"),
        (((4,),), "stage 4"),
        ((), "no stage"),
    ):
        with pytest.raises(InputError, match=message):
            StageGraph(preds)
    with pytest.raises(InputError, match=r"7 microbatches are no multiple of 4 ranks.*Give 8"):
        interleaved(PipelineShape(4, 7, 2))
    with pytest.raises(InputError, match=r"stage 0 needs 1 activation, cap 0\.5"):
        PipelineShape(4, 8, cap=0.5)
    with pytest.raises(InputError, match="stage 1 needs 3 activations, cap 2"):
        check(lower(one_f_one_b(PipelineShape(4, 8))), [4, 2, 2, 2])
    with pytest.raises(FormatError, match="cell 1 is '0Q0'"):
        PipelineProgram.from_torch_csv("0F0,0Q0\n")
    with pytest.raises(InputError, match="no number left out"):
        PipelineProgram.from_torch_csv("0F999999999,0B999999999\n")


@pytest.mark.parametrize("change", [
    {"schema": "other"}, {"rank": [[0]]}, {"peer_stage": [9] * 10}, {"peer": [-2] * 10}, {"op": ["F"] * 10},
    {"preds": [[1], [0]]},
    {"preds": "ab"}, {"num_ranks": 10**15}, {"microbatch": [10**6] * 10}, {"stage": [2**40] * 10},
])  # fmt: skip
def test_a_program_from_a_file_that_is_none_is_refused(change):
    fields = lower(one_f_one_b(PipelineShape(2, 1))).to_json()
    with pytest.raises(InputError):
        check(PipelineProgram.from_json(json.dumps({**fields, **change})))
    with pytest.raises(FormatError):
        PipelineProgram.from_json("{")


@pytest.mark.parametrize(("name", "text", "said"), [
    ("absent.csv", None, "cannot read"), ("empty.csv", "", "no action"), ("twice.csv", "0F0,0F0,0B0", "is there twice"),
    ("alone.json", "{}", "not a pipeline program"),
])  # fmt: skip
def test_a_file_that_cannot_be_checked_is_one_error(name, text, said, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert said in refusal("parallel", "schedule", "check", str(tmp_path / name))


@pytest.mark.slow
@given(routed(), st.data())
def test_a_program_with_a_changed_message_is_refused(case, data):
    program = lower(*case)
    rows = np.flatnonzero((program.op == SEND) | (program.op == RECV))
    assume(rows.size)
    row, column = data.draw(st.sampled_from(rows.tolist())), data.draw(st.sampled_from(["microbatch", "peer_stage"]))
    changed = getattr(program, column).copy()
    changed[row] = (changed[row] + 1) % max(2, int(changed.max()) + 1)

    with pytest.raises((InputError, CycleError)):
        check(replace(program, **{column: changed}))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_verbs_export_check_and_simulate_every_order(name, tmp_path):
    v = {"interleaved": 2, "v": 2}.get(name, 1)
    shape = ["--schedule", name, "--stages", "4", "--microbatches", "8", "--interleave", str(v)]
    shape += ["--forward-ns", "10", "--input-ns", "12", "--weight-ns", "8"]
    file = tmp_path / "orders.csv"
    assert headway_here("parallel", "schedule", "export", *shape, "--output", file).returncode == 0
    report = json_of("parallel", "schedule", "check", file, "--json")
    found = json_of("parallel", "simulate", *shape, "--json")

    assert max(report["peak_activations"]) / v == max(found["peak_activations"])
    assert found["makespan_ns"] >= 8 * 30
    assert found["simulated"] is True
