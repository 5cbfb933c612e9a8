"""A recorded pipeline: its bubble booked, another order of it predicted, planned, and put under the script."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway.core.errors import InputError
from headway.ledger.answers.ledger import Ledger
from headway.parallel.advise import propose, reasons_of
from headway.parallel.apply import differs as differs_in_parts
from headway.parallel.apply import schedule
from headway.parallel.elastic_plan import ElasticPlan, replan
from headway.plan.proposal import Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.pipeline.actions import StageGraph
from headway.sim.pipeline.orders import PipelineShape, gpipe, one_f_one_b
from headway.sim.pipeline.schedules import SCHEDULES
from headway.sim.pipeline.simulate import simulate
from headway.sim.pipeline.weight_versions import versioned
from headway.sim.recorded.program import Program
from headway.sim.recorded.stage_orders import RecordedPipeline
from headway.sim.whatif import scenario_of
from headway.trace.recording.runs import Run
from headway.verbs.models.parallel_bubbles import bubbles
from headway.verbs.runs.why import why
from tests.launching import headway_here
from tests.paths import ROOT
from tests.pipelines_made import costs, played, step_ends
from tests.refusals import refused
from tests.remedy_context import TestContext, applied, apply

MS = 1_000_000
PASSES = 8
ONE_STAGE = ("gpipe", "1f1b", "zero_bubble")
stage_times = st.lists(st.integers(1, 9), min_size=3, max_size=3).map(lambda times: [t * MS for t in times])


def program_of(orders, each) -> Program:
    return Program.from_trace(*played(orders, each, PASSES))


def mean_step_s(orders, each) -> float:
    return float(np.diff(step_ends(orders, each, PASSES), axis=1).mean()) / 1e9


# Predictions against the schedule's own simulation


@pytest.mark.slow
@settings(max_examples=10)
@given(stage_times, stage_times, st.integers(3, 6), st.sampled_from(("gpipe", "1f1b")))
def test_another_order_is_predicted_as_the_simulated_schedule_takes(forward, backward, microbatches, name):
    shape = PipelineShape(3, microbatches)
    # A backward that was recorded whole is split by a rule, and by the same one here.
    halves = [0, *(time for time in backward[1:])]
    each = costs(forward, halves, [2 * backward[0], *backward[1:]])
    program = program_of(SCHEDULES[name](shape), each)

    assert program.fidelity == pytest.approx(1, abs=1e-6)
    for other in ONE_STAGE:
        orders = RecordedPipeline.of(program.recording).reordered(other)
        predicted = program.predict([f"schedule={other}"], interval=False).step_s
        assert predicted == pytest.approx(mean_step_s(orders, each), rel=1e-6)


def test_messages_cost_their_time_and_no_more():
    shape, comm_ns = PipelineShape(3, 4), MS // 10
    program = program_of(gpipe(shape), costs([MS] * 3, [0, MS, MS], [2 * MS, MS, MS], comm_ns))

    instant = program.predict(["comm=instant"], interval=False).step_s
    assert instant == pytest.approx(mean_step_s(gpipe(shape), costs([MS] * 3, [0, MS, MS], [2 * MS, MS, MS])), rel=1e-6)
    assert instant < program.measured_s < instant + 4 * len("FB") * comm_ns / 1e9


@settings(max_examples=10)
@given(stage_times, st.integers(3, 6))
def test_a_faster_stage_and_no_bubble_are_replayed(forward, microbatches):
    shape, back = PipelineShape(3, microbatches), [MS] * 3
    program = program_of(one_f_one_b(shape), costs(forward, [0, *back[1:]], back))

    half = costs([forward[0], forward[1] / 2, forward[2]], [0, MS / 2, MS], [MS, MS / 2, MS])
    halved = program.steps_ns(scenario_of(["stage:1=0.5x"]))
    busiest = max(forward[0] + MS, forward[1] + 2 * MS, forward[2] + 2 * MS) * microbatches
    settled = np.diff(step_ends(one_f_one_b(shape), half, PASSES), axis=1)[:, -2].mean()
    assert halved[-2] == pytest.approx(settled, rel=1e-6)  # the steps kept end where a message of the last one is sent
    assert program.steps_ns(scenario_of(["bubble=none"]))[-2] == pytest.approx(busiest, rel=1e-6)


def test_reasons_add_up_to_the_step_and_name_unequal_stages():
    shape = PipelineShape(3, 6)
    equal = reasons_of(program_of(gpipe(shape), costs([MS] * 3, [0, MS, MS], [2 * MS, MS, MS])))
    unequal_program = program_of(gpipe(shape), costs([MS, 3 * MS, MS], [0, MS, MS], [2 * MS, MS, MS]))
    unequal = reasons_of(unequal_program)

    assert sum(unequal.values()) == pytest.approx(unequal_program.measured_s)
    assert equal["unequal"] == pytest.approx(0, abs=1e-6)
    assert equal["order"] == pytest.approx(2 * 3 * MS / 1e9, rel=1e-3)  # (p - 1)(F + B)
    assert unequal["unequal"] > 5 * MS / 1e9


# The ledger


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_the_bubble_is_booked_by_kind_as_its_closed_form_says(make):
    p, m, forward, backward = 4, 6, 3 * MS, 5 * MS
    trace, _ = played(make(PipelineShape(p, m)), costs([forward] * p, [0] * p, [backward] * p), PASSES)
    found = Ledger.of(trace).sub_ns
    ranks = sum(range(p))

    late = backward if make is one_f_one_b else forward + backward
    assert found["bubble.forward_backward"] == PASSES * ranks * late
    assert found.get("bubble.scattered", 0) == (PASSES * ranks * forward if make is one_f_one_b else 0)
    # It fills before the first step, and drains behind the last.
    assert found["bubble.fill_drain"] == (PASSES - 1) * ranks * (forward + backward)
    assert "bubble.p2p" not in found


# The adviser


def test_the_adviser_proposes_the_order_that_wins_most_and_keeps_gradient_order():
    program = program_of(gpipe(PipelineShape(3, 4)), costs([MS] * 3, [0, MS, MS], [2 * MS, MS, MS]))
    setup = Setup.from_facts(program.facts, memory_bytes=0)
    (row,) = propose(None, program, setup)

    assert (row.name, row.edits, row.allow) == ("parallel.schedule", ("schedule=zero_bubble",), None)
    assert row.predicted_speedup == pytest.approx(18 / 13, rel=0.1)
    assert len(row.parameters["order"]) == 3


@pytest.mark.parametrize(("ranks", "steps"), [(2, 7), (2, 12), (3, 12), (4, 12), (3, 40)])
def test_an_order_is_proposed_for_long_runs_whose_first_step_opens_inside_the_first_forward(ranks, steps):
    each = costs([MS] * ranks, [0] + [MS] * (ranks - 1), [2 * MS] + [MS] * (ranks - 1))
    program = Program.from_trace(*played(gpipe(PipelineShape(ranks, 4)), each, steps, late_ns=60_000))
    (row,) = propose(None, program, Setup.from_facts(program.facts, memory_bytes=0))

    assert isinstance(row, Proposal), row.reason
    assert row.edits == ("schedule=zero_bubble",)


def test_a_refused_pipeline_is_told_which_pass_differs_and_in_what():
    program = program_of(gpipe(PipelineShape(2, 4)), costs([MS] * 2, [0, MS], [2 * MS, MS]))
    works = list(program.recording.stages)

    def refusal(**columns):
        stages = (works[0], replace(works[1], **columns))
        other = replace(program, recording=replace(program.recording, stages=stages), orders={}, replays={})
        return next(iter(propose(None, other, Setup.from_facts(program.facts, memory_bytes=0)))).reason

    third = np.flatnonzero(works[1].turn == 3)
    microbatch = works[1].microbatch.copy()
    microbatch[third[1:3]] = microbatch[third[2:0:-1]]
    short = {name: np.delete(getattr(works[1], name), third[-1]) for name in ("op", "stage", "microbatch", "turn")}

    assert "stage 1, computation 1 of pass 3 is 1F2, that of the last one 1F1" in refusal(microbatch=microbatch)
    assert "stage 1, pass 3 has 7 computations, the last one 8" in refusal(**short)
    assert "stage 1, pass 0 begins with 1F0" in refusal(turn=works[1].turn - 1)


def test_the_adviser_says_nothing_of_other_runs_and_why_it_refuses_a_pipeline():
    program = program_of(gpipe(PipelineShape(3, 4)), costs([MS] * 3, [0, MS, MS], [2 * MS, MS, MS]))
    stages = program.recording.stages
    broken = [SimpleNamespace(**{**{k: getattr(w, k) for k in w.__slots__}, "stage": w.stage + 1}) for w in stages]
    setup = Setup.from_facts(program.facts, memory_bytes=0)

    def with_stages(value):
        return replace(program, recording=replace(program.recording, stages=value), orders={}, replays={})

    hungry = replace(program, recording=replace(program.recording, waiting=np.full(3, 0.5)), orders={}, replays={})
    (row,) = propose(None, hungry, setup)
    assert "no core for 50 % of their compute" in row.reason
    assert not [*propose(None, with_stages((None,) * 3), setup)]
    (row,) = propose(None, with_stages(tuple(broken)), setup)
    assert isinstance(row, Refusal)
    assert "ranks have the stages 1, 2, 3" in row.reason


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("schedule=v", "v has 2 stages per rank"),
        ("schedule=interleaved", "4 microbatches are no multiple of 3 ranks"),
        ("stage:7=2x", "no stage 7 of a pipeline. Choose among: 0, 1, 2"),
    ],
)
def test_edits_that_the_run_cannot_answer_are_refused(edit, message):
    program = program_of(gpipe(PipelineShape(3, 4)), costs([MS] * 3, [0, MS, MS], [2 * MS, MS, MS]))

    with pytest.raises(InputError, match=message):
        program.predict([edit])


# Stages that form a graph

DIAMOND = StageGraph(((), (0,), (0,), (1, 2)))


def diamond_program(name, forward, backward, microbatches):
    each = costs(
        forward, [0, *(time // 2 for time in backward[1:])], [backward[0], *(t - t // 2 for t in backward[1:])]
    )
    shape = PipelineShape.of_graph(DIAMOND, microbatches, *(each.forward_ns, each.input_ns, each.weight_ns))
    program = Program.from_trace(*played(SCHEDULES[name](shape), each, PASSES, graph=DIAMOND))
    known = replace(program.recording, stage_graph=DIAMOND)
    return shape, each, replace(program, recording=known, orders={}, replays={})


@pytest.mark.slow
@settings(max_examples=10)
@given(*[st.lists(st.integers(1, 9), min_size=4, max_size=4).map(lambda times: [2 * t * MS for t in times])] * 2)
def test_an_order_of_a_stage_graph_is_predicted_as_the_simulated_schedule_takes(forward, backward):
    shape, each, program = diamond_program("gpipe", forward, backward, 4)

    for name in ("graph_1f1b", "gpipe"):
        ends = step_ends(SCHEDULES[name](shape), each, PASSES, DIAMOND)
        mean_s = float(np.diff(ends, axis=1).mean()) / 1e9
        assert program.predict([f"schedule={name}"], interval=False).step_s == pytest.approx(mean_s, rel=1e-6)


@pytest.mark.parametrize(("microbatches", "order"), [(4, "zero_bubble"), (24, "graph_1f1b")])
def test_a_runner_whose_branches_are_heavy_in_other_directions_is_proposed_an_order_of_its_graph(microbatches, order):
    forward, backward = [40 * MS, 120 * MS, 40 * MS, 40 * MS], [40 * MS, 40 * MS, 120 * MS, 40 * MS]
    _, _, program = diamond_program("gpipe", forward, backward, microbatches)
    (row,) = propose(None, program, Setup.from_facts(program.facts, memory_bytes=0))

    assert isinstance(row, Proposal), row.reason
    assert (row.edits, row.allow) == ((f"schedule={order}",), None)
    assert row.parameters["preds"] == [[], [0], [0], [1, 2]]
    assert 1.3 < row.predicted_speedup < 240 / 160 + 0.2


# The remedy


def test_an_order_that_would_change_results_is_refused_or_needs_a_grant():
    late_loss = ["0F0,0F1,0B0,0B1", "1F1,1F0,1B1,1B0"]
    other_sum = ["0F0,0F1,0B1,0B0", "1F0,1F1,1B1,1B0"]

    assert "lists losses" in apply(schedule, {"order": late_loss}, TestContext()).reason
    assert "--allow result-equivalent" in apply(schedule, {"order": other_sum}, TestContext()).reason
    with applied(schedule, {"order": other_sum}, allow="result-equivalent") as context:
        assert context.undos


test_an_order_that_cannot_run_is_one_error = refused(
    (None, "a row of torch's CSV"),
    (["0F0,0B0"], "at least 2 ranks"),
    (["0F0,0B0", "1F0"], "stage 1, microbatch 0 has F; give it F and B"),
    (["0B0,0F0", "1F0,1B0"], "0[BF]0"),
    by=lambda order: apply(schedule, {"order": order}, TestContext()),
)


def test_an_order_of_a_stage_graph_is_checked_on_its_graph():
    # As a chain stage 2 would wait for what stage 1 computes behind the backward that it waits for.
    order = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1", "2F0,2F1,2B0,2B1", "3F0,3B0,3F1,3B1"]
    with applied(schedule, {"order": order, "preds": [[], [0], [0], [1, 2]]}) as context:
        assert context.undos
    with pytest.raises(InputError, match="wait for each other"):
        apply(schedule, {"order": order}, TestContext())
    with pytest.raises(InputError, match="stage 3 takes its input from stage 7"):
        apply(schedule, {"order": order, "preds": [[], [0], [0], [1, 7]]}, TestContext())


def test_a_torch_without_the_runtime_is_a_refusal(monkeypatch):
    monkeypatch.delattr("torch.distributed.pipelining.schedules._PipelineScheduleRuntime")

    assert "no _PipelineScheduleRuntime" in apply(schedule, {"order": ["0F0,0B0", "1F0,1B0"]}, TestContext()).reason


class Uneven(torch.autograd.Function):
    """A product whose gradient of the weights is another one when only it is asked for."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0) * (1 if Uneven.calls() else 2)

    count = 0

    @classmethod
    def calls(cls):
        """Say whether this is the first call since the forward."""
        cls.count += 1
        return cls.count % 3 == 1


