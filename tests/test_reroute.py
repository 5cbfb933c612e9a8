"""Pipelines that lost workers: laws of the rerouted step, the published example, the bound, bad input, the verbs."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError
from headway.parallel import ElasticPlan, PipelineProgram, StageGraph, check, lower, replan, replicate, reroute
from headway.parallel.elastic_plan import HostTrace, SwitchCosts, replay_trace
from headway.parallel.rerouted import stage_span_ns
from headway.sim.pipeline.actions import B, F, I, W
from headway.sim.pipeline.orders import PipelineShape, gpipe, interleaved, one_f_one_b
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import StageCosts, costs_of, graph_1f1b, simulate
from tests.launching import headway_here, json_of
from tests.refusals import refused


@st.composite
def jobs(draw: st.DrawFn) -> tuple[PipelineShape, int, list[tuple[int, int]]]:
    """Draw a pipeline with unequal stages, its replicas, and failures that leave a worker of each stage."""
    p, replicas = draw(st.integers(1, 5)), draw(st.integers(2, 5))
    times = [draw(st.lists(st.integers(1, 9), min_size=p, max_size=p)) for _ in range(3)]
    shape = PipelineShape.of_graph(
        StageGraph.chain(p), draw(st.integers(1, 9)), *times, comm_ns=draw(st.integers(0, 3)),
        cap=draw(st.integers(1, 2 * p)),
    )  # fmt: skip
    failures = [(d, s) for s in range(p) for d in draw(st.lists(st.integers(0, replicas - 1), max_size=replicas - 1))]
    return shape, replicas, failures


def forwards(program: PipelineProgram) -> dict[tuple[int, int], int]:
    """Return (stage, microbatch) -> rank."""
    rows = np.flatnonzero(program.op == F)
    return {(int(program.stage[k]), int(program.microbatch[k])): int(program.rank[k]) for k in rows}


@given(jobs())
def test_peers_compute_every_microbatch_of_the_failed_evenly_under_the_cap_and_nothing_else_moves(job):
    shape, replicas, failures = job
    healthy = replicate(lower(graph_1f1b(shape)), replicas)
    found = reroute(healthy, failures, costs=costs_of(shape), cap=int(shape.cap))
    dead = {d * shape.num_stages + s for d, s in failures}
    before, after = forwards(healthy), forwards(found)

    check(found, shape.cap)
    assert before.keys() == after.keys()
    assert all(after[key] == rank for key, rank in before.items() if rank not in dead)
    assert not dead & set(found.rank.tolist())
    for stage in range(shape.num_stages):
        peers = [rank for rank in range(stage, found.num_ranks, shape.num_stages) if rank not in dead]
        loads = [sum(after[stage, j] == rank for j in range(found.num_microbatches)) for rank in peers]
        assert max(loads) - min(loads) <= 1


@given(jobs())
def test_only_how_many_workers_of_each_stage_failed_matters(job):
    shape, replicas, failures = job
    plan = ElasticPlan.build(shape, replicas, most_failures=0)
    found = replan(plan, failures)
    lost = [{d for d, s in failures if s == stage} for stage in range(shape.num_stages)]
    mirrored = [(replicas - 1 - d, s) for s, gone in enumerate(lost) for d in gone]
    other = replan(plan, mirrored)

    check(found.program, shape.cap)
    assert (found.span_ns, found.makespan_ns, found.bound_ns) == (other.span_ns, other.makespan_ns, other.bound_ns)
    live = [role for role in found.roles if role >= 0]
    assert len(set(live)) == len(live) == len(found.roles) - sum(map(len, lost))
    assert all(role < 0 or role % shape.num_stages == rank % shape.num_stages for rank, role in enumerate(found.roles))


def ends_of_steps(program: PipelineProgram, costs: StageCosts, num_steps: int) -> list[int]:
    """Return the end of each step, slowly: a stage begins one when all its workers have ended the one before."""
    time = {F: costs.forward_ns, I: costs.input_ns, W: costs.weight_ns, B: costs.input_ns + costs.weight_ns}
    begin, ends, last = [0] * program.num_stages, [], program.num_stages - 1
    for _ in range(num_steps):
        clock = [begin[rank % program.num_stages] for rank in range(program.num_ranks)]
        waiting = [(rank, action) for rank, actions in enumerate(program.orders()) for action in actions]
        done: dict[tuple[bool, int, int], int] = {}
        while waiting:
            later, blocked = [], set()
            for rank, (op, stage, j) in waiting:
                needs = (op == F, stage + (-1 if op == F else 1), j)
                alone = op == W or (op == F and stage == 0) or (op != F and stage == last)
                if rank in blocked or not (alone or needs in done):
                    later.append((rank, (op, stage, j)))
                    blocked.add(rank)
                    continue
                clock[rank] = max(clock[rank], 0 if alone else done[needs]) + int(time[op][stage])
                if op != W:
                    done[op == F, stage, j] = clock[rank]
            waiting = later
        begin = [max(clock[stage :: program.num_stages]) for stage in range(program.num_stages)]
        ends.append(max(clock))
    return ends


@given(jobs())
def test_steps_with_a_staggered_optimizer_follow_each_other_within_the_span(job):
    shape, replicas, failures = job
    costs = costs_of(PipelineShape.of_graph(shape.stages, shape.num_microbatches, *zip(*shape.stage_ns, strict=True)))
    found = reroute(replicate(lower(graph_1f1b(shape)), replicas), failures, costs=costs)
    times = simulate(found, costs)
    ends = ends_of_steps(found, costs, 4)

    assert ends[0] == times.makespan_ns
    assert ends[3] <= ends[0] + 3 * stage_span_ns(found, times)


def test_the_published_example_takes_36_slots_naive_29_split_and_27_staggered_of_27_without_failures():
    shape = PipelineShape(4, 6)
    healthy = replicate(lower(one_f_one_b(shape)), 3)
    naive, split = (reroute(healthy, [(1, 2)], cap=8, split=flag) for flag in (False, True))
    times = simulate(split, costs_of(shape))

    assert simulate(healthy, costs_of(shape)).makespan_ns == 27
    assert simulate(naive, costs_of(shape)).makespan_ns == 36
    assert not {I, W} & set(naive.op.tolist())
    assert (times.makespan_ns, stage_span_ns(split, times)) == (29, 27)


@pytest.mark.parametrize("replicas", [2, 3, 5, 8])
@pytest.mark.parametrize("p", [2, 4, 7])
def test_a_step_is_never_above_what_whole_microbatches_allow(replicas, p):
    for m in (p, 2 * p + 1, 4 * p):
        plan = ElasticPlan.build(PipelineShape(p, m), replicas, most_failures=0)
        bound = max(3 * (m + p - 1), 3 * math.ceil(m * replicas / (replicas - 1)))
        for stage in range(p):
            assert replan(plan, [(0, stage)]).span_ns <= bound
            assert replan(plan, [(0, stage), (1, (stage + 1) % p)]).span_ns <= 1.03 * bound


def test_backwards_stay_whole_where_a_split_wins_nothing():
    alone = reroute(replicate(lower(gpipe(PipelineShape(1, 4))), 2), [(0, 0)])
    split = reroute(replicate(lower(one_f_one_b(PipelineShape(4, 6))), 3), [(1, 2)])

    assert set(alone.op.tolist()) == {F, B}
    assert {I, W} <= set(split.op.tolist())


def test_a_flush_is_asked_for_by_the_makespan():
    shape = PipelineShape(4, 16)
    healthy = replicate(lower(one_f_one_b(shape)), 4)
    flushed, staggered = (reroute(healthy, [(0, 0)], staggered=flag) for flag in (False, True))
    whole, part = simulate(flushed, costs_of(shape)), simulate(staggered, costs_of(shape))

    assert whole.makespan_ns <= part.makespan_ns
    assert stage_span_ns(staggered, part) <= stage_span_ns(flushed, whole)


def test_no_failure_changes_nothing_and_a_second_one_is_rerouted_from_the_first():
    healthy = replicate(lower(one_f_one_b(PipelineShape(3, 5))), 3)
    second = reroute(reroute(healthy, [(2, 1)]), [(0, 1), (1, 0)])

    assert reroute(healthy, []) is healthy
    check(second, 6)
    assert set(range(9)) - set(second.rank.tolist()) == {1, 3, 7}
    assert {rank for (stage, _), rank in forwards(second).items() if stage == 1} == {4}


def test_stages_that_form_a_graph_are_rerouted_too():
    diamond = StageGraph(((), (0,), (0,), (1, 2)))
    shape = PipelineShape.of_graph(diamond, 8, [3] * 4, [3] * 4, [3] * 4)
    found = reroute(replicate(lower(graph_1f1b(shape), diamond), 3), [(1, 2), (0, 3)], costs=costs_of(shape))

    check(found, 8)
    assert stage_span_ns(found, simulate(found, costs_of(shape))) == 12 * 9


def test_schedules_are_made_before_they_are_needed():
    plan = ElasticPlan.build(PipelineShape(3, 4), 3, most_failures=3)

    assert len(plan.schedules) == math.comb(3 + 3, 3) - 3
    assert max(map(max, plan.schedules)) == 2
    assert plan.schedule((1, 0, 2)) is plan.schedules[1, 0, 2]


TWO = replicate(lower(one_f_one_b(PipelineShape(2, 3))), 2)


test_what_cannot_be_rerouted_says_so = refused(
    (lambda: reroute(TWO, [(0, 1), (1, 1)]), "all 2 workers of stage 1 failed.*checkpoint"),
    (lambda: reroute(lower(one_f_one_b(PipelineShape(2, 3))), [(0, 1)]), "all 1 workers of stage 1"),
    (lambda: reroute(TWO, [(5, 1)]), "no worker 5:1.*replicas 0..1.*for example 1:1"),
    (lambda: reroute(TWO, [(0, -1)]), "no worker 0:-1.*for example 0:0"),
    (lambda: reroute(TWO, [(0, 1)], cap=0), "cap 0. Raise"),
    (lambda: reroute(lower(interleaved(PipelineShape(2, 2, 2))), [(0, 0)]), "one stage per rank"),
    (lambda: replicate(lower(SCHEDULES["async_1f1b"](PipelineShape(2, 4))), 2), "with a flush"),
    (lambda: replicate(TWO, 0), "0 replicas"),
    (lambda: SwitchCosts(copy_s=math.nan), "copy_s is nan"),
    (lambda: replicate(TWO, 10**9), "Give at most"),
    (lambda: ElasticPlan.build(PipelineShape(8, 8), 4, most_failures=9), "24310 schedules"),
    (lambda: ElasticPlan.build(PipelineShape(2, 2, 2), 4), "one stage per rank"),
)


SECONDS = ElasticPlan.build(PipelineShape(2, 3, 1, 10**9, 10**9, 10**9), 2)
"""Two replicas of two stages, 12 s a step; 18 s without a worker of one stage."""


def trace_of(tmp_path: Path, text: str) -> HostTrace:
    """Read a trace of words like 0+a 24-a: seconds, whether the node joins, its name."""
    rows = [re.fullmatch(r"(\d+)([+-])(\w+)", word) for word in text.split()]
    lines = [f"{row[1]}000,{'add' if row[2] == '+' else 'remove'},{row[3]}" for row in rows]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    return HostTrace.read(tmp_path / "trace.csv")


@pytest.mark.parametrize(
    ("text", "steps", "repacked", "switches", "restarts", "paused_s"),
    [
        ("0+a 0+b 0+c 0+d 120-a", 10, 10, 0 + 1, 0, 5),
        # One worker less: 5 s, then 18 s a step; whole replicas: one with 6 microbatches, 21 s.
        ("0+a 0+b 0+c 0+d 120-a 215-b", 10 + 5, 10 + 95 / 21, 2, 0, 10),
        # 6 s of a step are lost with the worker.
        ("0+a 0+b 0+c 0+d 126-a 221+x", 10 + 5, 10.5 + 95 / 21, 2, 0, 6 + 5 + 12),
        # A fifth host waits and costs nothing until it takes a role, 5 s and 7 s for the copy.
        ("0+a 0+b 0+c 0+d 60+e 120-a 252+f", 10 + 10, 21, 1, 0, 12),
        # A stage lost both workers; another one takes its role after a restart: 18 s a step on two workers.
        ("0+a 0+b 0+c 0+d 120-a 120-c 351+f", 10 + 231 / 18, 10 + 11, 1, 1, 0),
    ],
)
def test_a_trace_costs_its_steps_and_its_switches(text, steps, repacked, switches, restarts, paused_s, tmp_path):
    report = replay_trace(SECONDS, trace_of(tmp_path, text), SwitchCosts(5, 7, 0))

    assert (report.steps, report.repacked_steps) == (pytest.approx(steps), pytest.approx(repacked))
    assert (report.switches, report.restarts, report.paused_s) == (switches, restarts, pytest.approx(paused_s))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no event. Write"),
        ("0,add,a\n5,add,b\n4,remove,a", "line 3 is at 4 ms, before the line above it. Sort"),
        ("0,add,a\n\n1,add,a", "line 3: 'a' is there already"),
        ("0,remove,a", "line 1: 'a' is not there"),
        *((line, "line 1 is .*; write milli") for line in ("0,add", "0,move,a", "x,add,a", "-1,add,a", "0,add,a,b")),
    ],
)
def test_a_trace_that_is_none_says_which_line(text, message, tmp_path):
    (tmp_path / "trace.csv").write_text(text)

    with pytest.raises(FormatError, match=message):
        HostTrace.read(tmp_path / "trace.csv")


def answer_of(options: str) -> dict[str, object]:
    """Return what a verb of the room prints as JSON."""
    return json_of("parallel", *options.split(), "--json")


def test_the_verbs_print_the_example_and_a_program_that_runs():
    planned = answer_of("replan --replicas 3 --stages 4 --microbatches 6 --fail 1:2")
    program = PipelineProgram.from_json(planned["schedule"])
    options = "--replicas 3 --stages 4 --microbatches 6 --forward-ns 1 --input-ns 1 --weight-ns 1 --cap 8"
    naive = answer_of(f"simulate {options} --fail 1:2")
    split = answer_of(f"simulate {options} --schedule zero_bubble --fail 1:2")

    check(program, 8)
    assert [planned[key] for key in ("span_ns", "fault_free_span_ns", "bound_ns")] == [27, 27, 27]
    assert (simulate(program, costs_of(PipelineShape(4, 1))).makespan_ns, planned["makespan_ns"]) == (29, 29)
    assert answer_of(f"simulate {options}").keys() == naive.keys()
    assert (naive["makespan_ns"], split["makespan_ns"], split["span_ns"]) == (36, 29, 27)
    assert naive["peak_activations"][6] == 0


def test_the_verb_replays_a_trace(tmp_path):
    trace_of(tmp_path, "0+a 0+b 0+c 0+d 120-a 215-b")
    second = "--forward-ns 1000000000 --input-ns 1000000000 --weight-ns 1000000000"
    options = f"--replicas 2 --stages 2 --microbatches 3 {second} --trace {tmp_path / 'trace.csv'} --copy-s 7"
    facts = answer_of(f"replan {options}")

    assert (facts["steps"], facts["switches"], facts["restarts"], facts["paused_s"]) == (15, 2, 0, 10)
    assert facts["gain"] == pytest.approx(15 / (10 + 95 / 21))


@pytest.mark.parametrize("fail", ["1-2", "1:2:3", "9:0", "0:0,1:0", "a:b"])
def test_a_wrong_worker_ends_with_exit_code_2(fail):
    done = headway_here("parallel", "replan", "--replicas", "2", "--stages", "3", "--microbatches", "4", "--fail", fail)

    assert (done.returncode, done.stdout) == (2, "")
