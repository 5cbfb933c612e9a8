"""Who is to blame for a hang, from what all ranks are doing: groups of equal stacks, and the odd ones out.

Healthy ranks of one kind stand at the same place. Stacks are normalised
(paths, numbers and addresses cut off) and grouped; the groups that dominate
are healthy, the rest are outliers; the smallest parallel group that holds all
outliers is suspected whole, for those that wait for a faulty rank look odd
too (ByteRobust, section 4.2). The verdict of who waits for whom
(`headway.ledger.jobs.hang`) narrows it where it names ranks of that group.

    stacks   A A A A | A B B A | A A A A       ranks 5, 6 are outliers: their tensor group, ranks 4-7, is suspected

Nobody is blamed where more than half are outliers, or no group dominates.

>>> mesh = Mesh({"tp": 2, "dp": 4})
>>> stacks = {rank: ["all_reduce (comm.py:10)", "main (train.py:5)"] for rank in range(8)}
>>> suspects({**stacks, 4: ["read (data.py:3)"], 5: ["broadcast (comm.py:9)"]}, mesh).ranks
[4, 5]
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.ledger.jobs.hang import HangVerdict

MISSING = ("<no stack>",)
"""Stands for the stack of a rank that did not answer."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_FOLDER = re.compile(r"(?:[\w.~+-]*[/\\])+")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Who is suspected."""

    ranks: list[int]
    """In order; [] = nobody."""

    group: str | None
    """The parallel group that holds all outliers, such as 'tp of ranks 4, 5'."""

    confidence: float
    """From 0 to 1: the share of healthy ranks, times the share of the suspects that are outliers."""

    reason: str
    """One clause."""


def normalised(frames: Sequence[str]) -> tuple[str, ...]:
    """Return a stack without what differs between ranks that do the same: folders, numbers, addresses.

    >>> normalised(["wait (/a/b/torch/dist.py:2806) 0x7f3a", "step_12 (train.py:9)"])
    ('wait (dist.py:#) @', 'step_# (train.py:#)')
    """
    return tuple(_NUMBER.sub("#", _FOLDER.sub("", _ADDRESS.sub("@", frame))).strip() for frame in frames)


def suspects(
    stacks: Mapping[int, Sequence[str]], mesh: Mesh | None = None, verdict: HangVerdict | None = None
) -> Suspicion:
    """Return who is suspected, given the frames of each rank, innermost first.

    A rank of the mesh without a stack counts as one of a kind of its own. Without a mesh all ranks lie along dp.
    Raises `InputError` for ranks outside of the mesh, and where there is no stack.
    """
    if not stacks:
        raise InputError("there are no stacks. Pass the frames of each rank, innermost first.")
    mesh = mesh or Mesh({"dp": max(stacks) + 1})
    world = mesh.world_size
    beyond = [rank for rank in stacks if not 0 <= rank < world]
    if beyond:
        raise InputError(f"rank {min(beyond)} is not in {mesh.product()} = {world}; pass the mesh of the job.")
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in range(world):
        kinds[normalised(stacks[rank]) if rank in stacks else (*MISSING, str(rank))].append(rank)
    healthy = _dominant([len(ranks) for ranks in kinds.values()], world)
    outliers = sorted(rank for ranks in kinds.values() if len(ranks) not in healthy for rank in ranks)
    if not outliers:
        places = "all ranks are at the same place" if len(kinds) == 1 else "each place holds as many as the others"
        return Suspicion([], None, 0.0, places)
    if 2 * len(outliers) > world:
        return Suspicion([], None, 0.0, f"{len(outliers)} of {world} ranks are outliers: no consensus")
    members, name = _smallest_group(outliers, mesh)
    named = _blamed(verdict, members)
    ranks = named or members
    confidence = (1 - len(outliers) / world) * len({*outliers} & {*ranks}) / len(ranks)
    reason = f"{len(outliers)} of {world} ranks are elsewhere than the rest"
    if named:
        reason += ", and others wait for those named"
    return Suspicion(ranks, name, confidence, reason)


def _dominant(sizes: Sequence[int], world: int) -> set[int]:
    """Return the sizes of the groups that are healthy.

    The largest ones, equal ones together, until they hold half of the ranks; and those of like size: the ranks of
    one pipeline stage are as many as those of another, but for the outliers among them.

        16 16 16 12 4 of 64:   16 16 16 hold half; 12 is more than half of 16: healthy; 4 is not
    """
    healthy: set[int] = set()
    covered = 0
    for size in sorted(set(sizes), reverse=True):
        if 2 * covered >= world or size < 2:  # one rank alone dominates nothing
            break
        healthy.add(size)
        covered += size * sizes.count(size)
    return healthy | {size for size in sizes if size > 1 and 2 * size > min(healthy, default=world)}


def _smallest_group(outliers: Sequence[int], mesh: Mesh) -> tuple[list[int], str | None]:
    """Return the members of the smallest parallel group that holds all outliers, and its name.

    The outliers themselves where that is one rank, or more than half of the mesh.
    """
    if len(outliers) == 1:
        return [*outliers], None
    axes = [axis for axis, size in mesh.axes if size > 1]
    found: tuple[list[int], str] | None = None
    for count in range(1, len(axes)):
        for chosen in itertools.combinations(axes, count):
            members = mesh.group_of(outliers[0], *chosen)
            if {*outliers} <= {*members} and (found is None or len(members) < len(found[0])):
                found = members, "+".join(chosen)
    if found is None or 2 * len(found[0]) > mesh.world_size:
        return [*outliers], None
    members, name = found
    listed = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
    return members, f"{name} of ranks {listed}"


def _blamed(verdict: HangVerdict | None, members: Sequence[int]) -> list[int]:
    """Return the ranks of a group that the verdict names as the ones that others wait for."""
    if verdict is None:
        return []
    return sorted({rank for origin in verdict.origins for rank in origin.ranks} & {*members})
