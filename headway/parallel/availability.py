"""How much of a job's throughput is left when devices have failed, by what is done with their tensor-parallel groups.

A replica is `pp` groups of `tp` devices. It can be dropped when one device failed, or go on with the smaller group at
(tp - k) / tp of its pace (NTP). Groups can stay where they are, or be packed anew so that replicas consist of groups
alike:

                       groups stay                          groups are packed
    failed devices     |x...|....||....|..x.|               |....|....||x...|..x.|
    dropped            0 of 2 replicas                      1 of 2
    NTP                2 replicas at 3/4                    1, and 1 at 3/4

>>> [row] = availability(32768, 0.001, [64], 8)
>>> round(row.drop_packed, 3), round(row.drop_unpacked, 3), round(row.ntp_packed, 3), round(row.ntp_unpacked, 3)
(0.933, 0.606, 0.999, 0.994)

Devices fail independently, so that all four are exact sums over binomial distributions. Source: arXiv 2504.06095,
which simulates them.

What a job's mesh does with the devices that are left: the groups of each replica, its degree and share of the batch.

The groups of one stage hold the same weights in every replica, so that a replica can be formed of any group of each
stage without moving a weight. With the groups of each stage in order of what they lost, the i-th of all stages form
replica i, and what failed is in as few replicas as possible. All replicas that lost devices run at one reduced degree,
the one that trains the most examples; one with fewer devices than that in a stage is dropped.

>>> plan = plan_mesh(Mesh({"tp": 4, "dp": 3, "pp": 2}), [1, 17])
>>> plan.reduced, [(replica.groups, replica.tp) for replica in plan.replicas]
(3, [((0, 1), 3), ((1, 0), 4), ((2, 2), 4)])

Which units of a layer each tensor-parallel rank computes with and synchronises, when one replica is smaller.

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
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.core.rng import binomial

MOST_DEVICES = 1_000_000
"""Devices that a table may be asked for."""

NEVER = 1e-15
"""A chance that changes no digit of a mean."""


@dataclass(frozen=True, slots=True)
class PowerBoost:
    """More power for the devices that remain in a group, so that they compute its part of the batch in less time.

    Power grows as clock^exponent: of the power of a transistor that switches, C V^2 f, the voltage rises with the
    clock too, so that the exponent is 3; devices that run at a fixed voltage have 1.
    """

    limit: float = 1.0
    """Power that a device may take, as a multiple of what it takes otherwise; 1 is no boost."""

    exponent: float = 3.0
    """Power is clock^exponent; from 1 on."""

    def __post_init__(self) -> None:
        """Check both numbers; raises `InputError`."""
        if not 1 <= self.limit <= 10:
            raise InputError(f"the power boost is {self.limit:g}; give a multiple from 1 to 10, for example 1.3.")
        if not 1 <= self.exponent <= 10:
            raise InputError(f"the power exponent is {self.exponent:g}; give a number from 1 to 10, for example 3.")

    def speed_up(self, tp: int, tp_reduced: int) -> float:
        """Return the clock of the remaining devices: tp / tp_reduced, which hides the loss, or the most allowed.

        >>> round(PowerBoost(1.3).speed_up(8, 7), 4), round(PowerBoost(1.3).speed_up(64, 63), 4)
        (1.0914, 1.0159)
        """
        return min(tp / tp_reduced, math.pow(self.limit, 1 / self.exponent))

    def power(self, tp: int, tp_reduced: int) -> float:
        """Return the power that a remaining device takes at that clock, as a multiple."""
        return math.pow(self.speed_up(tp, tp_reduced), self.exponent)

    def batch_share(self, tp: int, tp_reduced: int) -> float:
        """Return the part of a replica's batch that the smaller group computes in the time of a whole one."""
        return min(1.0, tp_reduced / tp * self.speed_up(tp, tp_reduced)) if tp_reduced else 0.0


