"""Offsets and drifts out of differences of ends: medians for lines, and what is not measured stays plausible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.trace.sync.drift_windows import DRIFT, least_absolute
from headway.trace.sync.end_differences import estimate
from headway.trace.sync.meetings import Meetings, match
from tests.clocks_made import MS, US, Maker, S


def together(ends: np.ndarray, *, length_ns: int = 1000) -> Meetings:
    """Return collectives [m] of all clocks [C] with these raw ends [m, C]."""
    count, clocks = ends.shape
    flat = ends.ravel().astype(np.int64)
    return Meetings(
        np.arange(flat.size), np.tile(np.arange(clocks), count), flat - length_ns, flat,
        np.arange(count + 1) * clocks, np.zeros(count, np.int64), np.zeros(count, bool), np.zeros(flat.size, bool),
    )  # fmt: skip


@given(offset=st.lists(st.integers(-(10**17), 10**17), min_size=2, max_size=12), count=st.integers(1, 5))
def test_offsets_without_noise_are_exact_however_large(offset, count):
    ends = 5000 * np.arange(1, count + 1)[:, None] - np.array(offset)[None, :]
    met = together(ends)
    found = estimate(met, met.rank, len(offset), window_s=None)

    assert found.clocks.theta_ns[:, 0].tolist() == (np.array(offset) - offset[0]).tolist()
    assert found.reached.all()


@given(seed=st.integers(0, 20), drift=st.floats(-100e-6, 100e-6))
@settings(max_examples=20)
def test_a_drift_is_recovered_and_outliers_do_not_move_it(seed, drift):
    rng = np.random.default_rng(seed)
    when = np.sort(rng.uniform(0, 60 * S, 200))
    value = drift * when + rng.laplace(0, 20 * US, 200)
    value[rng.permutation(200)[:30]] += 500 * MS
    border = np.array([0.0, 60.0 * S])
    fit = least_absolute(np.zeros(200, np.int64), when, value, np.array([20e3]), border)[0]

    assert fit == pytest.approx(drift * border, abs=25 * US)


@given(seed=st.integers(0, 20))
@settings(max_examples=10)
def test_lines_of_windows_join_and_follow_a_changing_drift(seed):
    rng = np.random.default_rng(seed)
    border = np.arange(5) * 60.0 * S
    truth = np.cumsum(np.r_[0, rng.uniform(-20e-6, 20e-6, 4)]) * 60 * S
    when = np.sort(rng.uniform(0, 240 * S, 800))
    value = np.interp(when, border, truth) + rng.laplace(0, 20 * US, 800)
    fit = least_absolute(np.zeros(800, np.int64), when, value, np.array([20e3]), border)[0]

    assert fit == pytest.approx(truth, abs=25 * US)


def test_a_window_without_meetings_continues_the_drift_beside_it():
    when = np.r_[np.linspace(0, 60, 50), np.linspace(180, 240, 50)] * S
    border = np.arange(6) * 60.0 * S
    fit = least_absolute(np.zeros(100, np.int64), when, 15e-6 * when, np.array([1e3]), border)[0]

    assert fit == pytest.approx(15e-6 * border, abs=200 * US)


def test_a_short_trace_gets_no_slope_out_of_noise():
    rng = np.random.default_rng(1)
    when = np.sort(rng.uniform(0, 10 * MS, 8))
    border = np.array([0.0, 10 * MS])
    fit = least_absolute(np.zeros(8, np.int64), when, rng.laplace(0, 20 * US, 8), np.array([20e3]), border)[0]

    assert abs(fit[1] - fit[0]) < 0.1 * DRIFT * 10 * MS


@pytest.mark.parametrize("early_ns", [0, 400 * US])
def test_messages_both_ways_cancel_what_a_sender_is_early(early_ns):
    maker = Maker(np.random.default_rng(2))
    for seq in range(50):
        maker.message(seq, 0, 1, seq * S, late_ns=100 * US, work_ns=500 * US)
        maker.message(seq, 1, 0, seq * S + 300 * MS, late_ns=100 * US, work_ns=500 * US)
    met = match(maker.trace())
    met.end_ns[met.sends] -= early_ns

    theta = estimate(met, met.rank, 2, window_s=None).clocks.theta_ns
    assert abs(int(theta[1, 0])) < 10 * US


def test_a_calm_path_is_preferred_to_a_noisy_edge():
    rng = np.random.default_rng(3)
    parts = []
    for pair, noise in (((0, 1), 10 * MS), ((0, 2), US), ((2, 1), US)):
        ends = np.arange(1, 41)[:, None] * S + rng.laplace(0, noise, (40, 2))
        parts.append((pair, ends.astype(np.int64)))
    end = np.concatenate([ends.ravel() for _, ends in parts])
    clock = np.concatenate([np.tile(pair, 40) for pair, _ in parts])
    met = Meetings(
        np.arange(240), clock, end - 1000, end, np.arange(121) * 2, np.repeat([0, 1, 2], 40), np.zeros(120, bool),
        np.zeros(240, bool),
    )  # fmt: skip

    assert abs(int(estimate(met, clock, 3, window_s=None).clocks.theta_ns[1, 0])) < 10 * US


def test_clocks_in_different_units_are_refused():
    ends = np.arange(1, 50)[:, None] * 10 * MS * np.ones(3)
    ends[:, 2] /= 1000
    met = together(ends, length_ns=10)

    with pytest.raises(
        InputError, match=r"clock of rank 0 runs 1000 times faster than that of rank 2.*different units"
    ):
        estimate(met, met.rank, 3, window_s=60)


def test_a_window_of_no_length_is_refused():
    met = together(np.ones((2, 2)))

    with pytest.raises(InputError, match=r"window of -1 s is none\. Pass a length"):
        estimate(met, met.rank, 2, window_s=-1)
