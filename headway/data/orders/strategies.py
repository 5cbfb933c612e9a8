"""Orders of several jobs over one dataset: who receives which item when. Every job meets its own items once an epoch.

- `Independent`: each job has a permutation of its own; nothing is shared on purpose.
- `Shared`: one permutation of the whole dataset, each job takes its own items of it: jobs of like size that start
  together need the same items within a short time, and a small cache serves them all.
- `Dependent`: Joader's coupling (`headway.data.orders.random_orders`): for unlike sizes and starts.
- `Opportunistic`: Seneca's substitution (`headway.data.orders.random_orders`): what is cached goes first.

In the first three the order of one job is a uniform permutation of its set.
`headway.data.orders.choice` simulates them and chooses.

>>> order = Shared({"a": [0, 1, 2], "b": [1, 2, 3]}, seed=3)
>>> sorted(item for _ in range(3) for item, jobs in order.step().items() if "b" in jobs)
[1, 2, 3]
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.data.bytes.order import item_seeds
from headway.data.orders.job_order import Flags, Given, JobOrder, packed_flags, unpacked_flags
from headway.data.orders.random_orders import Dependent, Opportunistic

PASS = 1 << 64
"""Places in one pass of the shared order: an item stands at its key, a hash of (seed, pass, item)."""


class _Sequenced(JobOrder):
    """An order in which each job's epoch is laid down when it begins, whatever the other jobs do."""

    _laid: dict[str, array[int]]
    """Job -> what it needed when its epoch was laid down, in order; what it has taken since is the first part."""

    def _prepare(self) -> None:
        self._laid = {}

    def _forget(self, job: str) -> None:
        self._laid.pop(job, None)

    def _start_over(self, job: str) -> None:
        self._laid.pop(job, None)

    def _load_more(self, state: Mapping[str, Any]) -> None:
        self._laid = {}

    def _build(self) -> None:
        """Lay down the epochs that have begun."""
        for job in self._subset:
            if job not in self._laid:
                self._laid[job] = array("i", self._sequence(job).astype(np.int32).tobytes())

    def _draw(self) -> Given:
        """Give each job the next of its sequence."""
        given: Given = {}
        for job in self._active:
            left = self._num_needed[job] - len(self._taken[job])
            if left:
                given.setdefault(self._laid[job][-left], set()).add(job)
        return given

    def _draw_one(self, job: str) -> int:
        return self._laid[job][len(self._taken[job]) - self._num_needed[job]]

    @abstractmethod
    def _sequence(self, job: str) -> NDArray[np.int64]:
        """Return what `job` still needs in its epoch, in order."""


class Independent(_Sequenced):
    """A permutation of its own for every job and epoch."""

    def _sequence(self, job: str) -> NDArray[np.int64]:
        return self._own_order(job)


