"""Offset and drift of clocks from the ends of what their ranks did together, before any causality is looked at.

A collective ends at about the same moment for all its members, so the
difference of its raw ends is the difference of two clocks plus noise. The
differences of a pair of clocks are fitted with one line, offset and drift, by
medians (`robust_line`). Clocks are joined by the spanning tree of the least
scattered pairs, then all pairs are settled together, each with the weight of
its scatter. What sends messages one way only weighs least, because a sender
may be done early.

One line is all that is fitted. Where two lines, before and after some moment,
fit the differences of a pair much better, a clock was set while it recorded,
or its drift changed; `Estimate.broken` says so. Raw times in int64 ns.

>>> import numpy as np
>>> from headway.trace.sync.meetings import Meetings
>>> end = np.array([100, 1100, 205, 1205])
>>> met = Meetings(np.arange(4), np.array([0, 1, 0, 1]), end - 50, end, np.array([0, 2, 4]), np.zeros(2, int),
...                np.zeros(2, bool), np.zeros(4, bool))
>>> estimate(met, met.rank, 2, drift=False).clocks.theta_ns.tolist()
[[0], [-1000]]
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.trace.sync.clocks import ClockMap
from headway.trace.sync.meetings import Bools, Ints, Meetings

Floats = NDArray[np.float64]

ALL_PAIRS = 8
"""Up to so many members every pair of a group is looked at; of larger groups the pairs with their calmest member."""

MOST = 512
"""Meetings of a channel that are looked at, evenly spread: more would make no visible difference."""

DRIFT = 50e-6
"""Standard deviation of the drift of crystals, ns per ns: what a slope is held to where its noise is larger."""

ACCURACY_NS = 50_000
"""A line that misses an eighth of its differences by no more than this, in the median, is good enough."""

SPLITS, FEWEST, BROKEN = 16, 12, 0.5
"""A pair's differences are divided at so many places less one, into sides of at least so many; they are broken where
lines on both sides leave less than this fraction of the deviations that one line leaves."""

STRAY, SETTLINGS = 6.0, 3
"""Standard errors beyond which a pair of clocks loses weight, and rounds of settling all pairs."""

UNITS, UNITS_FROM_NS = 2.0, 1_000_000
"""Two clocks of which one runs so many times faster, over at least so long, do not count in one unit."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Clocks [C] as the ends of meetings have them."""

    clocks: ClockMap
    """Their maps; the reference's adds nothing."""

    reached: Bools
    """[C] Joined to the reference by meetings; the others' maps say nothing."""

    broken: Break | None
    """The clock that least keeps one offset and drift, None where all do."""


@dataclass(frozen=True, slots=True)
class Break:
    """Where one line does not describe a clock."""

    clock: int
    """The clock."""

    partner: int
    """A clock against which it shows."""

    after_ns: float
    """About when, after the first call of `clock`."""

    jump_ns: float
    """How far the clock jumps forward there; negative = back."""

    drift: float
    """How much faster it runs from there on, ns per ns."""

    missed_ns: float
    """How far one line is off, in the median of an eighth of the meetings."""


@dataclass(frozen=True, slots=True)
class _Series:
    """Differences between two clocks over the meetings of one channel."""

    kind: int
    """0 collectives, 1 messages from `a` to `b`, 2 messages from `b` to `a`."""

    end_a: Floats
    """[m] Ends at the first clock, ns after its origin, in order."""

    end_b: Floats
    """[m] Ends at the second clock, ns after its origin."""

    variance: float
    """Square of the standard error of their median difference, ns^2."""

    bias: float
    """Square of what a sender may end early, ns^2; 0 for collectives."""

    @property
    def noise(self) -> float:
        """Return the scatter of one difference, ns."""
        return float(np.sqrt(self.variance * len(self.end_a)))

    def steady(self) -> tuple[Floats, Floats]:
        """Return time [m] and difference [m] of the meetings; a clock that is set does not move the time."""
        between = np.minimum(np.diff(self.end_a), np.diff(self.end_b))
        return np.concatenate([[0.0], np.cumsum(np.maximum(between, 0.0))]), self.end_a - self.end_b


Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Edge:
    """Two clocks that have meetings in common."""

    a: int
    """The first clock."""

    b: int
    """The second clock, a larger number."""

    variance: float
    """Square of the standard error of their difference, ns^2."""

    series: tuple[_Series, ...]
    """What it follows from: one channel of collectives, or messages one way or both."""


