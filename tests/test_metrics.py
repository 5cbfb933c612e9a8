"""Ratios and rates against closed forms, simulation and published figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.ledger.answers import metrics
from tests.refusals import refused

mtbf = st.floats(600.0, 1e6)
short = st.floats(1.0, 100.0)


@given(mtbf, short, short, st.floats(10.0, 5000.0))
def test_ettr_is_a_fraction_and_falls_with_every_cost(mtbf_s, restart_s, save_s, interval_s):
    base = metrics.ettr(mtbf_s, restart_s=restart_s, interval_s=interval_s, save_s=save_s)

    assert 0.0 <= base < 1.0
    assert metrics.ettr(mtbf_s * 2, restart_s=restart_s, interval_s=interval_s, save_s=save_s) >= base
    assert metrics.ettr(mtbf_s, restart_s=restart_s * 2, interval_s=interval_s, save_s=save_s) <= base
    assert metrics.ettr(mtbf_s, restart_s=restart_s, interval_s=interval_s, save_s=save_s * 2) <= base


def test_llama_3_reports_over_ninety_percent():
    """419 interruptions in 54 days (Llama 3 report): M = 3.09 h; restart 600 s, save every 300 s for 10 s."""
    mtbf_s = 54 * 86_400 / 419

    exact = metrics.ettr(mtbf_s, restart_s=600.0, interval_s=300.0, save_s=10.0)

    assert mtbf_s / 3600 == pytest.approx(3.09, abs=0.005)
    assert exact == pytest.approx(0.904, abs=0.0005)
    assert metrics.ettr_first_order(mtbf_s, restart_s=600.0, interval_s=300.0, save_s=10.0) == pytest.approx(
        exact, abs=0.008
    )


def test_a_job_that_fails_faster_than_it_saves_has_no_progress():
    assert metrics.ettr(1.0, restart_s=600.0, interval_s=3600.0, save_s=1.0) == 0.0
    assert metrics.ettr_first_order(1.0, restart_s=600.0, interval_s=3600.0, save_s=1.0) == 0.0


test_impossible_values_are_named = refused(
    (lambda: metrics.ettr(0.0, restart_s=1, interval_s=1, save_s=1), r"mtbf_s is 0.0.*above 0"),
    (lambda: metrics.ettr(1.0, restart_s=-1, interval_s=1, save_s=1), r"restart_s is -1.*0 or more"),
    (lambda: metrics.optimal_interval_s(math.nan, save_s=1), r"mtbf_s is nan.*positive number"),
)
