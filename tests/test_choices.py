"""Ways to save side by side: cost, exposure, redundancy; and the settings that describe a job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint.advise import SETTINGS, SavingJob, job_with, protections, ways
from headway.core.errors import InputError, UnknownNameError
from tests.refusals import refused

JOB = SavingJob(step_s=0.5, save_s=20.0, every_steps=100, state_bytes=12 * 10**9)
seconds = st.floats(1e-3, 1e3)


@given(seconds, seconds, st.integers(1, 1000), st.integers(0, 10**12), st.none() | st.floats(100, 1e6))
def test_no_way_costs_more_than_it_may_and_every_one_states_its_exposure(step_s, save_s, every, state, mtbf_s):
    job = SavingJob(step_s=step_s, save_s=save_s, every_steps=every, state_bytes=state, mtbf_s=mtbf_s)
    for way in ways(job)[1:]:
        assert way.stall_s <= save_s
        assert mtbf_s is not None or way.overhead_fraction <= job.budget * (1 + 1e-6)
        assert way.exposure_s < way.worst_exposure_s
        assert way.worst_exposure_s == pytest.approx(way.every_steps * step_s + way.late_s)


@given(st.floats(1e3, 1e6))
def test_at_a_known_failure_rate_the_better_interval_loses_no_more_than_todays(mtbf_s):
    now, interval, behind = ways(SavingJob(0.5, 20.0, 100, 12 * 10**9, mtbf_s=mtbf_s))

    assert interval.lost_fraction <= now.lost_fraction + 1e-6
    assert behind.overhead_fraction <= interval.overhead_fraction


def test_saves_that_are_written_behind_the_steps_already_lose_what_was_not_durable_too():
    now, interval = ways(SavingJob(0.5, 1.0, 100, 10**9, late_s=4.0))

    assert (now.late_s, now.exposure_s, now.worst_exposure_s) == (4.0, 29.0, 54.0)
    assert interval.exposure_s == interval.every_steps * 0.25 + 4.0


def test_a_state_of_unknown_size_offers_no_copy():
    assert [way.name for way in ways(SavingJob(0.5, 20.0, 100))] == ["as now", "interval"]


@pytest.mark.parametrize(
    ("ranks", "hosts", "survives"),
    [(1, 1, [(0, 0)]), (4, 1, [(0, 0), (1, 0), (2, 0)]), (6, 6, [(0, 0), (1, 1), (2, 2)]),
     (64, 8, [(0, 0), (1, 0), (2, 1)])],
)  # fmt: skip
def test_parity_survives_as_many_hosts_as_its_stripes_have_no_more_parts_on(ranks, hosts, survives):
    found = protections(SavingJob(0.5, 20.0, 100, ranks=ranks, hosts=hosts))

    assert [(row.lost_ranks, row.lost_hosts) for row in found] == survives


def test_settings_describe_a_job_and_override_a_recorded_one():
    told = job_with(["step_s=0.5", "save_s=20", "every=100", "state=12GB", "ranks=8", "hosts=2"])

    assert told == SavingJob(0.5, 20.0, 100.0, 12 * 10**9, ranks=8, hosts=2)
    assert job_with(["mtbf_s=3600"], told).mtbf_s == 3600.0
    assert set(SETTINGS) == {"step_s", "save_s", "every", "state", "copy", "mtbf_s", "budget", "ranks", "hosts"}


test_settings_that_cannot_be_are_refused = refused(
    (["step_s"], "Write name=value"),
    (["steps=1"], "Did you mean 'step_s'"),
    (["step_s=fast"], "no number"),
    (["state=12 parsecs"], "size in bytes"),
    (["step_s=0.5"], "save_s, every must be given"),
    (["step_s=0", "save_s=1", "every=1"], "step_s"),
    (["step_s=1", "save_s=1", "every=1", "budget=-1"], "budget"),
    (["step_s=1", "save_s=1", "every=1", "ranks=2", "hosts=3"], "one rank per host"),
    by=job_with,
    error=(InputError, UnknownNameError),
)
