"""What the script does between its steps: from the end of one to the first forward of the next, as rows.

Batches made by hand, environments, writers and savers of the script's own run there. What has a name inside keeps
its own time in the ledger. Evaluation is left out. Times in int64 ns on CLOCK_MONOTONIC.

    step k  |           step k + 1                   |
            | zero_grad  get_batch   F   B   update  |
            [----------------------)

A step may ask its model many times before it learns: a policy that acts in an environment. Where the thread mostly
waited between two of these forwards (its CPU time says so), that is the script's time too.

    step k  |  reset   F   act, wait   F   act, wait   F   B   update  |
            [---------)   [---------)     [---------)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.intervals import LAST, Intervals, inside, merged, without
from headway.trace.events.vocabulary import KIND, WAIT_NS
from headway.trace.recording.basis import Basis, GradientCalls
from headway.trace.recording.pauses import pauses_of
from headway.trace.recording.rows import RecordedRows
from headway.trace.recording.segments import CODE

Ints = NDArray[np.int64]

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
