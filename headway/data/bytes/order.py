"""Which item a job reads when: seeded permutations, and how ranks share one global sequence.

The sequence of an epoch is defined first, for all ranks together; ranks take
strided slices of its global batches. So a position in it means the same for
any number of ranks, and where a job goes on after an interruption is one
number. The law is CheckFreq's (FAST 2021): the order of an epoch is a pure
function of seed and epoch.

>>> order = permute(10, seed=7, epoch=0)
>>> sorted(order(i) for i in range(10)) == list(range(10)), order(3) == permute(10, 7, 0)(3)
(True, True)
>>> sequence = Sequence(10, batch_size=2, world_size=2)
>>> [sequence.positions(g, rank=1).tolist() for g in range(sequence.num_batches())]
[[1, 3], [5, 7], [9]]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.rng import derived_seed
from headway.core.tables import pick

Ints = NDArray[np.int64]

TABLE_ITEMS = 1 << 17
"""Up to this many items an order is a table (1 MB, 15 ms); a longer one is computed index by index (1 us each)."""

ROUNDS = 8
"""Rounds of the Feistel network; six pass every test of uniformity here, two are reserve."""

TAILS: dict[str, str] = {
    "short": "the last items are dealt to the ranks in turn; ranks without one end earlier",
    "pad": "the sequence begins again to fill the last global batch",
    "drop": "items that do not fill a global batch are left out of the epoch",
}
"""What becomes of the items that do not fill a global batch."""


class Permutation:
    """A bijection on [0, n), made by `permute`: call it with an index or an array of indices."""

    def __init__(self, n: int, at: Callable[[Ints], Ints]) -> None:
        self.n = n
        self._at = at

    def __len__(self) -> int:
        return self.n

    def __call__(self, index: Any) -> Any:
        """Return the item(s) at `index`: int for an int, int64 array for anything longer. Raises `InputError`."""
        indices = np.asarray(index, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= self.n):
            raise InputError(f"index {index!r} lies outside an order of {self.n} items. Use 0 to {self.n - 1}.")
        items = self._at(indices.reshape(-1)).reshape(indices.shape)
        return items if indices.ndim else int(items)


def permute(n: int, seed: int, epoch: int) -> Permutation:
    """Return the order of `epoch`: a pseudo-random bijection on [0, n), the same in every process and release.

    Short orders sort counter-based random numbers, long ones are a balanced
    Feistel network with cycle walking, so that any index costs O(1) time and
    memory. Raises `InputError` on a negative argument.
    """
    if n < 0 or epoch < 0:
        raise InputError(f"n is {n} and epoch {epoch}; both must be 0 or more.")
    key = derived_seed(seed, "order", epoch)
    if n <= TABLE_ITEMS:
        # Raw numbers of a bit generator are the only random numbers that numpy promises never to change.
        table = np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable")
        return Permutation(n, lambda indices: table[indices])
    return Permutation(n, _Feistel(n, key).walk)


def in_order(n: int) -> Permutation:
    """Return the identity on [0, n)."""
    return Permutation(n, lambda indices: indices.copy())


class _Feistel:
    """A keyed bijection on the smallest even power of two that holds n; indices that fall outside walk on."""

    def __init__(self, n: int, key: int) -> None:
        self._n = n
        self._half = np.uint64(((n - 1).bit_length() + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.random.Philox(key=key).random_raw(ROUNDS)

    def walk(self, indices: Ints) -> Ints:
        """Return the items of [m] indices; each is re-encrypted until it lies inside, four times at most on average."""
        items = self._encrypted(indices.astype(np.uint64))
        # Cycle walking: the power of two is at most four times n, and an item outside is encrypted until it is inside.
        outside = np.flatnonzero(items >= self._n)
        while outside.size:
            items[outside] = self._encrypted(items[outside])
            outside = outside[items[outside] >= self._n]
        return items.astype(np.int64)

    def _encrypted(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # One round of Feistel: the halves change places, one of them mixed with the other and the round's key.
        #     (left, right) -> (right, left ^ F(right ^ key))      whatever F is, this can be undone: it is a bijection
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        mixed: NDArray[np.uint64] = (left << self._half) | right
        return mixed


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finaliser (Steele, Lea, Flood 2014) of each value: the round function."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Sequence:
    """How the positions of one epoch fall into global batches and onto ranks.

    Global batch g holds the next `batch_size * world_size` positions; rank r
    takes positions r::world_size of it. `start` is the position at which the
    epoch goes on: 0, or anywhere when the global batch was changed.
    """

    num_items: int
    batch_size: int
    """Items per rank and batch."""
    world_size: int = 1
    tail: str = "short"
    start: int = 0

    def __post_init__(self) -> None:
        """Raise `InputError` on sizes that cannot be."""
        for name, least in (("num_items", 0), ("batch_size", 1), ("world_size", 1), ("start", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be {least} or more.")
        if self.start > self.num_items:
            raise InputError(f"start is {self.start}; an epoch of {self.num_items} items has no such position.")
        pick(TAILS, self.tail, "tail")

    @property
    def global_batch(self) -> int:
        """Items of all ranks in one step."""
        return self.batch_size * self.world_size

    @property
    def num_global_batches(self) -> int:
        """Global batches from `start` to the end of the epoch."""
        left = self.num_items - self.start
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def num_batches(self, rank: int = 0) -> int:
        """Return how many of them have an item for `rank`."""
        left, batches = self.num_items - self.start, self.num_global_batches
        # The items left over are dealt to ranks 0, 1, ...: ranks behind the last one have a batch less.
        short = self.tail == "short" and 0 < left % self.global_batch <= rank
        return batches - 1 if short else batches

    def positions(self, batch: int, rank: int) -> Ints:
        """Return the positions of `rank` in global batch `batch` (0 = the first from `start`); none past the end.

        In a padded tail, position `num_items + k` is the k-th of the sequence again.
        """
        if not 0 <= rank < self.world_size:
            raise InputError(f"rank is {rank}; a world of {self.world_size} has ranks 0 to {self.world_size - 1}.")
        if not 0 <= batch < self.num_global_batches:
            return np.zeros(0, np.int64)
        # start                       first
        #   |--- g * global batch ---|--- batch_size * W positions ---|    rank r: first + r, + r + W, + r + 2 W, ...
        first = self.start + batch * self.global_batch
        positions = np.arange(first + rank, first + self.global_batch, self.world_size, dtype=np.int64)
        return positions if self.tail == "pad" else positions[positions < self.num_items]

    def position_after(self, batches: int) -> int:
        """Return the position after `batches` global batches: what a state holds; `num_items` at the end."""
        if batches >= self.num_global_batches:
            return self.num_items
        return self.start + batches * self.global_batch


def occurrences(items: Iterable[Hashable], seen: dict[Any, int] | None = None) -> list[int]:
    """Return for each item how often it came before, counting into `seen`.

    >>> occurrences([4, 5, 4, 4])
    [0, 0, 1, 2]
    """
    seen = {} if seen is None else seen
    found = []
    for item in items:
        found.append(seen.get(item, 0))
        seen[item] = found[-1] + 1
    return found


def item_seeds(seed: int, epoch: int, items: Ints, occurrence: Ints) -> NDArray[np.uint64]:
    """Return a 64-bit seed per item, a function of (seed, epoch, item, occurrence) alone: never of a worker or rank.

    >>> both, one = item_seeds(1, 0, np.array([3, 5]), np.array([0, 0])), item_seeds(1, 0, np.array([5]), np.array([0]))
    >>> bool(both[1] == one[0])
    True
    """
    base = _items_key(seed, epoch)
    # Every word goes through the mixer before the next one joins: neighbours do not cancel.
    return _mixed(_mixed(items.astype(np.uint64) ^ base) + occurrence.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


@functools.lru_cache(maxsize=16, typed=True)
def _items_key(seed: int, epoch: int) -> np.uint64:
    return np.uint64(derived_seed(seed, "items", epoch) & 0xFFFFFFFFFFFFFFFF)
