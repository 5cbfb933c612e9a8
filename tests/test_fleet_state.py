"""Models, cohorts, Rgroups: every disk is in exactly one place; what is unknown or negative is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError, UnknownNameError
from headway.lab.fleet_plan import POLICIES
from headway.lab.fleet_state import FleetState


@pytest.fixture
def state():
    made = FleetState(POLICIES["pacemaker"])
    made.add("a", capacity_bytes=4e12, disk_bytes_per_s=100e6)
    made.add("b", capacity_bytes=8e12, disk_bytes_per_s=100e6)
    return made


@given(batches=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5000), st.booleans()), max_size=12))
def test_no_disk_is_lost_and_the_first_three_thousand_that_trickle_are_canaries(batches):
    state = FleetState(POLICIES["pacemaker"])
    state.add("a", capacity_bytes=4e12, disk_bytes_per_s=100e6)
    state.add("b", capacity_bytes=8e12, disk_bytes_per_s=100e6)
    for day, (name, disks, step) in enumerate(batches):
        state.deploy(name, 20 * day, disks, step=step)
    trickled = {name: sum(disks for n, disks, step in batches if n == name and not step) for name in "ab"}

    assert state.cohorts["disks"].sum() == sum(disks for _, disks, _ in batches)
    assert state.cohorts["disks"][state.cohorts["canary"]].sum() == sum(min(3000, num) for num in trickled.values())
    assert all(state.rgroups[index].shared != step for index, step in zip(
        state.cohorts["rgroup"], state.cohorts["rgroup"] > 0, strict=True
    ))  # fmt: skip


def test_deployments_days_apart_are_one_step_and_weeks_apart_are_two(state):
    for day in (0, 2, 4, 30):
        state.deploy("a", day, 4000, step=True)
    state.deploy("b", 4, 4000, step=True)

    assert state.cohorts["rgroup"].tolist() == [1, 1, 1, 2, 3]


def test_failed_disks_leave_the_cohorts_of_their_day_in_proportion(state):
    state.deploy("a", 0, 4000, step=False)
    state.deploy("a", 1, 1000, step=False)
    state.lose(0, 0, 400.0)

    assert state.cohorts["disks"].tolist() == [2700.0, 900.0, 1000.0]
    assert state.capacity().tolist() == [2700 * 4e12, 900 * 4e12, 1000 * 4e12]


def test_what_cannot_be_is_refused(state):
    with pytest.raises(UnknownNameError, match="unknown model of disk 'c'"):
        state.deploy("c", 0, 1, step=False)
    with pytest.raises(InputError, match="-1 disks of a"):
        state.deploy("a", 0, -1, step=False)
    with pytest.raises(InputError, match="'a' is known already"):
        state.add("a", capacity_bytes=1e12, disk_bytes_per_s=1e8)
    with pytest.raises(InputError, match="capacity_bytes=0"):
        state.add("c", capacity_bytes=0, disk_bytes_per_s=1e8)
