"""What lies between steps and around them: the script's own work, pauses, and what deep windows disturb.

What the script does from the end of one step to the first forward of the next, as rows.

Batches made by hand, environments, writers and savers of the script's own run there. What has a name inside keeps
its own time in the ledger. Evaluation is left out. Times in int64 ns on CLOCK_MONOTONIC.

    step k  |           step k + 1                   |
            | zero_grad  get_batch   F   B   update  |
            [----------------------)

A step may ask its model many times before it learns: a policy that acts in an environment. Where the thread mostly
waited between two of these forwards (its CPU time says so), that is the script's time too.

    step k  |  reset   F   act, wait   F   act, wait   F   B   update  |
            [---------)   [---------)     [---------)

Pauses of a recording: time between two cells of a notebook, in which none of its code ran.

A pause lies between two steps, or in one that begins in one cell and ends in another. It is no time of a step:
durations and replays go by a clock that stands still meanwhile. Times in int64 ns, arrays [n].

    clock       0    10   20   30   40   50
                | step 0 |  pause   | step 1 |
    elapsed     0    10   20        20   30

>>> elapsed(np.array([10, 25, 50]), (np.array([20]), np.array([40]))).tolist()
[10, 20, 30]

Which steps of a run a deep window disturbed: those under the profiler, and those that stay slower behind it.

    step       0 1 2 ...  63 | 64 | 65 66 67 ...
    window                   |====|
    undisturbed  yes           no   no where steps take NOTED_SLOWER longer from here on, else yes

A device's profiler may stay attached when it is off, and slows every launch then. No comparison and no prediction rests
on disturbed steps. Times are int64 ns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import FIRST, LAST, Intervals, Ints, inside, merged, without
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, WAIT_NS
from headway.trace.recording.basis import Basis, GradientCalls
from headway.trace.recording.rows import CODE, RecordedRows

# Pauses of a recording: time between two cells of a notebook, in which none of its code ran.

PAUSE = CODE["pause"]

NO_WORK = [PAUSE, *(CODE[name] for name in ("region", "eval.mark", "window"))]
"""Names of stretches in which the training thread need not have run any code."""


def pauses_of(main: RecordedRows) -> Intervals:
    """Return the pauses among the rows of a training thread, sorted and disjoint."""
    rows = main.where(main.name == PAUSE)
    return merged(rows.start_ns, rows.start_ns + rows.duration_ns)


def trimmed(rows: RecordedRows, training: NDArray[np.bool_]) -> RecordedRows:
    """Return `rows` with the pauses of the thread that trains ([n] `training`) cut down to where it recorded nothing.

    Pauses of another thread go: what trains beside the cells does not wait for them.
    """
    found = rows.name == PAUSE
    if not found.any():
        return rows
    main = rows.where(training & ~np.isin(rows.name, NO_WORK))
    worked = merged(main.start_ns, main.start_ns + main.duration_ns)
    start, end = without(pauses_of(rows.where(training)), worked)
    process = rows.process[training][:1]
    made = RecordedRows.of(PAUSE, start, end - start, kind=KIND["MARK"], process=np.resize(process, len(start)))
    return RecordedRows.concat([rows.where(~found), made])


def elapsed(moment_ns: Ints, pauses: Intervals) -> Ints:
    """Return moments by a clock that stands still during the sorted, disjoint `pauses`."""
    start, end = pauses
    if not len(start):
        return moment_ns
    begun = np.searchsorted(start, moment_ns, side="right")
    before = np.concatenate([[0], np.cumsum(end - start)])
    # Of the pause that began last, what lies behind the moment has not passed yet.
    ahead = np.maximum(np.concatenate([[FIRST], end])[begun], moment_ns) - moment_ns
    past: Ints = moment_ns - before[begun] + ahead
    return past


def without_pauses(trace: Trace) -> Trace:
    """Return the rows of one rank by a clock that stands still during its pauses."""
    events = trace.events
    found = trace.named("pause")
    if not found.any():
        return trace
    start, end = events["start_ns"], events["start_ns"] + events["duration_ns"]
    pauses = merged(start[found], end[found])
    begin = elapsed(start, pauses)
    return replace(trace, events={**events, "start_ns": begin, "duration_ns": elapsed(end, pauses) - begin})


FORWARD, SCRIPT = CODE["forward"], CODE["host.script"]


def gaps(
    main: RecordedRows, bounds_ns: Ints, evaluations: RecordedRows, gradients: GradientCalls, basis: Basis
) -> RecordedRows:
    """Return the `host.script` rows of steps with bounds [steps + 1]; none in a step without a forward.

    A gap ends where computing begins: with the first forward that is no evaluation's, provided that no gradient
    comes before it, or with the update whose closure makes that forward.
    """
    if len(bounds_ns) < 2:
        return RecordedRows.blank(0)
    spans = evaluations.start_ns, evaluations.start_ns + evaluations.duration_ns
    forwards = main.where(main.name == FORWARD)
    forwards = forwards.where(np.argsort(forwards.start_ns, kind="stable"))
    forwards = forwards.where(~inside(forwards.start_ns, spans))
    forward = forwards.start_ns
    low, high = bounds_ns[:-1], bounds_ns[1:]
    first, gradient = _first(forward, low), _first(gradients.start_ns, low)
    within = np.concatenate([gradients.end_ns, [LAST]])[np.searchsorted(gradients.start_ns, low)]
    # torch.func calls the module inside of what computes the gradient.
    real = (first < high) & ((first <= gradient) | (first < within))
    until = np.minimum(np.minimum(first, gradient), _first(basis.update_start_ns, low))[real]
    waits = _waits(forwards, bounds_ns, gradients, basis)
    start, end = without(merged(np.append(low[real], waits[0]), np.append(until, waits[1])), spans)
    start, end = without((start, end), pauses_of(main))
    rows = RecordedRows.of(SCRIPT, start, end - start, kind=KIND["HOST"])
    return rows.where(rows.duration_ns > 0)


def _waits(forwards: RecordedRows, bounds_ns: Ints, gradients: GradientCalls, basis: Basis) -> Intervals:
    """Return when the thread mostly waited between two of these forwards, with no gradient or update in between."""
    start, end = forwards.start_ns[1:], (forwards.start_ns + forwards.duration_ns)[:-1]
    cpu_ns = forwards.bytes[1:]
    waited = (cpu_ns >= 0) & (start - end >= WAIT_NS) & (2 * cpu_ns < start - end)
    for moments in (bounds_ns, gradients.start_ns, basis.update_start_ns):
        waited &= np.searchsorted(moments, end) == np.searchsorted(moments, start)
    return end[waited], start[waited]


def _first(moments: Ints, after: Ints) -> Ints:
    found: Ints = np.concatenate([moments, [LAST]])[np.searchsorted(moments, after)]
    return found


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
