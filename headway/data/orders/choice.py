"""Which order strategy loads least for a given mix of jobs: each candidate is simulated, the best one is taken.

Jobs come at their times, run at their speeds, take their indices from a
common order through `Buffered` queues and their data through a `TieredCache`;
what is made ahead for one of them is there for the others until it is used.
What is counted are loads: items that had to be fetched and prepared. Jobs that
are under way already have their past simulated, too: where they are relative to
each other decides what they can share. Large datasets are simulated on a sample of
their items, with the cache scaled alike.

>>> twins = {name: Reader(range(500)) for name in ("a", "b")}
>>> choice = choose_order(twins, cache_items=10, seed=1)
>>> choice.order, choice.loads["shared"], choice.union
('shared', 500.0, 500)
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.rng import derived_seed, stream
from headway.core.tables import pick
from headway.data.bytes.order import item_seeds
from headway.data.cached.tiered import TieredCache
from headway.data.orders.job_order import Buffered, JobOrder
from headway.data.orders.random_orders import Opportunistic
from headway.data.orders.strategies import ORDERS, PASS, Shared
from headway.sim.graph.process import Process

LEAST_TRIALS = 3
NEGLIGIBLE = 0.005
"""A difference in loads that decides nothing."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A job, as far as its input goes."""

    items: ArrayLike | range
    """[k] The items of its subset, distinct."""
    arrives_s: float = 0.0
    items_per_s: float = 1.0
    """Speed at which it consumes items when none is missing."""
    epochs: int = 1
    ahead_items: int = 0
    """Items that are made ahead for it: others share each of them until it has used it."""
    used_items: int = 0
    """Items of its first epoch that it has used before the time 0."""

    def __post_init__(self) -> None:
        """Raise `InputError` on numbers that cannot be."""
        if not self.arrives_s >= 0:
            raise InputError(f"arrives_s is {self.arrives_s}; pass 0 or more seconds.")
        if not self.items_per_s > 0:
            raise InputError(f"items_per_s is {self.items_per_s}; pass a speed above 0.")
        if self.epochs < 1:
            raise InputError(f"epochs is {self.epochs}; pass 1 or more.")
        if min(self.ahead_items, self.used_items) < 0:
            raise InputError(
                f"ahead_items is {self.ahead_items}, used_items {self.used_items}; pass 0 or more of each."
            )


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """What the planner found."""

    order: str
    """The candidate with the fewest loads; the first one of equals."""
    loads: dict[str, float]
    """Candidate -> mean loads over the trials, in items of the simulated sample."""
    union: int
    """Items that at least one job needs, in the sample: no order with one epoch per job can load fewer."""
    sampled_fraction: float
    """Part of the items that was simulated."""


def count_loads(
    order: str,
    readers: Mapping[str, Reader],
    *,
    cache_items: int,
    seed: int,
    policy: str = "refcount",
    before: str | None = None,
) -> int:
    """Simulate `readers` under one order and return how many items were loaded from the time 0 on.

    An item that several jobs take at one instant is loaded once, even without
    a cache. `cache_items` items fit into the cache; `policy` is one of
    CACHE_POLICIES (the opportunistic order always counts uses). `before`: the order
    until the time 0, in which `used_items` were used (default: the same one). Raises `InputError`.
    """
    return _Simulation(order, readers, cache_items, seed, policy, before or order).loads


