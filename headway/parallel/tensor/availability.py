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
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from headway.core.binomial import binomial
from headway.core.errors import InputError
from headway.core.mesh import Mesh

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
