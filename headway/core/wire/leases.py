"""Who works on what, and for how long: leases with generation numbers on an injected clock.

Use it wherever work is handed to holders that may die, hang or be cut off, as
splits of a dataset are to workers. A key waits or is leased, until it is
forgotten. Every lease has a generation number, larger than any before it, so
an answer says under which lease the work was done. A holder keeps its leases
by beating; one that has not beaten for `lease_s` is `silent`, and once it is
dropped its keys wait again, first in line. A key may be leased a second time
while the first lease runs (a straggler). Keys are any hashable values, times
are seconds of the clock given.

>>> now = [0.0]
>>> leases = Leases(["a", "b"], lease_s=10.0, clock=lambda: now[0])
>>> first = leases.take("w0")
>>> first.key, first.generation
('a', 1)
>>> now[0] = 11.0
>>> leases.silent(), [lease.key for lease in leases.drop("w0")], leases.take("w1").generation
(['w0'], ['a'], 2)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headway.core.errors import InputError

K = TypeVar("K", bound=Hashable)

TERM = 1 << 32
"""Generations per life of a table: one that is restored goes on at the next multiple, above all it ever gave out,
also after its last state was written."""


@dataclass(frozen=True, slots=True)
class Lease(Generic[K]):
    """One key in the hands of one holder."""

    key: K
    holder: str
    generation: int
    """Larger than that of any earlier lease of any key."""
    taken_s: float
    """When, on the table's clock."""


class Leases(Generic[K]):
    """A table of keys that wait in order, or are leased."""

    def __init__(
        self,
        keys: Iterable[K] = (),
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        term: int = 0,
    ) -> None:
        """Raise `InputError` on a lease that ends before it begins."""
        if not lease_s > 0:
            raise InputError(f"lease_s is {lease_s}; a lease lasts longer than 0 s. Pass the silence you can bear.")
        self.lease_s, self.term = lease_s, term
        self._clock = clock
        self._last = term * TERM
        self._waiting: dict[K, None] = dict.fromkeys(keys)
        self._leased: dict[K, list[Lease[K]]] = {}
        self._seen: dict[str, float] = {}

    @property
    def waiting(self) -> list[K]:
        """Keys that nobody holds, in the order in which they are handed out."""
        return list(self._waiting)

    def add(self, keys: Iterable[K]) -> None:
        """Let more keys wait; those known already stay what they are."""
        for key in keys:
            if key not in self._leased:
                self._waiting.setdefault(key)

    def forget(self, keys: Iterable[K]) -> list[Lease[K]]:
        """Drop keys altogether; returns the leases that end with them."""
        ended = []
        for key in keys:
            self._waiting.pop(key, None)
            ended += self._leased.pop(key, [])
        return ended

    def beat(self, holder: str) -> None:
        """Note that `holder` lives."""
        self._seen[holder] = self._clock()

    def take(self, holder: str, choose: Callable[[K], Any] | None = None) -> Lease[K] | None:
        """Lease the next waiting key to `holder`, None when there is none.

        `choose` ranks keys, smallest first, and refuses one with None.
        """
        key = next(iter(self._waiting), None) if choose is None else _smallest(self._waiting, choose)
        if key is None:
            return None
        del self._waiting[key]
        return self._lease(key, holder)

    def repeat(
        self, holder: str, *, older_than_s: float = 0.0, most: int = 2, choose: Callable[[Lease[K]], Any] | None = None
    ) -> Lease[K] | None:
        """Lease to `holder` what another one has held longest (more than `older_than_s`), None when nothing qualifies.

        A key has at most `most` leases at once; `choose` ranks the candidates instead of their age, as in `take`.
        """
        now = self._clock()
        slow = [
            held[0]
            for held in self._leased.values()
            if len(held) < most and now - held[0].taken_s > older_than_s and all(x.holder != holder for x in held)
        ]
        lease = _smallest(slow, choose or (lambda lease: lease.generation))
        return None if lease is None else self._lease(lease.key, holder)

    def adopt(self, key: K, holder: str, generation: int) -> bool:
        """Take over a lease given out in an earlier life of the table, if its key still waits; says whether it did."""
        if key not in self._waiting or not 0 < generation <= self._last:
            return False
        del self._waiting[key]
        self.beat(holder)
        self._leased[key] = [Lease(key, holder, generation, self._clock())]
        return True

    def held(self, key: K) -> list[Lease[K]]:
        """Return the leases of a key that run, the oldest first."""
        return list(self._leased.get(key, ()))

    def holding(self, holder: str) -> list[Lease[K]]:
        """Return the leases of a holder that run."""
        return [lease for held in self._leased.values() for lease in held if lease.holder == holder]

    def release(self, key: K, generation: int) -> bool:
        """End one lease; its key waits again, first in line, unless another lease runs. False when it had ended."""
        held = self._leased.get(key, [])
        left = [lease for lease in held if lease.generation != generation]
        if len(left) == len(held):
            return False
        if left:
            self._leased[key] = left
        else:
            del self._leased[key]
            self._waiting = {key: None, **self._waiting}
        return True

    def drop(self, holder: str) -> list[Lease[K]]:
        """Forget a holder; returns the leases that it lost, whose keys wait again in their order."""
        self._seen.pop(holder, None)
        lost = self.holding(holder)
        for lease in reversed(lost):
            self.release(lease.key, lease.generation)
        return lost

    def silent(self) -> list[str]:
        """Return the holders that have not beaten for `lease_s`."""
        limit = self._clock() - self.lease_s
        return [holder for holder, seen_s in self._seen.items() if seen_s < limit]

    def _lease(self, key: K, holder: str) -> Lease[K]:
        self._last += 1
        lease = Lease(key, holder, self._last, self._clock())
        self._leased.setdefault(key, []).append(lease)
        self.beat(holder)
        return lease


T = TypeVar("T")


def _smallest(candidates: Iterable[T], rank: Callable[[T], Any]) -> T | None:
    """Return the candidate of the smallest rank, the first of equals; those without a rank (None) are out."""
    ranked = [(place, candidate) for candidate in candidates if (place := rank(candidate)) is not None]
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else None
