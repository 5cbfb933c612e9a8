"""Joader's order: every job draws uniformly from what it still needs, and as many jobs as possible draw the same item.

Jobs are taken by ascending number of needed items. `common[k]` items are
needed by all jobs from the k-th on; the first of them draws one of those with
its fair probability, and each later job agrees with probability (needed by the
one before) / (needed by it), so that its own law stays uniform; the first that
does not agree draws from what is left (Joader, NeurIPS 2022). For two jobs
A, B the probability of one item for both is |A & B| / max(|A|, |B|), the most
that any coupling allows.

Items lie in bags: `shared[k]` holds what all jobs from the k-th on need and
the one before does not, `private[k]` what the k-th needs and a later one
does not. Sampling takes O(jobs) per step. All jobs of a step lose one item, so
their order by size stays; a change of jobs or mask sorts anew.

>>> order = Dependent({"a": range(6), "b": range(6)}, seed=1)
>>> [sorted(jobs) for jobs in order.step().values()]
[['a', 'b']]
>>> sum(len(order.step()) for _ in range(9)), order.remaining("a")
(5, 0)

Seneca's order: a job whose next item is not cached takes one that is, and comes back to its own later.

Every job has a permutation of its own. When the next item of it would have to
be loaded, a cached item that the job still needs in this epoch goes first,
drawn uniformly; the item it stands for stays next, so each item is given
exactly once per epoch (Seneca, FAST 2026, whose published code loses track of
the originals). J jobs then read each item from storage once together: a miss
rate of 1/J at any size of cache. The price is an order that leans
towards what is cached: `substituted_fraction` says how much. What is on its
way for another job counts as cached, where the caller knows of such (`Nearby`).
What a form keeps for ever (policy "static") stands for nothing: it is as cheap
at its own turn, and would open every epoch with the same items.

>>> from headway.data.cached.tiered import TieredCache
>>> order = Opportunistic({"a": range(4)}, seed=0, cache=TieredCache(2, (0, 0, 1)))
>>> for item in (1, 3):
...     stored = order.cache.put(item, "augmented", b"x")
>>> [item in (1, 3) for _ in range(4) for item in order.step()], order.num_substituted["a"] > 0
([True, True, False, False], True)
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.rng import stream
from headway.data.cached.tiered import TieredCache
from headway.data.orders.job_order import Flags, Given, JobOrder

BLOCK = 1 << 12
"""Random numbers drawn at once."""


class Dependent(JobOrder):
    """Joader's dependent sampling: uniform for every job, coupled as closely as the chain allows."""

    coupled = True
    _names: list[str]
    _sizes: list[int]
    _shared: list[array[int]]
    _private: list[array[int]]
    _uniform: Callable[[], float]

    def _build(self) -> None:
        """Sort the jobs by what they need and fill the bags."""
        # The sort is stable: equal sizes keep the order in which the jobs came.
        self._names = sorted(self._active, key=self._num_needed.__getitem__)
        self._sizes = [self._num_needed[job] for job in self._names]
        needs = [self._needs[job] for job in self._names]
        size = max((flags.size for flags in needs), default=0)
        self._shared, self._private = _bags([np.pad(flags, (0, size - flags.size)) for flags in needs])
        rng = stream(self.seed, "dependent", self.num_steps)
        blocks = iter(lambda: rng.random(BLOCK).tolist(), None)
        self._uniform = chain.from_iterable(blocks).__next__

    def _draw(self) -> Given:
        """Run the chain once."""
        names, private, uniform = self._names, self._private, self._uniform
        while names and self._sizes[0] == self._steps:  # it needs nothing any more: nothing is common to it and others
            for bags in (names, self._sizes, self._shared, private):
                del bags[0]
        num_jobs, sizes, shared = len(names), self._sizes, self._shared
        common = list(accumulate(map(len, shared)))
        given: Given = {}
        moved: list[tuple[int, int]] = []
        first, before, below = 0, -1, 0
        while first < num_jobs:
            gone = self._steps + below
            agreed = common[first] - below
            needed = sizes[first] - gone
            last = first + 1
            # One number decides whether the first job takes a common item, and which item it is in either case.
            point = uniform() * needed
            if point >= agreed:
                bag, place = private[first], int(point) - agreed
                item = bag[place]
                receivers = {names[first]}
            else:
                while last < num_jobs:
                    others = sizes[last] - gone
                    if others > needed and uniform() * others >= needed:
                        break
                    needed = others
                    last += 1
                place = below + int(point)
                level = bisect_right(common, place, before + 1, first)
                bag, place = shared[level], place - (common[level - 1] if level else 0)
                item = bag[place]
                receivers = set(names[first:last])
                # The jobs after `last` still need it, and so do those between its level and `first`, who drew before.
                if last < num_jobs:
                    moved.append((last, item))
                for job in range(level, first):
                    private[job].append(item)
            # Removed in O(1): the last entry takes the place.
            bag[place] = bag[-1]
            bag.pop()
            if item in given:
                given[item] |= receivers
            else:
                given[item] = receivers
            below, before, first = common[first], first, last
        # Not before the step is over: the later jobs would draw what the earlier ones have just been given.
        for level, item in moved:
            shared[level].append(item)
        return given


