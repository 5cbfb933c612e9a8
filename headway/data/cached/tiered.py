"""A cache of examples in three forms (encoded, decoded, augmented), each with a budget of bytes and a policy.

`get` is a job taking an item, hit or miss; `put` offers what was loaded for
it. Under `expect` the cache knows how many jobs still need each item: that is
what the policy "refcount" (Joader) goes by. Policies are functions from an
entry to its rank; the entry of the lowest rank leaves first, and a newcomer
never displaces a rank above its own. Payloads are copied in and handed out as
read-only views that stay valid after the entry has left. Not for several
threads at once; bytes held never exceed the budgets.

>>> cache = TieredCache(6, split=(0.5, 0.5, 0))
>>> cache.put(7, "encoded", b"jpg"), cache.put(8, "encoded", b"jpg"), cache.put(7, "decoded", b"rgb")
(True, False, True)
>>> form, view = cache.get(7)
>>> form, bytes(view), cache.get(8), cache.hits, cache.misses
('decoded', b'rgb', None, 1, 1)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.data.cached.partition import FORMS, CacheSplit


@dataclass(slots=True)
class CacheEntry:
    """One stored item, as its policy sees it."""

    item: int
    payload: bytes
    refs: int
    """Jobs that still need the item in their epoch."""
    uses_left: int
    """Times it may still be handed out under a policy that counts uses."""
    used_at: int
    """When it was stored or handed out last, in events of the cache."""
    served: set[str] = field(default_factory=set)
    """Jobs that had this very payload, under a policy that counts uses: what stays longer would grow with the jobs."""
    rank: float = 0.0
    begun: bool = True
    """Whether some job had it since a job last began to need it."""


class CachePolicy(Protocol):
    """A cache policy. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, entry: CacheEntry) -> float:
        """Return the rank of `entry`: the lowest leaves first, infinity never; <= 0 is not kept at all."""
        ...


def static(entry: CacheEntry) -> float:
    """Keep what came first for ever (CoorDL): hits are the cached fraction, in every later epoch."""
    return math.inf


def lru(entry: CacheEntry) -> float:
    """Drop what was not used for longest."""
    return float(entry.used_at)


def refcount(entry: CacheEntry) -> float:
    """Drop what the fewest jobs still need, and at once what none needs (Joader)."""
    return float(entry.refs)


def needed(entry: CacheEntry) -> float:
    """Drop first what none needs, then what none has had yet in its epoch, then what the fewest still need.

    Joader's count where jobs follow each other closely, and CoorDL's static cache in the room that they leave: what
    none needs now is kept for the next epoch, and nothing is displaced for its like.
    """
    return 1.0 if not entry.refs else 2.0 + entry.refs if entry.begun else 2.0


def uses(entry: CacheEntry) -> float:
    """Keep until it has been handed out as often as there are jobs (Seneca): nobody meets the same tensor twice.

    Where there is no room, what serves the fewest goes first: else a slow job would fill the cache with what it alone
    has still to take.
    """
    return float(entry.uses_left)


CACHE_POLICIES: dict[str, CachePolicy] = {
    "static": static, "refcount": refcount, "needed": needed, "uses": uses, "lru": lru,
}  # fmt: skip
"""Every policy of a cache. Adding one is adding a line here."""

DEFAULT_POLICIES = {"encoded": "static", "decoded": "static", "augmented": "uses"}
"""Only what is random may be used up: with one job, a use count is worse than none."""


