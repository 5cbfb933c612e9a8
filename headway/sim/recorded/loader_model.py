"""What loading a batch takes, and how torch's DataLoader orders the loads: measured where recorded, else typical.

Use it below `unroll`. A load is a blocked part (storage, network, sleep), a
CPU part (dataset and collate) and, with workers, a hand-off: the time from
the worker's last instruction until the batch can be taken, and the time that
taking it costs the training thread. Workers take batches in turn, one at a
time; a worker is told of batch `s` once batch `s - prefetch * workers` was
taken. Times are int64 ns.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_S
from headway.sim.recorded.lane import Lane
from headway.sim.recorded.recording import ConsumedBatches, Recording
from headway.sim.recorded.segment_times import (
    Costs,
    between_loads,
    first_loads,
    loads_first,
    measure_handoff,
    opening_parts,
)
from headway.sim.whatif import ResolvedEdits
from headway.trace.events.loader_facts import (
    CHECK_EVERY,
    CHECK_FIRST,
    LoaderFacts,
    bound,
    facts_of,
    may_try,
    uncacheable,
)

MAX_PRESSURE = 10.0
"""Beyond this, run-queue wait says more about single wake-ups than about the host."""


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """How one rank loads under a scenario: everything `unroll` needs to know of its batches."""

    workers: NDArray[np.int64]
    """[i] Workers of each pass; 0 = the training thread loads."""

    prefetch: NDArray[np.int64]
    """[i] Batches in flight per worker."""

    fetch_ns: NDArray[np.float64]
    """[b] Blocked part."""

    waiting_ns: NDArray[np.float64]
    """[b] Part in which the load was ready to run and had no core, and has it again in the replay."""

    cpu_ns: NDArray[np.float64]
    """[b] CPU part."""

    handoff_ns: NDArray[np.float64]
    """[b] From the end of the load until the batch can be taken (with workers)."""

    take_ns: NDArray[np.float64]
    """[b] What the call costs the training thread beside the load: CPU time."""

    late_ns: NDArray[np.float64]
    """[b] What it costs more than is usual, which is waiting: for the sender, or for a lock."""

    send_ns: NDArray[np.float64]
    """[b] CPU time of the worker's other threads for it, beside its next load: the batch is there behind that."""

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
        return replace(self, fetch_ns=self.fetch_ns * fetch, waiting_ns=self.waiting_ns * cpu, cpu_ns=self.cpu_ns * cpu)