def _bags(needs: list[Flags]) -> tuple[list[array[int]], list[array[int]]]:
    """Return (shared, private) bags [jobs] of bitmaps in the order of the chain."""
    shared: list[array[int]] = []
    private: list[array[int]] = []
    if not needs:
        return shared, private
    suffix = needs[-1]
    for job in range(len(needs) - 1, -1, -1):
        private.append(_bag(needs[job] & ~suffix))
        narrower = suffix & needs[job - 1] if job else np.zeros_like(suffix)
        shared.append(_bag(suffix & ~narrower))
        suffix = narrower
    return shared[::-1], private[::-1]


def _bag(flags: Flags) -> array[int]:
    """Return the items of a bitmap, four bytes each."""
    items: NDArray[np.int32] = np.flatnonzero(flags).astype(np.int32)
    return array("i", items.tobytes())


# Seneca's order: a job whose next item is not cached takes one that is, and comes back to its own later.


class Nearby(Protocol):
    """Items that can be had without loading them, besides those in the cache: on their way, or held for somebody."""

    def __iter__(self) -> Iterator[int]:
        """Yield them."""
        ...

    def usable(self, item: int, job: str) -> bool:
        """Return whether `job` may have `item`."""
        ...

    def watch(self, came: Callable[[int], object], went: Callable[[int], object]) -> None:
        """Call `came(item)` when it becomes so for an item, `went(item)` when it may be so no more."""
        ...


