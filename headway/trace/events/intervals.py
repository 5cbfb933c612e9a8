"""Sets of time on one lane, as sorted disjoint half-open intervals [start, end). Arrays are [n] int64 ns.

>>> start, end = merged(np.array([5, 0, 8]), np.array([9, 3, 12]))
>>> start.tolist(), end.tolist()
([0, 5], [3, 12])
>>> [part.tolist() for part in without((start, end), (np.array([2, 10]), np.array([6, 11])))]
[[0, 6, 11], [2, 10, 12]]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Intervals = tuple[Ints, Ints]

FIRST, LAST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def merged(start_ns: Ints, end_ns: Ints) -> Intervals:
    """Return the union of intervals in any order; empty ones go, those that touch become one."""
    some = end_ns > start_ns
    order = np.argsort(start_ns[some], kind="stable")
    start, end = start_ns[some][order], np.maximum.accumulate(end_ns[some][order])
    if not len(start):
        return start, end
    first = np.concatenate([[True], start[1:] > end[:-1]])
    return start[first], end[np.concatenate([first[1:], [True]])]


def without(one: Intervals, other: Intervals) -> Intervals:
    """Return what of `one` is not in `other`; both sorted and disjoint.

        one      [-----)   [------)
        other       [--------)  [--)
        result   [--)        [--)

    The time outside of `other` is again intervals, one more than it has; each of `one` is cut by those it meets.
    """
    (start, end), (cut, until) = one, other
    low, high = np.concatenate([[FIRST], until]), np.concatenate([cut, [LAST]])
    from_, to = np.searchsorted(high, start, side="right"), np.searchsorted(low, end, side="left")
    count = np.maximum(to - from_, 0)
    which = np.repeat(np.arange(len(start)), count)
    free = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(from_, count)
    return np.maximum(start[which], low[free]), np.minimum(end[which], high[free])


def inside(moment_ns: Ints, spans: Intervals) -> NDArray[np.bool_]:
    """Say of each moment whether it lies in one of the sorted, disjoint `spans`."""
    at = np.searchsorted(spans[0], moment_ns, side="right") - 1
    found: NDArray[np.bool_] = (at >= 0) & (moment_ns < np.concatenate([spans[1], [FIRST]])[at])
    return found
