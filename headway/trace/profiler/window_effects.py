"""Which steps of a run a deep window disturbed: those under the profiler, and those that stay slower behind it.

    step       0 1 2 ...  63 | 64 | 65 66 67 ...
    window                   |====|
    undisturbed  yes           no   no where steps take NOTED_SLOWER longer from here on, else yes

A device's profiler may stay attached when it is off, and slows every launch then. No comparison and no prediction rests
on disturbed steps. Times are int64 ns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.trace import Trace

Ints = NDArray[np.int64]

WARM_STEPS, LEAST_STEPS, NOTED_SLOWER = 16, 24, 0.03
"""Steps left out at the start of a run, and from the first window on; how many are compared at least; what is said."""


def slower_since(step_wall_ns: Ints, first: int) -> float:
    """Return by which fraction steps take longer since the first window, which opened behind step `first`.

    0.0 for less than `NOTED_SLOWER`, and where too few steps tell.

    >>> slower_since(np.repeat([100, 104], 200), 200), slower_since(np.repeat([100, 102], 200), 200)
    (0.04, 0.0)
    """
    warm = min(WARM_STEPS, max(first - LEAST_STEPS, 1))  # where steps are long, a window opens after few
    before, behind = step_wall_ns[warm:first], step_wall_ns[first + WARM_STEPS :]
    if min(len(before), len(behind)) < LEAST_STEPS:
        return 0.0
    quarter, half = np.quantile(behind, [0.25, 0.5]) / np.median(before)
    # Where steps differ much from each other, medians do by chance.
    return round(float(half) - 1, 6) if half >= 1 + NOTED_SLOWER and quarter > 1 else 0.0


def undisturbed(
    step_start_ns: Ints, step_end_ns: Ints, window_start_ns: Ints, window_end_ns: Ints, *, on_device: bool = True
) -> NDArray[np.bool_]:
    """Return [n] whether no window disturbed a step; [n] starts and ends of steps, [k] of windows, in order.

    A window is closed and written behind its last step, in the one after it. Steps of a host alone (`on_device` False)
    that stay slower have another reason.

    >>> steps = np.arange(0, 100, 10)
    >>> np.flatnonzero(~undisturbed(steps, steps + 10, np.array([31]), np.array([40]))).tolist()
    [3, 4]
    """
    kept = np.ones(len(step_start_ns), bool)
    opened = np.searchsorted(step_end_ns, window_start_ns, side="right")
    closed = np.searchsorted(step_start_ns, window_end_ns, side="right")
    for first, beyond in zip(opened.tolist(), closed.tolist(), strict=True):
        kept[first:beyond] = False
    if on_device and len(opened) and slower_since(step_end_ns - step_start_ns, int(opened[0])):
        kept[int(opened[0]) :] = False
    return kept


def steps_before_slowing(rows: Trace) -> int | None:
    """Return how many steps of a rank came before the window behind which steps stay slower; None without one.

    None for a rank without a device, too: a host that slows down has another reason.
    """
    windows, steps = rows.where(rows.named("window")).events, rows.where(rows.named("step")).events
    ends = np.sort(steps["start_ns"] + steps["duration_ns"])
    if not len(windows["start_ns"]) or not rows.named("device.work").any():
        return None
    first = int(np.searchsorted(ends, windows["start_ns"].min(), side="right"))
    return first if slower_since(np.diff(ends, prepend=steps["start_ns"].min()), first) else None
