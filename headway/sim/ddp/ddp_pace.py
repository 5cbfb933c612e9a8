"""How much slower a rank computes while a deep window profiles it, from the always-on records of the same run.

Use it to take the profiler's own cost out of a window's work: a quarter of
small operations' time. Per step a rank's own work is forward + backward +
update, less what it waited for communication; those are recorded at every
step, profiled or not. The pace is that work beside the window over that work
in it, 1 where the records do not say.

>>> pace(np.array([8, 8, 9]), np.array([10, 11, 10]))
0.8
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.sim.ddp.ddp_window import Ints
from headway.trace.events.trace import Trace
from headway.trace.recording.runs import Run

WARM = 8
"""First steps, which are no measure of others."""

BESIDE = 10
"""Steps on either side of a window that it is compared with: other work on the host comes and goes."""

AFTER = 3
"""Steps after a window that may still pay for it: its files are written then."""

SLOWEST = 0.5
"""A pace below is no cost of profiling: something else happened."""


def pace(beside_ns: Ints, inside_ns: Ints) -> float:
    """Return median work beside a window / in it, in [`SLOWEST`, 1]; 1 when either is empty."""
    if not beside_ns.size or not inside_ns.size:
        return 1.0
    return float(np.clip(np.median(beside_ns) / max(float(np.median(inside_ns)), 1.0), SLOWEST, 1.0))


def paces_of(run: Run, ranks: list[int]) -> dict[tuple[int, int], float]:
    """Return (number of a window, rank) -> pace, for every window that the records of the rank hold."""
    found: dict[tuple[int, int], float] = {}
    for rank in ranks:
        trace = run.parts.select([rank]).whole()
        steps = trace.where(np.flatnonzero(trace.named("step"))).events
        windows = trace.where(np.flatnonzero(trace.named("window"))).events
        work = _work_ns(trace, steps)
        begin, end = windows["start_ns"], windows["start_ns"] + windows["duration_ns"]
        # Steps first .. last - 1 of each window are those that end inside it. Steps that no window touches or delays
        # are `free`; those nearest to a window's middle are what its steps are compared with.
        first = np.searchsorted(steps["start_ns"] + steps["duration_ns"], begin, side="right")
        last = np.searchsorted(steps["start_ns"] + steps["duration_ns"], end, side="right")
        free = np.ones(work.size, bool)
        free[:WARM] = False
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            free[max(a - 1, 0) : b + AFTER] = False
        for number, a, b in zip(windows["seq"].tolist(), first.tolist(), last.tolist(), strict=True):
            near = np.flatnonzero(free)
            near = near[(near >= a - 2 * BESIDE) & (near < b + 2 * BESIDE)]
            near = near[np.argsort(np.abs(near - (a + b) / 2), kind="stable")][: 2 * BESIDE]
            found[int(number), rank] = pace(work[near], work[a:b])
    return found


def _work_ns(trace: Trace, steps: Mapping[str, NDArray[Any]]) -> Ints:
    """Return [steps] forward + backward + update - waits for communication of each step; 0 where none was recorded."""
    total = np.zeros(steps["start_ns"].size, np.int64)
    ends = steps["start_ns"] + steps["duration_ns"]
    for name, sign in (("segment.forward", 1), ("segment.backward", 1), ("optimizer.step", 1), ("comm.wait", -1)):
        rows = trace.where(np.flatnonzero(trace.named(name))).events
        at = np.searchsorted(ends, rows["start_ns"], side="right")
        inside = at < total.size
        np.add.at(total, at[inside], sign * rows["duration_ns"][inside])
    return np.maximum(total, 0)