@dataclass(slots=True)
class _EpochPosition:
    """Where a job of the shared order stands in its epoch.

    A place is pass * PASS + key. `clock` is where the job would stand if its items were spread evenly over a pass: it
    depends on counts alone, never on what was drawn.
    """

    whole: Flags
    """[size] What the job needed when its epoch began."""
    begin: int
    """Place from which its sequence is laid down."""
    clock_begin: int
    """Clock at that place."""
    num_begin: int
    """Items that it needed there."""
    reached: int
    """Place behind the last item that it used, as of the latest build or change."""

    @property
    def end(self) -> int:
        """Clock from which the job runs through its last items alone."""
        return (self.clock_begin // PASS + 1) * PASS

    def clock(self, num_used: int) -> int:
        """Return the clock after `num_used` items since `begin`."""
        return self.clock_begin + num_used * PASS // max(int(np.count_nonzero(self.whole)), 1)


class Shared(_Sequenced):
    """One order per pass over the dataset, of which each job takes its own items.

    A job that joins late, or that has fallen behind, begins where the foremost
    job is and completes its epoch in the next pass. Its order is an exactly
    uniform permutation of its set, provided that the place where it begins
    depends on none of its items more than on another. The key of the last item
    of a job that needs everything the newcomer needs is such a place: swapping
    two items of the newcomer in every pass swaps them in both orders and moves
    no place. The key of any other job is not. Behind such a job the newcomer begins at the
    other's clock, which is a function of counts alone; of the n items of a
    pass that is about sqrt(n) / 2 or less away from where the other is.
    Both suppose that arrivals and speeds do not depend on which items were drawn.

    Nobody joins a job that is completing its epoch: few others need those items.
    """

    ahead: dict[str, int]
    """Job -> items that were drawn for it and not used yet: another that begins now may still share them. Whoever knows
    writes it before a job begins."""
    _walks: dict[str, _EpochPosition]
    """Job -> where it stands, from the first build of its epoch on."""
    _unseen: int
    """The first pass of which no job has seen a key."""

    def _prepare(self) -> None:
        super()._prepare()
        self.ahead, self._walks, self._unseen = {}, {}, 0

    def _forget(self, job: str) -> None:
        super()._forget(job)
        self._walks.pop(job, None)

    def _start_over(self, job: str) -> None:
        super()._start_over(job)
        self._walks.pop(job, None)

    def _sequence(self, job: str) -> NDArray[np.int64]:
        number, begin = divmod(self._walks[job].begin, PASS)
        items = np.flatnonzero(self._needs[job])
        keys, later = self._keys(items, number), self._keys(items, number + 1)
        ahead = keys >= np.uint64(begin)
        first, rest = np.argsort(keys[ahead], kind="stable"), np.argsort(later[~ahead], kind="stable")
        return np.concatenate([items[ahead][first], items[~ahead][rest]])

    def _keys(self, items: NDArray[np.int64], number: int) -> NDArray[np.uint64]:
        """Return the place of each item within pass `number`."""
        return item_seeds(derived_seed(self.seed, "shared"), number, items, np.zeros_like(items))

    def _build(self) -> None:
        """Let each epoch that has begun start where the foremost running job stands, or with a new pass."""
        new_pass = self._unseen * PASS
        begun = {}
        for job in self._subset.keys() - self._walks.keys():
            whole = self._needs[job].copy()
            clock, place = self._front(whole) or (new_pass, new_pass)
            begun[job] = _EpochPosition(whole, place, clock, self._num_needed[job], place)
        for job, walk in begun.items():
            self._enter(job, walk)
        super()._build()

    def _enter(self, job: str, walk: _EpochPosition) -> None:
        """Let a job stand elsewhere; what it needs comes from that pass and the next one."""
        self._walks[job] = walk
        self._unseen = max(self._unseen, walk.clock_begin // PASS + 2)

    def catch_up(self, job: str) -> bool:
        """Let a job that has fallen behind go on where the foremost stands; return whether it had.

        What it skips comes in the next pass, side by side with whoever walks that. Whether to call may depend on time
        and on what the job has had: what is left of its epoch is uniform before and after. A job that has not taken
        an item yet is not behind: it begins where the others stand. Raises `InputError` on an unknown name.
        """
        self._known(job)
        self._settle()
        walk = self._walks.get(job)
        front = None if walk is None else self._front(walk.whole, besides=job)
        if walk is None or front is None or not self._num_needed[job] or front[0] <= self._clock(job):
            return False
        clock, place = front
        super()._start_over(job)
        self._enter(job, _EpochPosition(walk.whole, place, clock, self._num_needed[job], place))
        return True

    def _clock(self, job: str) -> int:
        """Return the clock of a job behind the last item that it used."""
        walk = self._walks[job]
        return walk.clock(max(walk.num_begin - self._num_needed[job] - self.ahead.get(job, 0), 0))

    def _front(self, whole: Flags, besides: str | None = None) -> tuple[int, int] | None:
        """Return (clock, place) at which a job begins that needs `whole`; None: with a new pass.

        It follows the foremost of the jobs that need all of `whole`, else the foremost of all. Who is foremost is
        told by the clock; who runs through its last items alone does not count.
        """
        running = {
            job: clock
            for job, walk in self._walks.items()
            if job != besides and self._num_needed[job] and (clock := self._clock(job)) <= walk.end
        }
        if not running:
            return None
        like = {job: clock for job, clock in running.items() if _covers(self._walks[job].whole, whole)}
        first = max(like or running, key=running.__getitem__)
        clock, walk = running[first], self._walks[first]
        if walk.clock(self.ahead.get(first, 0)) - walk.clock_begin >= walk.end - clock:
            # Nothing is left of this pass but what was drawn already: count the newcomer to the next one.
            clock = walk.end
        return clock, min(walk.reached, walk.end) if like else clock

    def _settle(self) -> None:
        """Note where each job stands before its epoch may change."""
        super()._settle()
        for job in self._laid:
            self._walks[job].reached = self._place(job)

    def _place(self, job: str) -> int:
        """Return the place behind the last item that `job` has used."""
        sequence, walk = self._laid[job], self._walks[job]
        used = len(sequence) - self._num_needed[job] - self.ahead.get(job, 0)
        if used <= 0:
            return walk.reached
        item = np.array([sequence[used - 1]], np.int64)
        number = walk.begin // PASS
        place = number * PASS + int(self._keys(item, number)[0])
        if place < walk.begin:
            place = (number + 1) * PASS + int(self._keys(item, number + 1)[0])
        return place + 1

    def _more_state(self) -> dict[str, Any]:
        # Places as (pass, key): a whole one does not fit into the 64 bits that file formats have.
        return {
            "unseen": self._unseen,
            "walks": {
                job: {
                    "whole": None if np.array_equal(walk.whole, self._subset[job]) else packed_flags(walk.whole),
                    "begin": divmod(walk.begin, PASS),
                    "clock_begin": divmod(walk.clock_begin, PASS),
                    "num_begin": walk.num_begin,
                    "reached": divmod(walk.reached, PASS),
                }
                for job, walk in self._walks.items()
            },
        }

    def _load_more(self, state: Mapping[str, Any]) -> None:
        super()._load_more(state)
        if "walks" not in state:
            raise InputError("the state is of an earlier shared order. Begin the epoch again with what is left of it.")
        self._unseen = state["unseen"]
        self._walks = {
            job: _EpochPosition(
                self._subset[job].copy() if facts["whole"] is None else unpacked_flags(facts["whole"]),
                begin=_whole_place(facts["begin"]),
                clock_begin=_whole_place(facts["clock_begin"]),
                num_begin=facts["num_begin"],
                reached=_whole_place(facts["reached"]),
            )
            for job, facts in state["walks"].items()
        }


def _whole_place(parts: Sequence[int]) -> int:
    """Return the place that a state has as (pass, key)."""
    number, key = parts
    return number * PASS + key


def _covers(flags: Flags, other: Flags) -> bool:
    """Return whether a bitmap has all that another one has; they may be of different length."""
    size = min(flags.size, other.size)
    return not bool((other[:size] > flags[:size]).any() or other[size:].any())


ORDERS: dict[str, type[JobOrder]] = {
    "independent": Independent,
    "shared": Shared,
    "dependent": Dependent,
    "opportunistic": Opportunistic,
}
"""Every order strategy. Adding one is adding a line here."""