def origins(meetings: Meetings, clock: Ints, num_clocks: int) -> Ints:
    """[C] First raw start of each clock, from which its times are counted; the largest int64 without any call."""
    origin = np.full(num_clocks, np.iinfo(np.int64).max)
    np.minimum.at(origin, clock, meetings.start_ns)
    return origin


def estimate(meetings: Meetings, clock: Ints, num_clocks: int, *, drift: bool, reference: int = 0) -> Estimate:
    """Estimate the maps of the clocks; `clock` [n] is the clock that each call's rank reads.

    Without `drift` the maps are offsets, and no break is looked for. Deterministic, and the same whatever the ranks
    are called. Raises `InputError` on clocks that do not count in one unit.
    """
    origin = origins(meetings, clock, num_clocks)
    edges = _edges(_pairs(meetings, clock, origin))
    tree, coarse = _tree(edges, num_clocks, reference)
    reached = np.zeros(num_clocks, bool)
    reached[[reference, *(new for _, new, _ in tree)]] = True
    edges_used = [edge for edge in edges if reached[edge.a]]
    broken = _break(edges_used, num_clocks, reference) if drift else None
    if broken is None:
        for _, _, index in tree:
            _same_unit(edges[index], meetings, clock)
    border = _borders(meetings, clock, origin, coarse, reached) if drift else np.zeros(1)
    apart = _apart(edges_used, coarse, border)
    place = {(edge.a, edge.b): at for at, edge in enumerate(edges_used)}
    theta = np.zeros((num_clocks, len(border)))
    for known, new, _ in tree:
        theta[new] = theta[known] + (apart[place[known, new]] if known < new else -apart[place[new, known]])
    theta = settled(theta, edges_used, apart, reference)
    # From origin to origin of the clocks back to raw times: whole numbers, whatever their size.
    origin = np.where(reached, origin, 0)
    knots = np.rint(border[None, :] - coarse[:, None]).astype(np.int64) + origin[:, None]
    whole = np.where(reached[:, None], np.rint(theta).astype(np.int64) + origin[reference] - origin[:, None], 0)
    return Estimate(ClockMap(knots, whole), reached, broken)


def _pairs(meetings: Meetings, clock: Ints, origin: Ints) -> dict[Pair, list[_Series]]:
    """Return the series of each pair of clocks (first < second) that have meetings in common."""
    found: dict[Pair, list[_Series]] = {}
    relative = (meetings.end_ns - origin[clock]).astype(np.float64)
    order = np.argsort(meetings.channel, kind="stable")
    cuts = np.flatnonzero(np.diff(meetings.channel[order], prepend=-1, append=-1))
    size = np.diff(meetings.first)
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        picked = order[begin:end]
        picked = picked[np.linspace(0, len(picked) - 1, min(MOST, len(picked))).astype(np.int64)]
        # The calls of the picked meetings, one meeting after the other: each is the range first[i] .. first[i] +
        # size[i] - 1, written as one running arange plus an offset per meeting. `column` says which of the picked
        # meetings each is of.
        rows = np.repeat(meetings.first[picked] - np.cumsum(size[picked]) + size[picked], size[picked]) + np.arange(
            int(size[picked].sum())
        )
        column = np.repeat(np.arange(len(picked)), size[picked])
        members, ends = _matrix(clock[rows], column, relative[rows], len(picked))
        sender = int(clock[rows[meetings.sends[rows]][0]]) if meetings.message[picked[0]] else -1
        own = meetings.end_ns[rows] - meetings.start_ns[rows]
        # The shortest call of a meeting holds the least waiting: its length is taken for how early a sender may be
        # done.
        early = float(np.median(np.minimum.reduceat(own, np.flatnonzero(np.diff(column, prepend=-1)))))
        for i, j in _candidates(ends):
            a, b = int(members[i]), int(members[j])
            found.setdefault((a, b), []).append(
                _series(ends[i], ends[j], 0 if sender < 0 else 1 + (sender == b), early)
            )
    return found


