"""Small exact searches, against trying everything."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.search import cut_chain, cut_weights, pareto, smallest_true, threshold

chains = st.lists(st.integers(0, 9), min_size=1, max_size=8).flatmap(
    lambda weights: st.tuples(st.just(weights), st.integers(1, len(weights)))
)


def every_cut(num_links: int, num_parts: int) -> list[list[int]]:
    return [[0, *cuts, num_links] for cuts in itertools.combinations(range(1, num_links), num_parts - 1)]


@given(chains)
def test_cuts_of_weights_are_as_good_as_the_best_of_all(chain: tuple[list[int], int]) -> None:
    weights, num_parts = chain

    def heaviest(bounds: list[int]) -> int:
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

    bounds = cut_weights(weights, num_parts)

    assert bounds in every_cut(len(weights), num_parts)
    assert heaviest(bounds) == min(map(heaviest, every_cut(len(weights), num_parts)))


@given(chains, st.randoms(use_true_random=False))
def test_cuts_by_any_price_are_as_good_as_the_best_of_all(chain: tuple[list[int], int], random) -> None:
    num_links, num_parts = len(chain[0]), chain[1]
    price = {
        (part, a, b): random.choice([1, 2, 5, 7, math.inf])
        for part in range(num_parts)
        for a in range(num_links)
        for b in range(a + 1, num_links + 1)
    }

    def dearest(bounds: list[int]) -> float:
        return max(price[part, a, b] for part, (a, b) in enumerate(itertools.pairwise(bounds)))

    bounds = cut_chain(num_links, num_parts, lambda part, a, b: price[part, a, b])

    assert bounds in every_cut(num_links, num_parts)
    assert dearest(bounds) == min(map(dearest, every_cut(num_links, num_parts)))


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
        (lambda: cut_weights([1, 2], 3), r"2 links cannot make 3 non-empty parts; ask for 1\.\.2"),
        (lambda: cut_chain(2, 0, lambda *_: 0), r"2 links cannot make 0"),
        (lambda: cut_weights([1, -2], 1), r"weight 1 is -2; pass finite weights >= 0"),
        (lambda: cut_weights([math.nan], 1), r"weight 0 is nan"),
        (lambda: cut_chain(1, 1, lambda *_: math.nan), r"links 0\.\.0 as part 0 cost NaN; return a number"),
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
