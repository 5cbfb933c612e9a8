"""A review begins what the failure log asks for, in the way that moves least, and early enough."""

import numpy as np
import pytest

from headway.lab.fleet import review
from headway.lab.fleet_plan import POLICIES
from headway.lab.fleet_state import FleetState

BATHTUB = np.interp(np.arange(1200), [0, 40, 500, 900], [0.08, 0.012, 0.012, 0.09])


def fleet(ages_seen, *, afr=BATHTUB, disks=30_000.0):
    """A state that knows `afr` of model "a" up to an age."""
    state = FleetState(POLICIES["pacemaker"])
    state.add("a", capacity_bytes=8e12, disk_bytes_per_s=100e6)
    ages = np.arange(ages_seen)
    state.models[0].log.add(np.full(ages_seen, disks), disks * afr[:ages_seen] / 365, ages)
    return state


def test_a_step_past_infancy_changes_as_a_whole_and_one_within_it_does_not():
    state = fleet(200)
    state.deploy("a", 0, 9000, step=True)

    assert review(state, 20) == []
    [change] = review(state, 150)
    assert (change.kind, change.method, change.source, change.target) == ("down", "type 2", "6-of-9", "30-of-33")
    assert change.io_bytes == pytest.approx(9000 * 8e12 * (6 / 9) * (33 / 30))


def test_canaries_stay_and_the_others_leave_for_the_shared_rgroup():
    state = fleet(300)
    state.deploy("a", 0, 6000, step=False)
    [change] = review(state, 150)
    going = state.cohorts["target"] >= 0

    assert (change.kind, change.method, change.num_disks) == ("down", "type 1", 3000)
    assert change.io_bytes == pytest.approx(3000 * 8e12 * 2)
    assert not (going & state.cohorts["canary"]).any()


def test_too_few_disks_begin_no_rgroup_of_their_own():
    state = fleet(300)
    state.deploy("a", 0, 3400, step=False)

    assert review(state, 150) == []


def trickled(ages_seen, day, *, every=1, per_day=100):
    """A shared Rgroup of cohorts of many ages, all under the scheme that saves most."""
    state = fleet(ages_seen)
    for born in range(0, 500, every):
        state.deploy("a", born, per_day, step=False)
    place = state.new_rgroup("30-of-33", len(state.schemes) - 1, shared=True)
    state.cohorts["rgroup"][~state.cohorts["canary"]] = place
    return state, review(state, day)


def test_disks_that_will_wear_out_leave_one_by_one_and_in_time_the_oldest_first():
    state, begun = trickled(900, 562)
    ups = [change for change in begun if change.kind == "up"]
    away = state.cohorts["target"] >= 0

    assert ups
    assert all(change.method == "type 1" and change.due_day > 562 for change in ups)
    assert state.cohorts["born"][away].max() < state.cohorts["born"][~away & ~state.cohorts["canary"]].min()


def test_when_most_must_leave_the_whole_rgroup_changes():
    _, begun = trickled(1100, 900)

    assert [change.method for change in begun if change.kind == "up"] == ["type 2"]


def test_an_rgroup_that_has_become_too_small_is_purged():
    state, _ = trickled(400, 500)
    rows = np.flatnonzero(state.cohorts["rgroup"] == 1)
    state.cohorts["disks"][rows] *= 900 / state.cohorts["disks"][rows].sum()
    kinds = [change.kind for change in review(state, 507)]

    assert kinds == ["purge"]


def test_the_valve_opens_only_when_the_rate_is_surely_beyond_the_scheme():
    sudden = BATHTUB.copy()
    sudden[300:] = 0.09
    calm, alarmed = (fleet(360, afr=afr) for afr in (BATHTUB, sudden))
    for state in (calm, alarmed):
        state.deploy("a", 0, 9000, step=True)
        state.rgroups[1].scheme = len(state.schemes) - 1
        review(state, 359)

    assert not calm.rgroups[1].urgent
    assert alarmed.rgroups[1].urgent
    assert alarmed.rgroups[1].target < len(alarmed.schemes) - 4


def test_a_change_that_will_not_do_any_more_is_sent_further():
    state = fleet(700)
    state.deploy("a", 0, 9000, step=True)
    group = state.rgroups[1]
    group.scheme = len(state.schemes) - 1
    rows = np.arange(1)
    state.begin_bulk(1, rows, group.scheme - 1, 690, "up", 690.0)
    [change] = review(state, 695)

    assert change.kind == "up"
    assert group.target < len(state.schemes) - 2
