"""Which units of a layer each tensor-parallel rank computes with and synchronises, when one replica is smaller.

A unit is what a layer cannot be cut below: a group of query heads with its key and value head, a column of the
feed-forward layer, a row of the vocabulary. A replica that lost devices splits the units over `tp_reduced` ranks, the
others over `tp`. Gradients can only be summed between ranks that hold the same units, so that a whole replica first
hands the units of its last `tp - tp_reduced` ranks (extra ranks) to the first `tp_reduced` (core ranks), rank i of
which then sums with rank i of the smaller replica:

    comp    rank 0: 0 1 2   rank 1: 3 4 5   rank 2: 6 7    a replica of 3 ranks computes with these
    moves                                   6 to 0, 7 to 1
    sync    rank 0: 0 1 2 6   rank 1: 3 4 5 7              both replicas sum these; the smaller computes with them

>>> shards = ShardMap.build(8, 3, 2)
>>> shards.comp, shards.sync
(((0, 1, 2), (3, 4, 5), (6, 7)), ((0, 1, 2, 6), (3, 4, 5, 7)))
>>> shards.sizes, shards.max_link_load
(ShardSizes(comp=(3, 3, 2), sync=(4, 4)), 1)

The order of units within a layer does not change what the layer computes as long as all its tensors have the same
order. Source: nonuniform tensor parallelism (arXiv 2504.06095); the map is ours: sizes differ by at most one in both
layouts for any number of units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from headway.core.errors import InputError

MOST_UNITS = 10_000_000
"""Units that a map may have: forty vocabularies of the largest kind."""


class UnitMove(NamedTuple):
    """A unit that a core rank synchronises and an extra rank computes with."""

    unit: int
    """Its number in the layer."""

    source: int
    """The extra rank that computes with it."""

    target: int
    """The core rank that sums its gradient with the other replicas."""


class ShardSizes(NamedTuple):
    """Units per rank in both layouts."""

    comp: tuple[int, ...]
    """[tp] Units that a rank of a whole replica computes with."""

    sync: tuple[int, ...]
    """[tp_reduced] Units that a core rank synchronises."""


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Two layouts of the same units, and the units that move between them."""

    comp: tuple[tuple[int, ...], ...]
    """[tp] Units of each rank of a whole replica: contiguous, as before the failure, so that no weight moves there."""

    sync: tuple[tuple[int, ...], ...]
    """[tp_reduced] Units of each rank of the smaller replica, and of each core rank while gradients are summed.

    A core rank's own units come first, then those moved to it, in the order of `moves`.
    """

    moves: tuple[UnitMove, ...]
    """Units of the extra ranks in order: exactly those whose rank differs between the layouts."""

    @classmethod
    def build(cls, units: int, tp: int, tp_reduced: int) -> ShardMap:
        """Split `units` over `tp` ranks and over the first `tp_reduced` of them, with as few moves as possible.

        Sizes of either layout differ by at most one, larger ones first. A rank of more units in `comp` is therefore
        never one of fewer in `sync`: no core rank gives a unit away, and the moves are the units of the extra ranks.
        They go round robin to the core ranks that lack units, which spreads them over the links. A rank has no unit
        where there are fewer units than ranks. Which device failed does not matter: number those that remain anew.
        Raises `InputError` outside 1 <= tp_reduced <= tp, and for a number of units that is not 1..10,000,000.
        """
        for name, value in (("units", units), ("tp", tp), ("tp_reduced", tp_reduced)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_UNITS:
                raise InputError(f"{name} is {value!r}; give a whole number from 1 to {MOST_UNITS:,}.")
        if tp_reduced > tp:
            raise InputError(
                f"the reduced degree is {tp_reduced}, the full one {tp}; a group that lost devices is smaller. "
                f"Give a reduced degree from 1 to {tp}."
            )
        sizes, goals = balanced(units, tp), balanced(units, tp_reduced)
        starts = [0, *accumulate(sizes)]
        comp = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False))
        sync = [list(numbers) for numbers in comp[:tp_reduced]]
        moves = []
        target = 0
        for source in range(tp_reduced, tp):
            for unit in comp[source]:
                while len(sync[target]) == goals[target]:
                    target = (target + 1) % tp_reduced
                sync[target].append(unit)
                moves.append(UnitMove(unit, source, target))
                target = (target + 1) % tp_reduced
        return cls(comp, tuple(map(tuple, sync)), tuple(moves))

    @property
    def units(self) -> int:
        """Number of units."""
        return sum(map(len, self.comp))

    @property
    def sizes(self) -> ShardSizes:
        """Units per rank in both layouts."""
        return ShardSizes(tuple(map(len, self.comp)), tuple(map(len, self.sync)))

    @property
    def link_loads(self) -> Mapping[tuple[int, int], int]:
        """(extra rank, core rank) -> units that move between them; pairs without a move are left out."""
        return Counter((move.source, move.target) for move in self.moves)

    @property
    def max_link_load(self) -> int:
        """Most units that move between two ranks; 0 where none move."""
        return max(self.link_loads.values(), default=0)


