"""What every order of several jobs over one dataset has in common: who needs which item, and where each job stands.

Jobs come and go at any time, each with its own subset of the items 0 to
size - 1. A step gives every job that is not masked one item; an epoch of a
job is each item of its subset, once. Which item it is, is the strategy's
business: `headway.data.orders.strategies` lists them. Every draw is a function of
the seed and of the calls so far, and so is the state: the bitmap of what each
job still needed at the last build, and the number of steps since, which
`load_state_dict` draws again.

`Buffered` lets jobs of different speed share an order. Where jobs are coupled,
decisions are taken for all of them together, and what a slow job has not
fetched yet waits as indices; where they are not, each draws when it takes.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.data.bytes.order import permute

Flags = NDArray[np.bool_]
Given = dict[int, set[str]]
"""One step: item -> the jobs that receive it."""

BUILD_STEPS = 1 << 15
"""Steps between two builds: the most that a restored order has to draw again."""

MOST_ITEMS = (1 << 31) - 1
"""Largest dataset: items are stored in four bytes."""


class DataShareError(InputError):
    """A job cannot share an order: what it reads is not what the others read."""


class JobOrder(ABC):
    """Jobs over one dataset, and what each of them still needs in its epoch; a strategy draws from that."""

    draws_again = True
    """Whether equal steps from an equal build give equal items: then a state needs the build and a count only."""
    coupled = False
    """Whether what a job gets depends on who draws with it: then all draw together, in steps."""

    def __init__(
        self,
        jobs: Mapping[str, ArrayLike | range],
        seed: int = 0,
        *,
        size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Begin the first epoch of `jobs`: name -> items, distinct whole numbers >= 0.

        `size` is the number of items of the dataset (default: as large as the
        items ask for); `fingerprint` names the dataset and pipeline that all
        jobs must agree on. Raises `InputError` or `DataShareError`.
        """
        if size is not None and not 0 <= size <= MOST_ITEMS:
            raise InputError(f"size is {size}; pass 0 to {MOST_ITEMS} items.")
        self.seed = seed
        self.num_steps = 0
        """Steps since the beginning."""
        self._size = size
        self._fingerprint = fingerprint
        self._subset: dict[str, Flags] = {}
        self._needs: dict[str, Flags] = {}
        self._num_needed: dict[str, int] = {}
        self._taken: dict[str, list[int]] = {}
        self._epoch: dict[str, int] = {}
        self._masked: frozenset[str] = frozenset()
        self._active: list[str] = []
        self._steps = 0
        self._stale = True
        self._apart = False
        self._prepare()
        for job, items in jobs.items():
            self.add(job, items)

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the order in which they came."""
        return list(self._subset)

    @property
    def size(self) -> int:
        """Items of the dataset, as far as known."""
        return self._size if self._size is not None else max((f.size for f in self._subset.values()), default=0)

    def add(
        self,
        job: str,
        items: ArrayLike | range,
        *,
        fingerprint: str | None = None,
        epoch: int = 0,
        remaining: ArrayLike | range | None = None,
    ) -> None:
        """Let `job` join with a subset of its own; takes effect at the next step.

        It begins `epoch`, of which `remaining` is left (default: everything).
        Raises `InputError` on a name that is taken, an empty or repeated
        subset, an item outside the dataset; `DataShareError` when its
        `fingerprint` (dataset and pipeline) is not that of the jobs here.
        """
        if job in self._subset:
            raise InputError(f"job {job!r} is here already. Choose another name, or remove the first one.")
        if fingerprint is not None:
            if self._fingerprint not in (None, fingerprint):
                raise DataShareError(
                    f"job {job!r} reads {fingerprint!r}, the jobs here read {self._fingerprint!r}. "
                    "Start an order of its own for it, or give both the same dataset and pipeline."
                )
            self._fingerprint = fingerprint
        subset = item_flags(job, items, self._size)
        left = subset.copy() if remaining is None else _part_of(subset, job, remaining)
        self._subset[job] = subset
        self._begin(job, epoch, left)

    def remove(self, job: str) -> None:
        """Let `job` go, wherever it stands; no other job's set changes. Raises `InputError` on an unknown name."""
        self._known(job)
        self._settle()
        self._forget(job)
        for table in (self._subset, self._needs, self._num_needed, self._taken, self._epoch):
            del table[job]

    def restart(self, job: str) -> None:
        """Begin the next epoch of `job`. Raises `InputError` while it still needs items of this one."""
        if self.remaining(job):
            raise InputError(
                f"job {job!r} still needs {self.remaining(job)} items of epoch {self._epoch[job]}. "
                "Take them first, or remove the job and add it again."
            )
        self._begin(job, self._epoch[job] + 1, self._subset[job].copy())

    def begin(self, job: str, epoch: int, remaining: ArrayLike | range | None = None) -> None:
        """Begin `epoch` of `job` wherever it stands, with what is `remaining` of it (default: everything).

        Raises `InputError` on an unknown name or an item that is not the job's.
        """
        self._known(job)
        subset = self._subset[job]
        self._begin(job, epoch, subset.copy() if remaining is None else _part_of(subset, job, remaining))

    def epoch(self, job: str) -> int:
        """Return the epoch in which `job` is, from 0."""
        self._known(job)
        return self._epoch[job]

    def remaining(self, job: str) -> int:
        """Return how many items `job` still needs in its epoch."""
        self._known(job)
        return self._num_needed[job] - len(self._taken[job])

    def needed(self, job: str) -> NDArray[np.int64]:
        """Return the items that `job` still needs in its epoch, ascending."""
        self._known(job)
        flags = self._needs[job].copy()
        flags[self._taken[job]] = False
        return np.flatnonzero(flags)

    def step(self, mask: Collection[str] = ()) -> Given:
        """Give every job one item, except those in `mask` and those whose epoch is over; {} when there is none left.

        A change of jobs or mask costs O(jobs * size) at the next step.
        """
        if (mask or self._masked) and self._masked != frozenset(mask):
            for job in mask:
                self._known(job)
            self._masked = frozenset(mask)
            self._stale = True
        if self._stale or self._steps == BUILD_STEPS:
            self._rebuild()
        given = self._draw()
        if given:
            self._steps += 1
            self.num_steps += 1
            taken = self._taken
            for item, receivers in given.items():
                for job in receivers:
                    taken[job].append(item)
        return given

    def draw(self, job: str) -> int | None:
        """Give one job its next item, whatever the others do; None when its epoch is over.

        Raises `InputError` on an unknown name, and where jobs are coupled.
        """
        if self.coupled:
            raise InputError(f"the jobs of {type(self).__name__} draw together. Call step, or take from `Buffered`.")
        if not self.remaining(job):
            return None
        if self._stale or self._masked:
            self._masked = frozenset()
            self._rebuild()
        item = self._draw_one(job)
        self.num_steps += 1
        self._apart = True
        taken = self._taken[job]
        taken.append(item)
        if len(taken) == BUILD_STEPS:
            self._fold(job)
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the state: two compressed bitmaps per job, size / 8 bytes each at most, and a few numbers."""
        if self._stale or self._apart or not self.draws_again:
            self._settle()
            if self.draws_again:
                self._rebuild()
        return {
            "version": 1,
            "strategy": type(self).__name__,
            "seed": self.seed,
            "size": self._size,
            "fingerprint": self._fingerprint,
            "num_steps": self.num_steps - self._steps,
            "steps": self._steps,
            "masked": sorted(self._masked),
            "jobs": {
                job: {
                    "epoch": self._epoch[job],
                    "subset": packed_flags(subset),
                    "needs": packed_flags(self._needs[job]),
                }
                for job, subset in self._subset.items()
            },
            **self._more_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the same jobs, sets and draws. Raises `InputError` on another strategy's."""
        if state.get("version") != 1 or state.get("strategy") != type(self).__name__:
            raise InputError(
                f"the state is of {state.get('strategy')!r}, version {state.get('version')!r}; "
                f"this is {type(self).__name__!r}, version 1. Load it into the order that wrote it."
            )
        self.seed, self._size, self._fingerprint = state["seed"], state["size"], state["fingerprint"]
        jobs = state["jobs"]
        self._subset = {job: unpacked_flags(facts["subset"]) for job, facts in jobs.items()}
        self._needs = {job: unpacked_flags(facts["needs"]) for job, facts in jobs.items()}
        self._num_needed = {job: int(flags.sum()) for job, flags in self._needs.items()}
        self._taken = {job: [] for job in jobs}
        self._epoch = {job: facts["epoch"] for job, facts in jobs.items()}
        self._masked = frozenset(state["masked"])
        self.num_steps, self._steps = state["num_steps"], 0
        self._load_more(state)
        self._rebuild()
        for _ in range(state["steps"]):
            self.step(self._masked)

    @abstractmethod
    def _build(self) -> None:
        """Get ready to draw for `self._active` from `self._needs`, which are up to date."""

    @abstractmethod
    def _draw(self) -> Given:
        """Return one step; all of `self._active` that still need something, an item each."""

    def _draw_one(self, job: str) -> int:
        """Return the next item of one job, which needs one; where jobs are not coupled."""
        raise NotImplementedError

    def _start_over(self, job: str) -> None:  # noqa: B027 - most strategies lay nothing down
        """Drop what was laid down for the epoch of `job`: another one begins."""

    def _prepare(self) -> None:  # noqa: B027 - most strategies keep nothing of their own
        """Set up what the strategy keeps, before the first job joins."""

    def _forget(self, job: str) -> None:  # noqa: B027 - most strategies keep nothing of their own
        """Drop what the strategy keeps of a job that goes."""

    def _more_state(self) -> dict[str, Any]:
        """Return what the strategy must keep beyond the sets."""
        return {}

    def _load_more(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most strategies keep nothing more
        """Read what `_more_state` wrote."""

    def _begin(self, job: str, epoch: int, needs: Flags) -> None:
        """Start an epoch in which `needs` is needed."""
        self._settle()
        self._start_over(job)
        self._needs[job] = needs
        self._num_needed[job] = int(needs.sum())
        self._taken[job] = []
        self._epoch[job] = epoch

    def _settle(self) -> None:
        """Bring the bitmaps up to date; the next step builds anew."""
        for job in self._taken:
            self._fold(job)
        self._steps, self._stale, self._apart = 0, True, False

    def _fold(self, job: str) -> None:
        """Bring one bitmap up to date."""
        items = self._taken[job]
        if items:
            self._needs[job][items] = False
            self._num_needed[job] -= len(items)
            self._taken[job] = []

    def _rebuild(self) -> None:
        """Settle and build: what follows depends on the sets, the mask and `num_steps` alone."""
        self._settle()
        self._active = [job for job in self._subset if job not in self._masked and self._num_needed[job]]
        self._build()
        self._stale = False

    def _own_order(self, job: str) -> NDArray[np.int64]:
        """Return what `job` still needs in the order that is its own in its epoch: a uniform permutation."""
        items = np.flatnonzero(self._subset[job])
        order = permute(items.size, derived_seed(self.seed, "own order", job), self._epoch[job])
        ordered: NDArray[np.int64] = items[order(np.arange(items.size))]
        return ordered[self._needs[job][ordered]]

    def _known(self, job: str) -> None:
        """Raise `InputError` on a name that is not here."""
        if job not in self._subset:
            raise InputError(f"there is no job {job!r} here. Add it, or name one of: {', '.join(self._subset)}.")


class Buffered:
    """Indices of jobs that run at different speed; nobody blocks another.

    Where jobs are coupled they are decided together and wait for the slow
    ones: a job that has `limit` indices waiting is left out of decisions until half of them are gone.
    """

    def __init__(self, order: JobOrder, *, limit: int | None = None) -> None:
        """Buffer `order`; without a limit a queue may hold a whole epoch, 8 bytes an index."""
        if limit is not None and limit < 1:
            raise InputError(f"limit is {limit}; a queue needs room for 1 index or more. Raise it.")
        self.order = order
        self._limit = limit
        self._waiting: dict[str, deque[int]] = {}
        self._full: set[str] = set()

    def take(self, job: str) -> int | None:
        """Return the next item of `job`, or None when its epoch is over. Raises `InputError` on an unknown name."""
        if not self.order.coupled:
            return self.order.draw(job)
        waiting = self._waiting.setdefault(job, deque())
        while not waiting and self.order.remaining(job):
            self._decide()
        if not waiting:
            return None
        item = waiting.popleft()
        if job in self._full and self._limit is not None and len(waiting) <= self._limit // 2:
            self._full.discard(job)
        return item

    def needed(self, job: str) -> NDArray[np.int64]:
        """Return the items that `job` has not taken in its epoch, ascending."""
        needed, waiting = self.order.needed(job), self._waiting.get(job)
        return np.sort(np.concatenate([needed, np.array(waiting, np.int64)])) if waiting else needed

    def begin(self, job: str, epoch: int, remaining: ArrayLike | range | None = None) -> None:
        """Begin `epoch` of `job` wherever it stands (`JobOrder.begin`); what waits for it is dropped."""
        self.order.begin(job, epoch, remaining)
        self._waiting.pop(job, None)
        self._full.discard(job)

    def remove(self, job: str) -> None:
        """Let `job` go, with what waits for it."""
        self.order.remove(job)
        self._waiting.pop(job, None)
        self._full.discard(job)

    def _decide(self) -> None:
        """Take one step for all jobs whose queue has room."""
        for item, jobs in self.order.step(self._full).items():
            for job in jobs:
                waiting = self._waiting.setdefault(job, deque())
                waiting.append(item)
                if self._limit is not None and len(waiting) >= self._limit:
                    self._full.add(job)


def item_flags(job: str, items: ArrayLike | range, size: int | None) -> Flags:
    """Return the bitmap of a subset, checking it."""
    array = np.asarray(items)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        what = f"{array.size} items of type {array.dtype}"
        raise InputError(f"job {job!r} has {what}; give a flat list of whole numbers, at least one.")
    low, high = int(array.min()), int(array.max())
    most = MOST_ITEMS if size is None else size
    if low < 0 or high >= most:
        wrong = low if low < 0 else high
        raise InputError(f"job {job!r} asks for item {wrong}, outside a dataset of {most} items. Drop it.")
    flags = np.zeros(high + 1 if size is None else size, bool)
    flags[array] = True
    if int(flags.sum()) != array.size:
        raise InputError(f"job {job!r} lists an item twice; give each item once per epoch.")
    return flags


def _part_of(subset: Flags, job: str, items: ArrayLike | range) -> Flags:
    """Return the bitmap of what remains of a subset, checking it."""
    left = np.zeros_like(subset)
    given = np.asarray(items)
    if given.size:
        flags = item_flags(job, given, None if given.dtype.kind not in "iu" else max(int(given.max()) + 1, subset.size))
        if bool(flags[subset.size :].any()) or bool((flags[: subset.size] & ~subset).any()):
            raise InputError(f"job {job!r} still needs items that are not its own. Pass a part of its subset.")
        left = flags[: subset.size]
    return left


def packed_flags(flags: Flags) -> tuple[int, bytes]:
    """Return a bitmap as (length, compressed bytes)."""
    return flags.size, zlib.compress(np.packbits(flags).tobytes(), 1)


def unpacked_flags(packed: tuple[int, bytes]) -> Flags:
    """Return the bitmap that `packed_flags` wrote."""
    size, data = packed
    return np.unpackbits(np.frombuffer(zlib.decompress(data), np.uint8), count=size).astype(bool)
