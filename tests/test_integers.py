"""Narrow types keep the values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.integers import WIDTHS, narrowed


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_values_stay_and_no_narrower_type_would_hold_them(values):
    found = narrowed(np.array(values, np.int64))

    assert found.tolist() == values
    for narrower in WIDTHS[: WIDTHS.index(found.dtype.type)]:
        assert np.array(values, np.int64).astype(narrower).tolist() != values


@pytest.mark.parametrize("width", WIDTHS)
def test_a_floor_is_kept(width):
    assert narrowed(np.array([1]), width).dtype == width
    assert narrowed(np.zeros(0, np.int64), width).dtype == width