class TieredCache:
    """Items in up to three forms; `get` returns the most prepared one."""

    def __init__(
        self,
        bytes: int,
        split: CacheSplit | Sequence[float] = (1.0, 0.0, 0.0),
        *,
        policies: str | Mapping[str, str] | None = None,
        num_jobs: int = 1,
    ) -> None:
        """Divide `bytes` over (encoded, decoded, augmented) by `split`: fractions that sum to 1 at most.

        `policies` is one of CACHE_POLICIES, or one per form; `num_jobs` is the
        number of uses under "uses". Raises `InputError`.
        """
        if bytes < 0:
            raise InputError(f"bytes is {bytes}; a cache holds 0 or more. Raise it.")
        if num_jobs < 1:
            raise InputError(f"num_jobs is {num_jobs}; pass 1 or more.")
        fractions = _fractions(split)
        chosen = dict.fromkeys(FORMS, policies) if isinstance(policies, str) else policies
        named = {**DEFAULT_POLICIES, **(chosen or {})}
        for form in named:
            pick(DEFAULT_POLICIES, form, "form")
        self.num_jobs = num_jobs
        """Uses of an entry under "uses"; may be changed as jobs come and go."""
        self.form_hits = dict.fromkeys(FORMS, 0)
        """Items handed out, by form."""
        self.misses = 0
        self.evictions = 0
        """Entries that made room for others."""
        self.refused = 0
        """Payloads that found no room."""
        self._watchers: list[tuple[Callable[[int], object], Callable[[int], object]]] = []
        self._bytes = int(bytes)
        self._tiers = {form: _Tier(pick(CACHE_POLICIES, named[form], "cache policy")) for form in FORMS}
        self._prepared_first = [self._tiers[form] for form in reversed(FORMS)]
        self.divide(fractions)
        self._refs: NDArray[np.int32] = np.zeros(0, np.int32)
        self._clock = 0

    @property
    def hits(self) -> int:
        """Items handed out, in whatever form."""
        return sum(self.form_hits.values())

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes held, by form."""
        return {form: tier.used_bytes for form, tier in self._tiers.items()}

    @property
    def capacity_bytes(self) -> dict[str, int]:
        """Budgets, by form."""
        return {form: tier.capacity_bytes for form, tier in self._tiers.items()}

    def __contains__(self, item: int) -> bool:
        """Return whether any form of `item` is here; counts nothing."""
        return any(item in tier.entries for tier in self._tiers.values())

    def __len__(self) -> int:
        """Return the number of payloads."""
        return sum(len(tier.entries) for tier in self._tiers.values())

    def items(self) -> set[int]:
        """Return the items that are here in any form."""
        return set().union(*(tier.entries for tier in self._tiers.values()))

    def watch(self, stored: Callable[[int], object], left: Callable[[int], object]) -> None:
        """Call `stored(item)` after a payload came in, `left(item)` after the last form of an item has left."""
        self._watchers.append((stored, left))

    def expect(self, items: ArrayLike | range, delta: int = 1) -> None:
        """Say that one job more (or `delta=-1`: fewer) needs each of the items, distinct, in its epoch."""
        array = np.asarray(items, np.int64)
        if array.size == 0:
            return
        if int(array.min()) < 0:
            raise InputError(f"item {int(array.min())} is expected; number items from 0, drop the negative ones.")
        self._room_for(int(array.max()))
        self._refs[array] = np.maximum(self._refs[array] + delta, 0)
        meant = np.zeros(self._refs.size, bool)
        meant[array] = True
        for tier in self._prepared_first:
            for entry in [entry for entry in tier.entries.values() if entry.item < meant.size and meant[entry.item]]:
                entry.begun = entry.begun and delta < 0
                self._rerank(tier, entry)

    def refs(self, item: int) -> int:
        """Return how many jobs still need `item`."""
        return int(self._refs[item]) if 0 <= item < self._refs.size else 0

    def get(self, item: int, job: str | None = None, *, expected: bool = True) -> tuple[str, memoryview] | None:
        """Hand `item` to `job`: (form, read-only view), or None when it must be loaded.

        One job less needs it now, if that was `expected`. What counts uses is never handed to the same job twice.
        """
        self._clock += 1
        found: tuple[str, memoryview] | None = None
        if expected and 0 <= item < self._refs.size and self._refs[item] > 0:
            self._refs[item] -= 1
        for form, tier in zip(reversed(FORMS), self._prepared_first, strict=True):
            entry = tier.entries.get(item)
            if entry is None:
                continue
            if found is None and not (tier.counts_uses and job in entry.served):
                found = form, memoryview(entry.payload)
                entry.used_at = self._clock
                entry.uses_left -= 1
                if tier.counts_uses and job is not None:
                    entry.served.add(job)
            entry.begun = True
            self._rerank(tier, entry)
        if found is None:
            self.misses += 1
        else:
            self.form_hits[found[0]] += 1
        return found

    def served(self, item: int) -> set[str]:
        """Return the jobs that had the payload of `item` that counts uses."""
        entries = (tier.entries.get(item) for tier in self._prepared_first if tier.counts_uses)
        return set().union(*(entry.served for entry in entries if entry is not None))

    def usable(self, item: int, job: str) -> bool:
        """Return whether `get(item, job)` would hit; counts nothing."""
        entries = ((tier, tier.entries.get(item)) for tier in self._prepared_first)
        return any(entry is not None and not (tier.counts_uses and job in entry.served) for tier, entry in entries)

    def may_leave(self, item: int, job: str) -> bool:
        """Return whether `get(item, job)` would hit now, and may miss later: no form of it is kept for ever."""
        held = [tier for tier in self._prepared_first if item in tier.entries]
        return bool(held) and not any(tier.policy is static for tier in held) and self.usable(item, job)

    def put(
        self,
        item: int,
        form: str,
        view: bytes | memoryview,
        *,
        uses: int | None = None,
        served: Iterable[str] = (),
    ) -> bool:
        """Offer a payload; return whether it is here afterwards.

        `uses` says how often it may be used in all (default: `num_jobs`),
        `served` which jobs have used it already. Raises `InputError` on an unknown form.
        """
        tier = pick(self._tiers, form, "form")
        if item < 0:
            raise InputError(f"the item is {item}; number items from 0, drop the negative ones.")
        if item in tier.entries:
            return True
        self._clock += 1
        had = set(served)
        size = memoryview(view).nbytes
        total = self.num_jobs if uses is None else uses
        entry = CacheEntry(item, b"", self.refs(item), total - len(had), self._clock, had)
        entry.rank = tier.policy(entry)
        if entry.rank <= 0 or not self._make_room(tier, size, entry.rank):
            self.refused += 1
            return False
        entry.payload = view if isinstance(view, bytes) else memoryview(view).tobytes()
        tier.add(entry)
        for stored, _ in self._watchers:
            stored(item)
        return True

    def may_keep(self, item: int, form: str, size: int) -> bool:
        """Return whether `put` of so many bytes could find room now: what cannot need not be made for it."""
        tier = pick(self._tiers, form, "form")
        if item in tier.entries or size > tier.capacity_bytes:
            return False
        if tier.used_bytes + size <= tier.capacity_bytes:
            return True
        lowest = tier.lowest()
        rank = tier.policy(CacheEntry(item, b"", self.refs(item), self.num_jobs, self._clock))
        return lowest is not None and lowest.rank < rank

    def divide(self, split: CacheSplit | Sequence[float]) -> None:
        """Divide the same bytes anew; a form that has less room than before lets its latest entries go."""
        left = self._bytes
        for tier, share in zip(self._tiers.values(), _fractions(split), strict=True):
            # The millionth undoes the rounding of shares like 0.35, of which there may be a byte less than is meant.
            tier.capacity_bytes = min(int(self._bytes * share + 1e-6), left)
            left -= tier.capacity_bytes
            for entry in reversed(list(tier.entries.values())):
                if tier.used_bytes <= tier.capacity_bytes:
                    break
                self._drop(tier, entry)
                self.evictions += 1

    def discard(self, item: int, form: str | None = None) -> None:
        """Drop `item` in one form, or in all."""
        if form is not None:
            pick(self._tiers, form, "form")
        for name, tier in self._tiers.items():
            if form in (None, name) and item in tier.entries:
                self._drop(tier, tier.entries[item])

    def release(self, items: ArrayLike | range, job: str) -> None:
        """Say that `job` will not use these items any more: one use less of each that it has not had."""
        meant = set(np.asarray(items).tolist())
        for tier in (tier for tier in self._prepared_first if tier.counts_uses):
            for entry in [tier.entries[item] for item in meant & tier.entries.keys()]:
                if job not in entry.served:
                    entry.uses_left -= 1
                    self._rerank(tier, entry)

    def _make_room(self, tier: _Tier, size: int, rank: float) -> bool:
        """Let entries of lower rank go until `size` bytes are free; False and nothing gone if that is not enough."""
        if size > tier.capacity_bytes:
            return False
        leaving: list[CacheEntry] = []
        free = tier.capacity_bytes - tier.used_bytes
        while free < size:
            entry = tier.lowest()
            if entry is None or entry.rank >= rank:
                for kept in leaving:
                    tier.push(kept)
                return False
            heapq.heappop(tier.heap)
            leaving.append(entry)
            free += len(entry.payload)
        for entry in leaving:
            self._drop(tier, entry)
            self.evictions += 1
        return True

    def _rerank(self, tier: _Tier, entry: CacheEntry) -> None:
        """Read the entry's count anew; drop it when its rank falls to 0."""
        entry.refs = self.refs(entry.item)
        rank = tier.policy(entry)
        if rank <= 0:
            self._drop(tier, entry)
        elif rank != entry.rank:
            entry.rank = rank
            tier.push(entry)

    def _drop(self, tier: _Tier, entry: CacheEntry) -> None:
        """Take an entry out; views of it live on."""
        del tier.entries[entry.item]
        tier.used_bytes -= len(entry.payload)
        if entry.item not in self:
            for _, left in self._watchers:
                left(entry.item)

    def _room_for(self, item: int) -> None:
        """Make the table of counts long enough."""
        if item >= self._refs.size:
            longer = np.zeros(max(item + 1, 2 * self._refs.size), np.int32)
            longer[: self._refs.size] = self._refs
            self._refs = longer


