"""Ranks and their coordinates: which rank does what in a parallel job.

A mesh lists its axes with the fastest-varying one first, as Megatron does:
with `tp=2, dp=2, pp=2`, ranks 0 and 1 share a tensor-parallel group, 0 and 2
a data-parallel one, 0 and 4 a pipeline. Sizes multiply to the world size.

>>> mesh = Mesh({"tp": 2, "dp": 2, "pp": 2})
>>> mesh.coordinates(5), mesh.rank(tp=1, pp=1)
({'tp': 1, 'dp': 0, 'pp': 1}, 5)
>>> mesh.groups("pp")
[[0, 4], [1, 5], [2, 6], [3, 7]]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.tables import pick

AXES: dict[str, str] = {
    "tp": "tensor parallel: a layer's matrices are split",
    "cp": "context parallel: a sequence is split",
    "ep": "expert parallel: the experts are spread",
    "dp": "data parallel: replicas of the model",
    "pp": "pipeline parallel: layers are split into stages",
}
"""Axis -> meaning, in Megatron's default order (tp-cp-ep-dp-pp), fastest first. A mesh may name others too."""


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """An arrangement of ranks 0..world_size-1 along named axes."""

    axes: tuple[tuple[str, int], ...]
    """(name, number of ranks along it) of each axis, fastest-varying first."""

    def __init__(self, sizes: Mapping[str, int], *, world_size: int | None = None) -> None:
        """Check the sizes, and their product against `world_size` if that is given; raises `InputError`."""
        object.__setattr__(self, "axes", tuple(sizes.items()))
        for axis, size in self.axes:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"axis {axis} has size {size!r}; give every axis a whole number >= 1.")
        if world_size is not None and self.world_size != world_size:
            raise InputError(
                f"{self.product()} = {self.world_size} is not the world size {world_size}. "
                "Change a degree, or use Mesh.fill to let dp take the rest."
            )

    @classmethod
    def fill(cls, world_size: int, *, order: Iterable[str] = tuple(AXES), rest: str = "dp", **degrees: int) -> Mesh:
        """Build a mesh of `world_size` ranks: `rest` takes what the given degrees leave, other axes are 1.

        `order` lists the axes, fastest-varying first. Raises `InputError`
        when the degrees do not divide the world size.

        >>> Mesh.fill(16, tp=2, pp=4).product()
        'tp(2) * cp(1) * ep(1) * dp(2) * pp(4)'
        """
        axes = list(order)
        if len(set(axes)) != len(axes):
            raise InputError(f"the order {'-'.join(axes)} names an axis twice; name each once.")
        for axis in (*degrees, rest):
            pick(dict.fromkeys(axes, True), axis, "axis")
        fixed = cls({axis: degrees.get(axis, 1) for axis in axes})
        if rest in degrees:
            return cls(fixed.sizes, world_size=world_size)
        if world_size < 1 or world_size % fixed.world_size:
            raise InputError(
                f"{fixed.product()} = {fixed.world_size} does not divide the world size {world_size}, so that "
                f"no whole {rest} is left. Change a degree or the number of ranks."
            )
        return cls({**fixed.sizes, rest: world_size // fixed.world_size})

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> number of ranks along it, in order."""
        return dict(self.axes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def product(self) -> str:
        """Return the sizes as one product, for messages."""
        return " * ".join(f"{axis}({size})" for axis, size in self.axes) or "1"

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`; raises `UnknownNameError`."""
        return pick(self.sizes, axis, "axis")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis -> index of a rank; raises `InputError` outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise InputError(
                f"rank {rank} is not in {self.product()} = {self.world_size}; use 0..{self.world_size - 1}."
            )
        place = {}
        for axis, size in self.axes:
            rank, place[axis] = divmod(rank, size)
        return place

    def rank(self, **coordinates: int) -> int:
        """Return the rank at these indices, 0 along axes not named; raises `InputError` outside the mesh."""
        rank, stride = 0, 1
        for axis in coordinates:
            self.size(axis)
        for axis, size in self.axes:
            index = coordinates.get(axis, 0)
            if not 0 <= index < size:
                raise InputError(f"{axis}={index} is outside {self.product()}; use 0..{size - 1}.")
            rank, stride = rank + index * stride, stride * size
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ along `axes` only, in order of their first rank.

        Together they hold every rank once. Raises `UnknownNameError`.
        """
        for axis in axes:
            self.size(axis)
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            members.setdefault(tuple(place[axis] for axis, _ in self.axes if axis not in axes), []).append(rank)
        return list(members.values())

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks that share a group along `axes` with `rank`, it included."""
        group = [self.coordinates(rank)]
        for axis in axes:
            group = [{**place, axis: index} for index in range(self.size(axis)) for place in group]
        return sorted(self.rank(**place) for place in group)
