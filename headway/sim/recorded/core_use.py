"""What a rank's compute does with the cores of its host: the training thread occupies one, waits for one, or neither.

Marks of the training thread tell: now and then at a step it notes its CPU
time, its wait for a core, and the CPU time of all threads of the rank.

    compute          |--- busy: on a core ---|- waiting: ready, no core -|- blocked: accelerator, sleep -|
    other threads    |--- beside: cores of torch's kernels ---|

All three are shares of the duration of compute.

Who else wants the cores of a host while a job runs, and what that leaves to the job.

A quota, and other groups of processes under a fair scheduler, bound the CPU
time that the job gets in the long run, and hardly delay it below that bound:
a group that used less than its share is served at once. So each piece of CPU
work of the job also takes a token from a pipe that gives out `limit` cores'
worth of them, which is due some pieces later. Threads of others that share
core by core with the job's threads queue as those do, a quantum at a time:

    limit 1.5 of 2 cores   cores    job1 job1 .... job1
                                    job2 .... job2 job2
    2 cores, 1 rival       core 0   job1 riv  job2 job1 riv  job2
                           core 1   job2 job1 riv  job2 job1 riv

How cores are divided: with n groups of equal weight a group that wants less
than 1/n takes what it wants, and the others share the rest (max-min fairness,
as CFS does it over cgroups and sessions).

>>> Contention.of(HostLoad(cores=2, cores_available=1.5, quota_cores=1.5), 2, groups=1)
Contention(cores=2, limit=1.5, rivals=0.0)
>>> Contention.of(HostLoad(cores=2, cores_available=2, other_cores=1.9, sharing="sessions"), 2, groups=1)
Contention(cores=2, limit=1.0, rivals=0.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.core.machine.host_load import HostLoad
from headway.core.units import NS_PER_MS
from headway.trace.events.intervals import Ints
from headway.trace.events.trace import Trace

if TYPE_CHECKING:
    from headway.sim.recorded.lane import Lane
    from headway.sim.recorded.recording import ConsumedBatches


SPIN_NS = 12 * NS_PER_MS
"""How long a thread of torch's pool spins before it sleeps, and the training thread at the end of an operator."""


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
    # Where the threads waited in turns it is more, and the thread that has a core spins: that is no work. What it
    # computed, samples tell; else no step computes for less than the fastest (`headway.ledger.booking.core_waits`).
    spins = np.flatnonzero(rows.named("host.spins"))
    spent_ns = unspun_ns(at, cpu_ns, *(rows.events[name][spins] for name in ("start_ns", "corr")))
    sampled_ns = np.diff(spent_ns) - np.diff(known_ns)
    told = ~np.isnan(sampled_ns)
    if told.any():
        busy = float(np.clip(sampled_ns[told].sum() / max(float(wall[told].sum()), 1.0), 0.0, busy))
    low = float(np.clip((np.ptp(delay_ns) - np.ptp(waited_ns)) / whole, 0.0, 1.0 - busy))
    more = NS_PER_MS * float(np.ptp(np.maximum(rows.events["peer"][marks], 0))) / whole
    of_step = np.bincount(lane.step[compute], weights=lane.duration_ns[compute])
    of_step = of_step[of_step > 0]
    fastest = float(of_step.min() / of_step.mean()) if of_step.size else 1.0
    high = 1 - (busy if told.any() else fastest)
    waiting = max(low, min(low + more, high))
    busy = min(busy, 1.0 - waiting)
    # Threads that make batches would count as those of kernels.
    others_ns = 0.0 if batches.together.any() else float(np.ptp(all_ns) - np.ptp(cpu_ns))
    return busy, waiting, max(0.0, others_ns / whole)