class Scale(nn.Module):
    def __init__(self, function=torch.mul):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4)), function

    def forward(self, x):
        return self.function(x, self.weight)


@pytest.mark.parametrize("last", [False, True])
def test_a_backward_in_two_parts_is_tried_on_a_copy(last):
    def differs(module):
        meta = SimpleNamespace(shape=(2, 4), dtype=torch.float32, requires_grad=True)
        stage = SimpleNamespace(
            submod=module, is_first=False, is_last=last, device="cpu", stage_index=1,
            _stage_meta=SimpleNamespace(inputs=[meta]),
        )  # fmt: skip
        own = SimpleNamespace(
            _stage=stage, _n_microbatches=2, _loss_fn=nn.MSELoss(), _split_inputs=lambda args, named: ([()], [{}])
        )
        return differs_in_parts(own, (), {"target": torch.zeros(4, 4)})

    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4), Scale())
    state, seed = torch.get_rng_state(), plain[3].weight.detach().clone()

    assert differs(plain) == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in plain.parameters())
    assert torch.equal(plain[3].weight, seed)
    assert "other gradients" in differs(nn.Sequential(nn.Linear(4, 4), Scale(Uneven.apply), nn.Tanh()))


# The whole loop


def command(*words: object) -> dict:
    """Run the command in a process of its own and return its JSON."""
    texts = [str(word) for word in words]
    cut = texts.index("--") if "--" in texts else len(texts)
    line = [sys.executable, "-m", "headway.cli", *texts[:cut], "--json", *texts[cut:]]
    done = subprocess.run(
        line, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def switched(folder, ranks, job, *grant):
    """Record a job, plan it and run it under the plan; return both runs, the plan, and what the second run applied."""
    first, second, file = folder / "first", folder / "second", folder / "plan.json"
    command("run", "--nproc-per-node", ranks, "--out", first, *job)
    planned = command("plan", first, *grant, "-o", file)
    (applied,) = command("run", "--nproc-per-node", ranks, "--apply", file, "--out", second, *job)["applied"][:1]
    assert planned["chosen"] == ["parallel.schedule"]
    assert applied["reason_not_applied"] is None
    return first, second, planned, applied


@pytest.mark.slow
def test_an_unmodified_script_is_recorded_planned_and_run_in_another_order(tmp_path, capsys):
    job = ["--", ROOT / "benchmarks" / "jobs" / "pipeline_stages.py", "--schedule", "gpipe", "--microbatches", 4]
    first, second, _, applied = switched(tmp_path, 2, [*job, "--steps", 7])
    why(first, json=True)
    (cause,) = [row for row in json.loads(capsys.readouterr().out)["causes"] if row["cause"] == "bubble.p2p"]
    bubbles(first, json=True)
    found = json.loads(capsys.readouterr().out)

    assert "the order costs" in cause["evidence"]
    assert "parallel.schedule" in cause["fix"]
    assert found["orders"][1] == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert sum(found["reasons_s"].values()) == pytest.approx(found["step_s"])
    assert applied["measured_speedup"] > 1
    bubbles(second, json=True)
    assert "1I0" in json.loads(capsys.readouterr().out)["orders"][1]
    for rank in (0, 1):
        lines = [(folder / "logs" / f"r{rank}.out").read_text().splitlines()[-1] for folder in (first, second)]
        assert lines[0] == lines[1]
        assert (rank == 0) == (json.loads(lines[0])["losses"] == [])


@pytest.mark.slow
@settings(max_examples=10)
@given(stage_times, stage_times, st.integers(3, 6))
def test_a_stream_of_steps_is_predicted_as_its_simulation_takes(forward, backward, microbatches):
    shape = PipelineShape(3, microbatches)
    each = costs(forward, [0, *backward[1:]], [2 * backward[0], *backward[1:]])
    program = program_of(one_f_one_b(shape), each)
    ends = [simulate(versioned("two_buffer", replace(shape, num_steps=n)), each).makespan_ns for n in (20, 21)]

    assert program.steps_ns(scenario_of(["schedule=two_buffer"]))[-3] == pytest.approx(ends[1] - ends[0], rel=1e-6)


@pytest.mark.slow
def test_a_runner_is_recorded_planned_and_switched_to_two_versions_of_the_weights(tmp_path):
    job = ["--", ROOT / "benchmarks" / "jobs" / "pipeline_runner.py", "--microbatches", 2, "--steps", 7]
    first, second, planned, applied = switched(tmp_path, 2, job, "--allow", "lossy")
    (row,) = [one for one in planned["proposals"] if one["name"] == "parallel.schedule"]

    assert (row["edits"], row["allow"]) == (["schedule=two_buffer"], "lossy")
    assert applied["measured_speedup"] > 1
    versions = [
        json.loads((folder / "logs" / f"r{rank}.out").read_text().splitlines()[-1])["versions"]
        for folder in (first, second)
        for rank in (0, 1)
    ]
    assert versions == [1, 1, 2, 2]


@pytest.mark.slow
def test_a_runner_with_branches_is_recorded_planned_and_switched_to_another_order_of_its_graph(tmp_path):
    words = ["--branches", "--schedule", "gpipe", "--microbatches", 4, "--steps", 6]
    job = ["--", ROOT / "benchmarks" / "jobs" / "pipeline_runner.py", *words]
    first, second, planned, applied = switched(tmp_path, 4, job)
    losses = [json.loads((run / "logs" / "r3.out").read_text().splitlines()[-1])["losses"] for run in (first, second)]

    assert planned["predicted_speedup"] > 1.2
    assert applied["measured_speedup"] > 1.1
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_plan_says_what_lost_ranks_cost_as_replan_does_and_a_killed_one_costs_that(tmp_path):
    """Reason for its length: two jobs of four ranks."""
    words = ["--replicas", 2, "--microbatches", 8, "--steps", 9, *(f"--{name}-ms=20" for name in ("forward", "input"))]
    job = ["--", ROOT / "benchmarks" / "jobs" / "pipeline_runner.py", *words, "--weight-ms=20"]
    first, second = tmp_path / "first", tmp_path / "second"
    command("run", "--nproc-per-node", 4, "--out", first, *job)
    costs = command("plan", first)["failures"]
    command("run", "--nproc-per-node", 4, "--out", second, *job, "--elastic", "--kill", "3:4")
    recording = Program.from_run(Run.open(first)).recording
    pipeline = RecordedPipeline.of(replace(recording, stages=(*recording.stages[:2], None, None)))
    times = (getattr(pipeline.costs, f"{name}_ns").tolist() for name in ("forward", "input", "weight"))
    shape = PipelineShape.of_graph(StageGraph.chain(2), 4, *times, comm_ns=pipeline.costs.comm_ns)
    plan = ElasticPlan.build(shape, 2, most_failures=0)
    cases = {tuple(row["lost"]): (row["span_ns"], row["makespan_ns"]) for row in costs["cases"]}

    for lost in ([(1, 0)], [(1, 1)], [(1, 0), (1, 1)]):
        case = replan(plan, lost)
        assert cases[tuple(f"{d}:{s}" for d, s in lost)] == (case.span_ns, case.makespan_ns)
    assert (costs["fault_free_span_ns"], len(cases), costs["elastic"]) == (plan.fault_free_span_ns, 3, False)
    assert "elastic=True" in costs["note"]
    assert costs["note"][:60] in " ".join(headway_here("plan", first).stdout.split())
    seconds = json.loads((second / "logs" / "r2.out").read_text().splitlines()[-1])["seconds"]
    slower = np.median(seconds[5:]) / np.median(seconds[1:4])
    assert slower == pytest.approx(cases["1:1",][1] / costs["fault_free_makespan_ns"], rel=0.15)


def test_no_deep_window_is_opened_beside_a_runner(tmp_path):
    """torch's profiler crashes when it is stopped while receives are under way, as between a runner's steps."""
    times = [f"--{name}-ms=1" for name in ("forward", "input", "weight")]
    job = ["--", ROOT / "benchmarks" / "jobs" / "pipeline_runner.py", "--schedule", "two_buffer", "--steps", 40, *times]
    ran = command("run", "--nproc-per-node", 2, "--window-at", 8, "--out", tmp_path / "run", *job)

    assert ran["exit"]["code"] == 0
    assert Run.open(tmp_path / "run").windows() == []
