"""Offset and drift of clocks from the ends of what their ranks did together, before any causality is looked at.

A collective ends at about the same moment for all its members, so the
difference of its raw ends is the difference of two clocks plus noise. The
differences of a pair of clocks are fitted with a line per window, continuous
over the windows' borders, by least absolute deviations: medians, for a line.
Clocks are joined by the spanning tree of the least scattered pairs, then all
pairs are settled together, each with the weight of its scatter. What sends
messages one way only weighs least, because a sender may be done early.

The fit is held by what oscillators do (`headway.trace.sync.drift_windows`): a
drift of `DRIFT` and a change of drift of `DRIFT_CHANGE` from window to window
are one standard deviation. It outweighs nothing that was measured; it fills
windows without a meeting and keeps a short trace from fitting a slope to
noise. Windows in which a drift changes are halved. Raw times in int64 ns.

>>> import numpy as np
>>> from headway.trace.sync.meetings import Meetings
>>> end = np.array([100, 1100, 205, 1205])
>>> met = Meetings(np.arange(4), np.array([0, 1, 0, 1]), end - 50, end, np.array([0, 2, 4]), np.zeros(2, int),
...                np.zeros(2, bool), np.zeros(4, bool))
>>> estimate(met, met.rank, 2, window_s=None).clocks.theta_ns.tolist()
[[0], [-1000]]
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.units import NS_PER_S
from headway.trace.sync.clocks import ClockMap
from headway.trace.sync.drift_windows import Differences, fit_windows
from headway.trace.sync.meetings import Bools, Ints, Meetings

Floats = NDArray[np.float64]

ALL_PAIRS = 8
"""Up to so many members every pair of a group is looked at; of larger groups the pairs with their calmest member."""

MOST = 512
"""Meetings of a channel that are looked at per window, evenly spread: more would make no visible difference."""

STRAY, SETTLINGS = 6.0, 3
"""Standard errors beyond which a pair of clocks loses weight, and rounds of settling all pairs."""

MOST_STEPS, SETTLED_NS = 300, 0.01
"""Steps of conjugate gradients, and the change below which they end."""

UNITS, UNITS_FROM_NS = 2.0, 1_000_000
"""Two clocks of which one runs so many times faster, over at least so long, do not count in one unit."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Clocks [C] as the ends of meetings have them."""

    clocks: ClockMap
    """Their maps; the reference's adds nothing."""

    window_ns: Ints
    """[Q] Borders of the windows on the reference clock; one entry without drift."""

    reached: Bools
    """[C] Joined to the reference by meetings; the others' maps say nothing."""


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


def estimate(
    meetings: Meetings, clock: Ints, num_clocks: int, *, window_s: float | None, reference: int = 0
) -> Estimate:
    """Estimate the maps of the clocks; `clock` [n] is the clock that each call's rank reads.

    `window_s` None means offsets without drift. Deterministic, and the same
    whatever the ranks are called. Raises `InputError` on clocks that do not
    count in one unit.
    """
    origin = origins(meetings, clock, num_clocks)
    windows = 1 if window_s is None else _num_windows(meetings, clock, origin, window_s)
    edges = _edges(_pairs(meetings, clock, origin, most=MOST * windows))
    tree, coarse = _tree(edges, num_clocks, reference)
    reached = np.zeros(num_clocks, bool)
    reached[[reference, *(new for _, new, _ in tree)]] = True
    for _, _, index in tree:
        _same_unit(edges[index], meetings, clock)
    edges_used = [edge for edge in edges if reached[edge.a]]
    border = _borders(meetings, clock, origin, coarse, reached, windows if window_s is not None else 0)
    border, apart = _fit(edges_used, coarse, border)
    place = {(edge.a, edge.b): at for at, edge in enumerate(edges_used)}
    theta = np.zeros((num_clocks, len(border)))
    for known, new, _ in tree:
        theta[new] = theta[known] + (apart[place[known, new]] if known < new else -apart[place[new, known]])
    theta = settled(theta, edges_used, apart, reference)
    # From origin to origin of the clocks back to raw times: whole numbers, whatever their size.
    origin = np.where(reached, origin, 0)
    knots = np.rint(border[None, :] - coarse[:, None]).astype(np.int64) + origin[:, None]
    whole = np.where(reached[:, None], np.rint(theta).astype(np.int64) + origin[reference] - origin[:, None], 0)
    return Estimate(ClockMap(knots, whole), np.rint(border).astype(np.int64) + origin[reference], reached)


