"""Offsets and drifts out of differences of ends: medians for lines, and what is not measured stays plausible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.trace.sync.end_differences import DRIFT, estimate, robust_line
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
    found = estimate(met, met.rank, len(offset), drift=False)

    assert found.clocks.theta_ns[:, 0].tolist() == (np.array(offset) - offset[0]).tolist()
    assert found.reached.all()


@given(seed=st.integers(0, 20), drift=st.floats(-100e-6, 100e-6))
@settings(max_examples=20)
def test_a_drift_is_recovered_and_outliers_do_not_move_it(seed, drift):
    rng = np.random.default_rng(seed)
    when = np.sort(rng.uniform(0, 60 * S, 200))
    value = drift * when + rng.laplace(0, 20 * US, 200)
    value[rng.permutation(200)[:30]] += 500 * MS
    level, slope = robust_line(when, value, 20e3)

    assert [level, level + slope * 60 * S] == pytest.approx([0, drift * 60 * S], abs=25 * US)


def test_a_short_trace_gets_no_slope_out_of_noise():
    rng = np.random.default_rng(1)
    when = np.sort(rng.uniform(0, 10 * MS, 8))
    slope = robust_line(when, rng.laplace(0, 20 * US, 8), 20e3)[1]

    assert abs(slope) < 0.1 * DRIFT


@pytest.mark.parametrize("early_ns", [0, 400 * US])
def test_messages_both_ways_cancel_what_a_sender_is_early(early_ns):
    maker = Maker(np.random.default_rng(2))
    for seq in range(50):
        maker.message(seq, 0, 1, seq * S, late_ns=100 * US, work_ns=500 * US)
        maker.message(seq, 1, 0, seq * S + 300 * MS, late_ns=100 * US, work_ns=500 * US)
    met = match(maker.trace())
    met.end_ns[met.sends] -= early_ns

    theta = estimate(met, met.rank, 2, drift=False).clocks.theta_ns
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

    assert abs(int(estimate(met, clock, 3, drift=False).clocks.theta_ns[1, 0])) < 10 * US


def test_clocks_in_different_units_are_refused():
    ends = np.arange(1, 50)[:, None] * 10 * MS * np.ones(3)
    ends[:, 2] /= 1000
    met = together(ends, length_ns=10)

    with pytest.raises(
        InputError, match=r"clock of rank 0 runs 1000 times faster than that of rank 2.*different units"
    ):
        estimate(met, met.rank, 3, drift=True)
