"""Linear and integer programs, against trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.linear import minimise

numbers = st.integers(-5, 5)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_whole_programs_are_as_good_as_the_best_of_all(data: st.DataObject, n: int, m: int) -> None:
    cost = data.draw(st.lists(numbers, min_size=n, max_size=n))
    rows = data.draw(st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=m, max_size=m))
    bound = data.draw(st.lists(st.integers(-4, 9), min_size=m, max_size=m))
    feasible = [
        x
        for x in itertools.product(range(4), repeat=n)
        if all(np.dot(row, x) <= b for row, b in zip(rows, bound, strict=True))
    ]
    matrix = np.array(rows, float).reshape(m, n)
    if not feasible:
        with pytest.raises(InputError, match=r"no x satisfies all the rows|no solution"):
            minimise(cost, rows=matrix, row_high=bound, high=3, whole=1)
        return
    best = minimise(cost, rows=matrix, row_high=bound, high=3, whole=1)

    assert best.value == pytest.approx(min(np.dot(cost, x) for x in feasible))
    assert tuple(best.x) in feasible


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 20))
def test_the_price_of_a_row_is_what_one_more_unit_changes(weights: list[int], budget: int) -> None:
    def solve(limit: float) -> float:
        return minimise([-1.0] * len(weights), rows=[weights], row_high=[limit]).value

    best = minimise([-1.0] * len(weights), rows=[weights], row_high=[budget])

    assert solve(budget + 1) - best.value == pytest.approx(best.row_price[0])


def test_a_program_without_rows_sits_on_its_bounds() -> None:
    best = minimise([1, -1], low=[-2, 0], high=[5, 7])

    assert (best.x.tolist(), best.value) == ([-2.0, 7.0], -9.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cost": [1], "rows": [[1, 2]]}, r"rows has shape \[1, 2\], cost has 1 entries; give rows 1 columns"),
        ({"cost": [1], "rows": [[np.nan]]}, r"rows holds NaN or infinity; pass finite"),
        ({"cost": [np.nan]}, r"cost\[0\] is NaN; pass numbers"),
        ({"cost": [1, 2], "high": [1, 2, 3]}, r"high has shape \[3\]; pass 2 numbers"),
        ({"cost": [-1]}, r"no least value.*Add bounds"),
        ({"cost": [1], "rows": [[1], [1]], "row_high": [1, np.inf], "row_low": [-np.inf, 2]}, r"Drop or widen one"),
    ],
)
def test_bad_programs_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        minimise(**arguments)
