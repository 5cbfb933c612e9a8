"""Small exact searches that planners share: cuts of a chain, bisection, the Pareto front.

Linear and integer programs are in `headway.core.linear`.

>>> cut_weights([4, 1, 1, 5, 2], 3)
[0, 2, 4, 5]
>>> smallest_true(lambda x: x * x >= 50, 0, 100)
8
>>> pareto([(1, 9), (2, 2), (3, 3), (9, 1)])
[0, 1, 3]
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

from headway.core.errors import InputError


def cut_chain(num_links: int, num_parts: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """Cut links 0..num_links-1 into `num_parts` contiguous, non-empty parts so that the dearest part is cheapest.

    `cost(part, first, last)` prices links first..last-1 as that part. Returns
    the bounds [num_parts + 1]; of equally good cuts, each part ends as early
    as it can, last part first. Exact, O(num_links^2 * num_parts) prices.
    Raises `InputError` when there are fewer links than parts or a price is NaN.
    """
    _check_parts(num_links, num_parts)
    best = [math.inf] * (num_links + 1)
    best[0] = 0.0
    cuts: list[list[int]] = []
    for part in range(num_parts):
        cheapest, choice = [math.inf] * (num_links + 1), [-1] * (num_links + 1)
        for last in range(part + 1, num_links - (num_parts - 1 - part) + 1):
            for first in range(part, last):
                price = cost(part, first, last)
                if math.isnan(price):
                    raise InputError(f"links {first}..{last - 1} as part {part} cost NaN; return a number or infinity.")
                worst = max(best[first], price)
                if choice[last] < 0 or worst < cheapest[last]:
                    cheapest[last], choice[last] = worst, first
        best, cuts = cheapest, [*cuts, choice]
    bounds = [num_links]
    for choice in reversed(cuts):
        bounds.append(choice[bounds[-1]])
    return bounds[::-1]


def cut_weights(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cut a chain of weights (>= 0) into contiguous, non-empty parts so that the heaviest part is lightest.

    Returns the bounds [num_parts + 1]. Exact (within rounding of
    the sums): a dynamic program whose last cut is found by bisection, O(num_parts * n * log n).
    Raises `InputError` on negative or non-finite weights, or too few of them.
    """
    num_links = len(weights)
    _check_parts(num_links, num_parts)
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"weight {index} is {weight}; pass finite weights >= 0.")
    prefix = [0.0, *itertools.accumulate(weights)]
    best = [prefix[last] for last in range(num_links + 1)]
    cuts: list[list[int]] = [[0] * (num_links + 1)]
    for part in range(1, num_parts):
        cheapest, choice = [math.inf] * (num_links + 1), [-1] * (num_links + 1)
        for last in range(part + 1, num_links + 1):
            # best rises with the cut, the last part's weight falls: the optimum is where they cross.
            cross = bisect.bisect_left(
                range(part, last),
                True,
                key=lambda cut: best[cut] >= prefix[last] - prefix[cut],
            )
            near = [cut for cut in (part + cross - 1, part + cross) if part <= cut < last]
            choice[last] = min(near, key=lambda cut: (max(best[cut], prefix[last] - prefix[cut]), cut))
            cheapest[last] = max(best[choice[last]], prefix[last] - prefix[choice[last]])
        best, cuts = cheapest, [*cuts, choice]
    bounds = [num_links]
    for choice in reversed(cuts):
        bounds.append(choice[bounds[-1]])
    return bounds[::-1]


def smallest_true(predicate: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the least whole number in low..high for which a predicate that stays true once true holds; None if none.

    Raises `InputError` when low > high.
    """
    if low > high:
        raise InputError(f"the range {low}..{high} is empty; pass low <= high.")
    if not predicate(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if predicate(middle):
            high = middle
        else:
            low = middle + 1
    return low


def threshold(predicate: Callable[[float], bool], low: float, high: float, *, tolerance: float) -> float | None:
    """Return a number at which a monotone predicate holds, at most `tolerance` above where it begins to; None if never.

    Raises `InputError` on an empty or infinite range or a tolerance <= 0.
    """
    if not (low <= high and math.isfinite(low) and math.isfinite(high)):
        raise InputError(f"the range {low}..{high} is empty or infinite; pass finite low <= high.")
    if not tolerance > 0:
        raise InputError(f"tolerance is {tolerance}; pass a number > 0.")
    if predicate(low):
        return low
    if not predicate(high):
        return None
    while high - low > tolerance:
        middle = low + (high - low) / 2
        if middle in (low, high):
            break
        if predicate(middle):
            high = middle
        else:
            low = middle
    return high


def pareto(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of points that no other point beats: smaller is better in every coordinate.

    Of equal points the first stays. In order of index; O(n log n + n * front).
    Raises `InputError` on NaN or coordinates of different length.
    """
    if len({len(point) for point in points}) > 1:
        raise InputError("the points have different numbers of coordinates; give each the same.")
    for index, point in enumerate(points):
        if any(math.isnan(x) for x in point):
            raise InputError(f"point {index} is {tuple(point)}; remove points with NaN.")
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if not any(all(a <= b for a, b in zip(points[kept], points[index], strict=True)) for kept in front):
            front.append(index)
    return sorted(front)


def _check_parts(num_links: int, num_parts: int) -> None:
    """Every part must hold at least one link."""
    if not 1 <= num_parts <= num_links:
        raise InputError(f"{num_links} links cannot make {num_parts} non-empty parts; ask for 1..{num_links}.")