def choose_order(
    readers: Mapping[str, Reader],
    *,
    cache_items: int,
    seed: int,
    candidates: Sequence[str] = ("shared", "dependent"),
    policy: str = "refcount",
    num_trials: int = 32,
    arrival_spread_s: float = 0.0,
    most_items: int = 2000,
    before: str | None = None,
) -> OrderChoice:
    """Simulate every candidate up to `num_trials` times, until one is clearly best, and return it.

    In each trial every job arrives up to `arrival_spread_s` later than stated.
    `before` is the order in which the readers are now (see `count_loads`).
    At most about `most_items` items of the largest job are simulated. The
    window that a shared order needs grows with the root of the number of
    items only: `ahead_items` are scaled by the root for it, the cache is not, so that a sample
    judges that order with caution. Raises `InputError`.
    """
    if not readers or not candidates or num_trials < 1:
        raise InputError(
            f"{len(readers)} readers, {len(candidates)} candidates, {num_trials} trials; give at least 1 of each."
        )
    largest = max(np.asarray(reader.items).size for reader in readers.values())
    fraction = min(1.0, most_items / max(largest, 1))
    small = _sampled(readers, fraction, seed)
    capacity = round(cache_items * fraction)
    found: dict[str, list[int]] = {order: [] for order in candidates}
    for trial in range(num_trials):
        late = stream(seed, "arrivals", trial).random(len(small)) * arrival_spread_s
        jobs = {
            job: replace(reader, arrives_s=reader.arrives_s + float(delay))
            for (job, reader), delay in zip(small.items(), late, strict=True)
        }
        # The same seed and arrivals for every candidate: their differences vary less than they do.
        drawn = derived_seed(seed, "trial", trial)
        for order, counts in found.items():
            scale = math.sqrt(fraction) if order == "shared" else fraction
            scaled = {
                job: replace(reader, ahead_items=round(reader.ahead_items * scale)) for job, reader in jobs.items()
            }
            counts.append(count_loads(order, scaled, cache_items=capacity, seed=drawn, policy=policy, before=before))
        if _clear(np.array(list(found.values()))):
            break
    loads = {order: float(np.mean(counts)) for order, counts in found.items()}
    union = _union(small).size
    return OrderChoice(min(candidates, key=lambda name: loads[name]), loads, union, fraction)


def _clear(counts: NDArray[np.int64]) -> bool:
    """Return whether loads [candidates, trials] tell the best one from each other, or say that it hardly matters."""
    means = counts.mean(axis=1)
    best = int(means.argmin())
    gaps = np.delete(counts, best, axis=0) - counts[best]
    if counts.shape[1] < LEAST_TRIALS:
        return not gaps.size
    error = gaps.std(axis=1, ddof=1) / math.sqrt(counts.shape[1])
    gap = gaps.mean(axis=1)
    return bool(((gap > 3 * error) | (gap + 3 * error < NEGLIGIBLE * means[best])).all())


