"""Small exact searches, against trying everything."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.search import pareto, smallest_true, threshold


@given(st.integers(-20, 20), st.integers(0, 40), st.integers(-25, 65))
def test_bisection_finds_where_a_predicate_begins_to_hold(low: int, width: int, begin: int) -> None:
    found = smallest_true(lambda x: x >= begin, low, low + width)

    assert found == next((x for x in range(low, low + width + 1) if x >= begin), None)


@given(st.floats(-100, 100), st.floats(0, 100), st.floats(-250, 250), st.floats(1e-9, 1))
def test_a_threshold_is_within_its_tolerance(low: float, width: float, begin: float, tolerance: float) -> None:
    found = threshold(lambda x: x >= begin, low, low + width, tolerance=tolerance)

    if begin > low + width:
        assert found is None
    else:
        assert found is not None
        assert found >= begin
        assert found - max(begin, low) <= tolerance * (1 + 1e-9) + 1e-12


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, ...]]) -> None:
    def beaten(i: int) -> bool:
        return any(
            all(a <= b for a, b in zip(points[j], points[i], strict=True)) and (points[j] != points[i] or j < i)
            for j in range(len(points))
            if j != i
        )

    assert pareto(points) == [i for i in range(len(points)) if not beaten(i)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: smallest_true(bool, 2, 1), r"range 2\.\.1 is empty; pass low <= high"),
        (lambda: threshold(bool, 0, math.inf, tolerance=1), r"range 0\.\.inf is empty or infinite"),
        (lambda: threshold(bool, 0, 1, tolerance=0), r"tolerance is 0; pass a number > 0"),
        (lambda: pareto([(1,), (1, 2)]), r"different numbers of coordinates; give each the same"),
        (lambda: pareto([(1, math.nan)]), r"point 0 is \(1, nan\); remove points with NaN"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
