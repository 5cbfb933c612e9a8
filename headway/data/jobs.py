"""What one job of a data server is owed: its global batches, and each rank's place in them.

An epoch is walked in a `Pass`: its global sequence is drawn first, for all
ranks together; global batch g is the next `batch_size * world_size` items,
rank r takes items r::world_size of it. Ranks run at their own speed: what the
foremost has drawn waits as numbers for the others.

>>> terms = Terms(batch_size=2, world_size=2)
>>> walk = Pass(0, terms, iter([4, 1, 3, 0, 2, None]).__next__)
>>> [walk.batch(g, rank=1).tolist() for g in (0, 1)], walk.batch(1, rank=0).tolist(), walk.batch(2, rank=0)
([[1, 0], []], [2], None)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.data.batches import Ints, Pending
from headway.data.order import TAILS
from headway.data.service_counts import JobCounts


@dataclass(frozen=True, slots=True)
class Terms:
    """How a job wants its items."""

    batch_size: int
    """Items per rank and batch."""
    world_size: int = 1
    shuffle: bool = True
    """False: in the order in which the job lists its items."""
    tail: str = "short"
    """What becomes of items that do not fill a global batch: one of `headway.data.order.TAILS`."""

    def __post_init__(self) -> None:
        """Raise `InputError` on sizes below 1 or an unknown tail."""
        if min(self.batch_size, self.world_size) < 1:
            raise InputError(f"batch_size is {self.batch_size}, world_size {self.world_size}; pass 1 or more of each.")
        pick(TAILS, self.tail, "tail")

    @property
    def global_batch(self) -> int:
        """Items of all ranks in one step."""
        return self.batch_size * self.world_size


class Pass:
    """One epoch of a job: global batches, decided as the foremost rank comes to them, kept for the other ranks."""

    def __init__(
        self,
        epoch: int,
        terms: Terms,
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
        self._num_own, self._again = 0, np.zeros(0, np.int64)

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
        padded = self.complete and number == self.num_batches - 1 and self._again.size
        whole = np.zeros(self._batches[number].size, np.int64)
        if padded:
            whole[self._num_own :] = self._again
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
                sequence = np.concatenate([self._head, found])
                self._num_own = len(items)
                self._again = 1 + np.arange(size - len(items)) // sequence.size
                found = np.concatenate([found, np.resize(sequence, size - len(items))])
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
    ahead: deque[Pending] = field(default_factory=deque)
    """Batches in the making or ready, in order."""
    over: bool = False
    """Whether all batches of its pass are begun."""
    told: bool = False
    """Whether it was told that its pass has ended."""


@dataclass(slots=True, eq=False)
class Opening:
    """A pass that ranks have begun."""

    epoch: int
    left: NDArray[np.bool_]
    """[size] What was left of the epoch."""
    histories: dict[int, Sequence[Ints]] | None
    """Rank -> global batches that it had from a server before this one; None: there was none, nobody is waited for."""

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


class Job:
    """A job: its terms, its ranks, its passes."""

    def __init__(self, name: str, terms: Terms, items: Ints, subset: NDArray[np.bool_]) -> None:
        self.name, self.terms, self.items = name, terms, items
        """[n] Its items, in the order in which it lists them."""
        self.subset = subset
        """[size] The same as a bitmap."""
        self.ranks = [Rank() for _ in range(terms.world_size)]
        self.passes: dict[int, Pass] = {}
        """Number of the pass -> the pass, as long as a rank may need it."""
        self.openings: list[Opening] = []
        """How each pass so far was begun."""
        self.num_started = 0
        """Passes that have started, which they do in order."""
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

    def walk(self, rank: Rank) -> Pass | None:
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

    def enter(self, number: int, epoch: int, left: NDArray[np.bool_], history: Sequence[Ints] | None) -> None:
        """Let rank `number` into the next pass of its own. Raises `InputError` when it means another one."""
        rank = self.ranks[number]
        if rank.num_begun == len(self.openings):
            self.openings.append(Opening(epoch, left, None if history is None else {}))
        opening = self.openings[rank.num_begun]
        same = epoch == opening.epoch and np.array_equal(opening.left, left)
        if not same or (history and opening.histories is None):
            raise InputError(
                f"rank {number} of job {self.name!r} begins epoch {epoch} elsewhere than the ranks before it (epoch "
                f"{opening.epoch}). Load one state into all ranks."
            )
        if opening.histories is not None:
            opening.histories[number] = list(history or ())
        rank.num_begun += 1
        rank.number, rank.over, rank.told = len(history or ()), False, False

    def may_start(self) -> int | None:
        """Return the next pass that is to start: it was begun, waits for nobody, and the one before it has started."""
        number = self.num_started
        if number == len(self.openings):
            return None
        said = self.openings[number].histories
        waits = said is not None and any(not rank.left and k not in said for k, rank in enumerate(self.ranks))
        return None if waits else number

    @property
    def attached(self) -> bool:
        """Whether any of its ranks is here."""
        return any(rank.attached for rank in self.ranks)

    def tidy(self) -> list[Pass]:
        """Drop batches and passes that every rank has behind it, and return those passes.

        A rank that left needs nothing any more; one that has not come yet needs everything.
        """
        here = [rank for rank in self.ranks if not rank.left]
        first = min((rank.num_begun for rank in here), default=len(self.openings) + 1) - 1
        dropped = [self.passes.pop(number) for number in list(self.passes) if number < first]
        if first in self.passes:
            self.passes[first].forget(min(rank.number for rank in here if rank.num_begun - 1 == first))
        return dropped
