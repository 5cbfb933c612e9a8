"""Schemes of redundancy: what each tolerates, and how long data lives, against chains that are solved in full."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.lab.schemes import SCHEMES, Scheme, Viability, bounds_afr, mttdl_hours, mttdl_parallel_hours, tolerated_afr
from tests.refusals import refused

widths = st.integers(1, 40)
parities = st.integers(1, 5)
rates = st.floats(1e-7, 1e-5)

PUBLISHED = {
    "7-of-10": 13.7, "8-of-11": 12.0, "9-of-12": 10.7, "10-of-13": 9.6, "11-of-14": 8.7, "12-of-15": 8.0,
    "13-of-16": 7.4, "15-of-18": 6.4, "18-of-21": 5.3, "24-of-27": 4.0, "27-of-30": 3.6, "30-of-33": 3.2,
}  # fmt: skip
"""Tolerated AFR in percent for a target of 6-of-9 at 16 %."""


@given(k=widths, m=parities)
def test_more_parity_tolerates_more_and_wider_stripes_less(k, m):
    here = tolerated_afr(k, k + m)

    assert tolerated_afr(k, k + m + 1) >= here
    assert tolerated_afr(k + 1, k + 1 + m) < here


@given(k=widths, m=parities)
def test_at_the_tolerated_rate_both_promises_of_the_default_scheme_are_kept_and_one_is_just_kept(k, m):
    afr = tolerated_afr(k, k + m)
    lasts = mttdl_hours(k, k + m, afr / 8760, 1 / 24) / mttdl_hours(6, 9, 0.16 / 8760, 1 / 24)
    reads = afr * k / (0.16 * 6)

    assert lasts >= 1 - 1e-9
    assert reads <= 1 + 1e-9
    assert math.isclose(lasts, 1, rel_tol=1e-9) or math.isclose(reads, 1, rel_tol=1e-9)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_trusted_with_what_it_tolerates_itself(name):
    scheme = SCHEMES[name]
    afr = scheme.tolerated_afr()

    assert scheme.tolerated_afr(default=(scheme.k, scheme.n, afr)) == pytest.approx(afr, rel=1e-12)
    assert Viability().allows(scheme)
    assert name == scheme.name


@given(k=st.integers(1, 12), m=st.integers(1, 4), lam=rates)
def test_parallel_repair_of_like_disks_is_m_factorial_times_serial_repair(k, m, lam):
    mu = lam * 1e9  # as lam / mu -> 0

    ratio = mttdl_parallel_hours(k, [lam] * (k + m), mu) / mttdl_hours(k, k + m, lam, mu)

    assert ratio == pytest.approx(math.factorial(m), rel=1e-6)


@given(lam=st.lists(rates, min_size=3, max_size=6), k=st.integers(1, 2))
def test_the_chance_that_k_less_one_disks_are_up_is_that_of_every_subset_added_up(lam, k):
    mu = 1 / 24
    up = [mu / (mu + each) for each in lam]
    chance = sum(
        math.prod(up[i] if i in alive else 1 - up[i] for i in range(len(lam)))
        for alive in itertools.combinations(range(len(lam)), k - 1)
    )

    assert mttdl_parallel_hours(k, lam, mu) == pytest.approx(1 / (mu * (len(lam) - k + 1) * chance), rel=1e-9)


@given(k=st.integers(1, 8), m=st.integers(1, 3))
def test_serial_repair_is_the_time_to_absorption_of_the_birth_death_chain(k, m):
    lam, mu = 1e-4, 1.0
    num = m + 1  # states: 0..m disks down
    chain = np.zeros((num, num))
    for down in range(num):
        fails, heals = (k + m - down) * lam, mu if down else 0.0
        chain[down, down] = -(fails + heals)
        if down + 1 < num:
            chain[down, down + 1] = fails
        if down:
            chain[down, down - 1] = heals
    hours = np.linalg.solve(chain, -np.ones(num))[0]

    assert mttdl_hours(k, k + m, lam, mu) == pytest.approx(hours, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_of_tolerated_rates_is_the_published_one(name):
    scheme = SCHEMES[name]

    assert round(100 * tolerated_afr(scheme.k, scheme.n), 1) == PUBLISHED[name]


def test_six_of_nine_lasts_five_thirds_of_seven_of_ten_and_thirty_of_thirty_three_saves_26_7_percent():
    assert mttdl_hours(6, 9, 2e-5, 1 / 24) / mttdl_hours(7, 10, 2e-5, 1 / 24) == pytest.approx(5 / 3, rel=1e-12)
    assert max(scheme.saving(Scheme(6, 9)) for scheme in SCHEMES.values()) == pytest.approx(0.2667, abs=1e-4)
    assert tolerated_afr(6, 9) == pytest.approx(0.16, rel=1e-12)
    assert bounds_afr(7, 10)["mttdl"] == pytest.approx(0.1408, abs=1e-4)


def test_an_rgroup_must_be_able_to_rebuild_a_disk_in_time_and_to_hold_a_stripe():
    rules = Viability(max_rebuild_h=24)

    assert rules.least_disks(Scheme(30, 33), 12e12, 5e6) * 5e6 * 24 * 3600 >= 31 * 12e12
    assert Viability().least_disks(Scheme(30, 33), 12e12, 5e6) == 33
    assert not rules.allows(Scheme(10, 12))
    assert not rules.allows(Scheme(40, 43))


@pytest.mark.parametrize(("k", "n"), [(9, 9), (9, 6), (0, 3), (-1, 2)])
def test_as_many_chunks_of_data_as_chunks_is_no_scheme(k, n):
    for ask in (lambda: tolerated_afr(k, n), lambda: mttdl_hours(k, n, 1e-6, 1), lambda: Scheme(k, n)):
        with pytest.raises(InputError, match=r"is no scheme.*Choose 0 < k < n"):
            ask()


test_rates_that_are_not_positive_are_refused = refused(
    (lambda: mttdl_hours(6, 9, 0.0, 1.0), "failure rate is 0"),
    (lambda: mttdl_parallel_hours(1, [1e-6] * 3, math.nan), "repair rate is nan"),
    (lambda: tolerated_afr(7, 10, default=(6, 9, -0.1 * 8760)), r"failure rate is -0\.1"),
    (lambda: tolerated_afr(7, 10, mttr_h=0), "mttr_h is 0"),
)