class Opportunistic(JobOrder):
    """Seneca's opportunistic sampling over one cache, with exactly-once epochs.

    The caller loads what is not in the cache and offers it with `store`. A state holds sets, not the cache: an order
    that is restored begins with whatever its cache holds then.
    """

    draws_again = False

    def __init__(
        self,
        jobs: Mapping[str, ArrayLike | range],
        seed: int = 0,
        *,
        cache: TieredCache,
        nearby: Nearby | None = None,
        size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Begin the first epoch of `jobs` over `cache`, whose use counts follow the number of jobs."""
        self.cache = cache
        self._nearby = nearby
        self.num_given: dict[str, int] = {}
        """Job that is here -> items it received."""
        self.num_substituted: dict[str, int] = {}
        """Job that is here -> items it received in place of its own next one."""
        self._open: dict[str, bytearray] = {}
        self._pools: dict[str, _Pool] = {}
        cache.watch(self._came, self._went)
        if nearby is not None:
            nearby.watch(self._came, self._went)
        super().__init__(jobs, seed, size=size, fingerprint=fingerprint)

    def substituted_fraction(self, job: str) -> float:
        """Return the fraction of the items of `job` that came in place of its own next one."""
        self._known(job)
        return self.num_substituted.get(job, 0) / max(self.num_given.get(job, 0), 1)

    def store(self, item: int, form: str, view: bytes | memoryview, *, served: Iterable[str]) -> bool:
        """Offer the cache what was loaded for the jobs `served`: each job whose set holds it may use it once."""
        uses = sum(item < flags.size and bool(flags[item]) for flags in self._subset.values())
        return self.cache.put(item, form, view, uses=uses, served=served)

    def _forget(self, job: str) -> None:
        """The cache need not wait for `job`."""
        for table in (self._open, self._pools, self.num_given, self.num_substituted):
            table.pop(job, None)
        self.cache.release(np.flatnonzero(self._subset[job]), job)

    def _build(self) -> None:
        """Lay down what is left of each job's own order, and pool what the cache holds for it."""
        self.cache.num_jobs = max(len(self._subset), 1)
        self._rng = stream(self.seed, "opportunistic", self.num_steps)
        self._open = {job: bytearray(self._needs[job].tobytes()) for job in self._active}
        self._own = {job: array("i", self._own_order(job).astype(np.int32).tobytes()) for job in self._active}
        self._place = dict.fromkeys(self._active, 0)
        self._pools = {job: _Pool() for job in self._active}
        for item in sorted(self.cache.items().union(self._nearby or ())):
            self._came(item)

    def _draw(self) -> Given:
        given: Given = {}
        for job in self._active:
            if self._num_needed[job] > len(self._taken[job]):
                given.setdefault(self._draw_one(job), set()).add(job)
        return given

    def _draw_one(self, job: str) -> int:
        own, place, needed = self._own[job], self._place[job], self._open[job]
        while not needed[own[place]]:
            place += 1
        self._place[job] = place
        item, pool = own[place], self._pools[job]
        if len(pool) and item not in pool and not self.cache.usable(item, job):
            item = pool.at(int(self._rng.random() * len(pool)))
            self.num_substituted[job] = self.num_substituted.get(job, 0) + 1
        self.num_given[job] = self.num_given.get(job, 0) + 1
        pool.discard(item)
        needed[item] = 0
        return item

    def _came(self, item: int) -> None:
        """Note that `item` is cached or nearby now: it may be given to whoever needs it."""
        for job, needed in self._open.items():
            if item < len(needed) and needed[item] and self._usable(item, job):
                self._pools[job].add(item)
            elif item in self._pools[job]:
                self._pools[job].discard(item)

    def _went(self, item: int) -> None:
        """Note that `item` has left the cache, or is nearby no more."""
        for job, pool in self._pools.items():
            if item in pool and not self._usable(item, job):
                pool.discard(item)

    def _usable(self, item: int, job: str) -> bool:
        """Return whether `job` had better take `item` now: what is cached for good is as cheap later."""
        return self.cache.may_leave(item, job) or (self._nearby is not None and self._nearby.usable(item, job))

    def _more_state(self) -> dict[str, Any]:
        return {"num_given": dict(self.num_given), "num_substituted": dict(self.num_substituted)}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        self.num_given, self.num_substituted = dict(state["num_given"]), dict(state["num_substituted"])


class _Pool:
    """A set from which any entry can be picked by number, in O(1)."""

    def __init__(self) -> None:
        self._items: list[int] = []
        self._index: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: int) -> bool:
        return item in self._index

    def at(self, index: int) -> int:
        """Return the entry at `index`."""
        return self._items[index]

    def add(self, item: int) -> None:
        """Add an entry, once."""
        if item not in self._index:
            self._index[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: int) -> None:
        """Remove an entry if it is here; the last one takes its place."""
        index = self._index.pop(item, None)
        if index is None:
            return
        last = self._items.pop()
        if last != item:
            self._items[index] = last
            self._index[last] = index
