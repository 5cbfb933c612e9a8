"""Orders of several jobs over one dataset: who receives which item when. Every job meets its own items once an epoch.

- `Independent`: each job has a permutation of its own; nothing is shared on purpose.
- `Shared`: one permutation of the whole dataset, each job takes its own items of it: jobs of like size that start
  together need the same items within a short time, and a small cache serves them all.
- `Dependent`: Joader's coupling (`headway.data.orders.dependent`): for unlike sizes and starts.
- `Opportunistic`: Seneca's substitution (`headway.data.orders.opportunistic`): what is cached goes first.

In the first three the order of one job is a uniform permutation of its set.
`headway.data.orders.choice` simulates them and chooses.

>>> order = Shared({"a": [0, 1, 2], "b": [1, 2, 3]}, seed=3)
>>> sorted(item for _ in range(3) for item, jobs in order.step().items() if "b" in jobs)
[1, 2, 3]
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.rng import derived_seed
from headway.data.orders.dependent import Dependent
from headway.data.orders.job_order import Given, JobOrder, own_order
from headway.data.orders.opportunistic import Opportunistic
from headway.data.orders.order import item_seeds

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
        order = own_order(self._subset[job], self.seed, job, self._epoch[job])
        return order[self._needs[job][order]]


class Shared(_Sequenced):
    """One order per pass over the dataset, of which each job takes its own items.

    A job that comes later begins where the foremost job stands and completes
    its epoch in the next pass, so that its order is a uniform permutation too.
    A job that completes its epoch so runs through its last items alone: nobody begins where it stands.
    """

    ahead: dict[str, int]
    """Job -> items that were drawn for it and not used yet: another that begins now may still share them. Whoever knows
    writes it before a job begins."""
    _begun: dict[str, tuple[int, int]]
    """Job -> (epoch, place at which it began)."""
    _reached: dict[str, int]
    """Job -> place behind the last item it used, as of the latest build or change."""
    _furthest: int
    """Place that no job has passed yet."""

    def _prepare(self) -> None:
        super()._prepare()
        self.ahead, self._begun, self._reached, self._furthest = {}, {}, {}, 0

    def _forget(self, job: str) -> None:
        super()._forget(job)
        self._begun.pop(job, None)
        self._reached.pop(job, None)

    def _start_over(self, job: str) -> None:
        super()._start_over(job)
        self._begun.pop(job, None)

    def _sequence(self, job: str) -> NDArray[np.int64]:
        begin = self._begun[job][1]
        items = np.flatnonzero(self._needs[job])
        keys, later = self._keys(items, begin // PASS), self._keys(items, begin // PASS + 1)
        ahead = keys >= np.uint64(begin % PASS)
        first, rest = np.argsort(keys[ahead], kind="stable"), np.argsort(later[~ahead], kind="stable")
        return np.concatenate([items[ahead][first], items[~ahead][rest]])

    def _keys(self, items: NDArray[np.int64], number: int) -> NDArray[np.uint64]:
        """Return the place of each item within pass `number`."""
        return item_seeds(derived_seed(self.seed, "shared"), number, items, np.zeros_like(items))

    def _build(self) -> None:
        """Let each epoch that has begun start where the foremost running job stands, or with a new pass."""
        front = self._front()
        place = -(-self._furthest // PASS) * PASS if front is None else front
        for job in self._subset.keys() - self._begun.keys():
            self._begun[job], self._reached[job] = (self._epoch[job], place), place
        super()._build()

    def catch_up(self, job: str) -> bool:
        """Let a job that has fallen behind go on where the foremost stands; return whether it had.

        What it skips comes in the next pass, side by side with whoever walks that. Whether to call may depend on time
        and on what the job has had: what is left of its epoch is uniform before and after.
        """
        self._known(job)
        self._settle()
        front = self._front(besides=job)
        if front is None or not self._num_needed[job] or front <= self._reached[job]:
            return False
        self._start_over(job)
        return True

    def _front(self, besides: str | None = None) -> int | None:
        """Return where the foremost running job stands; who runs through its last items alone does not count."""
        return max(
            (
                reached
                for job, (_, begin) in self._begun.items()
                if job != besides
                and self._num_needed[job]
                and (reached := self._reached[job]) <= (begin // PASS + 1) * PASS
            ),
            default=None,
        )

    def _settle(self) -> None:
        """Note where each job stands before its epoch may change."""
        super()._settle()
        for job in self._laid:
            self._furthest = max(self._furthest, self._place(job, 0))
            self._reached[job] = self._place(job, self.ahead.get(job, 0))

    def _place(self, job: str, ahead: int) -> int:
        """Return the place behind the last item that `job` took, before the latest `ahead` of them."""
        sequence = self._laid[job]
        begin = self._begun[job][1]
        taken = len(sequence) - self._num_needed[job] - ahead
        if taken <= 0:
            return self._reached[job]
        item = np.array([sequence[taken - 1]], np.int64)
        place = begin // PASS * PASS + int(self._keys(item, begin // PASS)[0])
        if place < begin:
            place = (begin // PASS + 1) * PASS + int(self._keys(item, begin // PASS + 1)[0])
        return place + 1

    def _more_state(self) -> dict[str, Any]:
        # As (pass, key): a whole place does not fit into the 64 bits that file formats have.
        return {
            "begun": {job: [epoch, *divmod(place, PASS)] for job, (epoch, place) in self._begun.items()},
            "reached": {job: list(divmod(place, PASS)) for job, place in self._reached.items()},
            "furthest": list(divmod(self._furthest, PASS)),
        }

    def _load_more(self, state: Mapping[str, Any]) -> None:
        super()._load_more(state)
        self._begun = {job: (epoch, number * PASS + key) for job, (epoch, number, key) in state["begun"].items()}
        self._reached = {job: number * PASS + key for job, (number, key) in state["reached"].items()}
        self._furthest = state["furthest"][0] * PASS + state["furthest"][1]


ORDERS: dict[str, type[JobOrder]] = {
    "independent": Independent,
    "shared": Shared,
    "dependent": Dependent,
    "opportunistic": Opportunistic,
}
"""Every order strategy. Adding one is adding a line here."""
