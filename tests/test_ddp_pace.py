"""The pace of profiled steps: what profiling adds is taken out, what it does not add is left."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.ddp.ddp_link import AFTER, SLOWEST, pace, paces_of
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND

MS = 1_000_000


def run_of(work_ms, windows, wait_ms=5):
    """Return a run of one rank: per step forward, backward with a wait, update; `windows` = (first step, steps)."""
    names = ["step", "segment.forward", "segment.backward", "optimizer.step", "comm.wait", "window"]
    rows, at = [], 0
    begins = []
    for work in work_ms:
        forward, update = work * MS // 4, work * MS // 4
        backward = work * MS - forward - update + wait_ms * MS
        begins.append(at)
        rows += [(0, at, work * MS + wait_ms * MS), (1, at, forward), (2, at + forward, backward)]
        rows += [(4, at + forward + backward - wait_ms * MS, wait_ms * MS), (3, at + forward + backward, update)]
        at += (work + wait_ms) * MS
    begins.append(at)
    seqs = [0] * len(rows)
    for number, (first, count) in enumerate(windows):
        rows.append((5, begins[first], begins[first + count] - begins[first]))
        seqs.append(number)
    name, start, duration = (np.array(column) for column in zip(*rows, strict=True))
    trace = Trace.from_columns(
        {"rank": np.zeros(len(rows), int), "start_ns": start, "duration_ns": duration, "seq": np.array(seqs),
         "kind": np.full(len(rows), KIND["MARK"])},
        names=names, name=name,
    )  # fmt: skip
    return SimpleNamespace(parts=Parts.of(trace))


@given(slow=st.floats(1.0, 1.9), work=st.integers(4, 400))
def test_work_that_profiling_slows_gets_its_own_pace_back(slow, work):
    steps = [work] * 60
    steps[30:33] = [round(work * slow)] * 3
    found = paces_of(run_of(steps, [(30, 3)]), [0])
    assert abs(found[0, 0] - work / round(work * slow)) < 1e-6


def test_waits_for_communication_are_no_work():
    steps = [20] * 60
    steps[30:33] = [25] * 3
    same = paces_of(run_of(steps, [(30, 3)], wait_ms=1), [0])
    assert same == paces_of(run_of(steps, [(30, 3)], wait_ms=500), [0])


def test_a_window_is_compared_with_the_steps_beside_it():
    steps = [10] * 40 + [30] * 80  # other work arrived at step 40
    steps[80:83] = [36] * 3
    assert abs(paces_of(run_of(steps, [(80, 3)]), [0])[0, 0] - 30 / 36) < 1e-9


def test_steps_right_after_a_window_do_not_count():
    steps = [10] * 60
    steps[30 : 33 + AFTER] = [15] * (3 + AFTER)
    assert paces_of(run_of(steps, [(30, 3)]), [0])[0, 0] == 10 / 15


def test_where_nothing_is_known_the_window_keeps_its_own_times():
    assert pace(np.array([], np.int64), np.array([4])) == 1.0
    assert pace(np.array([9]), np.array([4])) == 1.0
    assert pace(np.array([1]), np.array([100])) == SLOWEST
    assert paces_of(run_of([10] * 6, [(2, 3)]), [0])[0, 0] == 1.0
