"""Pauses of a recording: time between two cells of a notebook, in which none of its code ran.

A pause lies between two steps, or in one that begins in one cell and ends in another. It is no time of a step:
durations and replays go by a clock that stands still meanwhile. Times in int64 ns, arrays [n].

    clock       0    10   20   30   40   50
                | step 0 |  pause   | step 1 |
    elapsed     0    10   20        20   30

>>> elapsed(np.array([10, 25, 50]), (np.array([20]), np.array([40]))).tolist()
[10, 20, 30]
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import FIRST, Intervals, Ints, merged, without
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.recording.rows import RecordedRows
from headway.trace.recording.segments import CODE

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
