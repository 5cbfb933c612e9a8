"""What one job of a data server is owed: its global batches, and each rank's place in them.

An epoch is walked in a `JobPass`: its global sequence is drawn first, for all
ranks together; global batch g is the next `batch_size * world_size` items,
rank r takes items r::world_size of it. Ranks run at their own speed: what the
foremost has drawn waits as numbers for the others.

>>> terms = JobTerms(batch_size=2, world_size=2)
>>> walk = JobPass(0, terms, iter([4, 1, 3, 0, 2, None]).__next__)
>>> [walk.batch(g, rank=1).tolist() for g in (0, 1)], walk.batch(1, rank=0).tolist(), walk.batch(2, rank=0)
([[1, 0], []], [2], None)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import BackgroundError, InputError
from headway.core.tables import pick
from headway.data.bytes.order import TAILS
from headway.data.service.batches import Batch, Ints, JobCounts


@dataclass(frozen=True, slots=True)
class JobTerms:
    """How a job wants its items."""

    batch_size: int
    """Items per rank and batch."""
    world_size: int = 1
    shuffle: bool = True
    """False: in the order in which the job lists its items."""
    tail: str = "short"
    """What becomes of items that do not fill a global batch: one of `headway.data.bytes.order.TAILS`."""

    def __post_init__(self) -> None:
        """Raise `InputError` on sizes below 1 or an unknown tail."""
        if min(self.batch_size, self.world_size) < 1:
            raise InputError(f"batch_size is {self.batch_size}, world_size {self.world_size}; pass 1 or more of each.")
        pick(TAILS, self.tail, "tail")

    @property
    def global_batch(self) -> int:
        """Items of all ranks in one step."""
        return self.batch_size * self.world_size


class JobPass:
    """One epoch of a job: global batches, decided as the foremost rank comes to them, kept for the other ranks."""

    def __init__(
        self,
        epoch: int,
        terms: JobTerms,
        draw: Callable[[], int | None],
        history: Sequence[Ints] = (),
        needs: NDArray[np.bool_] | None = None,
    ) -> None:
        """Walk what `draw` gives (None: that was all) behind the global batches of `history`."""
        self.epoch, self.terms = epoch, terms
        self._draw = draw
        self._batches: dict[int, Ints] = dict(enumerate(history))
        self._head = np.concatenate([np.zeros(0, np.int64), *history])[: terms.global_batch]
        self.num_batches = len(history)
        """Global batches decided so far."""
        self.complete = False
        """Whether there will be no more."""
        self.needs = np.zeros(0, bool) if needs is None else needs
        """[size] What the cache was told that this pass needs, and has not been asked for."""
        self._padded: dict[int, Ints] = {}
        """Number of a batch that is filled up -> how often each of its items came before."""

    def batch(self, number: int, rank: int) -> Ints | None:
        """Return the items of `rank` in global batch `number` (none of a short last one: empty), None past the end."""
        whole = self.everybody(number)
        return None if whole is None else whole[rank :: self.terms.world_size]

    def everybody(self, number: int) -> Ints | None:
        """Return the items of global batch `number` for all ranks, deciding it if need be; None past the end."""
        while number >= self.num_batches and not self.complete:
            self._decide()
        return self._batches.get(number)

    def occurrence(self, number: int, rank: int) -> Ints:
        """Return how often each item of `rank` in a decided batch came before in this pass."""
        whole = self._padded.get(number, np.zeros_like(self._batches[number]))
        return whole[rank :: self.terms.world_size]

    def decide_all(self) -> None:
        """Decide what is left, for ranks that come later."""
        while not self.complete:
            self._decide()

    def forget(self, number: int) -> None:
        """Drop the global batches before `number`: every rank has had them."""
        for old in [old for old in self._batches if old < number]:
            del self._batches[old]

    def _decide(self) -> None:
        """Draw one global batch; at the end, what the tail says."""
        size = self.terms.global_batch
        items: list[int] = []
        while len(items) < size and (item := self._draw()) is not None:
            items.append(item)
        found = np.array(items, np.int64)
        if len(items) < size:
            self.complete = True
            if not items or self.terms.tail == "drop":
                return
            if self.terms.tail == "pad":
                sequence, missing = np.concatenate([self._head, found]), size - len(items)
                again = 1 + np.arange(missing) // sequence.size
                self._padded[self.num_batches] = np.concatenate([np.zeros_like(found), again])
                found = np.concatenate([found, np.resize(sequence, missing)])
        if self._head.size < size:
            self._head = np.concatenate([self._head, found])[:size]
        self._batches[self.num_batches] = found
        self.num_batches += 1


@dataclass(slots=True, eq=False)
class Rank:
    """Where one rank stands."""

    attached: bool = False
    left: bool = False
    """Whether it was attached, and is gone."""
    num_begun: int = 0
    """Passes that it has begun: all ranks begin the same ones in the same order."""
    number: int = 0
    """Next global batch to be made for it."""
    ahead: deque[Batch] = field(default_factory=deque)
    """Batches in the making or ready, in order."""
    over: bool = False
    """Whether all batches of its pass are begun."""
    told: bool = False
    """Whether it was told that its pass has ended."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a rank knows of a pass from a server that is lost, over and above the batches that it had."""

    decided: Sequence[Ints] = ()
    """Global batches behind those that it had, in order."""
    complete: bool = False
    """Whether there are no more."""
    gone: Sequence[int] = ()
    """Ranks that had left, and need nothing any more."""


