"""Schemes for real logs: judged on what came later, and never more trusting than the log allows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.lab.failure_logs import Lifetimes, ObservationWindow, read_totals, windows
from headway.lab.placement import Lived, place, replay, saved
from tests.paths import shared
from tests.refusals import refused


def window(failures, disks=10_000, days=90.0):
    return ObservationWindow("a", 4e12, days, disks * days, failures)


@settings(max_examples=40)
@given(first=st.integers(0, 400), second=st.integers(0, 400))
def test_a_scheme_tolerates_more_than_was_ever_seen_and_more_failures_never_save_more(first, second):
    [found], [worse] = (place([[window(first)], [window(more)]]) for more in (second, second + 60))
    seen = 365 * second / (10_000 * 90)

    assert found.tolerated > found.planned >= max(found.afr[2], seen) or found.scheme == "6-of-9"
    assert worse.saving <= found.saving


def test_a_rise_that_cannot_be_chance_is_carried_on():
    [steady] = place([[window(60)], [window(60)]])
    [rising] = place([[window(20)], [window(60)]])

    assert rising.planned > steady.planned * 1.3
    assert rising.tolerated > steady.tolerated


def test_few_disks_stay_in_default_and_say_why():
    [found] = place([[window(1, disks=500)]])

    assert (found.scheme, found.saving) == ("6-of-9", 0.0)
    assert found.reason == "not enough disks: 500 of 3000"
    assert saved([found]) == 0.0
    assert place([]) == []


def test_no_real_model_is_put_under_a_scheme_that_its_next_months_exceeded():
    dates = ("2021-10", "2021-11", "2022-09", "2022-11")
    totals = [read_totals(shared(f"disks/backblaze_{date}.csv")) for date in dates]
    spans = [windows(a, b) for a, b in itertools.pairwise(totals)]
    later = {window.model: window for window in spans[-1]}
    placed = place(spans[:-1])
    moved = [found for found in placed if found.saving > 0]

    assert len(moved) >= 10
    assert saved(placed) >= 0.15
    for found in moved:
        seen = later[found.model]
        assert 365 * seen.failures / seen.disk_days <= found.tolerated, found.model


def log(num=8000, days=200, seed=0):
    """Drives that all begin on one day; 8 % a year fail at first, then 1 %."""
    rng = np.random.default_rng(seed)
    rate = np.where(np.arange(days) < 30, 0.08, 0.01) / 365
    chance = rng.random((num, days)) < rate
    last = np.where(chance.any(axis=1), chance.argmax(axis=1), days - 1)
    zeros = np.zeros(num, np.int64)
    return Lifetimes(("a",), (4e12,), zeros, zeros, last, chance.any(axis=1))


def test_a_fleet_that_lives_through_a_log_saves_space_and_books_each_drive_day_once():
    drives = log()
    result = replay(drives)

    assert [change.kind for change in result.transitions][:1] == ["down"]
    assert sum(one.disk_days for one in result.lived) == pytest.approx(float((drives.last + 1).sum()))
    assert sum(one.failures for one in result.lived) == pytest.approx(float(drives.failed.sum()))
    assert 0 < result.savings < 0.27
    assert result.io_frac.max() <= 0.05 + 1e-9
    assert not any(one.exceeded for one in result.lived)


def test_more_failures_than_a_scheme_tolerates_are_seen_beyond_doubt_only():
    assert Lived("a", "30-of-33", 0.032, 365e3, 60).exceeded
    assert not Lived("a", "30-of-33", 0.032, 365e3, 35).exceeded


test_no_scheme_holds_for_a_negative_time = refused((lambda: place([], ahead_days=-3), "ahead_days is -3"))
