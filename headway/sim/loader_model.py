"""What loading a batch takes, and how torch's DataLoader orders the loads: measured where recorded, else typical.

Use it below `unroll`. A load is a blocked part (storage, network, sleep), a
CPU part (dataset and collate) and, with workers, a hand-off: the time from
the worker's last instruction until the batch can be taken, and the time that
taking it costs the training thread. Workers take batches in turn, one at a
time; a worker is told of batch `s` once batch `s - prefetch * workers` was
taken. Times are int64 ns.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_MS, NS_PER_S, NS_PER_US
from headway.sim.edits import Scenario
from headway.sim.recording import Batches, Lane, Recording
from headway.trace.loader_facts import LoaderFacts, bound, facts_of, uncacheable

SLACK_NS = 3 * NS_PER_MS
"""A batch that was loaded this long before it was asked for had surely been handed over."""

MAX_PRESSURE = 10.0
"""Beyond this, run-queue wait says more about single wake-ups than about the host."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs that a run without workers, or without a cache, cannot show: typical of torch 2.13 and fork on Linux."""

    handoff_ns: int = 700 * NS_PER_US
    """From the end of a load until the training thread can take the batch: pickling, a pipe, a wake-up."""

    receive_ns: int = 900 * NS_PER_US
    """Taking a batch that is ready: one descriptor per tensor, a mapping, the next index handed out."""

    per_byte_ns: float = 0.12
    """More of each of the two for each byte of the batch."""

    fork_ns: int = 9 * NS_PER_MS
    """Making one worker, on the training thread."""

    first_ns: int = 10 * NS_PER_MS
    """From the iterator's creation until its workers begin to load."""

    stop_ns: int = 7 * NS_PER_MS
    """Ending one worker, on the training thread."""

    reset_ns: int = NS_PER_MS
    """A new pass over workers that persist."""

    thread_handoff_ns: int = 120 * NS_PER_US
    """The same from a thread of the rank: a wake-up, whatever the size."""

    thread_receive_ns: int = 50 * NS_PER_US
    """Taking a batch that a thread made."""

    thread_ns: int = 400 * NS_PER_US
    """Making one thread, on the training thread; ending it takes as long as the example that it reads."""

    trial_ns: int = 40 * NS_PER_MS
    """Trying in a forked child whether workers may make a loader's batches: once for loaders with the same facts."""

    thread_trial_ns: int = 400 * NS_PER_MS
    """The same for threads, and how long two of them wait for the interpreter's lock."""

    cache_trial_ns: int = 200 * NS_PER_MS
    """Trying in forked children whether a loader's examples may be kept."""

    hit_ns: int = 20 * NS_PER_US
    """Serving one example from the cache."""

    keep_ns: int = 180 * NS_PER_US
    """Keeping one example: whether it drew random numbers is watched while it is read."""

    look_ns: int = 500 * NS_PER_US
    """Looking, before each batch, whether the script has changed the dataset that examples are kept of."""

    hit_per_byte_ns: float = 0.25
    """More of it for each byte: the copy that is handed out."""

    log_ns: int = 150 * NS_PER_US
    """What a log record still costs when a background thread handles it: the hand-over, and the handler's own CPU time,
    which comes back through the interpreter's lock. Only what blocks is won."""

    collect_ns: int = 2 * NS_PER_MS
    """One collection of garbage when everything old is frozen."""

    def slowed(self, factor: float) -> Costs:
        """Return the costs on a host whose other work makes CPU time take `factor` times as long."""
        names = (
            "handoff_ns", "receive_ns", "fork_ns", "first_ns", "stop_ns", "reset_ns", "log_ns",
            "thread_handoff_ns", "thread_receive_ns", "thread_ns", "trial_ns",
            "cache_trial_ns", "keep_ns", "look_ns",
        )  # fmt: skip
        return replace(self, **{name: round(getattr(self, name) * factor) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """How one rank loads under a scenario: everything `unroll` needs to know of its batches."""

    workers: NDArray[np.int64]
    """[i] Workers of each pass; 0 = the training thread loads."""

    prefetch: NDArray[np.int64]
    """[i] Batches in flight per worker."""

    fetch_ns: NDArray[np.float64]
    """[b] Blocked part."""

    cpu_ns: NDArray[np.float64]
    """[b] CPU part."""

    handoff_ns: NDArray[np.float64]
    """[b] From the end of the load until the batch can be taken (with workers)."""

    take_ns: NDArray[np.float64]
    """[b] What the call costs the training thread beside the load."""

    between_ns: NDArray[np.float64]
    """[b] From the end of the worker's load before until it begins this one, although it had been told of it."""

    iter_ns: NDArray[np.float64]
    """[i] Creation of the iterator, on the training thread."""

    first_ns: NDArray[np.float64]
    """[i] From then until workers begin to load."""

    stop_ns: NDArray[np.float64]
    """[i] Call that finds the pass at its end, on the training thread."""

    def paced(self, fetch: float, cpu: float) -> Loading:
        """Return the loads with both parts scaled."""
        if fetch == 1.0 and cpu == 1.0:
            return self
        return replace(self, fetch_ns=self.fetch_ns * fetch, cpu_ns=self.cpu_ns * cpu)


@dataclass(frozen=True, slots=True, eq=False)
class LoaderModel:
    """The loaders of one rank: what was measured of each batch, and what the run's facts say."""

    batches: Batches
    """The recorded batches."""

    owned_ns: NDArray[np.int64]
    """[b] Time of the training thread inside the call, other causes left out."""

    iter_ns: NDArray[np.int64]
    """[i] Recorded creation of each iterator."""

    stop_ns: NDArray[np.int64]
    """[i] Recorded call that found the end of each pass."""

    prefetch: NDArray[np.int64]
    """[i] Recorded batches in flight per worker."""

    persistent: NDArray[np.bool_]
    """[i] Whether the workers were kept from the pass before."""

    tunable: NDArray[np.bool_]
    """[i] Whether the number of workers may change."""

    tried: NDArray[np.bool_]
    """[i] Whether a remedy would be tried before this pass: the first one over loaders with the same facts."""

    trial_ns: NDArray[np.float64]
    """[i] What trying worker processes takes, as the recording measured it, else as usual."""

    thread_trial_ns: NDArray[np.float64]
    """[i] The same of threads."""

    cache_trial_ns: NDArray[np.float64]
    """[i] The same of a cache; 0 for a loader of headway's own, which is asked for one."""

    cacheable: NDArray[np.bool_]
    """[i] Whether its examples have an index that a cache can go by."""

    batch_size: NDArray[np.int64]
    """[i] Examples per batch."""

    take_ns: NDArray[np.float64]
    """[b] Cost of taking a batch from a worker."""

    handoff_ns: NDArray[np.float64]
    """[b] Hand-off from a worker."""

    between_ns: NDArray[np.float64]
    """[b] What a worker does between two loads; 0 where no worker was recorded."""

    first_ns: NDArray[np.float64]
    """[i] From the creation of the iterator to the first load of a worker."""

    costs: Costs
    """What the run could not show."""

    @classmethod
    def of(cls, batches: Batches, lane: Lane, facts: Mapping[str, LoaderFacts], costs: Costs) -> LoaderModel:
        """Measure what can be measured. `facts` is the `loaders` entry of run.json."""
        told = [facts_of(facts, int(group)) for group in batches.group]
        owned = np.zeros(int(lane.row.max(initial=-1)) + 2, np.int64)
        np.add.at(owned, lane.row, lane.duration_ns)  # row -1 (compute) lands in the spare last place
        rows = lane.row[batches.segment]
        num_bytes = batches.bytes.astype(np.float64)
        take = costs.receive_ns + costs.per_byte_ns * num_bytes
        handoff = costs.handoff_ns + costs.per_byte_ns * num_bytes
        per_worker = batches.workers[batches.iterator] > 0
        prefetch = np.array([fact.prefetch_factor or 2 for fact in told], dtype=np.int64)
        for group in np.unique(batches.group):
            own = per_worker & (batches.load_start_ns >= 0) & (batches.group[batches.iterator] == group)
            _measure_handoff(batches, own, take, handoff)
        unknown = per_worker & (batches.load_start_ns < 0)
        take[unknown], handoff[unknown] = (batches.end_ns - batches.start_ns)[unknown], 0.0
        created = batches.iter_segment
        return cls(
            batches=batches,
            owned_ns=owned[rows],
            iter_ns=np.where(created >= 0, lane.duration_ns[np.maximum(created, 0)], 0),
            stop_ns=np.where(batches.end_segment >= 0, lane.duration_ns[np.maximum(batches.end_segment, 0)], 0),
            prefetch=prefetch,
            persistent=np.array([fact.persistent for fact in told], dtype=bool) & (batches.epoch > 0),
            tunable=np.array([not bound(fact) for fact in told], dtype=bool),
            tried=_first_of_each([(fact.dataset, fact.batch_size, fact.sampler) for fact in told]),
            trial_ns=_seconds([fact.rehearsal.processes_s for fact in told], costs.trial_ns),
            thread_trial_ns=_seconds([fact.rehearsal.threads_s for fact in told], costs.thread_trial_ns),
            cache_trial_ns=_seconds(
                [0.0 if fact.own else fact.rehearsal.cache_s for fact in told], costs.cache_trial_ns
            ),
            cacheable=np.array([not uncacheable(fact) for fact in told], dtype=bool),
            batch_size=np.array([fact.batch_size or 1 for fact in told], dtype=np.int64),
            take_ns=take,
            handoff_ns=handoff,
            between_ns=_between_loads(batches, prefetch),
            first_ns=_first_loads(batches, lane, costs),
            costs=costs,
        )

    def under(self, scenario: Scenario, seed: int, starved: float = 0.0) -> Loading:
        """Return the loads as `scenario` changes them.

        `starved` is the share of the recorded run-queue wait that comes from
        outside the job: it stays. The rest arises anew where cores are short.
        """
        batches = self.batches
        recorded = batches.workers
        tuned = self._tuned(scenario)
        workers = recorded if scenario.workers is None else np.where(tuned, scenario.workers.count, recorded)
        ahead = self.prefetch if scenario.prefetch is None else scenario.prefetch
        prefetch = np.where(tuned, ahead, self.prefetch)
        fetch, cpu = self._loads(scenario, seed, starved)
        was_inline = recorded[batches.iterator] == 0
        now_inline = workers[batches.iterator] == 0
        inline_ns = np.maximum(self.owned_ns - batches.part_ns.sum(axis=1), 0) * was_inline
        threaded = (scenario.threads & tuned & (workers > 0))[batches.iterator]
        taking = np.where(threaded, float(self.costs.thread_receive_ns), self.take_ns)
        take = np.where(now_inline, inline_ns, taking) * scenario.transfer
        handoff = np.where(threaded, float(self.costs.thread_handoff_ns), self.handoff_ns) * scenario.transfer
        iter_ns, first_ns, stop_ns = self._turns(scenario, workers)
        return Loading(
            workers=workers,
            prefetch=prefetch,
            fetch_ns=fetch,
            cpu_ns=cpu,
            handoff_ns=handoff,
            take_ns=take,
            between_ns=np.where(threaded | now_inline | was_inline, 0.0, self.between_ns),
            iter_ns=iter_ns * scenario.factor("input.iter"),
            first_ns=first_ns,
            stop_ns=stop_ns * scenario.factor("input.next"),
        )

    def _tuned(self, scenario: Scenario) -> NDArray[np.bool_]:
        """Return [i] whether the edits of workers reach the loader of each pass."""
        reached = np.array([scenario.reaches(int(group)) for group in self.batches.group], dtype=bool)
        return np.asarray(self.tunable & reached)

    def with_handoff(self, factor: float) -> LoaderModel:
        """Return the model with the assumed costs of workers scaled."""
        return replace(
            self, take_ns=self.take_ns * factor, handoff_ns=self.handoff_ns * factor, first_ns=self.first_ns * factor
        )

    def _loads(self, scenario: Scenario, seed: int, starved: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the blocked and the CPU part of each load, cache hits drawn one by one."""
        fetch, starving, prep, collate = self.batches.part_ns.astype(np.float64).T
        prep = prep + starved * starving
        if scenario.cache_fraction > 0:
            size = self.batch_size[self.batches.iterator]
            # Dealt anew among shards, an example was at this rank in one of `e` epochs with 1 - (1 - 1 / shards)^e.
            seen = np.maximum(self.batches.epoch[self.batches.iterator] - scenario.cache_cold + 1, 0)
            kept = scenario.cache_fraction * self.cacheable[self.batches.iterator]
            chance = kept * (1 - (1 - 1 / scenario.cache_shards) ** seen)
            hits = np.random.default_rng(seed).binomial(size, chance)
            share = hits / size
            # What misses and has a place is copied too: into the cache.
            copied = np.maximum(hits, kept * size)
            copy_ns = self.costs.hit_ns * copied + self.costs.hit_per_byte_ns * self.batches.bytes * copied / size
            copy_ns = copy_ns + self.costs.keep_ns * (copied - hits)
            look_ns = self.costs.look_ns * (kept > 0)
            fetch, prep = fetch * (1 - share), prep * (1 - share) + copy_ns + look_ns
        fetch = fetch * scenario.fetch * scenario.factor("input.fetch") / scenario.storage
        prep = prep * scenario.factor("input.prep") + collate * scenario.factor("input.collate")
        return fetch, prep * scenario.prep

    def _turns(
        self, scenario: Scenario, workers: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return, per pass, what making its iterator costs, when its workers begin, and what its end costs."""
        had, again = self.batches.workers, self.batches.epoch > 0
        kept, tuned = self.persistent, self._tuned(scenario)
        free = tuned & (scenario.persistent is not None)
        keeps = np.where(free, again & bool(scenario.persistent), kept) & (workers > 0)
        # Workers are made and ended one after the other. The end of the pass before is paid in the call that finds it.
        per_fork = np.where(had > 0, self.iter_ns / np.maximum(had, 1), self.costs.fork_ns)
        per_fork = np.where(kept, self.costs.fork_ns, per_fork)
        per_stop = np.where((had > 0) & ~_survives(self), self.stop_ns / np.maximum(had, 1), self.costs.stop_ns)
        plain = np.where(had == 0, self.iter_ns, np.minimum(self.iter_ns, self.costs.reset_ns))
        made = np.where(keeps, np.minimum(self.iter_ns, self.costs.reset_ns), plain + per_fork * workers)
        made = np.where(had > 0, np.where(keeps, made, per_fork * workers), made)
        made = np.where(workers == 0, plain, made)
        made = np.where((workers == had) & (keeps == kept), self.iter_ns, made)
        stays = np.where(free, bool(scenario.persistent), _survives(self))
        bare = np.where(had == 0, self.stop_ns, 0)
        stop = np.where(stays | (workers == 0), bare, bare + per_stop * workers)
        stop = np.where((workers == had) & (stays == _survives(self)), self.stop_ns, stop)
        first = np.where(keeps & ~kept, 0.0, np.where(~keeps & kept, float(self.costs.first_ns), self.first_ns))
        threaded = scenario.threads & tuned & (workers > 0)
        made = np.where(threaded, plain + self.costs.thread_ns * workers, made)
        first, stop = np.where(threaded, 0.0, first), np.where(threaded, bare, stop)
        trial = np.where(threaded, self.thread_trial_ns, self.trial_ns)
        made = made + np.where(self.tried & tuned & (workers != had), trial, 0)
        made = made + np.where(self.tried & self.cacheable & (scenario.cache_fraction > 0), self.cache_trial_ns, 0)
        return made.astype(np.float64), first, stop.astype(np.float64)


def _first_of_each(keys: list[Hashable]) -> NDArray[np.bool_]:
    """Return [i] whether key i has not come before."""
    return np.array([keys.index(key) == place for place, key in enumerate(keys)], dtype=bool)


def _seconds(measured: list[float | None], usual_ns: int) -> NDArray[np.float64]:
    """Return ns of what was measured in seconds, `usual_ns` where nothing was."""
    return np.array([usual_ns if took is None else took * NS_PER_S for took in measured], dtype=np.float64)


def _survives(model: LoaderModel) -> NDArray[np.bool_]:
    """Return [i] whether the workers of each pass were kept at its end."""
    kept = {int(group) for group in model.batches.group[model.persistent]}
    return np.isin(model.batches.group, sorted(kept)) if kept else np.zeros(model.batches.group.size, bool)


def _measure_handoff(
    batches: Batches, known: NDArray[np.bool_], take: NDArray[np.float64], handoff: NDArray[np.float64]
) -> None:
    """Replace the typical costs of one loader's batches by measured ones where workers were recorded (in place).

    A batch that had been ready for long costs its receiver alone; one that was
    awaited also shows the hand-off: what it took after its load ended, less
    the usual cost of receiving. Both are those of the batch itself, so that
    slow ones count with what they took. Other batches get medians. The first
    batch of each worker takes longer: its pipe and its threads are made then.

        next()    |----------- waits -----------|= take =|
        worker    ----- load -----|- hand-off --|

    A thread of the worker hands over, while the worker loads on. A dataset
    that holds the interpreter's lock keeps it waiting, up to the end of that
    next load: a batch that is asked for before then may still be on its way.

        next()                     |-- waits --|= take =|
        worker    -- load --|---- next load ---|
        its thread          |----- hand-off ---|
    """
    load_end = batches.load_start_ns + batches.load_ns
    arrival = (batches.end_ns - load_end).astype(np.float64)
    after = np.minimum(arrival, batches.end_ns - batches.start_ns).clip(min=0)
    free = _worker_free_ns(batches, load_end)
    ready = known & (free + SLACK_NS < batches.start_ns)
    if ready.any():
        take[known] = np.median(after[ready])
        take[ready] = after[ready]
    waited = (load_end <= batches.start_ns) & (free > batches.start_ns) & (after > take + SLACK_NS)
    awaited = known & ((load_end > batches.start_ns) | waited)
    opening = batches.seq < batches.workers[batches.iterator]
    for which in (opening, ~opening):
        seen = awaited & which
        if not seen.any():
            continue
        whole = float(np.median(arrival[seen]))
        rest = known & which & ~ready
        typical = float(np.median(take[rest])) if rest.any() else 0.0
        part = min(typical, whole) if ready.any() else min(typical, whole / 2)
        take[rest], handoff[known & which] = part, whole - part
        take[seen] = np.minimum(part, after[seen])
        handoff[which & known] = np.minimum(handoff, np.maximum(arrival - take, 0))[which & known]
        handoff[seen] = arrival[seen] - take[seen]


def _worker_free_ns(batches: Batches, load_end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [b] when its worker had loaded the batch, and the one after it if that had begun when b was asked for."""
    free = load_end.copy()
    for index in range(batches.group.size):
        own = np.flatnonzero(batches.iterator == index)
        workers = int(batches.workers[index])
        if workers and own.size > workers and not batches.together[index]:
            this, following = own[:-workers], own[workers:]
            begun = batches.load_start_ns[following] < batches.start_ns[this]
            free[this] = np.where(begun, load_end[following], free[this])
    return free


def _between_loads(batches: Batches, prefetch: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [b] what the worker did between its load before and this one; medians where it may have been idle.

    A worker that has been told of a batch begins it at once: what passes until then is its own (a batch put into a
    queue, an index taken out of one). It had been told if the batch that makes room for this one was taken by then.
    """
    between = np.zeros(batches.seq.size)
    load_end = batches.load_start_ns + batches.load_ns
    for index in range(batches.group.size):
        own = np.flatnonzero(batches.iterator == index)
        workers = int(batches.workers[index])
        if not workers or batches.together[index] or own.size <= workers or (batches.load_start_ns[own] < 0).any():
            continue
        bound = workers * int(prefetch[index])
        gap = (batches.load_start_ns[own[workers:]] - load_end[own[:-workers]]).astype(np.float64)
        told_ns = np.full(own.size, np.iinfo(np.int64).min)
        told_ns[bound:] = batches.end_ns[own[:-bound]] if own.size > bound else told_ns[bound:]
        busy = told_ns[workers:] <= load_end[own[:-workers]]
        usual = float(np.median(gap[busy])) if busy.any() else 0.0
        between[own[workers:]] = np.maximum(np.where(busy, gap, usual), 0.0)
    return between


def _first_loads(batches: Batches, lane: Lane, costs: Costs) -> NDArray[np.float64]:
    """Return [i] when the workers of each pass began to load, after the end of its creation."""
    first = np.full(batches.group.size, float(costs.first_ns))
    for index in range(batches.group.size):
        mine = (batches.iterator == index) & (batches.load_start_ns >= 0)
        segment = batches.iter_segment[index]
        if batches.workers[index] > 0 and segment >= 0 and mine.any():
            made_ns = lane.start_ns[segment] + lane.duration_ns[segment]
            first[index] = max(0, int(batches.load_start_ns[mine].min() - made_ns))
    return first


def storage_is_shared(recording: Recording) -> bool | None:
    """Say whether readers share one pipe (True) or each get full speed (False); None when the run cannot show it.

    Where loads overlap, a shared pipe makes the blocked part grow with the
    number of loads that are blocked at once; storage that serves readers in
    parallel does not. The run shows it only if that number varies.
    """
    spans = [
        (start, start + part[0], part[0], size)
        for batches in recording.batches
        for start, part, size, one in zip(
            batches.load_start_ns, batches.part_ns, batches.bytes, ~batches.together[batches.iterator], strict=True
        )
        if start >= 0 and part[0] > 0 and one
    ]
    if len(spans) < 20:
        return None
    start, end, blocked, size = np.array(spans, dtype=np.float64).T
    bounds = np.sort(np.concatenate([start, end]))
    active = np.searchsorted(np.sort(start), bounds, side="right") - np.searchsorted(np.sort(end), bounds, side="right")
    area = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(bounds))])
    together = (np.interp(end, bounds, area) - np.interp(start, bounds, area)) / (end - start)
    pace = blocked / np.maximum(size, 1)
    few, many = np.quantile(together, [0.2, 0.8])
    if many < 1.3 * few:
        return None
    growth = np.median(pace[together >= many]) / max(float(np.median(pace[together <= few])), 1e-12)
    expected = np.median(together[together >= many]) / np.median(together[together <= few])
    return bool(growth > 1 + 0.5 * (expected - 1))


def own_service(batches: tuple[Batches, ...]) -> float:
    """Return the time for which one shared pipe was busy / the blocked time that its readers recorded.

    While loads with blocked shares p, q, ... overlap, the pipe is busy for
    min(1, p + q + ...) of the time: one reads while the other computes. So it
    is while threads make a batch together, each a part of it.
    """
    begin = np.concatenate([b.load_start_ns for b in batches]).astype(np.float64)
    wall = np.concatenate([b.load_ns for b in batches]).astype(np.float64)
    blocked = np.concatenate([b.part_ns[:, 0] for b in batches]).astype(np.float64)
    makers = np.concatenate([np.where(b.together, b.workers, 1)[b.iterator] for b in batches])
    known = (begin >= 0) & (blocked > 0)
    begin, wall, blocked, makers = begin[known], wall[known], blocked[known], makers[known]
    begin, wall = begin + wall * (1 - 1 / makers), wall / makers
    if not blocked.size:
        return 1.0
    instant = np.concatenate([begin, begin + wall])
    change = np.concatenate([blocked / wall, -blocked / wall])
    order = np.argsort(instant, kind="stable")
    load = np.cumsum(change[order])[:-1]
    return float((np.minimum(load, 1.0) * np.diff(instant[order])).sum() / blocked.sum())


def busiest_host(recording: Recording) -> int:
    """Return how many threads of the job want a core on the host that has most of them: ranks and their workers."""
    threads = [1 + int(part.workers.max(initial=0)) for part in recording.batches]
    return int(np.bincount(recording.host, weights=threads).max())


def host_pressure(recording: Recording, cores: int) -> float:
    """Return how much longer CPU work takes because others want the cores too: (CPU + run-queue wait) / CPU, >= 1.

    Told from the loads of a job that leaves itself enough cores, so that it
    does not wait for itself; 1 where that cannot be told.
    """
    batches = recording.batches
    users = busiest_host(recording)
    parts = np.concatenate([part.part_ns for part in batches]).sum(axis=0)
    cpu_ns, starved_ns = float(parts[2] + parts[3]), float(parts[1])
    if users > cores or cpu_ns <= 0:
        return 1.0
    return min(MAX_PRESSURE, (cpu_ns + starved_ns) / cpu_ns)