NO_MORE = Known()


@dataclass(slots=True, eq=False)
class Opening:
    """A pass that ranks have begun."""

    epoch: int
    left: NDArray[np.bool_]
    """[size] What was left of the epoch."""
    histories: dict[int, Sequence[Ints]] | None
    """Rank -> global batches that were decided by a server before this one, as it knows them; None: there was none,
    nobody is waited for."""
    since_ns: int = 0
    """When the latest rank began it."""
    complete: bool = False
    """Whether a rank knows that there are no more."""
    started: bool = False

    def longest(self, job: str) -> Sequence[Ints]:
        """Return what the foremost rank had. Raises `InputError` where another had something else."""
        histories = self.histories or {}
        first = max(histories.values(), key=len, default=())
        for rank, history in histories.items():
            if not all(np.array_equal(mine, theirs) for mine, theirs in zip(history, first, strict=False)):
                raise InputError(
                    f"rank {rank} of job {job!r} had other batches of epoch {self.epoch} than the foremost rank. "
                    "Start the job again from one state."
                )
        return first


class ServedJob:
    """A job: its terms, its ranks, its passes."""

    def __init__(self, name: str, terms: JobTerms, items: Ints, subset: NDArray[np.bool_]) -> None:
        self.name, self.terms, self.items = name, terms, items
        """[n] Its items, in the order in which it lists them."""
        self.subset = subset
        """[size] The same as a bitmap."""
        self.ranks = [Rank() for _ in range(terms.world_size)]
        self.passes: dict[int, JobPass] = {}
        """Number of the pass -> the pass, as long as a rank may need it."""
        self.openings: dict[int, Opening] = {}
        """Number of the pass -> how it was begun, as long as a rank may come to it."""
        self._need_nothing: set[int] = set()
        """Ranks that left the lost server."""
        self.resumed = False
        """Whether it goes on from a server that is lost."""
        self.alone_since_ns: int | None = None
        """Since when none of its ranks is here; None: some are."""
        self.num_alone = 0
        """Items that storage was read for, since it last caught up."""
        self.counts = JobCounts()

    def rank(self, number: int) -> Rank:
        """Return a rank. Raises `InputError` on a number outside the world."""
        if not 0 <= number < self.terms.world_size:
            raise InputError(
                f"rank is {number}; job {self.name!r} has ranks 0 to {self.terms.world_size - 1}. Pass one of them."
            )
        return self.ranks[number]

    def walk(self, rank: Rank) -> JobPass | None:
        """Return the pass in which a rank is; None before its first one, and while that waits for other ranks."""
        return self.passes.get(rank.num_begun - 1)

    def part(self, items: ArrayLike) -> NDArray[np.bool_]:
        """Return the bitmap [size] of some of its items. Raises `InputError` when one is not its own."""
        array = np.asarray(items, np.int64)
        inside = (array >= 0) & (array < self.subset.size)
        wrong = array[~(inside & self.subset[np.where(inside, array, 0)])]
        if wrong.size:
            raise InputError(f"job {self.name!r} does not read item {wrong[0]}. Pass a part of its own items.")
        flags = np.zeros_like(self.subset)
        flags[array] = True
        return flags

    def enter(
        self,
        number: int,
        epoch: int,
        left: NDArray[np.bool_],
        history: Sequence[Ints] | None,
        *,
        index: int | None = None,
        known: Known = NO_MORE,
        now_ns: int = 0,
    ) -> None:
        """Let rank `number` into pass `index` (default: its next). Raises `InputError` when it means another one."""
        rank = self.ranks[number]
        index = rank.num_begun if index is None else index
        self.resumed = self.resumed or history is not None
        fresh = Opening(epoch, left, {} if self.resumed else None)
        opening = self.openings.get(index, fresh)
        same = epoch == opening.epoch and np.array_equal(opening.left, left)
        if not same or index < rank.num_begun or (history and opening.histories is None):
            raise InputError(
                f"rank {number} of job {self.name!r} begins epoch {epoch} elsewhere than the ranks before it (epoch "
                f"{opening.epoch}). Load one state into all ranks."
            )
        self.openings[index] = opening
        if opening.histories is not None:
            opening.histories[number] = [*(history or ()), *known.decided]
        opening.since_ns, opening.complete = now_ns, opening.complete or known.complete
        for other in known.gone:
            if not self.rank(other).attached:
                self.ranks[other].left = True
                self._need_nothing.add(other)
        rank.num_begun = index + 1
        rank.number, rank.over, rank.told = len(history or ()), False, False

    def may_start(self) -> int | None:
        """Return the first pass that has not started, where it waits for nobody."""
        number = self._first_waiting()
        return None if number is None or self.missing() else number

    def missing(self) -> list[int]:
        """Return the ranks that the first pass that has not started waits for, because only they know what they had.

        One that was here in an earlier pass has had nothing of this one; what one had that left a server is known.
        """
        number = self._first_waiting()
        if number is None or self.openings[number].histories is None or self.openings[number].complete:
            return []
        return [k for k, rank in enumerate(self.ranks) if not rank.num_begun and k not in self._need_nothing]

    def _first_waiting(self) -> int | None:
        return min((number for number, opening in self.openings.items() if not opening.started), default=None)

    def overdue(self, now_ns: int, grace_ns: int) -> list[int]:
        """Return the ranks that its others, or nobody at all, have waited for in vain for `grace_ns`."""
        waiting = self._first_waiting()
        since = self.openings[waiting].since_ns if waiting is not None and self.missing() else self.alone_since_ns
        if since is None or now_ns - since < grace_ns:
            return []
        return self.missing() or [k for k, rank in enumerate(self.ranks) if not rank.left]

    def known(self, number: int) -> dict[int, tuple[int, Known]]:
        """Return pass -> the next batch of rank `number` there, and what is decided from that on; from its own on."""
        mine = self.ranks[number]
        gone = [k for k, rank in enumerate(self.ranks) if rank.left]
        found = {}
        for index in sorted(index for index in self.passes if index >= mine.num_begun - 1):
            walk, first = self.passes[index], mine.number if index == mine.num_begun - 1 else 0
            ahead = [pending.everybody for pending in mine.ahead] if index == mine.num_begun - 1 else []
            later = [walk.everybody(batch) for batch in range(first, walk.num_batches)]
            decided = [*ahead, *(items for items in later if items is not None)]
            found[index] = (first - len(ahead), Known(decided, walk.complete, gone))
        return found

    @property
    def attached(self) -> bool:
        """Whether any of its ranks is here."""
        return any(rank.attached for rank in self.ranks)

    def tidy(self) -> list[JobPass]:
        """Drop batches and passes that every rank has behind it, and return those passes.

        A rank that left needs nothing any more; one that has not come yet needs everything.
        """
        here = [rank for rank in self.ranks if not rank.left]
        first = min((rank.num_begun for rank in here), default=max(self.openings, default=0) + 2) - 1
        dropped = [self.passes.pop(number) for number in list(self.passes) if number < first]
        for number in [number for number, opening in self.openings.items() if number < first and opening.started]:
            del self.openings[number]
        if first in self.passes:
            self.passes[first].forget(min(rank.number for rank in here if rank.num_begun - 1 == first))
        return dropped


def not_come(job: str, missing: Sequence[int], grace_s: float) -> BackgroundError:
    """Return what to tell the ranks that wait for those that did not come."""
    ranks = ", ".join(map(str, missing))
    return BackgroundError(
        f"job {job!r} lost a data server and waits for rank {ranks}: what it had is known to nobody else, and it has "
        f"not come for {grace_s:g} s (grace_s). Start the job again from its last state."
    )