def _matrix(clock: Ints, column: Ints, ends: Floats, width: int) -> tuple[Ints, Floats]:
    """Return the clocks [G] of a channel, and their mean end [G, width] at each meeting, NaN where one was absent.

    Ranks of one clock are averaged: a mean expects the same noise however many there are, an earliest would not.
    """
    members, member = np.unique(clock, return_inverse=True)
    cell = member * width + column
    count = np.bincount(cell, minlength=len(members) * width)
    total = np.bincount(cell, weights=ends, minlength=len(members) * width)
    with np.errstate(invalid="ignore"):
        return members, (total / np.where(count, count, np.nan)).reshape(len(members), width)


def _candidates(ends: Floats) -> Iterator[Pair]:
    """Yield the pairs of rows of `ends` [G, m] to look at, the smaller row first."""
    size = len(ends)
    if size <= ALL_PAIRS:
        yield from ((i, j) for i in range(size) for j in range(i + 1, size))
        return
    away = ends - np.nanmean(ends, axis=0)
    # The steps from one meeting to the next show a clock's noise without its drift.
    noise = np.nanmedian(np.abs(np.diff(away, axis=1)), axis=1) if ends.shape[1] > 1 else np.zeros(size)
    hub = int(np.nanargmin(noise))
    yield from ((min(hub, i), max(hub, i)) for i in range(size) if i != hub)


def _series(end_a: Floats, end_b: Floats, kind: int, early: float) -> _Series:
    both = ~np.isnan(end_a) & ~np.isnan(end_b)
    a, b = end_a[both], end_b[both]
    order = np.argsort(a + b, kind="stable")  # As the pair has it, whichever of them is called the first.
    a, b = a[order], b[order]
    # The changes from one meeting to the next, less the usual one where there are enough: noise without drift.
    steps = np.diff(a - b)
    usual = np.median(steps) if len(steps) >= FEWEST else 0.0
    scatter = max(float(np.median(np.abs(steps - usual))) if len(steps) else 1e6, 1.0)
    return _Series(kind, a, b, scatter**2 / max(len(a), 1), 0.0 if kind == 0 else early**2)


def _edges(pairs: dict[Pair, list[_Series]]) -> list[Edge]:
    """Return an edge for each pair: its best collective, else its messages.

    Messages both ways are averaged: what a sender is early cancels.
    """
    edges = []
    for (a, b), series in pairs.items():
        held = [s for s in series if len(s.end_a)]
        best = {s.kind: s for s in sorted(held, key=lambda s: -s.variance)}  # The least scattered one stays.
        ways = [best[kind] for kind in (1, 2) if kind in best]
        if 0 in best:
            edges.append(Edge(a, b, best[0].variance, (best[0],)))
        elif len(ways) == 2:
            edges.append(Edge(a, b, sum(s.variance for s in ways) / 4, tuple(ways)))
        elif ways:
            edges.append(Edge(a, b, ways[0].variance + ways[0].bias, tuple(ways)))
    return edges


def _tree(edges: list[Edge], num_clocks: int, reference: int) -> tuple[list[tuple[int, int, int]], Floats]:
    """Join the clocks by their least scattered paths: (known, new, edge) in order, and offsets [C] of origins."""
    beside: dict[int, list[int]] = {}
    for index, edge in enumerate(edges):
        beside.setdefault(edge.a, []).append(index)
        beside.setdefault(edge.b, []).append(index)
    offset = np.zeros(num_clocks)
    tree: list[tuple[int, int, int]] = []
    best = {reference: 0.0}
    came: dict[int, tuple[int, int]] = {}
    queue = [(0.0, reference)]
    done: set[int] = set()
    while queue:
        length, here = heapq.heappop(queue)
        if here in done:
            continue
        done.add(here)
        if here in came:
            known, index = came[here]
            tree.append((known, here, index))
            offset[here] = offset[known] + _middle(edges[index]) * (1 if edges[index].b == here else -1)
        for index in beside.get(here, ()):
            there = edges[index].a + edges[index].b - here
            reach = length + edges[index].variance
            if there not in done and reach < best.get(there, np.inf):
                best[there], came[there] = reach, (here, index)
                heapq.heappush(queue, (reach, there))
    return tree, offset


