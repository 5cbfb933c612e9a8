"""Clock offsets: collectives bound them, and a wrong estimate is put between the bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.trace.clocks import SYNCHRONISING, offset_bounds, refined, within
from headway.trace.trace import Trace
from headway.trace.vocabulary import COLLECTIVES


def host(arrivals: list[int], ends: list[int], *, clock_ns: int = 0, corr: int = 0, group: int = 0) -> Trace:
    """Return a host's all-reduces: true moments, told on a clock that is `clock_ns` ahead of the truth."""
    start = np.array(arrivals, np.int64)
    return Trace.from_columns(
        {
            "start_ns": start + clock_ns,
            "duration_ns": np.array(ends, np.int64) - start,
            "seq": np.arange(len(start)),
            "group": np.full(len(start), group),
            "corr": np.full(len(start), corr),
            "name": np.zeros(len(start), np.int32),
            "rank": np.zeros(len(start), np.int32),
        },
        names=["comm.collective"],
    )


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


@pytest.mark.parametrize("name", SYNCHRONISING)
def test_every_synchronising_collective_is_known(name):
    assert name in COLLECTIVES


def test_bounds_that_exclude_each_other_prove_nothing():
    assert within(5, 10, -10) == 5
