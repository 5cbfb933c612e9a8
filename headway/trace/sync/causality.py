"""Clocks held to causality: no collective ends before its last start, no message is received before it is sent.

Use it on estimated clocks. `project` moves them as little as possible (least
sum of moves of knots) until no matched call contradicts the order: a linear
program with a row for the worst contradiction of each pair of clocks, solved
again until none is left. No clock is made to drift more than `MAX_DRIFT`,
which no working one does. Where no clocks fulfil the order, the answer names
calls that contradict each other whatever the clocks, and by how much at
least. Times in int64 ns.

>>> import numpy as np
>>> from headway.trace.sync.meetings import Meetings
>>> met = Meetings(np.arange(2), np.array([0, 1]), np.array([0, 30]), np.array([20, 60]), np.array([0, 2]),
...                np.zeros(1, int), np.zeros(1, bool), np.zeros(2, bool))
>>> clocks = ClockMap(np.zeros((2, 1), int), np.zeros((2, 1), int))
>>> found = project(met, met.rank, clocks)
>>> found.violations_before, found.clocks.theta_ns.tolist()
(1, [[0], [-14]])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.linear import minimise
from headway.core.units import NS_PER_US
from headway.trace.sync.clocks import ClockMap
from headway.trace.sync.meetings import Bools, Ints, Meetings

GRAIN_NS = 4
"""What rounding knots and mapped times to whole ns can cost both sides of an order together."""

MAX_DRIFT = 500e-6
"""Steepest stretch of a clock's map, ns per ns: what a time service slews at most; crystals stay ten times below."""

MOST_CUTS = 1000
"""Contradictions that one program takes up at once, the worst first."""

Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Projection:
    """Clocks after projection."""

    clocks: ClockMap
    """Their maps; those that were given where no clocks fulfil the order."""

    violations_before: int
    """Ends of calls, under the clocks as given, before something they had to wait for."""

    violations: int
    """The same under `clocks`."""

    shortfall_ns: int = 0
    """Worst violation under `clocks`."""

    contradiction: tuple[Link, ...] = ()
    """(call that ended, call that had not started yet), the weightiest first: no clocks can satisfy all of these."""

    contradiction_ns: int = 0
    """How much some link of them is short by, whatever the clocks."""


def violations(meetings: Meetings, start_ns: Ints, end_ns: Ints) -> tuple[int, int]:
    """Return how many calls ended before something they had to wait for, and the worst shortfall in ns.

    `start_ns` and `end_ns` [n] are on the common clock.
    """
    if not meetings.num_meetings:
        return 0, 0
    last_start = np.maximum.reduceat(_proving_starts(meetings, start_ns), meetings.first[:-1])
    early = last_start[meetings.meeting] - end_ns
    early[meetings.sends] = 0  # A sender may be done before anything else begins.
    return int((early > 0).sum()), max(int(early.max()), 0)


def project(meetings: Meetings, clock: Ints, clocks: ClockMap) -> Projection:
    """Move `clocks` until the order of all meetings holds; the first one stays. `clock` [n] is each call's clock."""
    before, worst = violations(meetings, *_mapped(meetings, clock, clocks))
    if not before:
        return Projection(clocks, 0, 0)
    # With a margin for rounding where there is room for it.
    for margin in (GRAIN_NS, 0):
        program = _Program(meetings, clock, clocks, margin)
        moved = program.solve()
        if moved is not None:
            count, worst = violations(meetings, *_mapped(meetings, clock, moved))
            # Without a margin whole ns may miss the order by their grain.
            return Projection(moved, before, count if worst > GRAIN_NS else 0, worst)
    return Projection(clocks, before, before, worst, *program.contradiction())