def _middle(edge: Edge) -> float:
    """Return what to add to the second clock to put it on the first, both from their origins, without drift."""
    return float(np.mean([np.median(s.end_a - s.end_b) for s in edge.series]))


def _borders(meetings: Meetings, clock: Ints, origin: Ints, offset: Floats, reached: Bools) -> Floats:
    """Return first and last time [2] of all calls, ns after the reference's origin."""
    mine = reached[clock]
    if not mine.any():
        return np.zeros(1)
    shift = offset[clock[mine]]
    low = float((meetings.start_ns[mine] - origin[clock[mine]] + shift).min())
    high = float((meetings.end_ns[mine] - origin[clock[mine]] + shift).max())
    return np.asarray(np.rint([low, max(high, low + 1)]))


def _apart(edges: list[Edge], offset: Floats, border: Floats) -> Floats:
    """[E, Q] What puts the second clock of each edge on the first, at `border` [Q]; one border for no drift."""
    result = np.zeros((len(edges), len(border)))
    for index, edge in enumerate(edges):
        if len(border) == 1:
            result[index] = _middle(edge)
            continue
        for s in edge.series:
            when = (s.end_a + offset[edge.a] + s.end_b + offset[edge.b]) / 2
            level, slope = robust_line(when, s.end_a - s.end_b, s.noise)
            result[index] += (level + slope * border) / len(edge.series)
    return result


def robust_line(when: Floats, value: Floats, noise: float) -> tuple[float, float]:
    """Return (level at 0, slope) of a line through the points [n], in order of time; three in ten may be outliers.

    Theil's incomplete method: each point of the first half is paired with one half a series later, and the slope is
    the median of the pairs'. A slope that the points' `noise` may feign is drawn to 0 by the prior `DRIFT`: a short
    trace has none.
    """
    half = len(when) // 2
    run, rise = (x[len(x) - half :] - x[:half] for x in (when, value))
    apart = run > 0
    slope = 0.0
    if apart.any():
        run, rise = run[apart], rise[apart]
        error = noise / float(np.median(run)) * np.sqrt(np.pi / len(run))  # of a median of slopes of two noisy points
        slope = float(np.median(rise / run)) * DRIFT**2 / (DRIFT**2 + error**2)
    return float(np.median(value - slope * when)), slope


def _break(edges: list[Edge], num_clocks: int, reference: int) -> Break | None:
    """Return the break of the clock that breaks against the largest share of its partners, None without any."""
    broken = [(edge, s, *split) for edge in edges for s in edge.series if (split := _split(s)) is not None]
    if not broken:
        return None
    degree, count = (
        np.bincount([end for edge in some for end in (edge.a, edge.b)], minlength=num_clocks)
        for some in ([edge for edge in edges for _ in edge.series], [row[0] for row in broken])
    )
    share = count / np.maximum(degree, 1)
    share[reference] -= 1e-9  # Of two clocks alone, the one that is not the reference.
    clock = int(np.argmax(share))
    edge, s, index, missed_ns = max((row for row in broken if clock in (row[0].a, row[0].b)), key=lambda row: row[3])
    ends, sign = (s.end_a, 1.0) if clock == edge.a else (s.end_b, -1.0)
    # What the second clock lacks grows where the first is set forward, and falls where the second is.
    when, value = s.steady()
    before, after = (robust_line(when[part], value[part], s.noise) for part in (slice(index), slice(index, None)))
    jump = after[0] - before[0] + (after[1] - before[1]) * float(when[index])
    return Break(
        clock, edge.a + edge.b - clock, float(ends[index - 1]), sign * jump, sign * (after[1] - before[1]), missed_ns
    )


