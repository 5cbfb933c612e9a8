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
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from headway.core.rng import stream
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
        self._shared, self._private = _bags([_padded(flags, size) for flags in needs])
        rng = stream(self.seed, "dependent", self.num_steps)
        blocks = iter(lambda: rng.random(BLOCK).tolist(), None)
        self._uniform = chain.from_iterable(blocks).__next__

    def _draw(self) -> Given:
        """Run the chain once."""
        names, private, uniform = self._names, self._private, self._uniform
        while names and self._sizes[0] == self._steps:
            self._drop_first()
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

    def _drop_first(self) -> None:
        """Let the smallest job go: it needs nothing any more, so nothing is common to it and the others."""
        for bags in (self._names, self._sizes, self._shared, self._private):
            del bags[0]


def _padded(flags: Flags, size: int) -> Flags:
    """Return the bitmap at full length."""
    return flags if flags.size == size else np.concatenate([flags, np.zeros(size - flags.size, bool)])


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
