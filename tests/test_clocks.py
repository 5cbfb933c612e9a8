"""Clock offsets: collectives bound them, and a wrong estimate is put between the bounds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import COLLECTIVES
from headway.trace.sync.clocks import (
    ClockMap,
    aligned_ns,
    common_ns,
    is_mapped,
    offset_at,
    offset_bounds,
    on_common_clock,
    refined,
    within,
)


def host(arrivals: list[int], ends: list[int], *, clock_ns: int = 0, corr: int = 0, group: int = 0) -> Trace:
    """Return a host's all-reduces: true moments, told on a clock that is `clock_ns` ahead of the truth."""
    start = np.array(arrivals, np.int64)
    return Trace.from_columns(
        {
            "start_ns": start + clock_ns, "duration_ns": np.array(ends, np.int64) - start, "seq": np.arange(len(start)),
            "group": np.full(len(start), group), "corr": np.full(len(start), corr),
            "name": np.zeros(len(start), np.int32), "rank": np.zeros(len(start), np.int32),
        },
        names=["comm.collective"],
    )  # fmt: skip


MEETINGS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 50)), min_size=1, max_size=20)


@given(meetings=MEETINGS, clock_ns=st.integers(-(10**15), 10**15), error_ns=st.integers(-(10**9), 10**9))
def test_the_true_offset_keeps_the_bounds_and_a_wrong_one_is_put_between_them(meetings, clock_ns, error_ns):
    a = [10_000 * i + x for i, (x, _, _) in enumerate(meetings)]
    b = [10_000 * i + y for i, (_, y, _) in enumerate(meetings)]
    ends = [max(p, q) + extra for p, q, (_, _, extra) in zip(a, b, meetings, strict=True)]
    reference, other = host(a, ends), host(b, ends, clock_ns=clock_ns)
    lower, upper = offset_bounds(reference, other)
    found = refined(-clock_ns + error_ns, reference, other)

    assert lower <= -clock_ns <= upper
    assert lower <= found <= upper
    assert refined(-clock_ns, reference, other) == -clock_ns


def test_without_a_matched_collective_the_estimate_stays():
    assert offset_bounds(host([0], [5]), host([0], [5], group=3)) is None
    assert refined(7, host([0], [5]), host([], [])) == 7


def test_a_broadcast_proves_nothing():
    corr = COLLECTIVES.index("broadcast")
    assert offset_bounds(host([0], [5], corr=corr), host([0], [5], corr=corr)) is None


def test_bounds_that_exclude_each_other_prove_nothing():
    assert within(5, 10, -10) == 5


RAW = st.lists(st.integers(-(10**17), 10**17), min_size=1, max_size=8).map(
    lambda values: np.array(sorted(values), np.int64)
)


@st.composite
def maps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Knots within an hour of each other anywhere in the range of Unix times, and what a drift below 500 ppm adds."""
    gaps = draw(st.lists(st.integers(10**6, 3600 * 10**9), min_size=0, max_size=4))
    first = draw(st.integers(-(10**18), 2 * 10**18))
    knots = first + np.cumsum([0, *gaps])
    rises = [draw(st.integers(-gap // 2000, gap // 2000)) for gap in gaps]
    return knots, draw(st.integers(-(10**17), 10**17)) + np.cumsum([0, *rises])


@given(clock=maps(), near=st.lists(st.integers(-(10**13), 10**13), min_size=1, max_size=8))
def test_a_clocks_map_keeps_order_and_is_exact_at_its_knots(clock, near):
    knots, theta = clock
    raw = np.sort(knots[0] + np.array(near, np.int64))
    aligned = raw + offset_at(raw, knots, theta)

    assert (np.diff(aligned) >= 0).all()
    assert offset_at(knots, knots, theta).tolist() == theta.tolist()
    assert (np.abs(np.diff(aligned) - np.diff(raw)) <= np.diff(raw) / 1990 + 1).all()


@given(clock=maps(), near=st.lists(st.integers(-(10**13), 10**13), min_size=1, max_size=8))
def test_a_rank_is_mapped_by_its_entry_as_by_the_clocks_it_came_from(clock, near):
    knots, theta = clock
    raw = knots[0] + np.array(near, np.int64)
    known = {
        "offset_ns": int(theta[0]),
        "drift_ns": [[int(k), int(t - theta[0])] for k, t in zip(knots, theta, strict=True)],
    }

    assert aligned_ns(known, raw).tolist() == ClockMap(knots[None], theta[None]).aligned_ns(raw * 0, raw).tolist()


@given(raw=RAW, offset=st.integers(-(10**17), 10**17))
def test_an_offset_alone_is_added_and_nothing_known_changes_nothing(raw, offset):
    assert aligned_ns({"offset_ns": offset}, raw).tolist() == (raw + offset).tolist()
    assert aligned_ns({"host": "a"}, raw).tolist() == raw.tolist()


def test_a_trace_whose_clocks_are_not_mapped_is_left_alone():
    trace = host([0, 5], [9, 9])

    assert not is_mapped(trace)
    assert on_common_clock(trace) is trace
    assert common_ns(trace)[1].tolist() == [9, 9]
