"""The generator of operation traces with known losses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._synthetic import (
    FAULTS,
    SyntheticFault,
    SyntheticJob,
    calibrated,
    durations,
    generate,
    play,
    scenario,
)
from benchmarks._synthetic_play import actions
from headway.core.errors import InputError, UnknownNameError

jobs = st.builds(
    lambda dp, pp, vpp, rounds, overlap: SyntheticJob(
        dp=dp, pp=pp, vpp=vpp if pp > 1 else 1, num_microbatches=pp * rounds, num_steps=2, overlap_dp=overlap
    ),
    dp=st.integers(1, 3),
    pp=st.integers(1, 4),
    vpp=st.integers(1, 3),
    rounds=st.integers(1, 3),
    overlap=st.booleans(),
)


@given(job=jobs)
def test_every_rank_computes_every_microbatch_forward_and_backward_once(job):
    for rank in range(job.pp):
        order = actions(job, rank)
        everything = [(layer, m) for layer in range(job.vpp) for m in range(job.num_microbatches)]

        assert sorted(action[1:] for action in order if action[0] == "forward") == everything
        assert sorted(action[1:] for action in order if action[0] == "backward") == everything


@given(job=jobs, seed=st.integers(0, 99))
@settings(max_examples=25)
def test_computes_of_a_rank_never_overlap_and_messages_take_time(job, seed):
    trace = generate(job, seed=seed).trace
    start, duration = trace.events["start_ns"], trace.events["duration_ns"]
    computes = trace.named("forward-compute", "backward-compute")
    for rank in np.unique(trace.events["rank"]):
        mine = np.flatnonzero(computes & (trace.events["rank"] == rank))
        mine = mine[np.argsort(start[mine])]
        assert (start[mine][1:] >= (start + duration)[mine][:-1]).all()
    assert (duration >= 0).all()


@given(job=jobs, seed=st.integers(0, 99))
@settings(max_examples=25)
def test_a_forward_waits_for_the_stage_before_and_a_backward_for_the_stage_behind(job, seed):
    trace = generate(job, seed=seed).trace
    start, end = trace.events["start_ns"], trace.events["start_ns"] + trace.events["duration_ns"]
    ended: dict[tuple[str, int, int, int, int], int] = {}
    began = {}
    for i in np.flatnonzero(trace.named("forward-compute", "backward-compute")).tolist():
        dp = int(trace.ranks[int(trace.events["rank"][i])]["dp"])
        place = (int(trace.events["step"][i]), dp, int(trace.events["stage"][i]), int(trace.events["microbatch"][i]))
        ended[(trace.name_of(i), *place)] = int(end[i])
        began[(trace.name_of(i), *place)] = int(start[i])
    for (name, step, dp, stage, m), when in began.items():
        if name == "forward-compute" and stage > 0:
            assert when > ended[name, step, dp, stage - 1, m]
        if name == "backward-compute":
            assert when >= ended["forward-compute", step, dp, stage, m]
            if stage < job.num_stages - 1:
                assert when > ended[name, step, dp, stage + 1, m]


@given(job=jobs, seed=st.integers(0, 99), kind=st.sampled_from(sorted(FAULTS)))
@settings(max_examples=25)
def test_a_fault_makes_no_step_faster_unless_it_only_moves_work(job, seed, kind):
    fault = SyntheticFault(kind, {"sequence": 0.3, "gc": 5.0}.get(kind, 3.0))
    made = generate(job, seed=seed, faults=[fault])
    healthy = play(job, durations(job, seed, ()))

    if kind != "sequence":
        assert (made.step_ns >= healthy).all()
    lost = (made.step_ns - healthy).sum() / 1e9 * job.devices
    assert made.lost_device_s == {FAULTS[kind][0]: pytest.approx(lost)}
    assert made.slowdown == pytest.approx(made.step_ns.sum() / healthy.sum())


def test_equal_seeds_give_equal_traces_and_other_seeds_others():
    one, same, other = (generate(SyntheticJob(), seed=seed).trace for seed in (1, 1, 2))

    for column, values in one.events.items():
        assert np.array_equal(same.events[column], values)
    assert not np.array_equal(other.events["duration_ns"], one.events["duration_ns"])


def test_a_fault_changes_nothing_but_what_it_is_about():
    job = SyntheticJob()
    healthy, slow = durations(job, 1, ()), durations(job, 1, [SyntheticFault("worker", 2.0, dp=1, stage=2)])

    assert (slow.forward[:, 1, 2] > healthy.forward[:, 1, 2]).all()
    slow.forward[:, 1, 2] = healthy.forward[:, 1, 2]
    slow.backward[:, 1, 2] = healthy.backward[:, 1, 2]
    assert np.array_equal(slow.forward, healthy.forward)
    assert np.array_equal(slow.backward, healthy.backward)
    assert np.array_equal(slow.forward_transfer, healthy.forward_transfer)


def test_uneven_sequences_keep_the_total_work():
    job = SyntheticJob(noise=0.0)
    uneven = durations(job, 1, [SyntheticFault("sequence", 0.4)])

    assert uneven.forward.mean() == pytest.approx(durations(job, 1, ()).forward.mean(), rel=1e-6)
    assert uneven.forward[0, 0, 0].std() / uneven.forward.mean() > 0.2


def test_without_noise_1f1b_takes_the_closed_form():
    """(m + p - 1)(f + b) when transfers and collectives are free."""
    job = SyntheticJob(dp=2, pp=4, num_microbatches=8, num_steps=2, noise=0.0, transfer_s=0.0, collective_s=0.0)

    assert play(job, durations(job, 0, ())).tolist() == [(8 + 3) * 300_000_000 + 10_000_000] * 2


def test_without_noise_interleaving_divides_the_bubble():
    """(p - 1)(f + b) of bubble become (p - 1)(f + b)/v, with f + b of a whole rank."""
    job = SyntheticJob(dp=1, pp=4, vpp=2, num_microbatches=8, num_steps=2, noise=0.0, transfer_s=0.0, collective_s=0.0)

    assert play(job, durations(job, 0, ())).tolist() == [(8 * 2 + 3) * 300_000_000 + 10_000_000] * 2


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_a_calibrated_fault_costs_what_was_asked(kind):
    job = SyntheticJob(dp=4, pp=2, num_microbatches=8, num_steps=6)
    fault = calibrated(job, 3, SyntheticFault(kind, 1.0), (), 1.2)
    slowdown = play(job, durations(job, 3, [fault])).sum() / play(job, durations(job, 3, ())).sum()

    assert slowdown == pytest.approx(1.2, rel=0.02)


def test_scenarios_cover_clean_single_and_double_faults_and_every_cause():
    drawn = [scenario(seed) for seed in (0, 2, 6, 9, 12)]

    assert {len(faults) for _, faults in drawn} == {0, 1, 2}
    assert {FAULTS[fault.kind][0] for _, faults in drawn for fault in faults} == {cause for cause, _ in FAULTS.values()}
    assert {job.vpp for job, _ in drawn} == {1, 2}
    assert {job.overlap_dp for job, _ in drawn} == {True, False}


def test_bad_input_a_shape_without_a_schedule():
    with pytest.raises(InputError, match="6 micro-batches cannot be interleaved over 4 pipeline ranks"):
        SyntheticJob(pp=4, vpp=2, num_microbatches=6)
    with pytest.raises(InputError, match="dp is 0"):
        SyntheticJob(dp=0)


def test_bad_input_an_unknown_fault():
    with pytest.raises(UnknownNameError, match="Did you mean 'worker'"):
        generate(SyntheticJob(), seed=0, faults=[SyntheticFault("wroker", 2.0)])
