"""What checkpoints cost: bounds of CheckFreq, the interval of Young and Daly, the expected wall time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoint.costs import (
    Goal,
    behind_steps,
    best_interval_s,
    best_steps,
    budget_steps,
    choose_snapshot,
    overlap_steps,
    wall_factor,
    young_daly,
)
from tests.refusals import refused

seconds = st.floats(1e-6, 1e6)
budgets = st.floats(1e-4, 1.0)


@given(seconds, seconds, seconds, budgets)
def test_the_bounds_keep_saves_apart_and_stalls_within_the_budget_and_one_step_less_would_not(
    stall_s, more_s, step_s, budget
):
    apart = overlap_steps(stall_s=stall_s, duration_s=stall_s + more_s, step_s=step_s)
    rare = budget_steps(cost_s=stall_s, step_s=step_s, budget=budget)

    assert apart * step_s >= (stall_s + more_s - stall_s) * (1 - 1e-8)
    assert stall_s <= budget * rare * step_s * (1 + 1e-8)
    assert rare == 1 or stall_s > budget * (rare - 1) * step_s * (1 - 1e-8)


@given(seconds, seconds, seconds, budgets, st.floats(1, 100))
def test_dearer_or_longer_saves_or_a_smaller_budget_never_make_saves_more_frequent(stall_s, rest_s, step_s, p, more):
    base = {"stall_s": stall_s, "duration_s": stall_s + rest_s, "step_s": step_s}

    assert overlap_steps(**{**base, "duration_s": stall_s + more * rest_s + rest_s}) >= overlap_steps(**base)
    assert budget_steps(cost_s=more * stall_s, step_s=step_s, budget=p) >= budget_steps(
        cost_s=stall_s, step_s=step_s, budget=p
    )
    assert budget_steps(cost_s=stall_s, step_s=step_s, budget=p / more) >= budget_steps(
        cost_s=stall_s, step_s=step_s, budget=p
    )
    assert overlap_steps(**base, inflight=2) <= overlap_steps(**base)


def test_an_exact_quotient_is_not_rounded_up():
    assert overlap_steps(stall_s=0.0, duration_s=0.3, step_s=0.1) == 3
    assert budget_steps(cost_s=0.035, step_s=0.1, budget=0.035) == 10


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1e7), st.floats(1e-2, 1e3))
def test_of_whole_numbers_of_steps_none_loses_less_than_the_best(stall_s, mtbf_s, step_s):
    best = best_steps(stall_s, step_s=step_s, budget=0.035, mtbf_s=mtbf_s)

    def lost(steps):
        return wall_factor(steps * step_s, stall_s=stall_s, mtbf_s=mtbf_s)

    assert best >= 1
    assert lost(best) <= lost(best + 1) * (1 + 1e-9)
    assert best == 1 or lost(best) <= lost(best - 1) * (1 + 1e-9)


@pytest.mark.parametrize(("mtbf_s", "steps"), [(None, 40), (40.0, 20)])
def test_saves_behind_the_steps_never_overtake_and_come_more_often_than_now_only_against_failures(mtbf_s, steps):
    goal: Goal = {"step_s": 0.1, "budget": 0.035, "mtbf_s": mtbf_s}

    assert behind_steps(0.05, late_s=1.0, now=40, goal=goal) == steps
    assert behind_steps(0.05, late_s=9.0, now=40, goal=goal) == 90


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1e7), st.floats(0.3, 3.0))
def test_no_interval_is_better_than_the_best(stall_s, mtbf_s, other):
    best = best_interval_s(stall_s, mtbf_s)

    least = wall_factor(best, stall_s=stall_s, mtbf_s=mtbf_s)
    assert least <= wall_factor(best * other, stall_s=stall_s, mtbf_s=mtbf_s) * (1 + 1e-9)


@given(st.floats(1e-6, 0.5), st.floats(1.0, 1e7))
def test_dalys_interval_is_within_a_percent_of_the_exact_one_up_to_half_the_mtbf(share, mtbf_s):
    stall_s = share * mtbf_s

    assert young_daly(stall_s, mtbf_s) == pytest.approx(best_interval_s(stall_s, mtbf_s), rel=0.01)


def test_for_rare_failures_it_is_youngs_square_root():
    assert young_daly(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-4)


@pytest.mark.parametrize("interval", [young_daly, best_interval_s])
def test_limits_free_saves_are_always_taken_and_a_job_that_never_fails_needs_none(interval):
    assert interval(0.0, 3600.0) == 0.0
    assert interval(5.0, math.inf) == math.inf
    assert young_daly(7200.0, 3600.0) == 3600.0


@pytest.mark.parametrize(
    ("mtbf_s", "restart_s", "interval_s", "stall_s"),
    [(11_124.0, 600.0, 300.0, 10.0), (3600.0, 300.0, 600.0, 20.0), (20_000.0, 120.0, 900.0, 5.0)],
)
def test_the_expected_wall_time_is_that_of_failures_played_at_random(mtbf_s, restart_s, interval_s, stall_s):
    rng = np.random.default_rng(7)
    rounds = 40_000
    wall_s = np.zeros(rounds)
    # Segments of one interval and its save: each trial runs until one is finished without a failure.
    open_rounds, need_s = np.arange(rounds), np.full(rounds, interval_s + stall_s)
    restarting = np.zeros(rounds, bool)
    while len(open_rounds):
        target = np.where(restarting[open_rounds], restart_s, need_s[open_rounds])
        failure = rng.exponential(mtbf_s, len(open_rounds))
        failed = failure < target
        wall_s[open_rounds] += np.minimum(failure, target)
        finished = ~failed & ~restarting[open_rounds]
        restarting[open_rounds] = failed
        open_rounds = open_rounds[~finished]

    played = wall_s.mean() / interval_s
    # The formula lets every interval begin with a restart's share e^(u/M): both count failures during restarts.
    expected = wall_factor(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s)
    assert played == pytest.approx(expected, rel=0.02)


def test_an_interval_that_no_failure_free_stretch_can_hold_takes_forever():
    assert wall_factor(1e9, stall_s=1.0, mtbf_s=1.0) == math.inf


@pytest.mark.parametrize(
    ("free_bytes", "device_s", "overlap_s", "device", "stall_s"),
    [(10**9, 0.02, 0.1, "device", 0.02), (10**6, 0.02, 0.1, "host", 0.4), (10**9, 0.02, 0.6, "host", 0.0)],
)
def test_the_copy_stays_on_the_device_where_it_fits_and_hides_less_on_the_host(
    free_bytes, device_s, overlap_s, device, stall_s
):
    choice = choose_snapshot(
        device_s=device_s, host_s=0.5, overlap_s=overlap_s, state_bytes=10**8, free_bytes=free_bytes
    )

    assert (choice.device, choice.stall_s) == (device, pytest.approx(stall_s))


test_what_cannot_be_is_refused_by_its_name = refused(
    (lambda: young_daly(-1.0, 10.0), "stall_s"),
    (lambda: young_daly(1.0, 0.0), "mtbf_s"),
    (lambda: young_daly(math.nan, 10.0), "stall_s"),
    (lambda: best_interval_s(1.0, math.nan), "mtbf_s"),
    (lambda: wall_factor(0.0, stall_s=1.0, mtbf_s=1.0), "interval_s"),
    (lambda: overlap_steps(stall_s=0.1, duration_s=1.0, step_s=0.0), "step_s"),
    (lambda: overlap_steps(stall_s=0.1, duration_s=1.0, step_s=1.0, inflight=0), "inflight"),
    (lambda: budget_steps(cost_s=0.1, step_s=1.0, budget=0.0), "budget"),
    (lambda: budget_steps(cost_s=math.inf, step_s=1.0, budget=0.1), "cost_s"),
    (lambda: choose_snapshot(device_s=0, host_s=1, overlap_s=0, state_bytes=0, free_bytes=1), "state_bytes"),
)