def balanced(units: int, num_ranks: int) -> list[int]:
    """[num_ranks] Split a number of units into sizes that differ by at most one, larger ones first.

    >>> balanced(64, 7)
    [10, 9, 9, 9, 9, 9, 9]
    """
    size, larger = divmod(units, num_ranks)
    return [size + (rank < larger) for rank in range(num_ranks)]


def attention_units(query_heads: int, kv_heads: int) -> int:
    """Return the units of an attention layer: its key and value heads, each with the query heads that read it.

    Query, key and value tensors are cut at the same groups, since a query head reads the keys of its own group only.
    Raises `InputError` where the groups would be unlike, with the numbers of key and value heads that are possible.

    >>> attention_units(32, 8)
    8
    """
    for name, value in (("query heads", query_heads), ("key and value heads", kv_heads)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_UNITS:
            raise InputError(f"the number of {name} is {value!r}; give a whole number from 1 to {MOST_UNITS:,}.")
    if query_heads % kv_heads:
        allowed = [str(heads) for heads in range(1, min(query_heads, 4096) + 1) if query_heads % heads == 0]
        raise InputError(
            f"{query_heads} query heads cannot be grouped over {kv_heads} key and value heads: units would differ in "
            f"size. Use one of: {', '.join(allowed)}."
        )
    return kv_heads


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """How a tensor is split: along which dimension, and how much of it is one unit of which map."""

    shards: ShardMap
    """Which rank has which units; tensors that are split together have the same map."""

    dim: int
    """The dimension that is split."""

    unit_size: int
    """Elements of it that belong to one unit."""


def split_together(shards: ShardMap, tensors: Mapping[str, tuple[int, int]]) -> dict[str, TensorSplit]:
    """Split tensors at the same units: name -> (dimension, its length), of the whole tensor, to name -> its split.

    Tensors belong together where one's unit is used with the other's alone: query, key, value and output of one group
    of heads; a column of the feed-forward layer, its bias and its row in the layer behind. Raises `InputError` where a
    length is not a whole number of units, with the numbers of units that all lengths have in common.

    >>> splits = split_together(ShardMap.build(8, 4, 3), {"query": (0, 2048), "key": (0, 512), "output": (1, 2048)})
    >>> [split.unit_size for split in splits.values()]
    [256, 64, 256]
    """
    for name, (dim, length) in tensors.items():
        if dim < 0:
            raise InputError(f"the dimension of {name} is {dim}; give it from the front, from 0 on.")
        if length < shards.units or length % shards.units:
            common = math.gcd(*(length for _, length in tensors.values()))
            allowed = ", ".join(str(units) for units in range(1, min(common, 4096) + 1) if common % units == 0)
            raise InputError(
                f"{name} has {length} elements along its split dimension, which {shards.units} units do not divide. "
                f"{', '.join(tensors)} are split together; use a number of units of: {allowed}."
            )
    return {name: TensorSplit(shards, dim, length // shards.units) for name, (dim, length) in tensors.items()}


def batch_shares(examples: int, degrees: Sequence[int]) -> list[int]:
    """[replicas] Split a batch in proportion to the replicas' tensor-parallel degrees, by largest remainders.

    >>> batch_shares(64, [8, 8, 7])
    [22, 22, 20]
    """
    if examples < 0 or not degrees or min(degrees) < 1:
        raise InputError(f"{examples} examples for groups of {list(degrees)} devices; give at least one device each.")
    shares = [examples * degree // sum(degrees) for degree in degrees]
    by_remainder = sorted(range(len(degrees)), key=lambda replica: -(examples * degrees[replica] % sum(degrees)))
    for replica in by_remainder[: examples - sum(shares)]:
        shares[replica] += 1
    return shares
