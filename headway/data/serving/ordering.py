"""The order that the jobs of a data server share, and the moment at which it may become another one.

A named strategy stays. "auto" takes the shared or the dependent order,
whichever loads less in a simulation of the jobs present; it decides when a job begins an epoch, from the jobs' sets,
speeds and numbers of items used, never from which items were drawn. So no job's law changes: what is
left of its epoch is a uniform permutation in the new order as it was in the old one.

>>> ordering = Ordering("auto", size=6, seed=1)
>>> ordering.begin("a", range(6), epoch=0)
>>> sorted(ordering.take("a") for _ in range(6)), ordering.take("a"), ordering.name
([0, 1, 2, 3, 4, 5], None, 'shared')
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.tables import pick
from headway.data.caches.cache import TieredCache
from headway.data.orders.choice import Reader, choose_order
from headway.data.orders.job_order import Buffered, JobOrder
from headway.data.orders.opportunistic import Nearby, Opportunistic
from headway.data.orders.strategies import ORDERS, Shared

AUTO = "auto"
CANDIDATES = ("shared", "dependent")
QUEUE = 1 << 16
"""Indices that wait for a slow job at most; beyond that it is no longer coupled to the others."""
TRIALS, MOST_ITEMS = 4, 400
"""Size of the simulation: 0.1 s for four jobs."""
LEAST_GAIN = 0.01
"""Part of the loads that another order must save: with a change, what jobs have drawn together so far is lost."""


class Ordering:
    """Which job gets which item next."""

    def __init__(
        self,
        name: str,
        *,
        size: int,
        seed: int,
        cache: TieredCache | None = None,
        nearby: Nearby | None = None,
    ) -> None:
        """Use the strategy `name`, or "auto". Raises `InputError` on another name."""
        pick({AUTO: None, **ORDERS}, name, "order")
        self._auto = name == AUTO
        self.name = CANDIDATES[0] if self._auto else name
        """The strategy in use."""
        self.num_changes = 0
        self._size, self._seed = size, seed
        self._cache, self._nearby = cache, nearby
        self._items: dict[str, NDArray[np.int64]] = {}
        self._whole: dict[str, NDArray[np.int64]] = {}
        """Job -> what it needed when its epoch began in the present order, ascending."""
        self._buffered = Buffered(self._made(), limit=QUEUE)

    def begin(
        self,
        job: str,
        items: ArrayLike | range,
        *,
        epoch: int,
        remaining: ArrayLike | None = None,
        ahead: Mapping[str, int] | None = None,
        items_per_s: Mapping[str, float] | None = None,
        cache_items: int = 0,
        made_ahead: Mapping[str, int] | None = None,
    ) -> None:
        """Let `job` begin `epoch` of its `items`, of which `remaining` is left (default: everything).

        `ahead`: job -> items taken for it that it has not used yet. "auto" also
        goes by `items_per_s` (job -> speed), `cache_items`, and `made_ahead`: job -> items that
        are taken for it ahead of use at most, which others may share. Raises `InputError`.
        """
        if isinstance(self._buffered.order, Shared):
            self._buffered.order.ahead = dict(ahead or {})
        if job in self._items:
            self._buffered.begin(job, epoch, remaining)
        else:
            self._buffered.order.add(job, items, epoch=epoch, remaining=remaining)
            self._items[job] = np.asarray(items, np.int64)
        if self._auto:
            self._whole[job] = self._buffered.needed(job)
            self._decide(items_per_s or {}, cache_items, ahead or {}, made_ahead or {})

    def catch_up(self, job: str, ahead: Mapping[str, int]) -> bool:
        """Let a job that has fallen behind the others go on with them, where the order can; return whether it did."""
        order = self._buffered.order
        if not isinstance(order, Shared) or job not in self._items:
            return False
        order.ahead = dict(ahead)
        return order.catch_up(job)

    def take(self, job: str) -> int | None:
        """Return the next item of `job`, None when its epoch is over."""
        return self._buffered.take(job)

    def remove(self, job: str) -> None:
        """Let a job go, if it is here."""
        self._whole.pop(job, None)
        if self._items.pop(job, None) is not None:
            self._buffered.remove(job)

    def substituted_fraction(self, job: str) -> float:
        """Return the part of a job's items that came in place of its own next one (opportunistic order)."""
        order = self._buffered.order
        return order.substituted_fraction(job) if isinstance(order, Opportunistic) and job in self._items else 0.0

    def substitutions(self, job: str) -> dict[str, int]:
        """Return the items that a job was given, and how many came in place of its own next one; {} elsewhere."""
        order = self._buffered.order
        if not isinstance(order, Opportunistic):
            return {}
        return {"substituted": order.num_substituted.get(job, 0), "items": order.num_given.get(job, 0)}

    def _made(self) -> JobOrder:
        """Return an empty order; each later one draws from a seed of its own."""
        seed = derived_seed(self._seed, "ordering", self.num_changes)
        if self.name != "opportunistic":
            return ORDERS[self.name]({}, seed, size=self._size)
        if self._cache is None:
            raise InputError("the opportunistic order goes by a cache. Pass cache=.")
        return Opportunistic({}, seed, cache=self._cache, nearby=self._nearby, size=self._size)

    def _decide(
        self,
        items_per_s: Mapping[str, float],
        cache_items: int,
        ahead: Mapping[str, int],
        made_ahead: Mapping[str, int],
    ) -> None:
        """Change the order if another one loads less."""
        left = {job: num for job in self._items if (num := self._buffered.needed(job).size)}
        best = CANDIDATES[0]
        # Jobs of one set are side by side in the shared order, from wherever the later one begins: no other loads less.
        if len({self._whole[job].tobytes() for job in left}) > 1:
            speed = items_per_s if left.keys() <= items_per_s.keys() else dict.fromkeys(left, 1.0)
            readers = {
                job: Reader(
                    self._whole[job], items_per_s=speed[job], ahead_items=made_ahead.get(job, 0),
                    used_items=max(self._whole[job].size - num - ahead.get(job, 0), 0),
                )
                for job, num in left.items()
            }  # fmt: skip
            choice = choose_order(
                readers, cache_items=cache_items, seed=self._seed, candidates=CANDIDATES, num_trials=TRIALS,
                most_items=MOST_ITEMS, before=self.name,
            )  # fmt: skip
            gains = choice.loads[choice.order] < (1 - LEAST_GAIN) * choice.loads[self.name]
            best = choice.order if gains else self.name
        if best != self.name:
            self._change(best)

    def _change(self, name: str) -> None:
        """Let every job go on in another order with what it has not taken."""
        old = self._buffered
        self.name, self.num_changes = name, self.num_changes + 1
        self._buffered = Buffered(self._made(), limit=QUEUE)
        for job, items in self._items.items():
            self._buffered.order.add(job, items, epoch=old.order.epoch(job), remaining=old.needed(job))
            self._whole[job] = old.needed(job)