def middle_end(meetings: Meetings, end_ns: Ints) -> Ints:
    """[num_meetings] Median of the ends [n] of each meeting, on the common clock."""
    order = np.lexsort((end_ns, meetings.meeting))
    size = np.diff(meetings.first)
    low, high = (end_ns[order[meetings.first[:-1] + part]] for part in ((size - 1) // 2, size // 2))
    return np.asarray(low + (high - low) // 2)


def _mapped(meetings: Meetings, clock: Ints, clocks: ClockMap) -> tuple[Ints, Ints]:
    return clocks.aligned_ns(clock, meetings.start_ns), clocks.aligned_ns(clock, meetings.end_ns)


def _proving_starts(meetings: Meetings, start_ns: Ints) -> Ints:
    """[n] Starts, long ago for those that nothing has to wait for: receives."""
    receives = meetings.message[meetings.meeting] & ~meetings.sends
    return np.where(receives, np.iinfo(np.int64).min // 2, start_ns)


class _Program:
    """The linear program over the moves of knots, and the contradictions that it has taken up."""

    def __init__(self, meetings: Meetings, clock: Ints, given: ClockMap, margin: int) -> None:
        self.meetings, self.clock, self.given, self.margin = meetings, clock, given, margin
        self.end = self.start = np.zeros(0, np.int64)
        """[m] Row by row the call that ends too early, and the call that had not started yet."""

    def solve(self) -> ClockMap | None:
        """Return the moved clocks, None when the contradictions exclude each other."""
        clocks = self.given
        while True:
            end, start = self._worst(clocks)
            if not len(end):
                return clocks
            self.end, self.start = np.append(self.end, end), np.append(self.start, start)
            moved = self._optimum()
            if moved is None:
                return None
            clocks = moved

    def _worst(self, clocks: ClockMap) -> tuple[Ints, Ints]:
        """Return the worst new contradictions under `clocks`, one per pair of clocks: calls that end, that start."""
        met, begin = self.meetings, self.meetings.first[:-1]
        start, end = _mapped(met, self.clock, clocks)
        start = _proving_starts(met, start)
        end = np.where(met.sends, np.iinfo(np.int64).max // 2, end)
        order = np.arange(len(start))
        last = _first_of(order, met, start == np.maximum.reduceat(start, begin)[met.meeting])
        first = _first_of(order, met, end == np.minimum.reduceat(end, begin)[met.meeting])
        # Two kinds of pairs (call that ends, call that starts) in a meeting, so that every call occurs on both sides:
        # its end against the last start, and its start against the first end. Other pairs are contradicted less.
        ends, starts = np.concatenate([order, first[met.meeting]]), np.concatenate([last[met.meeting], order])
        short = start[starts] - end[ends]
        size = len(order)
        bad = (short > (0 if self.margin else GRAIN_NS)) & ~np.isin(ends * size + starts, self.end * size + self.start)
        ends, starts, short = ends[bad], starts[bad], short[bad]
        pair = self.clock[ends] * len(clocks.knot_ns) + self.clock[starts]
        ranked = np.lexsort((starts, ends, -short, pair))
        worst = ranked[np.diff(pair[ranked], prepend=-1) != 0]
        worst = worst[np.argsort(-short[worst], kind="stable")][:MOST_CUTS]
        return ends[worst], starts[worst]

    def _rows(self) -> tuple[Ints, tuple[Ints, Ints, NDArray[np.float64]], NDArray[np.float64], NDArray[np.float64]]:
        """Return the knots [W] that may move, the matrix over them as triplets, and the least and most [rows] of a row.

        A knot is numbered clock x Q + index; those of the first clock do not move.

            a contradiction              (move of the end) - (move of the start)     >= need + margin
            a stretch of a clock's map   (move of a knot) - (that of the one before)    keeps the drift within MAX_DRIFT
        """
        met, size, num_knots = self.meetings, len(self.end), self.given.knot_ns.shape[1]
        row, knot, weight = [], [], []
        for call, raw, sign in ((self.end, met.end_ns, 1.0), (self.start, met.start_ns, -1.0)):
            row.append(np.repeat(np.arange(size), num_knots))
            knot.append((self.clock[call][:, None] * num_knots + np.arange(num_knots)).ravel())
            weight.append(sign * self._shares(call, raw[call]).ravel())
        moves = np.concatenate(knot) >= num_knots
        moving, column = np.unique(np.concatenate(knot)[moves], return_inverse=True)
        before = np.flatnonzero(moving % num_knots < num_knots - 1)
        stretch = size + np.arange(len(before))
        triplets = (
            np.concatenate([np.concatenate(row)[moves], stretch, stretch]),
            np.concatenate([column.reshape(-1), before, before + 1]),
            np.concatenate([np.concatenate(weight)[moves], np.full(len(before), -1.0), np.full(len(before), 1.0)]),
        )
        rise, run = (np.diff(x.ravel())[moving[before]] for x in (self.given.theta_ns, self.given.knot_ns))
        most = np.maximum(MAX_DRIFT * run, np.abs(rise))
        (start, _), (_, end) = (_mapped(met, self.clock, self.given) for _ in range(2))
        need = start[self.start] - end[self.end] + float(self.margin)
        return moving, triplets, np.append(need, -most - rise), np.append(np.full(size, np.inf), most - rise)

    def _shares(self, call: Ints, raw_ns: Ints) -> NDArray[np.float64]:
        """[m, Q] How much of each knot's move a call's time makes: shares of the two knots beside it, 1 in all."""
        knots = self.given.knot_ns[self.clock[call]]
        shares, line = np.zeros(knots.shape), np.arange(len(call))
        if knots.shape[1] == 1:
            return shares + 1.0
        index = (raw_ns[:, None] >= knots[:, 1:-1]).sum(axis=1)
        way = (raw_ns - knots[line, index]) / (knots[line, index + 1] - knots[line, index])
        shares[line, index], shares[line, index + 1] = 1.0 - way, way
        return shares

    def _optimum(self) -> ClockMap | None:
        """Return the clocks with the least sum of moves that keeps all rows, None where none does."""
        moving, (row, column, weight), least, most = self._rows()
        width = len(moving)
        if not width:
            return None
        # The moves of each knot are `up` and `down`, both >= 0, so that their sum is what moving costs.
        triplets = np.append(row, row), np.append(column, column + width), np.append(weight, -weight)
        try:
            best = minimise(
                np.ones(2 * width), rows=triplets, num_rows=len(least), row_low=least / NS_PER_US,
                row_high=most / NS_PER_US,
            )  # fmt: skip
        except InputError:
            return None
        theta = self.given.theta_ns.copy()
        theta.ravel()[moving] += np.rint((best.x[:width] - best.x[width:]) * NS_PER_US).astype(np.int64)
        return ClockMap(self.given.knot_ns, theta)

    def contradiction(self) -> tuple[tuple[Link, ...], int]:
        """Return links that exclude each other, and how far the worst is short at best, after `solve` gave up.

        Every link may be short by as much as one variable says, which is made small: the rows with a price prove that
        it cannot be smaller.
        """
        moving, (row, column, weight), least, most = self._rows()
        width, links = len(moving), np.arange(len(self.end))
        best = minimise(
            np.append(np.zeros(width), 1.0),
            rows=(np.append(row, links), np.append(column, np.full(len(links), width)),
                  np.append(weight, np.ones(len(links)))),
            num_rows=len(least), row_low=least / NS_PER_US, row_high=most / NS_PER_US,
            low=np.append(np.full(width, -np.inf), 0.0),
        )  # fmt: skip
        price = best.row_price[: len(links)]
        priced = [index for index in np.argsort(-price, kind="stable").tolist() if price[index] > 1e-6]
        return tuple((int(self.end[index]), int(self.start[index])) for index in priced), round(best.value * NS_PER_US)


def _first_of(order: Ints, met: Meetings, mask: Bools) -> Ints:
    """[num_meetings] The first call of each meeting where `mask` holds."""
    return np.asarray(np.minimum.reduceat(np.where(mask, order, len(order)), met.first[:-1]))
