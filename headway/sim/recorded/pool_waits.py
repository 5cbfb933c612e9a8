"""What torch's threads wait for one another, and what fewer of them, or shorter waits for input, leave of that.

Threads that share an operator end it when the last of them has had a core. Where others take one of two cores, each
operator waits for it: 1 ms of them took 130 ms in steps beside one busy process, and 2 ms on one thread, which has a
core of its own. Where nobody else wants cores the threads themselves make such waits, behind a wait for input.

A thread of libgomp's pool that has nothing to do spins, and sleeps after a while (`SPIN_NS`: 300,000 pauses). The next
operator that is shared wakes it, on the core of the thread that woke it as often as not. That one comes to the end of
its share, and spins there for just as long before it lets the other have the core:

    training   |---- waits for a batch ----|op~~~~ spins ~~~~|sleeps|op|op|
    pool       |~ spins ~|----- sleeps ----|no core .........| op   |op|op|

A step with 1 ms of operators on two cores with nothing else on them (180 steps; a stall is 11 ms):

    waits, ms         2 to 10   12   14   18   24   33   100
    steps that stalled      0    0    8   26   92   56   156

On one thread, or where the threads of the pool never sleep (`GOMP_SPINCOUNT`), no step stalls. Nor
does one where workers make waits shorter than `SPIN_NS`; [b] is one value per batch, [k] one per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.machine.host_load import HostLoad
from headway.core.units import NS_PER_S, format_fraction
from headway.sim.recorded.core_use import SPIN_NS
from headway.sim.recorded.loader_model import Loading
from headway.sim.recorded.recording import Recording
from headway.sim.recorded.unroll import Occupancy, pool_threads
from headway.sim.whatif import ResolvedEdits
from headway.trace.recording.run_facts import RunFacts

STALLED = 0.6
"""Share of `SPIN_NS` by which a step that stalled computes longer than the fastest one, at least."""

MARKED = 2
"""Times the waits for a core that marks tell that stalls may be: a thread that spins has a core meanwhile."""

SPINS = 2 / 3
"""Weight of the case that threads beside the training thread only waited: on two cores of one host four convolutional
nets took 1.07, 1.08, 1.20 and 1.26 times as long on one thread as on two (docs/few-cores.md), small layers 1.0."""

TIMED = (1.25, 0.8)
"""What a step on one thread takes of what a child timed beside the training: most, least."""

BUSY = 0.15
"""Cores that others want from which on they make the threads of a pool wait."""

WAITS = 0.1
"""Share of the steps for which compute waits for cores, from which on nobody knows what fewer threads would take."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolWaits:
    """What the threads that share operators with the training thread waited for in a recorded run."""

    recording: Recording
    """The run."""

    pool_cores: NDArray[np.float64]
    """[ranks] Cores that the pool's threads occupy while the training thread computes."""

    stalled_ns: tuple[NDArray[np.float64], ...]
    """Per rank [k]: how long each step stalled behind a wait for input."""

    cores: int
    """Cores of the host."""

    others: float | None
    """Cores that others want; None where nobody counted them."""

    threads: int
    """Computing threads of each rank."""

    one_thread_ns: float | None = None
    """What forward and backward of a step take on one thread, as a child of the recorded process timed it."""

    spins: float = SPINS
    """Share of the work of threads that go for which they only waited, where nobody timed one thread."""

    stays: bool = False
    """Whether as many steps stall after shorter waits: where a thread lands when it is woken nobody knows."""

    @classmethod
    def of(cls, recording: Recording, cores: int, load: HostLoad | None, facts: RunFacts | None = None) -> PoolWaits:
        """Measure it on a host with `cores`; `facts` say how many threads torch has, and what children have timed."""
        others = None if load is None else load.demand + load.cores - load.cores_available  # a quota takes cores too
        pools = np.minimum(recording.beside, cores - 1)
        alone, ranks = _is_alone(others), range(len(recording.lanes))
        stalled = tuple(_stalled_ns(recording, index, pools[index], alone=alone) for index in ranks)
        calls = facts.compute.calls if facts is not None and facts.compute else ()
        timed = [call.rehearsed.step_s if call.rehearsed else None for call in calls]
        per_step = [max(1, round(batches.seq.size / recording.num_steps)) for batches in recording.batches]
        # One model is called once for each batch; of several nobody knows here which steps call which.
        one_ns = timed[0] * NS_PER_S * max(per_step) if len(timed) == 1 and timed[0] else None
        threads = max((facts.threads if facts is not None else {}).values(), default=0)
        threads = threads or max(pool_threads(float(pool)) for pool in pools)
        return cls(recording, pools, stalled, cores, others, threads, one_ns)

    @property
    def alone(self) -> bool:
        """Whether nobody else was seen to want cores."""
        return _is_alone(self.others)

    @property
    def stalls(self) -> bool:
        """Whether steps stalled."""
        return any(bool(stalled.any()) for stalled in self.stalled_ns)

    @property
    def free_cores(self) -> int:
        """Cores that others leave."""
        return int(self.cores - (self.others or 0.0) + 0.5)

    def has_cores(self, threads: int) -> bool:
        """Say whether so many computing threads of each rank have a core each, beside what others want."""
        ranks = int(np.bincount(self.recording.host).max())
        return self.others is not None and ranks * threads <= self.free_cores

    @property
    def waits(self) -> float:
        """Share of the steps' time for which compute waited for cores: of the rank that waits most."""
        shares = [
            waiting * lane.compute_ns().sum() / max(float(np.ptp(lane.step_end_ns)), 1.0)
            for waiting, lane in zip(self.recording.waiting, self.recording.lanes, strict=True)
        ]
        return float(max(shares))

    def _check(self, scenario: ResolvedEdits) -> None:
        """Refuse fewer computing threads for a run whose threads went without a core, where those would as well."""
        threads = scenario.compute_threads
        if threads is not None and not self.has_cores(threads) and self.waits > WAITS:
            raise InputError(
                f"compute_threads={threads} is not predictable here: threads that compute waited for cores for "
                f"{format_fraction(self.waits, 0)} of the steps, and as many would again. Run it once with "
                f"torch.set_num_threads({threads}), or record on a quieter host."
            )

    def beside_others(self, scenario: ResolvedEdits) -> list[float]:
        """Return the least and the most that edits may win of what they are predicted, where others make threads wait.

        How long the threads of a pool wait hangs on when each of them sleeps: steps of 165 ms, 125 of them waits, took
        64, 78, 92 and 134 with one or two workers by hand, where a replay that keeps the waits has 134.
        """
        waits = self.waits
        pool = pool_threads(float(self.pool_cores.max())) > 1 and scenario.compute_threads is None
        if not pool or waits < WAITS or self.others is None or self.alone:
            return []
        return [1 / (1 + waits / 4), 1 / (1 - waits / 2)]

    def cores_after(self, scenario: ResolvedEdits) -> NDArray[np.float64]:
        """Return [ranks] the cores that the pool occupies after the edits."""
        given = scenario.compute_threads
        return self.pool_cores if given is None else np.minimum(self.pool_cores, given - 1)

    def frees(self, scenario: ResolvedEdits) -> bool:
        """Say whether the edits leave a core to each of fewer computing threads: nothing waits for one any more."""
        fewer = scenario.compute_threads
        return fewer is not None and fewer < self.threads and self.has_cores(fewer)

    def occupancy(self, scenario: ResolvedEdits, busy: NDArray[np.float64], starved: float) -> Occupancy:
        """Return what compute does with cores after the edits; `busy` [ranks] and `starved` as `Program` has them."""
        waiting, pools = self.recording.waiting, self.cores_after(scenario) * (busy > 0)
        if self.frees(scenario):
            return Occupancy(np.minimum(1.0, busy / np.maximum(1 - waiting, 0.01)), np.zeros_like(waiting), pools)
        return Occupancy(busy, waiting * (1 - starved), pools)

    def longer(self, scenario: ResolvedEdits, loading: tuple[Loading, ...]) -> tuple[NDArray[np.float64], ...] | None:
        """Return, per rank, [k] how much longer each step computes on the host after the edits; None: as long.

        Raises `InputError` where fewer threads would wait for cores as well.
        """
        self._check(scenario)
        if scenario.compute_threads is None and not self.stalls:
            return None
        longer = list[NDArray[np.float64]]()
        for index, (lane, stalled) in enumerate(zip(self.recording.lanes, self.stalled_ns, strict=True)):
            computes_ns = np.maximum(lane.compute_ns(), 1)
            share = 1.0 if self.stays or scenario == ResolvedEdits() else self._left(index, loading[index])
            gone_ns = (1 - (0.0 if scenario.compute_threads == 1 else share)) * stalled
            if self.frees(scenario):  # two threads stall behind waits for input as more do
                kept_ns = 0.0 if scenario.compute_threads == 1 else stalled
                gone_ns = np.maximum(gone_ns, self.recording.waiting[index] * computes_ns - kept_ns)
            longer.append(self._works(index, scenario) * (1 - gone_ns / computes_ns))
        return tuple(longer)

    def _works(self, index: int, scenario: ResolvedEdits) -> float:
        """Return how much longer a rank computes on the threads that it keeps, waits left out.

        They have the work of all, at most, and no more than one thread has, where that was timed.
        """
        pool, after = float(self.pool_cores[index]), float(self.cores_after(scenario)[index])
        if pool <= after:
            return 1.0
        evenly = (1 + pool) / (1 + after)
        if self.one_thread_ns is None:
            return float(evenly ** (1 - self.spins))
        computes_ns = self.recording.lanes[index].compute_ns()[1:].astype(np.float64)
        on_cores_ns = min(computes_ns.min(), computes_ns.mean() * (1 - self.recording.waiting[index]))
        alone = min(max(self.one_thread_ns / max(on_cores_ns, 1.0), 1.0), 1 + pool)
        return float(1 + (alone - 1) * (evenly - 1) / pool)

    def bounds(self) -> list[PoolWaits]:
        """Return the least and the most that fewer threads may take."""
        if self.one_thread_ns is None:
            return [replace(self, spins=share) for share in (0.0, 1.0)]
        return [replace(self, one_thread_ns=self.one_thread_ns * factor) for factor in TIMED]

    def _left(self, index: int, loading: Loading) -> float:
        """Return the share of a rank's waits beyond `SPIN_NS` that are left with `loading`; 1 where no step stalled."""
        batches, stalled = self.recording.batches[index], self.stalled_ns[index]
        if not stalled.any():
            return 1.0
        computes_ns = float(np.median(self.recording.lanes[index].compute_ns() - stalled))
        loads_ns = loading.fetch_ns + loading.waiting_ns + loading.cpu_ns
        new = _waits_ns(loads_ns, loading.workers[batches.iterator], computes_ns)
        old = _waits_ns(batches.part_ns.sum(axis=1), batches.workers[batches.iterator], computes_ns)
        return min(1.0, float((new > SPIN_NS).sum()) / max(1, int((old > SPIN_NS).sum())))


