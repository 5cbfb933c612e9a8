"""Arrangement of operation traces, inference of their order, and its compilation into a Dag."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._synthetic import SyntheticJob, generate
from headway.core.errors import CycleError, InputError
from headway.ledger.operations.dependencies import blocks, infer
from headway.ledger.operations.operation_table import arrange
from headway.ledger.operations.straggler import analyse
from headway.ledger.operations.whatif_groups import WhatIf
from headway.trace.events.trace import Trace

shapes = st.builds(
    lambda dp, pp, vpp, rounds, overlap: SyntheticJob(
        dp=dp, pp=pp, vpp=vpp if pp > 1 else 1, num_microbatches=pp * rounds, num_steps=2, overlap_dp=overlap, noise=0.2
    ),
    dp=st.integers(1, 3),
    pp=st.integers(1, 4),
    vpp=st.integers(1, 2),
    rounds=st.integers(1, 3),
    overlap=st.booleans(),
)


def whatif_of(trace: Trace) -> WhatIf:
    table = arrange(trace)
    return WhatIf.of(table, infer(table))


def without(trace: Trace, *, optype: str, stage: int, seq: int | None = None, **where: int) -> Trace:
    """Drop the operations of a type from a pipeline rank."""
    pp = np.array([trace.ranks[rank]["pp"] for rank in trace.events["rank"].tolist()])
    gone = trace.named(optype) & (pp == stage)
    if seq is not None:
        gone &= trace.events["seq"] == seq
    for column, value in where.items():
        gone &= trace.events[column] == value
    return trace.where(~gone)


def oracle_step_s(whatif: WhatIf, durations: np.ndarray) -> list[float]:
    """Replay the order operation by operation, in seconds: slow and obvious."""
    table, order = whatif.table, whatif.order
    before: dict[int, list[int]] = {}
    for source, target in zip(order.source.tolist(), order.target.tolist(), strict=True):
        before.setdefault(target, []).append(source)
    result = []
    for step in range(table.shape[0]):

        @functools.cache
        def arrival(dp: int, op: int, step: int = step) -> float:
            return max((end(dp, source) for source in before.get(op, [])), default=0.0)

        @functools.cache
        def end(dp: int, op: int, step: int = step) -> float:
            group = int(order.group_of[op])
            if group < 0:
                return arrival(dp, op) + durations[step, dp, op]
            replicas = range(table.shape[1]) if order.synchronised[group] else [dp]
            last = max(arrival(d, member) for d in replicas for member in order.groups[group])
            return last + durations[step, dp, op]

        ends = np.flatnonzero(table.of_type("optimizer")).tolist()
        result.append(max(end(dp, op) for dp in range(table.shape[1]) for op in ends))
    return result


@pytest.mark.parametrize("blocking", [False, True])
@given(job=shapes, seed=st.integers(0, 99))
@settings(max_examples=25)
def test_the_replay_of_a_made_up_job_takes_as_long_as_the_job_took_and_receives_that_block_are_recognised(
    blocking, job, seed
):
    """The generator walks its schedule; the order inferred from the trace must explain every nanosecond."""
    made = generate(replace(job, blocking=blocking), seed=seed)
    table = arrange(made.trace)
    whatif = WhatIf.of(table, infer(table, blocking=blocks(table))) if blocking else whatif_of(made.trace)

    assert not blocking or blocks(table) == (job.pp > 1)
    assert whatif.step_s(whatif.observed_s) == pytest.approx(made.step_ns / 1e9, rel=1e-12)


def test_a_job_whose_receives_do_not_block_is_recognised():
    assert not blocks(arrange(generate(SyntheticJob(dp=2, pp=4), seed=1).trace))


@given(job=shapes, seed=st.integers(0, 99))
@settings(max_examples=15)
def test_the_replay_equals_the_oracle_for_any_durations(job, seed):
    whatif = whatif_of(generate(job, seed=seed).trace)
    durations = np.random.default_rng(seed).random(whatif.observed_s.shape)

    assert whatif.step_s(durations) == pytest.approx(oracle_step_s(whatif, durations), rel=1e-12)


@given(job=shapes, seed=st.integers(0, 99), place=st.floats(0, 0.999), more=st.floats(0, 10))
@settings(max_examples=25)
def test_a_longer_operation_delays_nothing_backwards_and_by_no_more_than_itself(job, seed, place, more):
    whatif = whatif_of(generate(job, seed=seed).trace)
    longer = whatif.observed_s.copy()
    longer.flat[int(place * longer.size)] += more
    base, after = whatif.step_s(whatif.observed_s), whatif.step_s(longer)

    assert (after >= base).all()
    # One operation lies on a path at most once.
    assert (after <= base + more + 1e-9).all()


@given(job=shapes, seed=st.integers(0, 9))
@settings(max_examples=10)
def test_every_group_talks_across_ranks_and_no_operation_stands_in_two(job, seed):
    table = arrange(generate(job, seed=seed).trace)
    order = infer(table)
    members = [op for group in order.groups for op in group]

    assert len(members) == len(set(members))
    for group in order.groups:
        stages = [int(table.stage[op]) for op in group]
        assert len(set(stages)) == len(stages)


@pytest.mark.parametrize(
    ("shape", "dropped", "message"),
    [
        ((1, 2, 2), {"optype": "forward-recv", "stage": 1, "seq": 0}, r"send 3 on stage 0 has no peer.*needs both"),
        ((1, 4, 2), {"optype": "forward-send", "stage": 1, "seq": 3}, r"stage 1 has 3 forward-send .* for 4 forward-c"),
        ((2, 2, 3), {"optype": "forward-recv", "stage": 1, "seq": 3, "step": 2, "rank": 3},
         r"stage 1 has 3 forward-recv operations .* in step 2 but 4 on DP rank 0"),
        ((1, 1, 2), {"optype": "forward-compute", "stage": 0, "seq": 1}, "numbered from 0 without gaps"),
    ],
)  # fmt: skip
def test_bad_input_operations_that_are_missing_are_named_with_stage_type_and_counts(shape, dropped, message):
    dp, pp, steps = shape
    trace = generate(SyntheticJob(dp=dp, pp=pp, num_microbatches=4, num_steps=steps), seed=0).trace

    with pytest.raises(InputError, match=message):
        analyse(without(trace, **dropped))


def test_bad_input_steps_whose_operations_are_numbered_otherwise_are_named_with_the_number():
    trace = generate(SyntheticJob(dp=2, pp=2, num_microbatches=4, num_steps=3), seed=0).trace
    at = (trace.events["rank"] == 1) & (trace.events["step"] == 1) & (trace.events["seq"] == 0)
    trace.events["seq"][at & trace.named("forward-compute")] = 9

    with pytest.raises(InputError, match=r"stage 0 has (no .* number 0|a .* number 9) on DP rank 1 in step 1 but"):
        analyse(trace)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda t: (t.events["step"] != 1) | (t.events["rank"] % 2 == 0), "DP rank 1 is missing in step 1"),
        (lambda t: ~np.isin(t.events["rank"], [2, 3]), "pipeline rank 1 of 3 has no rows"),
        (lambda t: t.events["step"] == 0, r"the trace has 1 step.*[Rr]ecord at least 2"),
        (lambda t: t.events["rank"] == 99, "has no operations"),
        (lambda t: ~t.named("optimizer"), "no operation is an 'optimizer'"),
        (lambda t: np.append(np.arange(len(t)), 5), "stands twice in step"),
    ],
)
def test_bad_input_ranks_steps_and_operations_that_are_missing_or_double_are_named(rows, message):
    trace = generate(SyntheticJob(dp=2, pp=3, num_microbatches=4, num_steps=3), seed=0).trace

    with pytest.raises(InputError, match=message):
        analyse(trace.where(rows(trace)))


def test_bad_input_an_unknown_type_is_refused_and_admitted_on_request():
    trace = generate(SyntheticJob(dp=1, pp=2, num_microbatches=4, num_steps=2), seed=0).trace
    renamed = replace(
        trace, names=tuple("layernorm-allreduce" if n.startswith("layernorm") else n for n in trace.names)
    )

    with pytest.raises(
        InputError, match=r"'layernorm-allreduce' is unknown.*Did you mean 'layernorm-grads-all-reduce'"
    ):
        analyse(renamed)
    with pytest.warns(UserWarning, match="treated as compute"):
        report = analyse(renamed, unknown_as_compute=True)
    assert report.slowdown >= 1


def test_bad_input_a_circular_order_lists_its_operations():
    """Stage 0 claims to run its backward before the forward that this backward needs through stage 1."""
    trace = generate(SyntheticJob(dp=1, pp=2, num_microbatches=2, num_steps=2, noise=0.0), seed=0).trace
    start = trace.events["start_ns"].copy()
    backward = trace.named("backward-compute") & (trace.events["rank"] == 0) & (trace.events["seq"] == 0)
    start[backward] = trace.events["start_ns"][trace.named("params-all-gather")][: backward.sum()]

    with pytest.raises(
        CycleError,
        match=r"wait for each other in a circle: .*forward-compute 0 on stage 0 -> .*backward-compute 0 on stage 1",
    ):
        analyse(replace(trace, events={**trace.events, "start_ns": start}))
