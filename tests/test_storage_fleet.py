"""A fleet from day to day: caps hold, protection holds, and years of made-up fleets keep the published bars."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError, UnknownNameError
from headway.lab.fleet import DiskFleet
from headway.lab.fleet_plan import POLICIES
from headway.lab.fleet_sim import Dgroup, made

DAYS = 700


@st.composite
def bathtubs(draw):
    """An AFR over age: infancy, useful life, wear-out that comes over months."""
    base = draw(st.floats(0.006, 0.025))
    worn = draw(st.integers(250, 500))
    return ((0.0, draw(st.floats(0.03, 0.12))), (40.0, base), (float(worn), base), (worn + 400.0, 3 * base))


@st.composite
def fleets(draw):
    """A model that trickles in and one that comes in a step."""
    per_day, length, first = draw(st.integers(40, 150)), draw(st.integers(60, 200)), draw(st.integers(0, 60))
    trickle = Dgroup("trickle", tuple((first + day, per_day) for day in range(length)), draw(bathtubs()),
                     capacity_bytes=draw(st.sampled_from([4e12, 8e12])))  # fmt: skip
    step = Dgroup("step", ((draw(st.integers(0, 200)), draw(st.integers(4000, 30_000))),), draw(bathtubs()))
    return [trickle, step]


@pytest.mark.slow
@settings(max_examples=3)
@given(clusters=fleets(), seed=st.integers(0, 99))
def test_each_rgroup_keeps_its_cap_nobody_is_under_protected_and_the_bound_is_not_beaten(clusters, seed):
    result = DiskFleet().simulate(clusters, 400, seed=seed)

    assert result.rgroup_peak_io <= 0.05 * (1 + 1e-9)
    assert result.valve_days > 0 or result.peak_io <= 0.05 * (1 + 1e-9)
    assert result.under_protected_disk_days == 0
    assert 0 <= result.savings <= result.oracle_savings
    assert len(result.io_frac) == len(result.savings_by_day) == 400
    assert sum(result.disk_days_by_scheme.values()) == pytest.approx(result.disk_days)


@pytest.mark.slow
def test_a_made_up_fleet_keeps_the_published_bars():
    clusters = made("step", seed=1)[1:4]
    planned, instant, reactive = (
        DiskFleet(name).simulate(clusters, DAYS, seed=1) for name in ("pacemaker", "instant", "reactive")
    )

    assert planned.peak_io <= 0.05 + 1e-9
    assert planned.mean_io <= 0.004
    assert planned.savings >= 0.14
    assert planned.under_protected_disk_days == 0
    assert planned.savings >= 0.97 * instant.savings
    assert reactive.peak_io >= 0.25
    assert reactive.mean_io > 3 * planned.mean_io


def test_one_seed_gives_one_history_and_a_simulation_leaves_the_fleet_as_it_was():
    clusters = [Dgroup("step", ((0, 9000),), ((0, 0.06), (40, 0.012)))]
    fleet = DiskFleet()
    first, again, other = (fleet.simulate(clusters, 200, seed=seed) for seed in (4, 4, 5))

    assert first.transitions == again.transitions
    assert np.array_equal(first.io_frac, again.io_frac)
    assert first.disk_days != other.disk_days
    assert len(fleet.state.cohorts) == 0


def test_two_policies_meet_the_same_failures():
    clusters = [Dgroup("step", ((0, 9000),), ((0, 0.06), (40, 0.012)))]
    lived = {DiskFleet(name).simulate(clusters, 200, seed=4).disk_days for name in POLICIES}

    assert len(lived) == 1


def test_a_static_fleet_saves_nothing_and_moves_nothing():
    result = DiskFleet("static").simulate(made("step", seed=0)[:2], 300)

    assert (result.savings, result.peak_io, result.transitions) == (0.0, 0.0, ())


def test_a_sudden_rise_opens_the_valve_and_reliability_goes_before_the_cap():
    clusters = [Dgroup("step", ((0, 20_000),), ((0, 0.08), (60, 0.015), (300, 0.015), (303, 0.09)))]
    result = DiskFleet().simulate(clusters, 400)

    assert result.valve_days > 0
    assert result.peak_io > 0.05
    assert result.rgroup_peak_io <= 0.05 + 1e-9
    assert result.transitions[-1].kind == "up"


def test_a_model_of_few_disks_stays_in_default():
    result = DiskFleet().simulate([Dgroup("few", ((0, 2000),), ((0, 0.05), (40, 0.01)))], 300)

    assert result.transitions == ()
    assert set(result.disk_days_by_scheme) == {"6-of-9"}


def test_a_fleet_that_is_fed_its_log_day_by_day_goes_down_and_up_in_time():
    fleet = DiskFleet()
    fleet.add("a", capacity_bytes=4e12)
    fleet.deploy("a", 0, 20_000, step=True)
    begun = []
    for day in range(420):
        afr = 0.08 if day < 30 else 0.012 + 1e-4 * max(0, day - 200)
        fleet.record("a", day, age_days=day, disk_days=20_000.0, failures=round(20_000 * afr / 365))
        begun += fleet.step(day)

    assert begun[0].kind == "down"
    assert {change.kind for change in begun[1:]} == {"up"}
    assert fleet.outlook("a").infancy_end == pytest.approx(30 + fleet.policy.settle_days, abs=5)
    afr_now = 0.012 + 1e-4 * 219
    assert fleet.state.tolerated[fleet.state.rgroups[1].scheme] > afr_now


def test_what_cannot_be_is_refused():
    fleet = DiskFleet()
    fleet.add("a", capacity_bytes=4e12)
    fleet.step(3)

    with pytest.raises(InputError, match="day 3 is not after day 3"):
        fleet.step(3)
    with pytest.raises(UnknownNameError, match=r"unknown policy 'pacemake'\. Did you mean 'pacemaker'"):
        DiskFleet("pacemake")
    with pytest.raises(UnknownNameError, match="unknown model of disk 'b'"):
        fleet.record("b", 4, age_days=0, disk_days=1, failures=0)
    with pytest.raises(InputError, match="5 failures in 1 disk-days"):
        fleet.record("a", 4, age_days=0, disk_days=1, failures=5)
    with pytest.raises(InputError, match="0 models of disk for 10 days"):
        fleet.simulate([], 10)