def _is_alone(others: float | None) -> bool:
    return others is not None and others < BUSY


def _stalled_ns(recording: Recording, index: int, pool: float, *, alone: bool) -> NDArray[np.float64]:
    """Return [k] how long each step of a rank stalled: bounded by what its marks say, none without long waits."""
    lane, batches = recording.lanes[index], recording.batches[index]
    computes_ns = lane.compute_ns().astype(np.float64)
    none = np.zeros_like(computes_ns)
    if not alone or pool_threads(pool) == 1 or recording.devices[index] is not None:
        return none
    loads_ns, workers = batches.part_ns.sum(axis=1), batches.workers[batches.iterator]
    long = _waits_ns(loads_ns, workers, float(np.median(computes_ns))) > SPIN_NS
    behind = np.isin(np.arange(computes_ns.size), lane.step[batches.segment[long]])
    over = computes_ns - computes_ns[1:].min(initial=np.inf)
    stalled = np.where(behind & (over > STALLED * SPIN_NS), np.minimum(over, SPIN_NS), 0.0)
    bound_ns = MARKED * recording.waiting[index] * computes_ns.sum()
    return np.asarray(stalled * min(1.0, bound_ns / max(float(stalled.sum()), 1.0)))


def _waits_ns(
    loads_ns: NDArray[np.float64] | NDArray[np.int64], workers: NDArray[np.int64], computes_ns: float
) -> NDArray[np.float64]:
    """Return [b] how long the training thread waits for batches whose loads are made by `workers` [b] in turns."""
    turn_ns: NDArray[np.float64] = loads_ns / np.maximum(workers, 1)
    return np.where(workers > 0, np.maximum(turn_ns - computes_ns, 0.0), turn_ns)
