"""Projection onto causality: no violation is left where none need be, no move is longer than a brute search's."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import InputError
from headway.core.linear import minimise
from headway.trace.sync.causality import GRAIN_NS, MAX_DRIFT, project, violations
from headway.trace.sync.clocks import ClockMap, stretch_of
from headway.trace.sync.meetings import Meetings

US = 1_000


def meetings(rows: list[tuple[int, int, int, int]], *, messages: tuple[int, ...] = ()) -> Meetings:
    """Return meetings of rows (meeting, clock, start, end); of those in `messages` the first row sends."""
    rows = sorted(rows, key=lambda row: row[0])
    number, clock, start, end = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    first = np.searchsorted(number, np.arange(number.max() + 2))
    message = np.isin(np.arange(number.max() + 1), messages)
    sends = np.zeros(len(number), bool)
    sends[first[:-1][message]] = True
    return Meetings(np.arange(len(number)), clock, start, end, first, np.zeros(len(message), np.int64), message, sends)


@st.composite
def cases(draw: st.DrawFn, *, clocks: int = 3, most_us: int = 8) -> Meetings:
    """Random meetings of two or three clocks, collectives and messages; times of a few us, in disorder."""
    rows, messages = [], []
    for number in range(draw(st.integers(1, 5))):
        who = draw(st.permutations(range(clocks)))[: draw(st.integers(2, clocks))]
        if len(who) == 2 and draw(st.booleans()):
            messages.append(number)
        for clock in who:
            start = draw(st.integers(0, most_us)) * US
            rows.append((number, clock, start, start + draw(st.integers(0, most_us)) * US))
    return meetings(rows, messages=tuple(messages))


def orders(met: Meetings) -> list[tuple[int, int]]:
    """Return every (call whose end, call whose start) that must keep order."""
    found = []
    for number, (a, b) in enumerate(itertools.pairwise(met.first.tolist())):
        for end, start in itertools.permutations(range(a, b), 2):
            if not met.message[number] or (met.sends[start] and not met.sends[end]):
                found.append((end, start))
    return found


def constant(num_clocks: int = 3) -> ClockMap:
    return ClockMap(np.zeros((num_clocks, 1), np.int64), np.zeros((num_clocks, 1), np.int64))


def feasible(met: Meetings, margin: int, pairs: Sequence[tuple[int, int]] | None = None) -> bool:
    """Say whether constant offsets fulfil every order: no negative circle of bounds (Floyd and Warshall)."""
    bound = np.full((3, 3), 10**12)
    np.fill_diagonal(bound, 0)
    for end, start in orders(met) if pairs is None else pairs:
        i, j = met.rank[end], met.rank[start]
        bound[i, j] = min(bound[i, j], met.end_ns[end] - met.start_ns[start] - margin)
    for k in range(3):
        bound = np.minimum(bound, bound[:, k : k + 1] + bound[k : k + 1, :])
    return bool((np.diag(bound) >= 0).all())


def least_moves(met: Meetings, margin: int, most: int) -> int:
    """Return the least sum of moves of clocks 1 and 2 that fulfils every order, by trying whole us plus margins."""
    steps = sorted(
        {sign * (k * US + e * margin) for k in range(most + 1) for e in (-2, -1, 0, 1, 2) for sign in (1, -1)}
    )
    pairs = orders(met)
    need = [(met.rank[e], met.rank[s], met.start_ns[s] - met.end_ns[e] + margin) for e, s in pairs if e != s]
    sums = [
        abs(b) + abs(c)
        for b in steps
        for c in steps
        if all((0, b, c)[i] - (0, b, c)[j] >= missing for i, j, missing in need)
    ]
    return min(sums)


@pytest.mark.slow
@given(met=cases())
def test_offsets_without_violation_are_found_exactly_when_they_exist(met):
    found = project(met, met.rank, constant())

    assert bool(found.contradiction) is not feasible(met, 0)
    if not found.contradiction:
        assert found.violations == 0
        shift = found.clocks.theta_ns[met.rank, 0]
        short = max((met.start_ns[s] + shift[s] - met.end_ns[e] - shift[e] for e, s in orders(met)), default=0)
        assert short <= 0


@given(met=cases(most_us=4))
@settings(max_examples=40)
def test_no_clock_moves_farther_than_it_must(met):
    before, _ = violations(met, met.start_ns, met.end_ns)
    margin = GRAIN_NS if feasible(met, GRAIN_NS) else 0
    if not before or not feasible(met, margin):
        return
    found = project(met, met.rank, constant())

    assert np.abs(found.clocks.theta_ns).sum() == least_moves(met, margin, most=9)


def whole_program(met: Meetings, clocks: ClockMap, margin: int) -> float | None:
    """Return the least sum of moves of all knots with every order as a row, None without a solution: the oracle."""
    knots = clocks.knot_ns.shape[1]
    width = knots * len(clocks.knot_ns)
    rows, low, high = [], [], []
    for end, start in orders(met):
        row = np.zeros(width)
        for sign, call, raw in ((1.0, end, met.end_ns), (-1.0, start, met.start_ns)):
            clock = int(met.rank[call])
            at, way = stretch_of(raw[[call]], clocks.knot_ns[clock])
            row[clock * knots + at[0]] += sign * (1 - way[0])
            row[clock * knots + at[0] + 1] += sign * way[0]
        rows.append(row)
        low.append(float(met.start_ns[start] - met.end_ns[end] + margin))
        high.append(np.inf)
    for clock in range(len(clocks.knot_ns)):
        for at in range(knots - 1):
            row = np.zeros(width)
            row[clock * knots + at : clock * knots + at + 2] = -1.0, 1.0
            most = MAX_DRIFT * (clocks.knot_ns[clock, at + 1] - clocks.knot_ns[clock, at])
            rows.append(row)
            low.append(-most)
            high.append(most)
    matrix = np.array(rows)
    fixed = np.r_[np.zeros(knots), np.full(width - knots, np.inf)]
    try:
        best = minimise(
            np.ones(2 * width), rows=np.hstack([matrix, -matrix]) , row_low=low, row_high=high, high=np.tile(fixed, 2)
        )  # fmt: skip
    except InputError:
        return None
    return best.value


@given(met=cases(), length_ms=st.integers(1, 40))
@settings(max_examples=60)
def test_with_drift_the_cuts_reach_the_optimum_of_the_whole_program(met, length_ms):
    knots = np.tile(np.array([-1, length_ms * 1000 * US]), (3, 1))  # A short window, in which no drift counts, or long.
    clocks = ClockMap(knots, np.zeros((3, 2), np.int64))
    found = project(met, met.rank, clocks)
    best = {margin: whole_program(met, clocks, margin) for margin in (GRAIN_NS, 0, -GRAIN_NS)}

    assert bool(found.contradiction) is (best[0] is None)
    if not found.contradiction and found.violations_before:
        # Without room for a margin an order may be missed by the grain, which may spare some of the moves.
        least, most = (best[GRAIN_NS],) * 2 if best[GRAIN_NS] is not None else (best[-GRAIN_NS], best[0])
        assert found.violations == 0
        assert least - 6 <= np.abs(found.clocks.theta_ns).sum() <= most + 6


@given(met=cases(most_us=4), shift=st.lists(st.integers(-(10**12), 10**12), min_size=3, max_size=3))
def test_a_contradiction_excludes_itself_and_is_as_short_as_any_clocks_leave_it(met, shift):
    if feasible(met, 0):
        return
    clocks = ClockMap(np.zeros((3, 1), np.int64), np.array(shift)[:, None])
    found = project(met, met.rank, clocks)

    assert found.clocks is clocks
    assert set(found.contradiction) <= set(orders(met))
    assert not feasible(met, 0, found.contradiction)
    assert feasible(met, -found.contradiction_ns - 2, found.contradiction)
    assert not feasible(met, -found.contradiction_ns + 2, found.contradiction)


def test_ranks_of_one_clock_can_contradict_each_other():
    met = meetings([(0, 0, 0, 1 * US), (0, 0, 3 * US, 9 * US), (0, 1, 0, 9 * US)])
    found = project(met, met.rank, constant(2))

    assert found.contradiction == ((0, 1),)
    assert found.contradiction_ns == 2 * US


def test_clocks_that_keep_the_order_are_returned_as_they_are():
    met = meetings([(0, 0, 0, 9), (0, 1, 5, 9)])
    clocks = constant(2)

    assert project(met, met.rank, clocks).clocks is clocks


def test_a_message_may_be_received_late_and_sent_early():
    met = meetings([(0, 0, 0, 1), (0, 1, 50, 60)], messages=(0,))

    assert violations(met, met.start_ns, met.end_ns) == (0, 0)
    assert violations(met, met.start_ns, np.array([1, -5])) == (1, 5)
