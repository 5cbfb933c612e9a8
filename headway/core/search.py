"""Small exact searches that planners share: bisection, the Pareto front.

Linear and integer programs are in `headway.core.linear`.

>>> smallest_true(lambda x: x * x >= 50, 0, 100)
8
>>> pareto([(1, 9), (2, 2), (3, 3), (9, 1)])
[0, 1, 3]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headway.core.errors import InputError


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
