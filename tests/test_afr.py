"""Failure rates by age: against exact Poisson intervals, known change-points, straight lines; and refused logs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.rng import stream
from headway.lab.afr import AfrModel, poisson_interval

counts = st.integers(0, 400)


def lived(afr, disks, *, seed=0, days=None):
    """A model whose `disks` disks failed at random with `afr` [ages]."""
    model = AfrModel()
    ages = np.arange(len(afr) if days is None else days)
    model.add(np.full(len(ages), float(disks)), stream(seed, "made").poisson(afr[: len(ages)] * disks / 365), ages)
    return model


def poisson_cdf(count, mean):
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


@given(failures=counts, scale=st.integers(1, 50))
def test_an_interval_holds_its_estimate_and_narrows_with_more_of_the_same(failures, scale):
    lo, mid, hi = poisson_interval(failures, 1e6)
    low, same, high = poisson_interval(failures * scale, 1e6 * scale)

    assert lo <= mid <= hi
    assert mid == pytest.approx(365 * failures / 1e6)
    assert same == pytest.approx(mid)
    assert (high - low) <= (hi - lo) * (1 + 1e-9)


@pytest.mark.parametrize("failures", [0, 1, 2, 5, 20, 100])
def test_the_interval_of_a_plain_count_is_the_exact_one_of_garwood(failures):
    lo, _, hi = (x * 1e6 / 365 for x in poisson_interval(failures, 1e6))

    assert poisson_cdf(failures, hi) == pytest.approx(0.025, abs=0.002)
    if failures >= 5:
        assert 1 - poisson_cdf(failures - 1, lo) == pytest.approx(0.025, abs=0.002)
    else:  # few failures: the lower end is on the low side
        assert lo == 0 or 1 - poisson_cdf(failures - 1, lo) < 0.025


@given(order=st.permutations(range(6)))
def test_the_order_in_which_a_log_is_read_does_not_matter(order):
    pieces = [(1000.0 * (i + 1), i, 10 * i) for i in range(6)]
    model, other = AfrModel(), AfrModel()
    for piece in pieces:
        model.add(*piece)
    for index in order:
        other.add(*pieces[index])

    assert other.afr(30) == model.afr(30)


def test_intervals_of_smoothed_rates_hold_the_truth_as_often_as_they_say():
    truth = np.full(200, 0.02)
    held = 0
    for seed in range(200):
        lo, _, hi = lived(truth, 3000, seed=seed).afr(100)
        held += lo <= 0.02 <= hi

    assert 0.90 <= held / 200 <= 0.99


def test_infancy_ends_where_the_rate_falls_never_much_earlier_and_rarely_later():
    off = []
    for seed in range(80):
        rng = stream(seed, "bathtub")
        end, young, old = int(rng.integers(20, 120)), rng.uniform(0.06, 0.15), rng.uniform(0.01, 0.02)
        off.append(lived(np.where(np.arange(300) < end, young, old), 20_000, seed=seed).infancy_end() - end)

    assert min(off) >= -5
    assert sum(days <= 10 for days in off) >= 76


@given(seed=st.integers(0, 50))
def test_a_fading_rate_only_falls_and_counts_every_failure_once(seed):
    truth = 0.01 + 0.08 * np.exp(-np.arange(300) / 25)
    model = lived(truth, 20_000, seed=seed)
    fading = model.fading()

    assert np.all(np.diff(fading) <= 1e-12)
    assert (fading * 20_000 / 365).sum() == pytest.approx(model.failures.sum(), rel=0.01)
    assert fading[100:200].mean() == pytest.approx(truth[100:200].mean(), rel=0.35)


def test_lines_do_not_mind_that_fewer_disks_are_old_than_young():
    ages = np.arange(400)
    disks = 1e7 * np.exp(-ages / 60)
    model = AfrModel()
    model.add(disks, disks * (0.01 + 1e-4 * ages) / 365, ages)
    lines, level = model.lines(window_days=120), model.curve()

    assert lines.mid == pytest.approx(0.01 + 1e-4 * ages, rel=1e-6)
    assert np.all(level.mid[100:] < lines.mid[100:])
    assert np.all((lines.lo <= lines.mid) & (lines.mid <= lines.hi))


def test_wear_out_is_not_the_end_of_infancy_and_a_level_rate_has_none():
    ages = np.arange(900)
    worn = np.where(ages < 40, 0.08, 0.015 + np.maximum(0, ages - 500) * 1e-4)

    assert abs(lived(worn, 20_000).infancy_end() - 40) <= 10
    assert lived(np.full(300, 0.02), 20_000, seed=3).infancy_end() == 0


def test_too_few_disk_days_tell_no_end_of_infancy_and_know_no_age():
    young = lived(np.full(300, 0.02), 20_000, days=12)
    few = lived(np.full(300, 0.02), 500)

    assert young.infancy_end() is None
    assert few.infancy_end() is None
    assert few.frontier() is None
    assert few.projected(100, 30) == (0.0, pytest.approx(math.nan, nan_ok=True), math.inf)
    assert AfrModel().infancy_end() is None


def test_nothing_seen_is_said_not_guessed():
    model = lived(np.full(100, 0.02), 20_000)
    lo, mid, hi = model.afr(400)

    assert (lo, hi) == (0.0, math.inf)
    assert math.isnan(mid)


def test_a_line_is_found_with_its_slope_and_goes_on_beyond_the_oldest_age():
    ages = np.arange(400)
    model = AfrModel()
    model.add(np.full(400, 1e6), 1e6 * (0.01 + 1e-5 * ages) / 365, ages)

    slope, error = model.slope(399)
    lo, mid, hi = model.projected(399, 100)

    assert slope == pytest.approx(1e-5, rel=1e-6)
    assert error < 1e-4
    assert mid == pytest.approx(0.01 + 1e-5 * 499, rel=1e-6)
    assert lo < mid < hi
    assert model.projected(100, 50) == model.afr(150)


def test_a_trend_over_a_longer_window_is_surer():
    model = lived(np.full(400, 0.02), 20_000)

    assert model.slope(399, window_days=240)[1] < model.slope(399)[1] / 4


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ((-1.0, 0, 5), "disk-days are -1"), ((10.0, -1, 5), "failures are -1"),
        ((10.0, 11, 5), "11 failures in 10 disk-days"), ((math.nan, 0, 5), "disk-days are nan"),
        (([10.0, 10.0], [0, 0], [7, 5]), "rising order"), (([10.0, 10.0], [0, 0], [5, 5]), "rising order"),
        ((10.0, 0, 5.5), "whole days"), ((10.0, 0, -5), "ages are -5"), (([10.0], [0, 0], [5]), "as many of each"),
    ],
)  # fmt: skip
def test_a_log_that_cannot_be_true_is_refused_and_leaves_no_trace(log, says):
    model = AfrModel()

    with pytest.raises(InputError, match=says):
        model.add(*log)

    assert model.num_ages == 0


def test_questions_about_negative_ages_are_refused():
    model = lived(np.full(100, 0.02), 20_000)

    with pytest.raises(InputError, match="age is nan"):
        AfrModel().afr(float("nan"))
    with pytest.raises(InputError, match="age is -1"):
        model.afr(-1)
    with pytest.raises(InputError, match="horizon=-1"):
        model.projected(5, -1)
    with pytest.raises(InputError, match="confidence"):
        AfrModel(confidence=1.5)