@dataclass(frozen=True, slots=True, eq=False)
class LoaderModel:
    """The loaders of one rank: what was measured of each batch, and what the run's facts say."""

    batches: ConsumedBatches
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

    alike: tuple[Hashable, ...]
    """[i] Facts of the loader of each pass: those with the same ones are tried once."""

    begin_ns: NDArray[np.int64]
    """[i] When the first batch of each pass was asked for."""

    trial_ns: NDArray[np.float64]
    """[i] What trying worker processes takes, as the recording measured it, else as usual."""

    thread_trial_ns: NDArray[np.float64]
    """[i] The same of threads."""

    cache_trial_ns: NDArray[np.float64]
    """[i] The same of a cache; 0 for a loader of headway's own, which is asked for one."""

    look_ns: NDArray[np.float64]
    """[i] What a look at all that its batches are made of takes."""

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

    opening_ns: NDArray[np.float64]
    """[b, 4] What the first load of a process takes beyond a later one of the same loader, split into `LOAD_PARTS`."""

    costs: Costs
    """What the run could not show."""

    @classmethod
    def of(cls, batches: ConsumedBatches, lane: Lane, facts: Mapping[str, LoaderFacts], costs: Costs) -> LoaderModel:
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
            measure_handoff(batches, own, take, handoff)
        unknown = per_worker & (batches.load_start_ns < 0)
        take[unknown], handoff[unknown] = (batches.end_ns - batches.start_ns)[unknown], 0.0
        created = batches.iter_segment
        persistent = np.array([fact.persistent for fact in told], dtype=bool) & (batches.epoch > 0)
        begins = np.full(len(told), np.iinfo(np.int64).max)
        np.minimum.at(begins, batches.iterator, batches.start_ns)
        return cls(
            batches=batches,
            owned_ns=owned[rows],
            iter_ns=np.where(created >= 0, lane.duration_ns[np.maximum(created, 0)], 0),
            stop_ns=np.where(batches.end_segment >= 0, lane.duration_ns[np.maximum(batches.end_segment, 0)], 0),
            prefetch=prefetch,
            persistent=persistent,
            tunable=np.array([not bound(fact) for fact in told], dtype=bool),
            alike=tuple((fact.dataset, fact.batch_size, fact.sampler) for fact in told),
            begin_ns=begins,
            trial_ns=_seconds([fact.rehearsal.processes_s for fact in told], costs.trial_ns),
            thread_trial_ns=_seconds([fact.rehearsal.threads_s for fact in told], costs.thread_trial_ns),
            cache_trial_ns=_seconds(
                [0.0 if fact.own else fact.rehearsal.cache_s for fact in told], costs.cache_trial_ns
            ),
            look_ns=np.maximum(
                costs.look_in_training * _seconds([fact.rehearsal.look_s for fact in told], 0), costs.look_ns
            ),
            cacheable=np.array([not uncacheable(fact) for fact in told], dtype=bool),
            batch_size=np.array([fact.batch_size or 1 for fact in told], dtype=np.int64),
            take_ns=take,
            handoff_ns=handoff,
            between_ns=between_loads(batches, prefetch),
            first_ns=first_loads(batches, lane, costs),
            opening_ns=opening_parts(batches, loads_first(batches, batches.workers, persistent)),
            costs=costs,
        )

    def under(self, scenario: ResolvedEdits, seed: int, starved: float = 0.0) -> Loading:
        """Return the loads as `scenario` changes them.

        `starved` is the share of the recorded run-queue wait that comes from
        outside the job: it stays. The rest arises anew where cores are short.
        """
        batches = self.batches
        recorded = batches.workers
        tuned, tried, since = self._in_force(scenario)
        workers = recorded if scenario.workers is None else np.where(tuned, scenario.workers.count, recorded)
        ahead = self.prefetch if scenario.prefetch is None else scenario.prefetch
        prefetch = np.where(tuned, ahead, self.prefetch)
        keeps = self._keeps(scenario, workers, tuned)
        processes = np.where(scenario.threads & tuned, 0, workers)
        now = loads_first(batches, processes, keeps)
        fetch, waiting, cpu = self._loads(scenario, workers, now, since, seed, starved)
        was_inline = recorded[batches.iterator] == 0
        now_inline = workers[batches.iterator] == 0
        threaded = (scenario.threads & tuned & (workers > 0))[batches.iterator]
        # A worker looks, too, whether what it read has changed the dataset.
        looks_ns = self._looks_ns(scenario)
        forked = was_inline & ~now_inline & ~threaded
        by_remedy = self.costs.pack_ns if scenario.watched else self.costs.turn_ns
        pack_ns = np.where(threaded, self.costs.thread_pack_ns, by_remedy)
        cpu = cpu * np.where(forked, self.costs.elsewhere, 1.0)
        cpu = cpu + (pack_ns + looks_ns) * (was_inline & ~now_inline)
        inline_ns = np.maximum(self.owned_ns - batches.part_ns.sum(axis=1), 0) * was_inline
        taking = np.where(threaded, float(self.costs.thread_receive_ns), self.take_ns)
        drawn_ns = np.maximum(inline_ns - self.costs.receive_ns, 0)  # a sampler draws in the training process, always
        taking = taking + looks_ns * was_inline + drawn_ns
        take = np.where(now_inline, inline_ns, taking) * scenario.transfer
        usual = self.costs.receive_ns + self.costs.per_byte_ns * batches.bytes
        late = np.where(now_inline, 0.0, np.maximum(take - usual, 0.0))
        handoff = np.where(threaded, float(self.costs.thread_handoff_ns), self.handoff_ns) * scenario.transfer
        iter_ns, first_ns, stop_ns = self._turns(scenario, workers, keeps, tuned, tried)
        return Loading(
            workers=workers,
            prefetch=prefetch,
            fetch_ns=fetch,
            waiting_ns=waiting,
            cpu_ns=cpu,
            handoff_ns=handoff,
            take_ns=take - late,
            late_ns=late,
            send_ns=np.where(forked & (not scenario.watched), float(self.costs.send_ns), 0.0),
            between_ns=np.where(threaded | now_inline | was_inline, 0.0, self.between_ns),
            iter_ns=iter_ns * scenario.factor("input.iter"),
            first_ns=first_ns,
            stop_ns=stop_ns * scenario.factor("input.next"),
        )

    def trials(self, asked: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return [i] whether a remedy is tried before each pass, and the n-th pass over its loader since such a trial.

        A remedy of the loaders `asked` [i] is tried as `may_try` has it; -1 until then.
        """
        tried, since = np.zeros(asked.size, bool), np.full(asked.size, -1)
        settled: set[Hashable] = set()
        first: dict[int, int] = {}
        began, spent_ns = None, 0.0
        for place in np.argsort(self.begin_ns, kind="stable"):
            if not asked[place]:
                continue
            facts, group, epoch = self.alike[place], int(self.batches.group[place]), int(self.batches.epoch[place])
            began = self.begin_ns[place] if began is None else began
            if facts not in settled and may_try(spent_ns / NS_PER_S, (self.begin_ns[place] - began) / NS_PER_S):
                settled.add(facts)
                tried[place] = True
                spent_ns += self.trial_ns[place]
            if facts in settled:
                since[place] = epoch - first.setdefault(group, epoch)
        return tried, since

    def _in_force(self, scenario: ResolvedEdits) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64]]:
        """Return [i] whether edits of workers reach the loader of each pass, then `tried` and `since` of `trials`."""
        reached = np.array([scenario.reaches(int(group)) for group in self.batches.group], dtype=bool) & self.tunable
        tried, since = self.trials(np.asarray(reached | self.cacheable & (scenario.cache_fraction > 0)))
        since = since if scenario.watched else self.batches.epoch
        return np.asarray(reached & (since >= 0)), tried, since

    def with_handoff(self, factor: float) -> LoaderModel:
        """Return the model with the assumed costs of workers scaled."""
        costs = self.costs
        return replace(
            self, take_ns=self.take_ns * factor, handoff_ns=self.handoff_ns * factor, first_ns=self.first_ns * factor,
            costs=replace(costs, pack_ns=round(costs.pack_ns * factor), send_ns=round(costs.send_ns * factor)),
        )  # fmt: skip

    def _keeps(
        self, scenario: ResolvedEdits, workers: NDArray[np.int64], tuned: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return [i] whether the pass is read by the workers of the one before."""
        edited = tuned & (scenario.persistent is not None)
        return np.where(edited, (self.batches.epoch > 0) & bool(scenario.persistent), self.persistent) & (workers > 0)

    def _loads(
        self, scenario: ResolvedEdits, workers: NDArray[np.int64], now: NDArray[np.bool_], since: NDArray[np.int64],
        seed: int, starved: float,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
        """Return of each load what is blocked, waits for a core, and is CPU time, cache hits drawn one by one.

        `now` [b]: whether it is the first load of its process; `since` [i] as `trials` has it.
        """
        was = loads_first(self.batches, self.batches.workers, self.persistent)
        change = (now.astype(np.float64) - was)[:, None]  # 1: it opens now, -1: no more
        parts = np.maximum(self.batches.part_ns + change * self.opening_ns, 0.0)
        fetch, starving, prep, collate = parts.T
        waiting = starved * starving * scenario.prep * scenario.factor("input.prep")
        if scenario.cache_fraction > 0:
            size = self.batch_size[self.batches.iterator]
            # Dealt anew among shards, an example was at this rank in one of `e` epochs with 1 - (1 - 1 / shards)^e.
            epoch = since[self.batches.iterator]
            seen = np.maximum(epoch - scenario.cache_cold + 1, 0)
            kept = scenario.cache_fraction * (self.cacheable[self.batches.iterator] & (epoch >= 0))
            chance = kept * (1 - (1 - 1 / scenario.cache_shards) ** seen)
            hits = np.random.default_rng(seed).binomial(size, chance)
            # What is found is read anew at times, to compare it: of the first load of a new worker, which opens files.
            share = (hits - (self._compared(hits, workers) if scenario.watched else 0)) / size
            opened = now[:, None] * self.opening_ns * (share < 1)[:, None]
            # What misses and has a place is copied too: into the cache.
            copied = np.maximum(hits, kept * size)
            copy_ns = self.costs.hit_ns * copied + self.costs.hit_per_byte_ns * self.batches.bytes * copied / size
            copy_ns = copy_ns + self.costs.keep_ns * (copied - hits) + self.costs.cold_ns * (copied > hits)
            look_ns = self._looks_ns(scenario) * (kept > 0)
            waiting = waiting * (1 - share)
            fetch = (fetch - opened[:, 0]) * (1 - share) + opened[:, 0]
            prep = (prep - opened[:, 2]) * (1 - share) + opened[:, 2] + copy_ns + look_ns
        fetch = fetch * scenario.fetch * scenario.factor("input.fetch") / scenario.storage
        prep = prep * scenario.factor("input.prep") + collate * scenario.factor("input.collate")
        return fetch, waiting, prep * scenario.prep

    def _compared(self, hits: NDArray[np.int64], workers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return [b] how many of a cache's `hits` [b] are read anew to compare them, in the mean.

        The first hit of each reader in a pass is, and the n-th one with p(n) of `headway.data.bytes.scrutiny`.
        """
        of_pass = self.batches.iterator
        group, compared = self.batches.group[of_pass], np.zeros(hits.size)
        for loader in np.unique(group):
            by_loader = hits * (group == loader)
            total = np.cumsum(by_loader)
            count = np.stack([total - by_loader, total])
            early, late = np.minimum(count, CHECK_FIRST * (CHECK_EVERY - 1)), count / CHECK_EVERY
            sums = CHECK_FIRST * np.log1p(early / CHECK_FIRST) + np.maximum(late - early / CHECK_EVERY, 0)
            compared += sums[1] - sums[0]
        begins = (self.batches.seq < np.maximum(workers, 1)[of_pass]) & (hits > 0)
        return np.minimum(np.where(begins, np.maximum(compared, 1), compared), hits)

    def _looks_ns(self, scenario: ResolvedEdits) -> NDArray[np.float64]:
        """Return [b] what a remedy's look at what the batch is made of takes: in a first pass, and early on."""
        of_pass = self.batches.iterator
        group, order = self.batches.group[of_pass], np.zeros(of_pass.size, np.int64)
        for loader in np.unique(group):
            order[group == loader] = np.arange(np.count_nonzero(group == loader))
        is_looked_at = (self.batches.epoch[of_pass] == 0) | (order < self.costs.full_looks)
        return np.asarray(self.look_ns[of_pass] * is_looked_at * scenario.watched)

    def _turns(
        self, scenario: ResolvedEdits, workers: NDArray[np.int64], keeps: NDArray[np.bool_],
        tuned: NDArray[np.bool_], tried: NDArray[np.bool_],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
        """Return, per pass, what making its iterator costs, when its workers begin, and what its end costs."""
        had = self.batches.workers
        kept = self.persistent
        free = tuned & (scenario.persistent is not None)
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
        trial = np.where(threaded, self.thread_trial_ns, self.trial_ns) * scenario.watched
        made = made + np.where(tried & tuned & (workers != had), trial, 0)
        made = made + np.where(tried & self.cacheable & (scenario.cache_fraction > 0), self.cache_trial_ns, 0)
        return made.astype(np.float64), first, stop.astype(np.float64)


def _seconds(measured: list[float | None], usual_ns: int) -> NDArray[np.float64]:
    """Return ns of what was measured in seconds, `usual_ns` where nothing was."""
    return np.array([usual_ns if took is None else took * NS_PER_S for took in measured], dtype=np.float64)


def _survives(model: LoaderModel) -> NDArray[np.bool_]:
    """Return [i] whether the workers of each pass were kept at its end."""
    kept = {int(group) for group in model.batches.group[model.persistent]}
    return np.isin(model.batches.group, sorted(kept)) if kept else np.zeros(model.batches.group.size, bool)


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
    # active: loads that are blocked between two successive bounds = begun - ended. `area` is its integral up to each
    # bound, so that the difference over a load / its length is how many were blocked at once, on average, while it was.
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


def own_service(batches: tuple[ConsumedBatches, ...]) -> float:
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
    # What W threads made together was recorded with the sum of their times: it took 1 / W of that, up to the same end.
    begin, wall = begin + wall * (1 - 1 / makers), wall / makers
    if not blocked.size:
        return 1.0
    # A sweep: each load adds its blocked share at its begin and takes it away at its end, so that the running sum is
    # what all loads ask of the pipe between two instants.
    instant = np.concatenate([begin, begin + wall])
    change = np.concatenate([blocked / wall, -blocked / wall])
    order = np.argsort(instant, kind="stable")
    load = np.cumsum(change[order])[:-1]
    return float((np.minimum(load, 1.0) * np.diff(instant[order])).sum() / blocked.sum())


def busiest_host(recording: Recording) -> int:
    """Return how many threads of the job want a core on the host that has most of them: ranks and their workers."""
    threads = [1 + int(part.workers.max(initial=0)) for part in recording.batches]
    return int(np.bincount(recording.host, weights=threads).max())


def host_pressure(recording: Recording, cores: int, *, alone: bool) -> float:
    """Return how much longer CPU work takes because others want the cores too: (CPU + run-queue wait) / CPU, >= 1.

    Told from the loads of a job that leaves itself enough cores, so that it does not wait for itself; 1 where that
    cannot be told. `alone`: nobody else was seen to want cores, and what of torch's threads spins waits for work.
    """
    batches = recording.batches
    users = busiest_host(recording) + (math.ceil(float(recording.beside.max(initial=0))) if alone else 0)
    parts = np.concatenate([part.part_ns for part in batches]).sum(axis=0)
    cpu_ns, starved_ns = float(parts[2] + parts[3]), float(parts[1])
    if users > cores or cpu_ns <= 0:
        return 1.0
    return min(MAX_PRESSURE, (cpu_ns + starved_ns) / cpu_ns)