@dataclass(frozen=True, slots=True)
class AvailabilityRow:
    """Throughput under one tensor-parallel degree, as a fraction of that without failures."""

    tp: int
    """Devices of a group."""

    drop_packed: float
    """Groups that lost a device are dropped, the others form replicas anew."""

    drop_unpacked: float
    """Replicas that lost a device are dropped."""

    ntp_packed: float
    """Groups go on with the devices that remain, those alike in the same replicas."""

    ntp_unpacked: float
    """Groups go on where they are; a replica keeps the pace of its smallest group."""


def failed_devices(devices: int, failed: float) -> int:
    """Return how many of `devices` have failed: `failed` is a fraction below 1, or a number of devices from 1 on.

    A fraction is rounded down to whole devices. Raises `InputError` where more failed than there are.

    >>> failed_devices(32768, 0.001), failed_devices(32768, 33)
    (32, 33)
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= MOST_DEVICES:
        raise InputError(f"the number of devices is {devices!r}; give a whole number from 1 to {MOST_DEVICES:,}.")
    if 0 <= failed < 1:
        return math.floor(devices * failed + 1e-9)  # 0.29 of 100 is 28.999999999999996 in floating point
    if not 1 <= failed <= devices or failed != int(failed):
        raise InputError(
            f"{failed:g} devices failed, of {devices}; give a fraction from 0 to below 1, or a whole number of "
            f"devices up to {devices}."
        )
    return int(failed)


def availability(
    devices: int, failed: float, tp: Sequence[int], pp: int = 1, *, boost: PowerBoost | None = None
) -> list[AvailabilityRow]:
    """Return a row per tensor-parallel degree of `tp`, in pipelines of `pp` stages, with `failed` of `devices` failed.

    `failed` (as `failed_devices` reads it) is the mean: each device has failed with the same chance, whatever the
    others did. Devices that do not fill a replica are spare and count nowhere. `boost` is the power that smaller groups
    get. Raises `InputError` where a replica needs more devices than there are.
    """
    chance = failed_devices(devices, failed) / devices
    for name, value in (*(("tensor-parallel degree", degree) for degree in tp), ("number of stages", pp)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"the {name} is {value!r}; give a whole number from 1 on.")
    for degree in tp:
        if degree * pp > devices:
            raise InputError(
                f"a replica of tp({degree}) * pp({pp}) = {degree * pp} needs more than the {devices} devices. "
                "Lower a degree, or give more devices."
            )
    return [_row(chance, devices // (degree * pp), degree, pp, boost or PowerBoost()) for degree in tp]


def _row(chance: float, replicas: int, tp: int, pp: int, boost: PowerBoost) -> AvailabilityRow:
    """Return the means for one degree.

    A replica has the pace of the group that lost most. With pace(k) that of a group that lost k devices, the mean is

        1 - sum over m >= 1 of (pace(m - 1) - pace(m)) * (fraction of replicas with a group that lost m or more)

    Each of the `pp` groups of a replica lost m or more with the same chance q, so that the fraction is 1 - (1 - q)^pp.
    Packed, groups are in order of what they lost and each pp of them are a replica: H groups that lost m or more are in
    ceil(H / pp) replicas, and H is binomial.

        lost 2 1 | 1 0 | 0 0  (pp 2)    with >= 1: 3 groups, in 2 replicas; with >= 2: 1 group, in 1 replica
    """
    lost = [float(k == round(chance * tp)) for k in range(tp + 1)] if chance in (0, 1) else list(binomial(tp, chance))
    # [tp] Chance that a group lost m or more, m = 1..tp; summed from the rare end, where no digit is lost.
    chances = [min(1.0, tail) for tail in accumulate(reversed(lost))][-2::-1]
    unpacked = [-math.expm1(pp * math.log1p(-q)) if q < 1 else 1.0 for q in chances]
    packed = [_packed(q, replicas, pp) for q in chances]
    pace = [boost.batch_share(tp, tp - k) for k in range(tp + 1)]
    steps = [before - after for before, after in pairwise(pace)]
    return AvailabilityRow(
        tp=tp,
        drop_packed=1 - packed[0],
        drop_unpacked=1 - unpacked[0],
        ntp_packed=1 - math.fsum(map(operator.mul, steps, packed)),
        ntp_unpacked=1 - math.fsum(map(operator.mul, steps, unpacked)),
    )


def _packed(chance: float, replicas: int, pp: int) -> float:
    """Return the mean fraction of replicas that groups fill which are so with this chance, packed."""
    if chance < NEVER:
        return 0.0
    if chance > 1 - NEVER:
        return 1.0
    return math.fsum(p * -(-h // pp) for h, p in enumerate(binomial(replicas * pp, chance))) / replicas


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica."""

    groups: tuple[int, ...]
    """[pp] The replica, before the failures, of the group that each stage now has."""

    remaining: tuple[int, ...]
    """[pp] Devices that are left in each of them."""

    tp: int
    """Tensor-parallel degree that it runs at; 0 where it is dropped."""

    batch_share: float
    """Its part of the batch, as a fraction of a whole replica's."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """A job's replicas after failures."""

    reduced: int
    """Degree of the replicas that lost devices; the whole degree where none did."""

    replicas: tuple[ReplicaPlan, ...]
    """Those that lost most first."""

    throughput: float
    """Examples per second, as a fraction of those without failures."""


