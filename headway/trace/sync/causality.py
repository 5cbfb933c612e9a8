"""Clocks held to causality: no collective ends before its last start, no message is received before it is sent.

Use it on estimated clocks. `project` moves them as little as possible (least
sum of moves) until no matched call contradicts the order: a linear program
over the knots that contradictions touch, with a row for the worst
contradiction of each pair of clocks and windows, solved again until none is
left. Other knots of a moved clock follow. No clock is made to drift more than
`MAX_DRIFT`, which no working one does.

Where no clocks fulfil the order, the answer names a cycle of calls that
contradict each other whatever the clocks, and how far. On request the work
goes on: what contradicts the estimate by more than its own scatter is set
aside, because a wrong record (a wait that was written for the call, say)
explains it and no clock does, and the medians of many ends are the better
witnesses. The rest gets the clocks that fulfil it, else those of least total
violation (the worst of each pair of clocks and windows, summed; moves weigh a
thousandth). Times in int64 ns.

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

from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.linear import minimise
from headway.core.units import NS_PER_US
from headway.trace.events.intervals import number_alike
from headway.trace.sync.clocks import ClockMap, stretch_of
from headway.trace.sync.meetings import Bools, Ints, Meetings

GRAIN_NS = 4
"""What rounding knots and mapped times to whole ns can cost both sides of an order together."""

MAX_DRIFT = 500e-6
"""Steepest stretch of a clock's map, ns per ns: what a time service slews at most; crystals stay ten times below."""

MOST_CUTS = 1000
"""Contradictions that one program takes up at once, the worst first."""

OUT_OF_THE_WAY_NS = 1 << 50
"""Thirteen days: a start so much earlier, an end so much later, contradicts nothing."""

MOVE_PRICE = 1e-3
"""Price of moving a knot beside that of a violation of equal size, where violations cannot be avoided."""

STRAYS, STRAY_FROM_NS = (3, 1), 1_000
"""A contradiction so many times larger than the median distance of ends from their middle, and 1 us, is a stray; both
are tried until the rest agrees."""

Link = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Projection:
    """Clocks after projection."""

    clocks: ClockMap
    """Their maps."""

    violations_before: int
    """Ends of calls, under the clocks as given, before something they had to wait for."""

    violations: int
    """The same under `clocks`."""

    cycle: tuple[Link, ...] = ()
    """(call that ended, call that had not started yet) round a circle that no clocks can satisfy; () when feasible."""

    cycle_ns: int = 0
    """How much the circle is short by."""

    shortfall_ns: int = 0
    """Worst violation that is left."""

    set_aside: int = 0
    """Starts and ends that were taken for wrong records."""


def violations(meetings: Meetings, start_ns: Ints, end_ns: Ints) -> tuple[int, int]:
    """Return how many calls ended before something they had to wait for, and the worst shortfall in ns.

    `start_ns` and `end_ns` [n] are on the common clock.
    """
    if not meetings.num_meetings:
        return 0, 0
    early = _last_start(meetings, start_ns)[meetings.meeting] - end_ns
    early[meetings.sends] = 0  # A sender may be done before anything else begins.
    return int((early > 0).sum()), max(int(early.max()), 0)


def project(meetings: Meetings, clock: Ints, clocks: ClockMap, *, tolerate: bool = False) -> Projection:
    """Move `clocks` until the order of all meetings holds; the first one stays. `clock` [n] is each call's clock.

    With an order that nothing satisfies, returns its cycle and the clocks as
    given, or with `tolerate` those that fulfil it but for strays, else those
    of least total violation.
    """
    before, worst = violations(meetings, *_mapped(meetings, clock, clocks))
    if not before:
        return Projection(clocks, 0, 0)
    found = _least_moved(meetings, clock, clocks)
    if found is not None:
        count, worst = violations(meetings, *_mapped(meetings, clock, found))
        # Where there was no room for a margin, whole ns may miss the order by their grain.
        return Projection(found, before, count if worst > GRAIN_NS else 0, shortfall_ns=worst)
    program = _Program(meetings, clock, clocks, 0, soft=True)
    program.solve(once=True)
    cycle, short = program.cycle()
    if not tolerate:
        return Projection(clocks, before, before, cycle, short, worst)
    for times in STRAYS:
        rest, aside = _without_strays(meetings, clock, clocks, times)
        found = _least_moved(rest, clock, clocks)
        if found is not None:
            break
    else:
        found = _Program(rest, clock, clocks, 0, soft=True).solve()
    assert found is not None, "violations have a price, so the program has a solution"
    count, worst = violations(meetings, *_mapped(meetings, clock, found))
    return Projection(found, before, count, cycle, short, worst, aside)


