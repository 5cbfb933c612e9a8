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

The sweep: cut a device's time at every interval end, give each piece to one owner.

Use it wherever intervals overlap and each nanosecond may be counted once.
Vectorised; int64 nanoseconds throughout, so the pieces add up to the window
exactly. Time O(n log n) for properly nested intervals.

>>> pieces = sweep([0, 2, 4], [10, 5, 6], [1, 2, 1], window=(0, 12))
>>> list(zip(pieces.start_ns.tolist(), pieces.end_ns.tolist(), pieces.row.tolist()))
[(0, 2, 0), (2, 4, 1), (4, 5, 1), (5, 6, 2), (6, 10, 0), (10, 12, -1)]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError

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


MAX_LAYERS = 24
"""Nesting depth handled by whole-array steps; deeper overlaps are painted row by row."""


EXACT_BELOW = 3_000_000_000
"""Products of two whole numbers below this fit int64; larger ones go through float64 and are off by 1e-16 of them."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Elementary intervals: disjoint, in order, without gaps."""

    start_ns: Ints
    """[m] Start of each piece."""

    end_ns: Ints
    """[m] End of each piece; equals the next one's start."""

    row: Ints
    """[m] Index of the interval that owns the piece, -1 when none covers it."""

    @property
    def duration_ns(self) -> Ints:
        """[m] Length of each piece."""
        return self.end_ns - self.start_ns


def sweep(
    start_ns: ArrayLike,
    end_ns: ArrayLike,
    precedence: ArrayLike,
    *,
    window: tuple[int, int],
    cuts: ArrayLike = (),
) -> Pieces:
    """Cover `window` with pieces, each owned by the interval [n] of highest precedence over it.

    Between intervals of equal precedence the one that started last (the inner one) owns; then the later row. `cuts`
    are further times at which pieces end. Raises `InputError` when the window or an interval ends before it starts.
    """
    low, high = window
    start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    rank = np.asarray(precedence, np.int64)
    if high < low:
        raise InputError(f"the window ends at {high} ns, before its start at {low} ns. Swap the two.")
    if len(start) and bool((end < start).any()):
        row = int(np.argmax(end < start))
        raise InputError(f"interval {row} ends at {end[row]} ns, before its start at {start[row]} ns. Drop the row.")
    start, end = np.clip(start, low, high), np.clip(end, low, high)
    marks = np.clip(np.asarray(cuts, np.int64), low, high)
    kept = np.flatnonzero(end > start)
    bounds = np.sort(np.concatenate([np.array([low, high], np.int64), start[kept], end[kept], marks]))
    bounds = bounds[np.append(True, bounds[1:] != bounds[:-1])]  # np.unique hashes: ten times slower on long traces
    owner = np.full(max(len(bounds) - 1, 0), -1, np.int64)
    first, last = np.searchsorted(bounds, start), np.searchsorted(bounds, end)
    # Painter's order: higher precedence, later start, shorter interval, later row come last and stay on top.
    order = kept[np.lexsort((kept, -end[kept], start[kept], rank[kept]))]
    levels = np.flatnonzero(np.diff(rank[order], prepend=np.int64(-(1 << 62)))) if len(order) else ()
    for rows in np.split(order, levels[1:]) if len(order) else ():
        _paint(owner, rows, start, end, first, last)
    return Pieces(bounds[:-1], bounds[1:], owner)


def _paint(owner: Ints, rows: Ints, start: Ints, end: Ints, first: Ints, last: Ints) -> None:
    """Write `rows` (in painter's order) into `owner`, layer by layer."""
    size = len(owner) + 1
    for layer in layers(rows, start, end):
        if isinstance(layer, int):
            owner[first[layer] : last[layer]] = layer
            continue
        delta = np.zeros(size, np.int64)
        delta[first[layer]] += layer + 1  # rows of one layer are disjoint, so no index occurs twice
        delta[last[layer]] -= layer + 1
        cover = np.cumsum(delta)[:-1]
        np.copyto(owner, cover - 1, where=cover > 0)


def layers(rows: Ints, start: Ints, end: Ints) -> Iterator[Ints | int]:
    """Yield groups of disjoint rows, outer ones first; single rows once `MAX_LAYERS` groups are out.

    `rows` come in order of start, the longer first. A row that no earlier one reaches into is outermost; taking all
    of those away repeatedly keeps painter's order, because whatever overlaps an outermost row starts after it.
    """
    for _ in range(MAX_LAYERS):
        if not len(rows):
            return
        reach = np.maximum.accumulate(end[rows])
        outer = np.ones(len(rows), bool)
        outer[1:] = start[rows[1:]] >= reach[:-1]
        yield rows[outer]
        rows = rows[~outer]
    yield from (int(row) for row in rows)


def share_out(total: ArrayLike, weights: ArrayLike) -> Ints:
    """Split each of `total` [n] over `weights` [n, k], in whole units that add up to it exactly.

    Cumulative rounding: a share is off by less than one unit. A row whose weights are all zero gets nothing but
    zeros, so check for that first.

    >>> share_out([10, 7], [[1, 2, 0], [0, 0, 5]]).tolist()
    [[3, 7, 0], [0, 0, 7]]
    """
    amount, weight = np.asarray(total, np.int64), np.asarray(weights, np.int64)
    edges = np.cumsum(weight, axis=1)
    whole = np.maximum(edges[:, -1:], 1)
    times, rest = np.divmod(amount[:, None], whole)
    exact = whole < EXACT_BELOW
    small = np.where(exact, rest, 0) * np.where(exact, edges, 0) // whole
    share = times * edges + np.where(exact, small, np.floor(rest * (edges / whole)).astype(np.int64))
    share = np.where(edges == edges[:, -1:], np.where(edges > 0, amount[:, None], 0), share)
    return np.diff(share, axis=1, prepend=0)