class _Simulation:
    """Jobs in an event loop; takes of one instant are settled together."""

    def __init__(
        self,
        order: str,
        readers: Mapping[str, Reader],
        cache_items: int,
        seed: int,
        policy: str,
        before: str,
    ) -> None:
        """Run it: under `before` until every job has used what it has, then under `order`."""
        self.loads = 0
        self._readers, self._seed = readers, seed
        self._left = {job: reader.epochs for job, reader in readers.items()}
        # Seneca's entries are counted by use, whatever the policy.
        counted = order == "opportunistic"
        self._form = "augmented" if counted else "encoded"
        self._cache = TieredCache(
            cache_items, (0, 0, 1) if counted else (1, 0, 0), policies="uses" if counted else policy
        )
        past_s = max(reader.used_items / reader.items_per_s for reader in readers.values())
        self._order = self._made(before if past_s else order)
        self._buffered = Buffered(self._order)
        self._taken: dict[int, list[str]] = {}
        self._ahead: dict[str, deque[int]] = {job: deque() for job in readers}
        """Job -> items that were taken for it and not used yet."""
        self._num_holding: Counter[int] = Counter()
        """Item -> jobs that have it ahead."""
        self._process = Process(seed)
        if past_s:
            self._process.after(past_s, self._begin_counting, None if before == order else order)
        for job, reader in readers.items():
            self._process.after(past_s - reader.used_items / reader.items_per_s + reader.arrives_s, self._arrive, job)
        self._process.run()

    def _made(self, order: str) -> JobOrder:
        """Return an empty order."""
        if order == "opportunistic":
            return Opportunistic({}, self._seed, cache=self._cache)
        return pick(ORDERS, order, "order")({}, self._seed)

    def _begin_counting(self, order: str | None) -> None:
        """Count loads from now on; let all jobs go on in `order`, where it is another one."""
        self.loads = 0
        if order is None:
            return
        old = self._buffered
        self._order = self._made(order)
        self._buffered = Buffered(self._order)
        for job in old.order.jobs:
            self._order.add(job, self._readers[job].items, epoch=old.order.epoch(job), remaining=old.needed(job))

    def _arrive(self, job: str) -> None:
        """Let a job join, and begin to take."""
        self._tell_ahead()
        self._order.add(job, self._readers[job].items)
        self._cache.expect(self._order.needed(job))
        self._process.after(0.0, self._begin_taking, job)

    def _begin_taking(self, job: str) -> None:
        """Take what is made ahead at once, then an item at a time."""
        for _ in range(self._readers[job].ahead_items):
            if (item := self._buffered.take(job)) is not None:
                self._note(job, item)
        self._take(job)

    def _tell_ahead(self) -> None:
        """Tell a shared order what was taken and not used, as a data server does."""
        if isinstance(self._order, Shared):
            self._order.ahead = {job: len(items) for job, items in self._ahead.items()}

    def _take(self, job: str) -> None:
        """Take one item; settle after all takes of this instant."""
        item = self._buffered.take(job)
        if item is not None:
            self._note(job, item)
        elif self._ahead[job]:
            self._use(job)
        else:
            self._end_epoch(job)
            return
        self._process.after(1.0 / self._readers[job].items_per_s, self._take, job)

    def _note(self, job: str, item: int) -> None:
        """Note that a job takes an item now."""
        if not self._taken:
            self._process.after(0.0, self._settle)
        self._taken.setdefault(item, []).append(job)

    def _use(self, job: str) -> None:
        """Let a job use the first item that it has ahead."""
        self._num_holding[self._ahead[job].popleft()] -= 1

    def _end_epoch(self, job: str) -> None:
        """Begin the next epoch, or leave."""
        self._left[job] -= 1
        if not self._left[job]:
            self._buffered.remove(job)
            return
        self._tell_ahead()
        self._order.restart(job)
        self._cache.expect(self._order.needed(job))
        self._begin_taking(job)

    def _settle(self) -> None:
        """Serve the takes of this instant: each item from the cache or from a job that has it ahead, or by one load."""
        missing = []
        for item, jobs in self._taken.items():
            lost = [job for job in jobs if self._cache.get(item, job) is None]
            if lost and self._num_holding[item] <= 0:
                missing.append((item, lost))
        for item, jobs in self._taken.items():
            for job in jobs:
                self._ahead[job].append(item)
                self._num_holding[item] += 1
                if len(self._ahead[job]) > self._readers[job].ahead_items:
                    self._use(job)
        self._taken = {}
        self.loads += len(missing)
        for item, lost in missing:
            if isinstance(self._order, Opportunistic):
                self._order.store(item, self._form, b"x", served=lost)
            else:
                self._cache.put(item, self._form, b"x", served=lost)


def _sampled(readers: Mapping[str, Reader], fraction: float, seed: int) -> Mapping[str, Reader]:
    """Return the readers on a fraction of the dataset, at speeds scaled alike: all times stay."""
    if fraction == 1.0:
        return readers
    union = _union(readers)
    keys = item_seeds(derived_seed(seed, "sample"), 0, union, np.zeros_like(union))
    kept = union[keys < np.uint64(int(fraction * PASS))]
    # Numbered anew: the bitmaps of the simulation are as small as the sample.
    number = np.full(int(union[-1]) + 1, -1)
    number[kept] = np.arange(kept.size)
    small = {}
    for job, reader in readers.items():
        found = number[np.asarray(reader.items, np.int64)]
        items = np.sort(found[found >= 0])
        small[job] = replace(
            reader, items=items if items.size else np.zeros(1, np.int64), items_per_s=reader.items_per_s * fraction,
            used_items=round(reader.used_items * fraction),
        )  # fmt: skip
    return small


def _union(readers: Mapping[str, Reader]) -> NDArray[np.int64]:
    """Return the items that at least one reader needs, ascending: by a bitmap, which a million items take 10 ms for."""
    sets = [np.asarray(reader.items, np.int64) for reader in readers.values()]
    flags = np.zeros(max((int(items.max()) + 1 for items in sets if items.size), default=0), bool)
    for items in sets:
        flags[items] = True
    return np.flatnonzero(flags)
