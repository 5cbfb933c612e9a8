"""Steps of clocks: a clock that is set forward or back by some hundred us or more while a job runs.

`find_steps` looks at the differences between the ends of two clocks, meeting
by meeting. A step changes all later differences of its clock at once, by more
than `STEP_ERRORS` standard errors and by more than a drift of `STEP_DRIFT`
over the pause between the two meetings explains. The clock that stepped is the
one with which most of its partners disagree; of two clocks alone, the one that
is not the reference. `without_step` takes a step out of raw times, so that
what is left drifts and no more; `with_steps` puts steps back into the maps.

A clock set back by more than the pause between two calls shows some times
twice. No map of raw times undoes that, so such a step is left alone.

>>> rng = np.random.default_rng(0)
>>> end = 1e8 * np.arange(60)[:, None] + rng.exponential(20e3, (60, 2))
>>> end[37:, 1] += 500e3  # The second clock is set forward by 500 us before meeting 37.
>>> flat = end.ravel().astype(np.int64)
>>> met = Meetings(np.arange(120), np.tile([0, 1], 60), flat - 1000, flat, 2 * np.arange(61), np.zeros(60, int),
...                np.zeros(60, bool), np.zeros(120, bool))
>>> step, = find_steps(edges_of(met, met.rank, 2), met, met.rank)
>>> step.clock, bool(flat[73] == step.before_ns < step.after_ns == flat[75] - 1000), abs(step.by_ns - 500_000) < 30_000
(1, True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.trace.sync.clocks import ClockMap, offset_at
from headway.trace.sync.end_differences import Edge, edges_of, origins
from headway.trace.sync.meetings import Ints, Meetings

Floats = NDArray[np.float64]

BESIDE, LEAST_BESIDE = 16, 3
"""Meetings on either side of a pause by which a step is measured, and the fewest."""

STEP_ERRORS, STEP_DRIFT, BEND = 8.0, 100e-6, 10e-6
"""What a step exceeds: standard errors; drift (ns per ns) over the pause; what a change of drift can feign over all
meetings by which it is measured (ns per ns)."""

SLOPE = 100e-6
"""Standard deviation of the drift at a step around the usual one of its two clocks, ns per ns."""

CANDIDATE, CALM = 4.0, 4
"""A difference that changes by so many times its usual change is looked at, if the median of so many does too."""

LEAST_SHARE = 0.5
"""Share of its partners with which a clock that stepped disagrees."""

SURE = 0.75
"""What agrees less well than the best of a round by this factor waits for the next one, without what was taken out."""

REWEIGHTED = 12
"""Rounds of reweighting of a local fit."""

MOST_ROUNDS, MOST_JUMPS = 32, 16
"""Rounds of search, of which each finds at most one step of a clock; jumps of a pair that one round looks at."""

BEYOND_NS = 1_000_000_000
"""How far behind its last knot a map is carried on, so that it does not end with a step."""


@dataclass(frozen=True, slots=True)
class ClockJump:
    """A clock set forward or back, on the clock as it reads once earlier steps of the same list are taken out."""

    clock: int
    """Which."""

    before_ns: int
    """Last time that is known to lie before the step."""

    after_ns: int
    """First time that is known to lie after it."""

    by_ns: int
    """How far forward; negative = back."""

    def removed(self, raw_ns: Ints) -> Ints:
        """Return times [n] without the step; the pause in which it lies is stretched or shortened evenly."""
        knots = np.array([self.before_ns - BEYOND_NS, self.before_ns, self.after_ns, self.after_ns + BEYOND_NS])
        return raw_ns + offset_at(raw_ns, knots, np.array([0, 0, -self.by_ns, -self.by_ns]))

    def put_back(self, times_ns: Ints) -> Ints:
        """Return times [n] with the step: the inverse of `removed`, to 1 ns."""
        knots = np.array([self.before_ns - BEYOND_NS, self.before_ns, self.after_ns - self.by_ns])
        knots = np.append(knots, knots[-1] + BEYOND_NS)
        return times_ns + offset_at(times_ns, knots, np.array([0, 0, self.by_ns, self.by_ns]))


@dataclass(frozen=True, slots=True)
class _Jump:
    """A jump of the difference of two clocks, as one of them reads."""

    place: tuple[int, int]
    """Number of the pair and way of meeting, and of the meeting behind it."""

    clock: int
    """One of the two."""

    before: float
    """Its end of the last meeting before, ns after its origin."""

    after: float
    """Its end of the first meeting behind."""

    by: float
    """How far it jumped, if the other one did not, ns."""


def find_steps(edges: Sequence[Edge], meetings: Meetings, clock: Ints) -> tuple[ClockJump, ...]:
    """Return the steps of the clocks, in the order in which they have to be taken out; `edges` are of `meetings`."""
    found: list[ClockJump] = []
    num_clocks = int(clock.max(initial=0)) + 1
    for _ in range(MOST_ROUNDS):
        more = []
        for jump in _stepped(edges):
            origin = int(origins(meetings, clock, num_clocks)[jump.clock])
            step = _located(jump, origin, meetings, clock)
            if step.before_ns < min(step.after_ns, step.after_ns - step.by_ns):
                more.append(step)
        if not more:
            break
        for step in more:
            meetings = without_step(meetings, clock, step)
        found += more
        edges = edges_of(meetings, clock, num_clocks)
    return tuple(found)


def without_step(meetings: Meetings, clock: Ints, step: ClockJump) -> Meetings:
    """Return the meetings with the step of one clock taken out of its raw times."""
    own = clock == step.clock
    start, end = meetings.start_ns.copy(), meetings.end_ns.copy()
    start[own], end[own] = step.removed(start[own]), step.removed(end[own])
    return replace(meetings, start_ns=start, end_ns=end)


def with_steps(clocks: ClockMap, steps: Sequence[ClockJump]) -> ClockMap:
    """Return maps of raw times for `clocks`, whose raw times had `steps` taken out."""
    if not steps:
        return clocks
    knots, thetas = [], []
    for index, (knot, theta) in enumerate(zip(clocks.knot_ns, clocks.theta_ns, strict=True)):
        own = [step for step in steps if step.clock == index]
        points = [_back(np.r_[knot[0] - BEYOND_NS, knot, knot[-1] + BEYOND_NS] if own else knot, own)]
        points += [_back(np.array([step.before_ns, step.after_ns]), own[:at]) for at, step in enumerate(own)]
        raw = np.unique(np.concatenate(points))
        even = _forth(raw, own)
        knots.append(raw)
        thetas.append(even - raw + offset_at(even, knot, theta))
    width = max(len(knot) for knot in knots)
    filled = [_filled(knot, width) for knot in knots]
    return ClockMap(
        np.stack(filled),
        np.stack([offset_at(more, knot, theta) for more, knot, theta in zip(filled, knots, thetas, strict=True)]),
    )


def _forth(raw_ns: Ints, steps: Sequence[ClockJump]) -> Ints:
    for step in steps:
        raw_ns = step.removed(raw_ns)
    return raw_ns


def _back(times_ns: Ints, steps: Sequence[ClockJump]) -> Ints:
    """Return the raw times of `times_ns`, which had `steps` taken out."""
    for step in reversed(steps):
        times_ns = step.put_back(times_ns)
    return times_ns


def _filled(knot_ns: Ints, width: int) -> Ints:
    """Return `knot_ns` with further ones in the middle of its longest stretches, `width` in all."""
    while len(knot_ns) < width:
        longest = int(np.argmax(np.diff(knot_ns)))
        knot_ns = np.insert(knot_ns, longest + 1, (knot_ns[longest] + knot_ns[longest + 1]) // 2)
    return knot_ns


def _stepped(edges: Sequence[Edge]) -> list[_Jump]:
    """Return the largest agreeing jump of each clock with which most of its partners disagree."""
    jumps: list[_Jump] = []
    count: dict[int, int] = {}
    number = 0
    for edge in edges:
        for series in edge.series:
            for clock in (edge.a, edge.b):
                count[clock] = count.get(clock, 0) + 1
            for at, by in _jumps(series.end_a, series.end_b):
                for clock, ends, sign in ((edge.a, series.end_a, 1.0), (edge.b, series.end_b, -1.0)):
                    jumps.append(_Jump((number, at), clock, float(ends[at - 1]), float(ends[at]), sign * by))
            number += 1
    found: list[_Jump] = []
    least = LEAST_SHARE
    while jumps:
        # One step is seen by all partners of its clock at about the same place and by the same amount.
        sets = [[other for other in jumps if _alike(one, other)] for one in jumps]
        share, _, _, best = max(
            (len(alike) / count[one.clock], one.clock != 0, -index, index)
            for index, (one, alike) in enumerate(zip(jumps, sets, strict=True))
        )
        if share < least:
            break
        least = max(least, SURE * share)
        alike, clock = sets[best], jumps[best].clock
        before, after = min(jump.before for jump in alike), max(jump.after for jump in alike)
        found.append(_Jump((-1, -1), clock, before, after, float(np.median([jump.by for jump in alike]))))
        explained = {
            jump.place for jump in jumps if jump.clock == clock and jump.before < after and before < jump.after
        }
        jumps = [jump for jump in jumps if jump.clock != clock and jump.place not in explained]
    return found


def _alike(one: _Jump, other: _Jump) -> bool:
    """Say whether two jumps of one clock may be the same step."""
    return (
        one.clock == other.clock
        and other.before < one.after
        and one.before < other.after
        and abs(other.by - one.by) < abs(one.by) / 2
    )


def _jumps(end_a: Floats, end_b: Floats) -> list[tuple[int, float]]:
    """Return (index of the first meeting behind it, change of a - b) of the jumps of a series, the surest first."""
    apart, when = end_a - end_b, (end_a + end_b) / 2
    found: list[tuple[int, float]] = []
    while len(apart) >= 2 * LEAST_BESIDE and len(found) < MOST_JUMPS:
        largest = _largest_jump(apart, when)
        if largest is None:
            break
        found.append(largest)
        apart[largest[0] :] -= largest[1]
    return found


def _largest_jump(apart: Floats, when: Floats) -> tuple[int, float] | None:
    """Return index and size of the surest jump of differences `apart` [m] at times `when` [m], None without any."""
    change = np.diff(apart)
    change = change - np.median(change)
    usual = max(float(np.median(np.abs(change))), 1.0)
    at = np.flatnonzero(np.abs(change) > CANDIDATE * usual) + 1
    at = at[(at >= LEAST_BESIDE) & (at <= len(apart) - LEAST_BESIDE)]
    sides = [
        np.median(apart[np.clip(at[:, None] + np.arange(low, high), 0, len(apart) - 1)], axis=1)
        for low, high in ((-CALM, 0), (0, CALM))
    ]
    level = np.abs(sides[1] - sides[0])
    at, level = at[level > CANDIDATE / 2 * usual], level[level > CANDIDATE / 2 * usual]
    if not len(at):
        return None
    before, after = _reaches(at, level, len(apart))
    by = _jumps_at(at, before, after, when, apart, usual)
    error = 2 * usual * np.sqrt(1 / before + 1 / after)
    bent = BEND * (when[at + after - 1] - when[at - before])
    sure = np.abs(by) / np.maximum(np.maximum(STEP_ERRORS * error, STEP_DRIFT * (when[at] - when[at - 1])), bent)
    # Beside a jump the two lines show it as well, but not the change from one meeting to the next.
    clear = np.where((sure > 1) & (level > np.abs(by) / 2), np.minimum(change[at - 1] * np.sign(by), np.abs(by)), 0.0)
    best = int(np.argmax(clear))
    return (int(at[best]), float(by[best])) if clear[best] > 0 else None


def _reaches(at: Ints, level: Floats, count: int) -> tuple[Ints, Ints]:
    """[n], [n] How many meetings before and behind each candidate measure it: none beyond another one of its size."""
    before, after = np.minimum(at, BESIDE), np.minimum(count - at, BESIDE)
    for one in range(len(at)):
        away = at[level > level[one] / 2] - at[one]
        before[one] = min([before[one], *(-away[away < -CALM]).tolist()])
        after[one] = min([after[one], *away[away > CALM].tolist()])
    return before, after


def _jumps_at(at: Ints, before: Ints, after: Ints, when: Floats, apart: Floats, noise: float) -> Floats:
    """[n] How far `apart` jumps before each index `at`: least absolute deviations from two parallel lines nearby."""
    near = at[:, None] + np.arange(-BESIDE, BESIDE)
    there = (near >= (at - before)[:, None]) & (near < (at + after)[:, None])
    near = np.clip(near, 0, len(apart) - 1)
    time = when[near] - when[at][:, None]
    reach = np.maximum(np.abs(np.where(there, time, 0)).max(axis=1, keepdims=True), 1)
    usual_drift = float(np.median(np.diff(apart))) / max(float(np.median(np.diff(when))), 1.0)
    value = apart[near] - apart[at][:, None] - usual_drift * time
    time = time / reach
    # A slope steeper than clocks drift is another step nearby.
    prior = np.zeros((len(at), 3, 3))
    prior[:, 1, 1] = (noise / (SLOPE * reach[:, 0])) ** 2
    line = np.stack([np.ones_like(time), time, np.broadcast_to(np.arange(-BESIDE, BESIDE) >= 0, time.shape)], axis=2)
    weight = there.astype(np.float64)
    found = np.zeros((len(at), 3))
    for _ in range(REWEIGHTED):
        matrix = np.einsum("nki,nk,nkj->nij", line, weight, line) + 1e-9 * np.eye(3) + prior
        found = np.linalg.solve(matrix, np.einsum("nki,nk->ni", line, weight * value)[:, :, None])[:, :, 0]
        away = np.abs(value - np.einsum("nki,ni->nk", line, found))
        weight = np.where(there, noise / np.maximum(away, 0.05 * noise), 0.0)
    return np.asarray(found[:, 2])


def _located(jump: _Jump, origin: int, meetings: Meetings, clock: Ints) -> ClockJump:
    """Return the step with the narrowest pause that the calls of its clock leave."""
    own = np.flatnonzero(clock == jump.clock)
    own = own[np.argsort(meetings.end_ns[own], kind="stable")]
    end, start = meetings.end_ns[own], meetings.start_ns[own]
    # One noisy end can move the jump by a meeting: calls a little before and behind are judged again.
    first, last = np.searchsorted(end, [round(jump.before) + origin, round(jump.after) + origin])
    first, last = max(int(first) - CALM, 0), min(int(last) + CALM, len(end) - 1)
    low, high = int(end[first]), int(end[last])
    between = own[first + 1 : last]
    behind = _behind(between, own, low, jump.by, meetings, clock)
    before = max([low, *meetings.end_ns[between[:behind]].tolist()])
    later = end > before
    after = np.where(start[later] > before, start[later], end[later])
    return ClockJump(jump.clock, before, int(after.min(initial=high)), round(jump.by))


def _behind(between: Ints, own: Ints, low: int, by: float, meetings: Meetings, clock: Ints) -> int:
    """Return how many of the calls `between` lie before the step: those that agree with their channel's last ones."""
    before = own[meetings.end_ns[own] <= low][-BESIDE * CALM :]
    usual: dict[tuple[int, int], list[int]] = {}
    for call in before.tolist():
        for partner, apart in _apart(call, meetings, clock):
            usual.setdefault(partner, []).append(apart)
    cost = np.zeros(len(between) + 1)
    for index, call in enumerate(between.tolist()):
        known = [
            (apart, usual[partner][-CALM:]) for partner, apart in _apart(call, meetings, clock) if partner in usual
        ]
        if known:
            # Another clock may step at about the same time: most partners decide.
            away = float(np.median([apart - np.median(last) for apart, last in known]))
            cost[: index + 1] += abs(away - by)
            cost[index + 1 :] += abs(away)
    return int(np.argmin(cost))


def _apart(call: int, meetings: Meetings, clock: Ints) -> list[tuple[tuple[int, int], int]]:
    """Return (channel, clock) of some partners of a call, and how much later than theirs it ended, raw."""
    meeting = int(np.searchsorted(meetings.first, call, side="right")) - 1
    others = np.arange(meetings.first[meeting], meetings.first[meeting + 1])
    others = others[clock[others] != clock[call]]
    others = others[:: max(len(others) // BESIDE, 1)]
    channel, end = int(meetings.channel[meeting]), int(meetings.end_ns[call])
    return [((channel, int(clock[other])), end - int(meetings.end_ns[other])) for other in others.tolist()]