def unspun_ns(moment_ns: Ints, cpu_ns: Ints, sampled_ns: Ints, spun_ns: Ints) -> NDArray[np.float64]:
    """[k] Return what of `cpu_ns` [k] at `moment_ns` [k] a thread did not spin for its pool, NaN where nobody sampled.

    `spun_ns` [n] is what it spun up to `sampled_ns` [n], some of those moments.
    """
    spent_ns = np.full(len(moment_ns), np.nan)
    _, marked, spun = np.intersect1d(moment_ns, sampled_ns, return_indices=True)
    spent_ns[marked] = cpu_ns[marked] - spun_ns[spun]
    return spent_ns


def _running(end_ns: NDArray[np.int64], amount: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return instants and the amount so far."""
    return end_ns.astype(np.float64), np.cumsum(amount).astype(np.float64)


# Who else wants the cores of a host while a job runs, and what that leaves to the job.

MOST_CYCLES = 50_000
"""Quanta of a rival in one replay; longer replays get longer quanta."""

UNEVEN = 0.93
"""Length of a rival's quantum / that of the job's threads."""

NEGLIGIBLE = 0.02
"""Cores below which load changes nothing that could be told from noise."""


@dataclass(frozen=True, slots=True)
class Contention:
    """The cores of a host and what competes for them with one job."""

    cores: int
    """Threads that run at once."""

    limit: float
    """Cores' worth of CPU time that the job gets at most."""

    rivals: float = 0.0
    """Mean threads of others that queue for the cores as the job's own do."""

    @property
    def taken_fraction(self) -> float:
        """Return the share of the cores that the job cannot have, from 0 to 1."""
        return 1 - min(self.limit, max(self.cores - self.rivals, 0.0)) / self.cores

    @property
    def bound(self) -> bool:
        """Say whether the job may use fewer cores' worth of time than there are cores."""
        return self.limit < self.cores - NEGLIGIBLE

    @classmethod
    def of(
        cls,
        load: HostLoad | None,
        cores: int,
        *,
        groups: int,
        edits: tuple[float | None, float | None] = (None, None),
        strength: float = 1.0,
    ) -> Contention:
        """Return what competes with a job of `groups` ranks on a host.

        `load` is what was recorded, `cores` what the run had where nothing was
        recorded. `edits` are cores and other load in place of the recorded ones; `strength` of the recorded load
        competes.
        """
        limit, other = edits
        known = load or HostLoad(cores=cores, cores_available=float(cores))
        # A limit in place of the recorded one is that of another host, or of another quota on this one.
        places = known.cores if limit is None else max(1, math.ceil(limit))
        quota = known.cores_available if limit is None else limit
        demand = strength * known.demand if other is None else other
        demand = 0.0 if demand < NEGLIGIBLE else demand
        if known.sharing == "threads":
            return cls(places, min(quota, float(places)), rivals=demand)
        # What its group leaves to the job: all that others do not want, at least its share among equals.
        own = groups if known.sharing == "sessions" else 1
        rivals = max(1.0, strength * known.other_sessions if known.sharing == "sessions" and other is None else 1.0)
        left = max(places - demand, places * own / (own + rivals))
        # What the job has used while others took the rest, it can use again.
        left = max(left, known.own_cores) if other is None and limit is None else left
        return cls(places, min(left, quota))


def rival_cycles(contention: Contention, horizon_ns: float, quantum_ns: int) -> list[NDArray[np.float64]]:
    """Return, for each rival thread, [cycles, 2] how long it computes and then sleeps."""
    threads = math.ceil(contention.rivals - NEGLIGIBLE)
    if threads <= 0:
        return []
    duty = min(1.0, contention.rivals / threads)
    # Quanta of equal length would end together for ever, and ties always go to the same thread.
    busy_ns = max(UNEVEN * quantum_ns, horizon_ns / MOST_CYCLES)
    cycle = np.array([busy_ns, busy_ns * (1 - duty) / duty])
    return [np.tile(cycle, (math.ceil(horizon_ns / cycle.sum()), 1)) for _ in range(threads)]