def _fractions(split: CacheSplit | Sequence[float]) -> tuple[float, ...]:
    """Return the share of each form, checked."""
    fractions = split.fractions if isinstance(split, CacheSplit) else tuple(split)
    if len(fractions) != len(FORMS) or not all(0 <= f <= 1 for f in fractions) or sum(fractions) > 1 + 1e-9:
        raise InputError(f"split is {fractions}; give 3 fractions of 0 to 1 that sum to 1 at most.")
    return fractions


class _Tier:
    """One form: its entries, and a heap by rank in which outdated places are skipped."""

    def __init__(self, policy: CachePolicy) -> None:
        self.capacity_bytes = 0
        self.policy = policy
        self.counts_uses = policy is uses
        self.used_bytes = 0
        self.entries: dict[int, CacheEntry] = {}
        self.heap: list[tuple[float, int, int]] = []

    def add(self, entry: CacheEntry) -> None:
        """Store an entry for which there is room."""
        self.entries[entry.item] = entry
        self.used_bytes += len(entry.payload)
        self.push(entry)

    def push(self, entry: CacheEntry) -> None:
        """Note the entry's rank; what never leaves needs no place."""
        if entry.rank == math.inf:
            return
        if len(self.heap) > 64 + 4 * len(self.entries):
            self.heap = [(e.rank, e.used_at, e.item) for e in self.entries.values()]
            heapq.heapify(self.heap)
        else:
            heapq.heappush(self.heap, (entry.rank, entry.used_at, entry.item))

    def lowest(self) -> CacheEntry | None:
        """Return the entry that leaves first, or None; it stands at the top of the heap."""
        while self.heap:
            rank, used_at, item = self.heap[0]
            entry = self.entries.get(item)
            if entry is not None and entry.rank == rank and entry.used_at == used_at:
                return entry
            heapq.heappop(self.heap)
        return None