def _num_windows(meetings: Meetings, clock: Ints, origin: Ints, window_s: float) -> int:
    """Return in how many equal windows of about `window_s` the longest clock is cut."""
    if not window_s > 0:
        raise InputError(f"a window of {window_s} s is none. Pass a length above 0, or None for offsets without drift.")
    span = int((meetings.end_ns - origin[clock]).max(initial=0))
    return max(1, round(span / (window_s * NS_PER_S)))


def _pairs(meetings: Meetings, clock: Ints, origin: Ints, *, most: int) -> dict[Pair, list[_Series]]:
    """Return the series of each pair of clocks (first < second) that have meetings in common."""
    found: dict[Pair, list[_Series]] = {}
    relative = (meetings.end_ns - origin[clock]).astype(np.float64)
    order = np.argsort(meetings.channel, kind="stable")
    cuts = np.flatnonzero(np.diff(meetings.channel[order], prepend=-1, append=-1))
    size = np.diff(meetings.first)
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        picked = order[begin:end]
        picked = picked[np.linspace(0, len(picked) - 1, min(most, len(picked))).astype(np.int64)]
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
    steps = np.abs(np.diff(a - b))
    scatter = max(float(np.median(steps)) if len(steps) else 1e6, 1.0)
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


def _borders(meetings: Meetings, clock: Ints, origin: Ints, offset: Floats, reached: Bools, windows: int) -> Floats:
    """Return the borders [Q] of the windows, ns after the reference's origin; one border for no window."""
    mine = reached[clock]
    if not windows or not mine.any():
        return np.zeros(1)
    shift = offset[clock[mine]]
    low = float((meetings.start_ns[mine] - origin[clock[mine]] + shift).min())
    high = float((meetings.end_ns[mine] - origin[clock[mine]] + shift).max())
    return np.rint(np.linspace(low, max(high, low + windows), windows + 1))


def _fit(edges: list[Edge], offset: Floats, border: Floats) -> tuple[Floats, Floats]:
    """Return the borders [Q] of windows that fit, and [E, Q] what puts the second clock of each edge on the first."""
    if len(border) == 1 or not edges:
        return border, np.array([[_middle(edge)] * len(border) for edge in edges]).reshape(len(edges), len(border))
    flat = [(edge, s) for edge in edges for s in edge.series]
    owner = np.repeat(np.arange(len(flat)), [len(s.end_a) for _, s in flat])
    apart = np.concatenate([s.end_a - s.end_b for _, s in flat])
    when = np.concatenate([(s.end_a + offset[edge.a] + s.end_b + offset[edge.b]) / 2 for edge, s in flat])
    noise = np.sqrt(np.array([s.variance * len(s.end_a) for _, s in flat]))
    border, values = fit_windows(Differences(owner, when, apart, noise), border)
    size = np.array([len(edge.series) for edge in edges])
    return border, np.asarray(np.add.reduceat(values, np.cumsum(size) - size, axis=0) / size[:, None])


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
        theta = theta + _pulled(rest, a, b, 1.0 / (variance * np.maximum(stray, 1.0)), len(theta), reference)
    return theta


def _pulled(rest: Floats, a: Ints, b: Ints, weight: Floats, clocks: int, reference: int) -> Floats:
    """Return the moves [C, Q] that leave the least weighted squares of `rest` [E, Q]: conjugate gradients."""

    def gathered(flow: Floats) -> Floats:
        columns = [np.bincount(b, f, clocks) - np.bincount(a, f, clocks) for f in flow.T]
        result = np.stack(columns, axis=1)
        result[reference] = 0.0
        return result

    scale = np.bincount(a, weight, clocks) + np.bincount(b, weight, clocks)
    scale = np.where(scale > 0, scale, 1.0)[:, None]
    move = np.zeros((clocks, rest.shape[1]))
    residue = gathered(weight[:, None] * rest)
    step = residue / scale
    power = (residue * step).sum(axis=0)
    for _ in range(MOST_STEPS):
        if np.abs(residue / scale).max() < SETTLED_NS:
            break
        pull = gathered(weight[:, None] * (step[b] - step[a]))
        length = power / np.maximum((step * pull).sum(axis=0), np.finfo(float).tiny)
        move += length * step
        residue = residue - length * pull
        before, power = power, (residue * residue / scale).sum(axis=0)
        step = residue / scale + power / np.maximum(before, np.finfo(float).tiny) * step
    return move


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
