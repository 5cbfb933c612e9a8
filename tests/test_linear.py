"""Linear and integer programs, against trying everything."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.linear import minimise
from headway.core.search import pareto, smallest_true, threshold
from tests.refusals import refused

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


@settings(max_examples=200)
@given(st.data(), st.integers(1, 5), st.integers(0, 5), st.booleans())
def test_dense_rows_and_triplets_give_equal_answers(data: st.DataObject, n: int, m: int, whole: bool) -> None:
    cost = data.draw(st.lists(numbers, min_size=n, max_size=n))
    # Entries in any order, several of them in one cell: a matrix adds them up.
    cell = st.tuples(st.integers(0, max(m - 1, 0)), st.integers(0, n - 1), numbers)
    entries = data.draw(st.lists(cell, max_size=12 if m else 0))
    high = data.draw(st.lists(st.integers(0, 9), min_size=m, max_size=m))
    matrix = np.zeros((m, n))
    for row, column, value in entries:
        matrix[row, column] += value
    triplets = tuple([entry[i] for entry in entries] for i in range(3))
    asked = {"row_high": high, "high": 3, "whole": int(whole)}

    dense, sparse = minimise(cost, rows=matrix, **asked), minimise(cost, rows=triplets, num_rows=m, **asked)

    assert (dense.x.tolist(), dense.value, dense.bound) == (sparse.x.tolist(), sparse.value, sparse.bound)
    assert dense.row_price.tolist() == sparse.row_price.tolist()
    assert dense.bound == pytest.approx(dense.value)


@pytest.mark.parametrize("gap", [0.0, 0.01, 0.2])
def test_the_bound_is_within_the_gap(gap: float) -> None:
    """A knapsack of 40 things: the value lies within `gap` of the bound, and the bound below the true optimum."""
    random = np.random.default_rng(3)
    worth, weights = random.uniform(1, 2, 40), random.uniform(1, 2, (3, 40))
    asked = {"rows": weights, "row_high": weights.sum(1) / 3, "high": 1, "whole": 1}

    best = minimise(-worth, gap=gap, **asked)

    assert best.value - best.bound <= gap * abs(best.value) + 1e-6
    assert best.bound <= minimise(-worth, **asked).value + 1e-6


@pytest.mark.slow
def test_triplets_of_2048_jobs_and_their_pairs_are_solved_without_the_matrix() -> None:
    """Each job shares itself over its pairs: 2,048 rows by 20,480 variables, a dense matrix of 335 MB."""
    jobs, pairs = 2048, 20480
    random = np.random.default_rng(0)
    one, other = random.integers(0, jobs, (2, pairs))
    row, column = np.concatenate([one, other]), np.tile(np.arange(pairs), 2)

    best = minimise(-random.uniform(1, 2, pairs), rows=(row, column, np.ones(2 * pairs)), num_rows=jobs, row_high=1)

    use = np.bincount(row, best.x[column], minlength=jobs)
    assert use.max() <= 1 + 1e-6
    assert np.dot(best.row_price, np.ones(jobs)) == pytest.approx(best.value)


def test_a_program_without_rows_sits_on_its_bounds() -> None:
    best = minimise([1, -1], low=[-2, 0], high=[5, 7])

    assert (best.x.tolist(), best.value) == ([-2.0, 7.0], -9.0)


test_bad_programs_are_refused = refused(
    ({"cost": [1], "rows": [[1, 2]]}, r"rows has shape \[1, 2\], cost has 1 entries; give rows 1 columns"),
    ({"cost": [1], "rows": [[np.nan]]}, r"rows holds NaN or infinity; pass finite"),
    ({"cost": [np.nan]}, r"cost\[0\] is NaN; pass numbers"),
    ({"cost": [1, 2], "high": [1, 2, 3]}, r"high has shape \[3\]; pass 2 numbers"),
    ({"cost": [-1]}, r"no least value.*Add bounds"),
    ({"cost": [1], "rows": [[1], [1]], "row_high": [1, np.inf], "row_low": [-np.inf, 2]}, r"Drop or widen one"),
    ({"cost": [1], "gap": -0.1}, r"gap is -0.1; it must be >= 0"),
    ({"cost": [1], "gap": np.nan}, r"gap is nan; it must be >= 0"),
    ({"cost": [1], "rows": ([0], [1], [1]), "num_rows": 1}, r"column 1 of triplet 0 is outside 0 to 0"),
    ({"cost": [1], "rows": ([0, -1], [0, 0], [1, 1]), "num_rows": 1}, r"row -1 of triplet 1 is outside 0 to 0"),
    ({"cost": [1], "rows": ([0], [0, 0], [1]), "num_rows": 1}, r"shapes \[1\], \[2\] and \[1\].*one length"),
    ({"cost": [1], "rows": ([0], [0], [np.nan]), "num_rows": 1}, r"rows holds NaN or infinity"),
    ({"cost": [1], "rows": ([0.5], [0], [1]), "num_rows": 1}, r"row indices must be a flat list of integers"),
    ({"cost": [1], "rows": [[1]], "num_rows": 1}, r"three lists: \(row, column, value\)"),
    ({"cost": [1], "num_rows": -1}, r"num_rows is -1"),
    by=lambda arguments: minimise(**arguments),
)


# Small exact searches, against trying everything.


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


test_bad_input_is_refused = refused(
    (lambda: smallest_true(bool, 2, 1), r"range 2\.\.1 is empty; pass low <= high"),
    (lambda: threshold(bool, 0, math.inf, tolerance=1), r"range 0\.\.inf is empty or infinite"),
    (lambda: threshold(bool, 0, 1, tolerance=0), r"tolerance is 0; pass a number > 0"),
    (lambda: pareto([(1,), (1, 2)]), r"different numbers of coordinates; give each the same"),
    (lambda: pareto([(1, math.nan)]), r"point 0 is \(1, nan\); remove points with NaN"),
)
