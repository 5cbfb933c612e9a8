"""The sweep: cut a device's time at every interval end, give each piece to one owner.

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

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError

Ints = NDArray[np.int64]

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
