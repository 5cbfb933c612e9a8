"""Sets of time on one lane, as sorted disjoint half-open intervals [start, end). Arrays are [n] int64 ns.

>>> start, end = merged(np.array([5, 0, 8]), np.array([9, 3, 12]))
>>> start.tolist(), end.tolist()
([0, 5], [3, 12])
>>> [part.tolist() for part in without((start, end), (np.array([2, 10]), np.array([6, 11])))]
[[0, 6, 11], [2, 10, 12]]

How events of one lane lie inside each other: depth, leaves, and the time they cover.

Use it on any columns of intervals: `lane` [n], `start_ns` [n] and
`duration_ns` [n]. An event's depth is the number of events of its lane that
are open when it starts; of two that start together the longer one is outside.
A leaf has nothing inside it. Everything is O(n log n) numpy.

>>> lane, start_ns, duration_ns = np.zeros(4, int), np.array([0, 0, 4, 20]), np.array([10, 3, 5, 1])
>>> nest = Nesting.of(lane, start_ns, duration_ns)
>>> nest.depth.tolist(), nest.leaf.tolist(), union_ns(start_ns, duration_ns)
([0, 1, 1, 0], [False, True, True, True], 11)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


# How events of one lane lie inside each other: depth, leaves, and the time they cover.


@dataclass(frozen=True, slots=True)
class Nesting:
    """Depth and leaves of `n` events."""

    depth: NDArray[np.int16]
    """[n] Events of the same lane that are open when this one starts."""

    leaf: NDArray[np.bool_]
    """[n] True when no event of the same lane starts inside this one."""

    @classmethod
    def of(cls, lane: NDArray[Any], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> Nesting:
        """Work out the nesting of every lane."""
        depth, leaf = np.zeros(len(lane), dtype=np.int16), np.ones(len(lane), dtype=bool)
        order = np.lexsort((-duration_ns, start_ns, lane))
        bounds = np.flatnonzero(np.diff(lane[order])) + 1
        for rows in np.split(order, bounds):
            if len(rows) > 1:
                depth[rows], leaf[rows] = _nest(start_ns[rows], duration_ns[rows])
        return cls(depth, leaf)


def leaves(lane: NDArray[Any], start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool [n]: events with nothing inside them."""
    return Nesting.of(lane, start_ns, duration_ns).leaf


def union_ns(start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> int:
    """Return how many nanoseconds at least one of the intervals covers."""
    if not len(start_ns):
        return 0
    order = np.argsort(start_ns, kind="stable")
    start, end = start_ns[order], start_ns[order] + duration_ns[order]
    reach = np.maximum.accumulate(end)
    before = np.concatenate([[start[0]], reach[:-1]])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


def enclosing(
    outer_key: NDArray[np.int64],
    outer_start_ns: NDArray[np.int64],
    inner_key: NDArray[np.int64],
    inner_start_ns: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return [m] for each inner event the outer one of its key that started last before or with it, -1 for none.

    Keys are rows: [n, k] and [m, k], equal rows belong together. Whether the outer one is still open is the caller's
    to say. O((n + m) log(n + m)), however many keys there are.

    >>> key = np.zeros((2, 1), int)
    >>> enclosing(key, np.array([0, 10]), np.array([[0], [0], [7]]), np.array([12, 3, 12])).tolist()
    [1, 0, -1]
    """
    n = len(outer_start_ns)
    code = number_alike(np.concatenate([outer_key, inner_key]))
    inner = np.arange(len(code)) >= n
    order = np.lexsort((inner, np.concatenate([outer_start_ns, inner_start_ns]), code))
    latest = np.maximum.accumulate(np.where(inner[order], -1, np.arange(len(code))))
    found = np.full(len(code), -1, np.int64)
    found[order] = np.where(latest >= 0, order[latest], -1)
    mine = found[n:]
    return np.where((mine >= 0) & (code[mine] == code[n:]), mine, -1)


def number_alike(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number [n] for each row of `rows` [n, k]: equal rows get equal numbers, from 0.

    The numbers follow the order of the last column, then of the one before it, and so on.
    """
    order = np.lexsort(rows.T)
    fresh = np.zeros(len(rows), bool)
    for column in rows.T:  # One at a time: a sorted copy of all of them is what would not fit into memory.
        ordered = column[order]
        fresh[1:] |= ordered[1:] != ordered[:-1]
    code = np.empty(len(rows), np.int64)
    code[order] = np.cumsum(fresh)
    return code


def _nest(start: NDArray[np.int64], duration: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Return depth and leaf of one lane whose rows stand in order of (start, longest first)."""
    lasting = duration > 0
    end = start + duration
    # Closed before row i: every lasting event that ends by its start, and every instant that stands before it.
    closed = np.searchsorted(np.sort(end[lasting]), start, side="right") + np.cumsum(~lasting) - ~lasting
    depth = np.arange(len(start)) - closed
    leaf = np.ones(len(start), dtype=bool)
    leaf[:-1] = start[1:] >= end[:-1]
    return np.minimum(depth, np.iinfo(np.int16).max).astype(np.int16), leaf
