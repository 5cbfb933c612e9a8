"""The account of a fleet, and the descriptions of models of disk it is made from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import FormatError, InputError
from headway.lab.fleet import DiskFleet
from headway.lab.fleet_sim import Dgroup, read_clusters, step_days
from tests.refusals import refused

FLAT = ((0.0, 0.02),)


def test_failures_are_as_many_as_the_rate_says():
    result = DiskFleet("static").simulate([Dgroup("a", ((0, 50_000),), ((0, 0.1),))], 365)

    assert result.disk_days == pytest.approx(50_000 * 365 * (1 - 0.05), rel=0.01)


def test_disks_retire_at_their_age():
    result = DiskFleet("static").simulate([Dgroup("a", ((0, 1000), (50, 1000)), ((0, 0.0),), retire_days=100)], 400)

    assert result.disk_days == 2 * 1000 * 100


def test_the_bound_is_the_best_scheme_for_the_true_rate_of_each_day():
    clusters = [Dgroup("a", ((0, 1000),), ((0, 0.12), (99, 0.12), (100, 0.0), (200, 0.0)))]
    result = DiskFleet("static").simulate(clusters, 200)

    assert result.oracle_savings == pytest.approx((1 - (11 / 8) / 1.5 + 1 - (33 / 30) / 1.5) / 2, rel=0.02)


@given(per_day=st.integers(1, 200), length=st.integers(20, 300))
def test_disks_that_come_for_weeks_are_no_step(per_day, length):
    assert step_days(dict.fromkeys(range(length), per_day)) == set()


@given(starts=st.sets(st.integers(0, 20), min_size=1), size=st.integers(3000, 9000))
def test_thousands_within_days_are_a_step_each_time(starts, size):
    arrivals = {30 * start + day: size // 2 + 1 for start in sorted(starts) for day in (0, 2)}

    assert step_days(arrivals) == set(arrivals)


def test_a_fleet_is_read_from_toml(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text('[[dgroup]]\nname = "a"\narrivals = [[0, 5000]]\nafr = [[0, 0.05], [60, 0.01]]\n')
    [model] = read_clusters(path)

    assert model == Dgroup("a", ((0, 5000),), ((0.0, 0.05), (60.0, 0.01)))
    assert model.true_afr(61)[[0, 30, 60]] == pytest.approx(np.array([0.05, 0.03, 0.01]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[dgroup", "is no TOML that headway reads"),
        ("x = 1", "must hold tables"),
        ('[[dgroup]]\nname = "a"\n', "dgroup 0.*arrivals"),
        ('[[dgroup]]\nname = "a"\narrivals = [[3, 5], [3, 5]]\nafr = [[0, 0.1]]\n', "rising days"),
        ('[[dgroup]]\nname = "a"\narrivals = [[0, 5]]\nafr = [[9, 0.1], [3, 0.1]]\n', "ages of its AFR do not rise"),
        (f'[[dgroup]]\nname = "a"\narrivals = [[0, {10**18}]]\nafr = [[0, 0.1]]\n', "1,000,000,000 at most"),
        ('[[dgroup]]\nname = "a"\narrivals = [[0, 5]]\nafr = [[0, 1e300]]\n', "an AFR is negative or above 1000"),
    ],
)
def test_a_file_that_is_no_fleet_is_refused_with_its_place(tmp_path, text, says):
    path = tmp_path / "fleet.toml"
    path.write_text(text)

    with pytest.raises(FormatError, match=says):
        read_clusters(path)


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_clusters(tmp_path / "none.toml")


test_models_that_cannot_be_are_refused = refused(
    (lambda: Dgroup("a", ((0, 5),), ((0, -0.1),)), "an AFR is negative"),
    (lambda: Dgroup("a", ((0, 5),), FLAT, capacity_bytes=0), "must be positive"),
    (lambda: DiskFleet().simulate([Dgroup("a", ((0, 5),), FLAT)] * 2, 5), "two models of disk have one name"),
    (lambda: DiskFleet().simulate(["a"], 5), "'a' is not a Dgroup"),
)
