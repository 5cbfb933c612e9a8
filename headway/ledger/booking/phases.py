"""What the training thread was doing where no recorded name says so: evaluation, and the phases of a step.

    |<------------------------- one step ------------------------->|
    script   [forward]   loss   [ backward ]   clipping   [update]
    host.    useful.     useful.  useful.      useful.    useful.
    script   forward     forward  backward     optimizer  optimizer

Recorded rows are in brackets (`host.script` is one as well). Where headway worked for itself behind an update, a row
`host.recording` takes that out of the script's time. Times are int64 ns.
"""

from __future__ import annotations

import numpy as np

from headway.ledger.booking.rows import NAME_ID, RankLifetime, RankRows
from headway.ledger.kinds.buckets import REMAINDER_SUB, SUB_CODE
from headway.trace.events.intervals import Intervals, inside, merged
from headway.trace.events.sweep import Ints
from headway.trace.recording.segments import ON_DEVICE


def evaluations_of(rows: RankRows) -> Intervals:
    """Return when the training thread evaluated, as sorted disjoint intervals."""
    picked = rows.of("eval")
    return merged(rows.start_ns[picked], rows.end_ns[picked])


def device_phases(rows: RankRows) -> tuple[Intervals, ...]:
    """Return when a device ran forward, when backward, as its events say, and when graphs of whole steps.

    Sorted disjoint intervals of each; the third is all that follows the first replay behind the last backward.
    """
    found = []
    for name in ("segment.forward", "segment.backward"):
        picked = rows.of(name)
        picked = picked[rows.column("corr", picked) == ON_DEVICE]
        found.append(merged(rows.start_ns[picked], rows.end_ns[picked]))
    replay_ns = rows.start_ns[rows.of("graph.replay")]
    whole = replay_ns[replay_ns > max((int(end.max()) for _, end in found if len(end)), default=0)][:1]
    return found[0], found[1], (whole, np.full(len(whole), np.iinfo(np.int64).max))


def phase_of(moment_ns: Ints, phases: tuple[Intervals, ...]) -> Ints:
    """Return [m] the sub-line of moments at which a device was at work, by its `device_phases`."""
    forward, backward, whole = phases
    if not len(forward[0]) and not len(backward[0]):
        return np.full(len(moment_ns), SUB_CODE["useful.compute"], np.int64)
    sub: Ints = np.full(len(moment_ns), SUB_CODE["useful.optimizer"], np.int64)
    sub[inside(moment_ns, forward)] = SUB_CODE["useful.forward"]
    sub[inside(moment_ns, backward)] = SUB_CODE["useful.backward"]
    sub[inside(moment_ns, whole)] = SUB_CODE["useful.compute"]
    return sub


def by_host(rows: RankRows, picked: Ints) -> Ints:
    """Return those of the rows `picked` that tell what the training thread did: no segment timed by device events."""
    segment = rows.name[picked] == NAME_ID["segment.backward"]
    kept: Ints = picked[~(segment & (rows.column("corr", picked) == ON_DEVICE))]
    return kept


def remainder(rows: RankRows, life: RankLifetime, moment_ns: Ints, step: Ints) -> Ints:
    """Return [m] the sub-line of moments inside steps that no row owns, by the learning events around them.

    `step` [m] is the step of each moment. What precedes a backward of the same step is forward, what follows the last
    one belongs to the update; a step without a backward is not told apart.

        moment:            a            b            c
        events of step k:      backward     backward     update
        sub-line:       forward      forward      optimizer
    """
    backward = rows.start_ns[by_host(rows, rows.of("segment.backward", "segment.grad"))]
    # Backwards before the moment, in all and before its step began: the difference is those of its own step.
    before = np.searchsorted(backward, moment_ns)
    first = np.searchsorted(backward, life.step_start[step])
    beyond = np.searchsorted(backward, life.step_end[step])
    sub: Ints = np.full(len(moment_ns), SUB_CODE[REMAINDER_SUB], np.int64)
    sub[before < beyond] = SUB_CODE["useful.forward"]
    sub[(before == beyond) & (before > first)] = SUB_CODE["useful.optimizer"]
    return sub