def _least_moved(meetings: Meetings, clock: Ints, clocks: ClockMap) -> ClockMap | None:
    """Return the clocks moved least so that every order holds, with a margin for rounding if there is room."""
    tries = (_Program(meetings, clock, clocks, margin).solve() for margin in (GRAIN_NS, 0))
    return next((found for found in tries if found is not None), None)


def middle_end(meetings: Meetings, end_ns: Ints) -> Ints:
    """[num_meetings] Median of the ends [n] of each meeting, on the common clock."""
    order = np.lexsort((end_ns, meetings.meeting))
    size = np.diff(meetings.first)
    low, high = (end_ns[order[meetings.first[:-1] + part]] for part in ((size - 1) // 2, size // 2))
    return np.asarray(low + (high - low) // 2)


def _without_strays(meetings: Meetings, clock: Ints, clocks: ClockMap, times: int) -> tuple[Meetings, int]:
    """Return the meetings with strays moved out of everybody's way, and how many there were."""
    start, end = _mapped(meetings, clock, clocks)
    middle = middle_end(meetings, end)[meetings.meeting]
    limit = max(times * int(np.median(np.abs(end - middle))), STRAY_FROM_NS)
    late = ~_may_start_any_time(meetings) & (start > middle + limit)
    last = _last_start(meetings, np.where(late, np.iinfo(np.int64).min // 2, start))[meetings.meeting]
    early = ~meetings.sends & (end < last - limit)
    moved = replace(
        meetings,
        start_ns=np.where(late, meetings.start_ns - OUT_OF_THE_WAY_NS, meetings.start_ns),
        end_ns=np.where(early, meetings.end_ns + OUT_OF_THE_WAY_NS, meetings.end_ns),
    )
    return moved, int(late.sum() + early.sum())


def _mapped(meetings: Meetings, clock: Ints, clocks: ClockMap) -> tuple[Ints, Ints]:
    return clocks.aligned_ns(clock, meetings.start_ns), clocks.aligned_ns(clock, meetings.end_ns)


def _may_start_any_time(meetings: Meetings) -> Bools:
    """[n] Starts that nothing has to wait for: those of receives."""
    return np.asarray(meetings.message[meetings.meeting] & ~meetings.sends)


def _last_start(meetings: Meetings, start_ns: Ints) -> Ints:
    low = np.iinfo(np.int64).min // 2
    return np.asarray(np.maximum.reduceat(np.where(_may_start_any_time(meetings), low, start_ns), meetings.first[:-1]))


@dataclass(slots=True)
class _Contradictions:
    """Contradictions [m] that a program has taken up; each is one row."""

    end: Ints
    """[m] Call that ends too early."""

    start: Ints
    """[m] Call that had not started yet."""

    cell: Ints
    """[m, 4] Clocks and windows of both: rows of one cell share their violation."""

    way: NDArray[np.float64]
    """[m, 2] How far in their windows both times lie."""

    need: Ints
    """[m] How much later the end has to move against the start, ns."""

    def plus(self, more: _Contradictions) -> _Contradictions:
        """Return these rows and more."""
        return _Contradictions(
            *(np.concatenate([getattr(part, f.name) for part in (self, more)]) for f in fields(_Contradictions))
        )

    def pick(self, which: Ints) -> _Contradictions:
        """Return some rows."""
        return _Contradictions(*(getattr(self, f.name)[which] for f in fields(_Contradictions)))


@dataclass(slots=True)
class _Program:
    """The linear program over the moves of knots, and the contradictions it has taken up."""

    meetings: Meetings
    clock: Ints
    given: ClockMap
    margin: int
    soft: bool = False
    rows: _Contradictions | None = None
    price: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """[m] Dual price of each row, after a soft solution."""

    def solve(self, *, once: bool = False) -> ClockMap | None:
        """Return the moved clocks, None when the rows contradict each other; `once` stops at the first such proof."""
        clocks, allowed = self.given, np.zeros(0)
        while True:
            fresh = self._worst(clocks, allowed)
            if not len(fresh.end):
                return clocks
            self.rows = fresh if self.rows is None else self.rows.plus(fresh)
            try:
                clocks, allowed = self._optimum(self.rows)
            except InputError:
                if self.soft:
                    raise
                return None
            if once and (allowed > GRAIN_NS).any():
                return clocks

    def _worst(self, clocks: ClockMap, allowed: NDArray[np.float64]) -> _Contradictions:
        """Return the worst new contradictions under `clocks`, one per cell; what `allowed` [m] covers is left out."""
        met, begin = self.meetings, self.meetings.first[:-1]
        start, end = _mapped(met, self.clock, clocks)
        start = np.where(_may_start_any_time(met), np.iinfo(np.int64).min // 2, start)
        end = np.where(met.sends, np.iinfo(np.int64).max // 2, end)
        order = np.arange(len(start))
        last = _first_of(order, met, start == np.maximum.reduceat(start, begin)[met.meeting])
        first = _first_of(order, met, end == np.minimum.reduceat(end, begin)[met.meeting])
        # Two kinds of pairs (call that ends, call that starts) in a meeting, so that every call occurs on both sides:
        # its end against the last start, and its start against the first end. Other pairs are contradicted less.
        ends = np.concatenate([order, first[met.meeting]])
        starts = np.concatenate([last[met.meeting], order])
        short = start[starts] - end[ends]
        bad = np.flatnonzero(short > (0 if self.margin else GRAIN_NS))
        short, found = short[bad], self._described(ends[bad], starts[bad])
        code = number_alike(found.cell)
        # Worst first within each cell; the first of each run of one cell is kept.
        ranked = np.lexsort((found.start, found.end, -short, code))
        worst = ranked[np.diff(code[ranked], prepend=-1) != 0]
        worst = worst[np.argsort(-short[worst], kind="stable")]
        new = ~self._taken(found.pick(worst), short[worst], allowed)
        return found.pick(worst[new][:MOST_CUTS])

    def _taken(self, found: _Contradictions, short: Ints, allowed: NDArray[np.float64]) -> NDArray[np.bool_]:
        """[m] Contradictions that are rows already, or no worse than the violation that was paid for in their cell."""
        if self.rows is None:
            return np.zeros(len(found.end), bool)
        links = set(zip(self.rows.end.tolist(), self.rows.start.tolist(), strict=True))
        known = np.array([link in links for link in zip(found.end.tolist(), found.start.tolist(), strict=True)], bool)
        if self.soft:
            paid = {tuple(cell): value for cell, value in zip(self.rows.cell.tolist(), allowed.tolist(), strict=True)}
            limit = np.array([paid.get(tuple(cell), 0.0) for cell in found.cell.tolist()])
            known |= short <= limit + GRAIN_NS
        return known

    def _described(self, end: Ints, start: Ints) -> _Contradictions:
        """Return rows for (end, start) pairs of calls."""
        met, clock = self.meetings, self.clock
        sides = [self._place(end, met.end_ns), self._place(start, met.start_ns)]
        cell = np.stack([clock[end], clock[start], sides[0][0], sides[1][0]], axis=1)
        need = self.given.aligned_ns(clock[start], met.start_ns[start]) - self.given.aligned_ns(
            clock[end], met.end_ns[end]
        )
        return _Contradictions(end, start, cell, np.stack([sides[0][1], sides[1][1]], axis=1), need)

    def _place(self, calls: Ints, raw_ns: Ints) -> tuple[Ints, NDArray[np.float64]]:
        """Return the stretch of its clock that each call's time lies in, and how far in it."""
        at, way = np.empty(len(calls), np.int64), np.empty(len(calls))
        order = np.argsort(self.clock[calls], kind="stable")
        cuts = np.searchsorted(self.clock[calls[order]], np.arange(len(self.given.knot_ns) + 1))
        for clock in np.flatnonzero(np.diff(cuts)).tolist():
            mine = order[cuts[clock] : cuts[clock + 1]]
            at[mine], way[mine] = stretch_of(raw_ns[calls[mine]], self.given.knot_ns[clock])
        return at, way

    def _optimum(self, rows: _Contradictions) -> tuple[ClockMap, NDArray[np.float64]]:
        """Solve for the rows so far; return the clocks and the violation of each row's cell, ns."""
        size = len(rows.end)
        at, knot, weight = self._entries(rows)
        moving, column = np.unique(knot, return_inverse=True)
        before, least, most = self._steepness(moving)
        shared, cell = np.unique(rows.cell, axis=0, return_inverse=True)
        width, spare = len(moving), len(shared) if self.soft else 0
        # The program. `up` and `down` are the moves of each knot, both >= 0, so that their sum is what moving costs:
        #
        #                                     up    down   violation
        #     a contradiction (row)           A     -A     1 in its cell (soft)   >= need + margin
        #     a stretch between two knots     D     -D     0                      between least and most
        #
        # A is the move of the end less the move of the start, D the move of a knot less that of the one before it.
        matrix = np.zeros((size + len(before), 2 * width + spare))
        np.add.at(matrix, (at, column), weight)
        if not self.soft and (~matrix[:size].any(axis=1)).any():
            raise InputError(
                "a call ends before another of its own clock starts. No move of clocks changes that; drop it."
            )
        limit = size + np.arange(len(before))
        matrix[limit, before], matrix[limit, before + 1] = -1.0, 1.0
        matrix[:, width : 2 * width] = -matrix[:, :width]
        if self.soft:
            matrix[np.arange(size), 2 * width + cell.reshape(-1)] = 1.0
        low = np.concatenate([rows.need + float(self.margin), least])
        high = np.concatenate([np.full(size, np.inf), most])
        cost = np.concatenate([np.full(2 * width, MOVE_PRICE if self.soft else 1.0), np.ones(spare)])
        found = minimise(cost, rows=matrix, row_low=low / NS_PER_US, row_high=high / NS_PER_US)
        self.price = found.row_price[:size]
        paid = found.x[2 * width :][cell.reshape(-1)] * NS_PER_US if self.soft else np.zeros(size)
        return self._moved(moving, (found.x[:width] - found.x[width : 2 * width]) * NS_PER_US), paid

    def _moved(self, moving: Ints, move_ns: NDArray[np.float64]) -> ClockMap:
        """Return the clocks with knots moved; those between two moved ones follow in line, those beyond as the last."""
        theta = self.given.theta_ns.copy()
        clock, knot = np.divmod(moving, theta.shape[1])
        for which in np.unique(clock).tolist():
            mine = clock == which
            raw = self.given.knot_ns[which]
            move = np.interp(raw - raw[0], (raw - raw[0])[knot[mine]], move_ns[mine])
            theta[which] += np.rint(move).astype(np.int64)
        return ClockMap(self.given.knot_ns, theta)

    def _entries(self, rows: _Contradictions) -> tuple[Ints, Ints, NDArray[np.float64]]:
        """Return (row, knot, weight) of the matrix: an end's time adds its clock's knots, a start's takes them away.

        A knot is numbered clock x Q + index; those of the first clock do not move.
        """
        knots, size = self.given.knot_ns.shape[1], len(rows.end)
        parts = []
        for side, sign in ((0, 1.0), (1, -1.0)):
            clock, here, way = rows.cell[:, side], rows.cell[:, 2 + side], rows.way[:, side]
            for step, weight in ((0, 1.0 - way), (1, way)):
                moves = (clock != 0) & (weight != 0)
                parts.append((np.arange(size)[moves], (clock * knots + here + step)[moves], sign * weight[moves]))
        at, knot, weight = (np.concatenate(part) for part in zip(*parts, strict=True))
        return at, knot, weight

    def _steepness(self, moving: Ints) -> tuple[Ints, NDArray[np.float64], NDArray[np.float64]]:
        """Return (place in `moving`, least, most) for the rise of moves to the next place of the same clock, ns."""
        clock, knot = np.divmod(moving, self.given.knot_ns.shape[1])
        before = np.flatnonzero(np.diff(clock) == 0)
        this, here, there = clock[before], knot[before], knot[before + 1]
        rise = (self.given.theta_ns[this, there] - self.given.theta_ns[this, here]).astype(np.float64)
        most = np.maximum(MAX_DRIFT * (self.given.knot_ns[this, there] - self.given.knot_ns[this, here]), np.abs(rise))
        return before, -most - rise, most - rise

    def cycle(self) -> tuple[tuple[Link, ...], int]:
        """Return a circle of contradicting calls out of the dual prices, and how much it is short by, ns.

        The prices are a circulation over the clocks (each row adds a clock's map and takes another's away), so a walk
        along priced rows closes; limits of steepness may take part, and then the worst row stands alone.
        """
        assert self.rows is not None, "only a solved program has prices"
        ended, begun = self.rows.cell[:, 0], self.rows.cell[:, 1]
        priced = [at for at in np.argsort(-self.price, kind="stable").tolist() if self.price[at] > 1e-6]
        path: list[int] = priced[:1]
        while path:
            here = int(ended[path[-1]])
            visited = begun[path].tolist()
            if here in visited:
                path = path[visited.index(here) :]
                break
            following = [at for at in priced if at not in path and begun[at] == here]
            if not following:
                path = priced[:1]
                break
            path.append(following[0])
        links = tuple((int(self.rows.end[at]), int(self.rows.start[at])) for at in path)
        return links, int(self.rows.need[path].sum())


def _first_of(order: Ints, met: Meetings, mask: Bools) -> Ints:
    """[num_meetings] The first call of each meeting where `mask` holds."""
    return np.asarray(np.minimum.reduceat(np.where(mask, order, len(order)), met.first[:-1]))
