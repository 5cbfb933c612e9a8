"""What a job's mesh does with the devices that are left: the groups of each replica, its degree and share of the batch.

The groups of one stage hold the same weights in every replica, so that a replica can be formed of any group of each
stage without moving a weight. With the groups of each stage in order of what they lost, the i-th of all stages form
replica i, and what failed is in as few replicas as possible. All replicas that lost devices run at one reduced degree,
the one that trains the most examples; one with fewer devices than that in a stage is dropped.

>>> plan = plan_mesh(Mesh({"tp": 4, "dp": 3, "pp": 2}), [1, 17])
>>> plan.reduced, [(replica.groups, replica.tp) for replica in plan.replicas]
(3, [((0, 1), 3), ((1, 0), 4), ((2, 2), 4)])
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.parallel.tensor.availability import MOST_DEVICES, PowerBoost


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
