"""Intervals of predictions: they hold what they should, and widen with what the model is known to miss."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.graph.intervals import Z_NOMINAL, ModelError, speedup_interval


@given(
    speedup=st.floats(0.2, 20), noise=st.floats(0, 0.5), floor=st.floats(0, 0.05), slope=st.floats(0, 0.4),
    discrepancy=st.floats(0, 0.05), seed=st.integers(0, 99),
)  # fmt: skip
def test_an_interval_holds_the_prediction_and_is_no_narrower_than_the_models_error(
    speedup: float, noise: float, floor: float, slope: float, discrepancy: float, seed: int
) -> None:
    after = np.random.default_rng(seed).lognormal(0.0, noise, 60)
    base = speedup * after
    model = ModelError(floor, slope)
    low, high = speedup_interval(base, after, discrepancy=discrepancy, model=model, seed=seed)

    own = Z_NOMINAL * model.deviation(speedup)
    assert low <= speedup * math.exp(-own) * (1 + 1e-9)
    assert high >= speedup * math.exp(own) * (1 - 1e-9)
    narrow = speedup_interval(base, after, discrepancy=discrepancy, model=ModelError(0, 0), seed=seed)
    assert low <= narrow[0] * (1 + 1e-9)
    assert high >= narrow[1] * (1 - 1e-9)


@pytest.mark.parametrize("speedup", [1.05, 2.0, 6.0])
def test_of_outcomes_that_err_as_the_model_says_nine_in_ten_lie_inside(speedup: float) -> None:
    rng, model = np.random.default_rng(3), ModelError(0.02, 0.1)
    low, high = speedup_interval(np.full(50, speedup), np.ones(50), model=model)
    outcomes = speedup * np.exp(rng.normal(0.0, model.deviation(speedup), 20_000))

    assert ((low <= outcomes) & (outcomes <= high)).mean() == pytest.approx(0.9, abs=0.01)


def test_other_costs_that_may_be_assumed_widen_the_side_they_shift() -> None:
    base, after, exact = np.full(50, 2.0), np.ones(50), ModelError(0, 0)

    assert speedup_interval(base, after, shifts=[0.8, 1.1], model=exact) == pytest.approx((1.6, 2.2))
