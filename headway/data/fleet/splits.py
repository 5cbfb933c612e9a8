"""What a pass over the data consists of when workers prepare it: splits of one rank's batches, and who serves whom.

A pass fixes the global sequence and how it falls onto ranks, exactly as a
`DataLoader` of the same seed would deal it. A split is a run of batches of one
rank: it has one reader, so a reader needs no more workers than it is given,
and what was delivered is one number per rank. Units are (epoch, cursor
range), not files: workers compute the items themselves, and stay stateless.

>>> work = FleetPass(num_items=10, batch_size=2, world_size=2, shuffle=False)
>>> work.num_batches(0), work.keys(2, rank=1).items, work.position(1)
(3, [9], 4)
>>> work.splits(rank=0, taken=1, split_batches=2, most=2)
[Split(rank=0, first=0, end=2), Split(rank=0, first=2, end=3)]
>>> [partners(rank, 2, num_workers=5, most=3) for rank in (0, 1)]
[[0, 1, 2], [2, 3, 4]]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.data.bytes.order import Permutation, Sequence, in_order, permute


class BatchKeys(NamedTuple):
    """The items of one batch, and what their random numbers depend on."""

    items: list[int]
    occurrence: list[int]
    """How often each came before in this pass: 1 where a padded tail begins again."""
    seed: int
    epoch: int
    batch: int
    """Number of the global batch in its epoch."""
    rank: int


@dataclass(frozen=True, slots=True)
class FleetPass:
    """One pass over the data as all its ranks see it; equal passes deal equal batches in any process."""

    num_items: int
    batch_size: int
    """Items per rank and batch."""
    world_size: int = 1
    seed: int = 0
    epoch: int = 0
    start: int = 0
    """Position in the global sequence at which the pass begins."""
    shuffle: bool = True
    tail: str = "short"

    def __post_init__(self) -> None:
        """Raise `InputError` on sizes that cannot be."""
        self.sequence()
        derived_seed(self.seed)

    def sequence(self) -> Sequence:
        """Return how positions fall into batches."""
        return Sequence(self.num_items, self.batch_size, self.world_size, tail=self.tail, start=self.start)

    def num_batches(self, rank: int) -> int:
        """Return the batches of `rank` from `start` to the end."""
        return self.sequence().num_batches(rank)

    def position(self, taken: int) -> int:
        """Return the committed cursor once every rank took `taken` batches: what a state holds."""
        return self.sequence().position_after(taken)

    def keys(self, batch: int, rank: int) -> BatchKeys:
        """Return what batch `batch` of `rank` (0 = the first from `start`) is made of."""
        sequence = self.sequence()
        positions = sequence.positions(batch, rank)
        items: list[int] = _order(self.num_items, self.seed, self.epoch, self.shuffle)(
            positions % self.num_items
        ).tolist()
        again: list[int] = (positions // self.num_items).tolist()
        return BatchKeys(items, again, self.seed, self.epoch, self.start // sequence.global_batch + batch, rank)

    def splits(self, rank: int, taken: int, *, split_batches: int, most: int) -> list[Split]:
        """Return the next splits of `rank` after `taken` batches, `most` at most; the first may be partly taken."""
        total, first = self.num_batches(rank), taken // split_batches * split_batches
        starts = range(first, min(total, first + most * split_batches), split_batches)
        return [Split(self, rank, start, min(start + split_batches, total)) for start in starts]


@dataclass(frozen=True, slots=True)
class Split:
    """Batches `first` .. `end` - 1 of one rank of a pass."""

    work: FleetPass = field(repr=False)
    rank: int
    first: int
    end: int


@lru_cache(maxsize=4)
def _order(num_items: int, seed: int, epoch: int, shuffle: bool) -> Permutation:
    return permute(num_items, seed, epoch) if shuffle else in_order(num_items)


def partners(rank: int, num_ranks: int, *, num_workers: int, most: int) -> list[int]:
    """Return which of `num_workers` workers serve `rank`: an arc of them, `most` at most.

    Every rank has min(most, num_workers) workers; every worker has a rank as
    long as there are no more than `most` workers per rank. Raises `InputError`
    on a rank that is not one.
    """
    if not 0 <= rank < num_ranks or most < 1 or num_workers < 0:
        raise InputError(
            f"rank {rank} of {num_ranks} with {most} of {num_workers} workers cannot be. Use ranks 0 to num_ranks - 1 "
            "and at least one worker per rank."
        )
    first = rank * num_workers // num_ranks
    return [(first + k) % num_workers for k in range(min(most, num_workers))]