def _split(s: _Series) -> tuple[int, float] | None:
    """Return before which meeting two lines fit a series much better than one, and how far one is off; else None."""
    (when, value), count = s.steady(), len(s.end_a)
    if count < 2 * FEWEST:
        return None
    rest = _deviations(when, value, s.noise)
    missed = max(abs(float(np.median(part))) for part in np.array_split(rest, 8))
    if missed <= ACCURACY_NS:
        return None
    splits = [at for k in range(1, SPLITS) if FEWEST <= (at := k * count // SPLITS) <= count - FEWEST]
    deviations = [
        sum(float(np.abs(_deviations(when[part], value[part], s.noise)).sum()) for part in (slice(at), slice(at, None)))
        for at in splits
    ]
    best = int(np.argmin(deviations))
    if deviations[best] >= BROKEN * float(np.abs(rest).sum()):
        return None
    # A clock that is set changes the difference most there, between two of the splits.
    low, high = (max(FEWEST, min(splits[best] + way * (count // SPLITS + 1), count - FEWEST)) for way in (-1, 1))
    return low + int(np.argmax(np.abs(np.diff(value[low - 1 : high])))), missed


def _deviations(when: Floats, value: Floats, noise: float) -> Floats:
    """[n] Values less their line."""
    level, slope = robust_line(when, value, noise)
    return np.asarray(value - level - slope * when)


def settled(theta: Floats, edges: list[Edge], apart: Floats, reference: int) -> Floats:
    """Return `theta` [C, Q] moved so that all edges agree best with `apart` [E, Q]; the reference stays at 0.

    Least squares with the edges' variances; an edge farther off than `STRAY` standard errors loses weight, so that
    a pair that was matched wrongly does not pull the others along.
    """
    if len(edges) < len(theta):  # A tree agrees with itself.
        return theta
    a, b = (np.array([getattr(edge, name) for edge in edges]) for name in ("a", "b"))
    variance = np.array([edge.variance for edge in edges])
    for _ in range(SETTLINGS):
        rest = apart - (theta[b] - theta[a])
        stray = np.abs(rest).max(axis=1) / (STRAY * np.sqrt(variance))
        weight = 1.0 / (variance * np.maximum(stray, 1.0))
        # Normal equations, the Laplacian of the graph of clocks: sum over its edges of w (move[b] - move[a] - rest) = 0
        # at each clock but the reference, which does not move, nor do clocks without an edge.
        matrix, right = np.zeros((len(theta), len(theta))), np.zeros_like(theta)
        for row, column, sign in ((a, a, 1.0), (b, b, 1.0), (a, b, -1.0), (b, a, -1.0)):
            np.add.at(matrix, (row, column), sign * weight)
        np.add.at(right, b, weight[:, None] * rest)
        np.add.at(right, a, -weight[:, None] * rest)
        still = np.diagonal(matrix) == 0
        still[reference] = True
        matrix[still], right[still] = np.eye(len(theta))[still], 0.0
        theta = theta + np.linalg.solve(matrix, right)
    return theta


def _same_unit(edge: Edge, meetings: Meetings, clock: Ints) -> None:
    """Raise when one of two clocks runs a multiple faster: their ranks recorded in different units."""
    for s in edge.series:
        spans = [float(np.subtract(*np.quantile(end, [0.75, 0.25]))) for end in (s.end_a, s.end_b)]
        if len(s.end_a) >= 4 and max(spans) >= UNITS_FROM_NS and max(spans) > UNITS * max(min(spans), 1.0):
            fast, slow = (edge.a, edge.b) if spans[0] > spans[1] else (edge.b, edge.a)
            ranks = [int(meetings.rank[clock == which].min()) for which in (fast, slow)]
            raise InputError(
                f"the clock of rank {ranks[0]} runs {max(spans) / max(min(spans), 1.0):.4g} times faster than that of "
                f"rank {ranks[1]} over the same collectives: their times are in different units. "
                "Convert both traces to nanoseconds."
            )
