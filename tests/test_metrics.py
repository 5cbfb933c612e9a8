"""Ratios and rates against closed forms, simulation and published figures."""

import math

import numpy as np
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


@given(mtbf, short)
def test_no_other_interval_beats_the_optimal_one(mtbf_s, save_s):
    best_s = metrics.optimal_interval_s(mtbf_s, save_s=save_s)
    best = metrics.ettr(mtbf_s, restart_s=0.0, interval_s=best_s, save_s=save_s)

    for factor in (0.5, 0.9, 1.1, 2.0):
        other = metrics.ettr(mtbf_s, restart_s=0.0, interval_s=best_s * factor, save_s=save_s)
        assert other <= best + 1e-12


@given(st.floats(1e4, 1e7), st.floats(0.1, 10.0))
def test_daly_and_the_exact_interval_agree_when_saves_are_short(mtbf_s, save_s):
    exact = metrics.optimal_interval_s(mtbf_s, save_s=save_s)

    assert metrics.daly_interval_s(mtbf_s, save_s=save_s) == pytest.approx(exact, rel=1e-3)


def test_daly_never_saves_less_often_than_it_fails():
    assert metrics.daly_interval_s(100.0, save_s=300.0) == 100.0


def played_ettr(mtbf_s: float, restart_s: float, interval_s: float, save_s: float, segments: int) -> float:
    """Oracle: play failures over many saves; a failure costs the segment so far and restarts, which may fail too."""
    rng = np.random.default_rng(7)
    wall_s = 0.0
    for _ in range(segments):
        restart_left = 0.0
        while True:
            need_s = restart_left + interval_s + save_s
            fails_after = rng.exponential(mtbf_s)
            if fails_after >= need_s:
                wall_s += need_s
                break
            wall_s += fails_after
            restart_left = restart_s
    return segments * interval_s / wall_s


@pytest.mark.parametrize(
    ("mtbf_s", "restart_s", "interval_s", "save_s"),
    [(11_124.0, 600.0, 300.0, 10.0), (3_600.0, 120.0, 400.0, 20.0), (50_000.0, 300.0, 600.0, 5.0)],
)
def test_ettr_equals_a_played_job(mtbf_s, restart_s, interval_s, save_s):
    closed = metrics.ettr(mtbf_s, restart_s=restart_s, interval_s=interval_s, save_s=save_s)

    # The closed form charges every segment with the restart before it; both agree to a point.
    assert closed == pytest.approx(played_ettr(mtbf_s, restart_s, interval_s, save_s, 4000), abs=0.01)


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
