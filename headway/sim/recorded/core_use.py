"""What a rank's compute does with the cores of its host: the training thread occupies one, waits for one, or neither.

Marks of the training thread tell: now and then at a step it notes its CPU
time, its wait for a core, and the CPU time of all threads of the rank.

    compute          |--- busy: on a core ---|- waiting: ready, no core -|- blocked: accelerator, sleep -|
    other threads    |--- beside: cores of torch's kernels ---|

All three are shares of the duration of compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.trace import Trace

if TYPE_CHECKING:
    from headway.sim.recorded.lane import Lane
    from headway.sim.recorded.recording import ConsumedBatches


def cores_used(
    rows: Trace, lane: Lane, batches: ConsumedBatches, computes: NDArray[np.bool_], collects: NDArray[np.bool_]
) -> tuple[float, float, float]:
    """Return `busy`, `waiting` and `beside` of `Recording`, from the 'host.cpu' marks.

    Loads in the main process and collections are known to be CPU time and are taken out. The median over the intervals
    between marks is not moved by the few that hold a checkpoint or a profiler window; waits come in bursts: their mean.
    `computes` and `collects` [labels] say which labels are compute, and which are collections.
    """
    marks = np.flatnonzero(rows.named("host.cpu"))
    at = rows.events["start_ns"][marks]
    marks = marks[(at >= lane.step_end_ns[0]) & (at <= lane.step_end_ns[-1] + np.diff(lane.step_end_ns).mean())]
    if marks.size < 2:
        return float("nan"), 0.0, 0.0
    at, cpu_ns, delay_ns, all_ns = (rows.events[name][marks] for name in ("start_ns", "corr", "seq", "bytes"))
    end_ns = lane.start_ns + lane.duration_ns
    compute = computes[lane.label]
    inline = batches.workers[batches.iterator] == 0
    own_ns = np.interp(at, *_running(end_ns, np.where(compute, lane.duration_ns, 0)))
    other, starved = np.where(collects[lane.label], lane.duration_ns, 0), np.zeros_like(lane.duration_ns)
    np.add.at(other, batches.segment[inline], batches.part_ns[inline, 2:].sum(axis=1))
    np.add.at(starved, batches.segment[inline], batches.part_ns[inline, 1])
    known_ns, waited_ns = (np.interp(at, *_running(end_ns, amount)) for amount in (other, starved))
    wall = np.diff(own_ns)
    share = (np.diff(cpu_ns) - np.diff(known_ns))[wall > 0] / wall[wall > 0]
    busy, whole = (
        float(np.clip(np.median(share), 0, 1)) if share.size else float("nan"),
        max(float(np.ptp(own_ns)), 1.0),
    )
    if (delay_ns < 0).any() or not all_ns.any() or not share.size:
        return busy, 0.0, 0.0
    waiting = float(np.clip((np.ptp(delay_ns) - np.ptp(waited_ns)) / whole, 0.0, 1.0 - busy))
    # Threads that make batches would count as those of kernels.
    others_ns = 0.0 if batches.together.any() else float(np.ptp(all_ns) - np.ptp(cpu_ns))
    return busy, waiting, max(0.0, others_ns / whole)


def _running(end_ns: NDArray[np.int64], amount: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return instants and the amount so far."""
    return end_ns.astype(np.float64), np.cumsum(amount).astype(np.float64)
