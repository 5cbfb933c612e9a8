"""Who works on what, for how long, and whose answer counts: leases with generation numbers on an injected clock.

Use it wherever work is handed to holders that may die, hang or be cut off:
splits of a dataset to workers, hosts to an attempt, rounds to a job. A key
waits, is leased, or is finished. Every lease has a generation number, larger
than any before it, so an answer says under which lease the work was done. A
holder keeps its leases by beating; one that has not beaten for `lease_s`
loses them, and their keys wait again, first in line. A key may be leased a
second time while the first lease runs (a straggler); the first to finish
wins. Keys are any hashable values, times are seconds of the clock given.

>>> now = [0.0]
>>> leases = Leases(["a", "b"], lease_s=10.0, clock=lambda: now[0])
>>> first = leases.take("w0")
>>> first.key, first.generation
('a', 1)
>>> now[0] = 11.0
>>> [lease.key for lease in leases.expire()], leases.take("w1").generation
(['a'], 2)
>>> leases.finish("a", 2), leases.finish("a", 1)
(True, False)
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
    """A table of keys that wait in order, are leased, or are finished.

    `late` says what becomes of an answer under a lease that was lost: "accept"
    where equal work gives equal results, "refuse" where a holder that was cut
    off must not act any more (fencing).
    """

    def __init__(
        self,
        keys: Iterable[K] = (),
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        late: str = "accept",
        term: int = 0,
    ) -> None:
        """Raise `InputError` on a lease that ends before it begins, or an unknown `late`."""
        if not lease_s > 0:
            raise InputError(f"lease_s is {lease_s}; a lease lasts longer than 0 s. Pass the silence you can bear.")
        if late not in ("accept", "refuse"):
            raise InputError(f"late is {late!r}; choose 'accept' or 'refuse'.")
        self.lease_s, self.term = lease_s, term
        self._clock, self._late = clock, late
        self._last = term * TERM
        self._waiting: dict[K, None] = dict.fromkeys(keys)
        self._leased: dict[K, list[Lease[K]]] = {}
        self._finished: set[K] = set()
        self._seen: dict[str, float] = {}

    @property
    def waiting(self) -> list[K]:
        """Keys that nobody holds, in the order in which they are handed out."""
        return list(self._waiting)

    def add(self, keys: Iterable[K]) -> None:
        """Let more keys wait; those known already stay what they are."""
        for key in keys:
            if key not in self._leased and key not in self._finished:
                self._waiting.setdefault(key)

    def forget(self, keys: Iterable[K]) -> list[Lease[K]]:
        """Drop keys altogether; returns the leases that end with them."""
        ended = []
        for key in keys:
            self._waiting.pop(key, None)
            self._finished.discard(key)
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

    def finish(self, key: K, generation: int | None = None) -> bool:
        """Note that work on `key` is done; True for the answer that counts, False for any after it.

        With a `generation` the answer counts only if that lease was given out,
        and still runs where `late` is "refuse". A key that nobody ever named is never finished.
        """
        if key in self._finished or not (key in self._leased or key in self._waiting):
            return False
        runs = any(lease.generation == generation for lease in self._leased.get(key, ()))
        if generation is not None and not runs and (self._late == "refuse" or not 0 < generation <= self._last):
            return False
        self._waiting.pop(key, None)
        self._leased.pop(key, None)
        self._finished.add(key)
        return True

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

    def expire(self) -> list[Lease[K]]:
        """Drop every silent holder; returns the leases they lost."""
        return [lease for holder in self.silent() for lease in self.drop(holder)]

    def state(self) -> dict[str, Any]:
        """Return what a table goes on from after its process died: leased keys wait again in it."""
        return {"term": self.term, "waiting": [*self._leased, *self._waiting], "finished": list(self._finished)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`, in the next term."""
        self.term = int(state["term"]) + 1
        self._last = self.term * TERM
        self._waiting, self._finished = dict.fromkeys(state["waiting"]), set(state["finished"])
        self._leased, self._seen = {}, {}

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