def plan_mesh(mesh: Mesh, failed: Iterable[int], boost: PowerBoost | None = None) -> MeshPlan:
    """Plan a mesh of the axes tp, dp and pp whose ranks `failed`; `boost` is the power that smaller groups get.

    Raises `InputError` for other axes, ranks outside the mesh, and where each replica lacks a stage.
    """
    boost = boost or PowerBoost()
    wrong = [axis for axis, size in mesh.axes if axis not in ("tp", "dp", "pp") and size > 1]
    if wrong:
        raise InputError(f"{mesh.product()} has {', '.join(wrong)}; give a mesh of tp, dp and pp only.")
    if mesh.world_size > MOST_DEVICES:
        raise InputError(f"{mesh.product()} has {mesh.world_size} ranks; give a mesh of at most {MOST_DEVICES:,}.")
    sizes = {"tp": 1, "dp": 1, "pp": 1} | mesh.sizes
    tp = sizes["tp"]
    remaining = [[tp] * sizes["dp"] for _ in range(sizes["pp"])]
    for rank in set(failed):
        coordinates = {"dp": 0, "pp": 0} | mesh.coordinates(rank)
        remaining[coordinates["pp"]][coordinates["dp"]] -= 1
    groups = list(zip(*(sorted(range(sizes["dp"]), key=stage.__getitem__) for stage in remaining), strict=True))
    counts = [tuple(stage[g] for stage, g in zip(remaining, replica, strict=True)) for replica in groups]
    smallest = [min(numbers) for numbers in counts]
    if max(smallest) == 0:
        raise InputError(
            f"a stage has no device left in any of the {sizes['dp']} replicas. Start from a checkpoint on fewer stages."
        )

    def degree(count: int, reduced: int) -> int:
        return tp if count == tp else reduced if count >= reduced else 0

    def total(reduced: int) -> float:
        return sum(boost.batch_share(tp, degree(count, reduced)) for count in smallest)

    # Where a replica lost devices, some degree below `tp` is better than `tp`: it drops fewer replicas.
    reduced = max((count for count in set(smallest) if count), key=lambda candidate: (total(candidate), candidate))
    degrees = [degree(count, reduced) for count in smallest]
    shares = [boost.batch_share(tp, its_tp) for its_tp in degrees]
    replicas = map(ReplicaPlan, groups, counts, degrees, shares)
    return MeshPlan(reduced, tuple(replicas), sum(shares) / sizes["dp"])


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
