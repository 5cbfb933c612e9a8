"""Which processes of a run are devices: one for each rank, and one for each child that trains by itself.

A rank is the process that the script spawned for it, else the one that made most updates. Children that train
without a process group (one `mp.Process` each, Hogwild) become ranks of their own, with role 'child': they take the
number of a parent that makes no update itself, and the free numbers behind.

>>> by_rank([])
{}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.trace.events.vocabulary import SPANS
from headway.trace.rings import spool
from headway.trace.rings.spool import Recorded

UPDATE, BACKWARD, WORKER = (SPANS[name].code for name in ("optimizer.step", "segment.backward", "input.worker"))


def by_rank(stems: Sequence[Path], *, split: bool = True) -> dict[int, list[Recorded]]:
    """Read every process and group them by rank; `split` makes ranks of children that train."""
    groups: dict[int, list[Recorded]] = {}
    for stem in stems:
        found = spool.recorded(stem)
        if found is not None:
            groups.setdefault(found.header.rank, []).append(found)
    for rank in sorted(groups) if split else ():
        for child in _further_trainers(groups[rank]):
            # Its loader workers go with it; what else runs below the parent stays there.
            family = [child, *(process for process in groups[rank] if process.header.pid in _workers(child))]
            groups[rank] = [process for process in groups[rank] if not any(process is one for one in family)]
            groups[max(groups) + 1] = family
    return dict(sorted(groups.items()))


def lead_of(processes: Sequence[Recorded]) -> Recorded:
    """Return the process that is the rank: one that the script spawned for it, else the one with most updates."""

    def weight(process: Recorded) -> tuple[bool, int, bool]:
        role = process.header.role
        return role == "spawned", updates_of(process), role == "main"

    return max(processes, key=weight)


def updates_of(process: Recorded) -> int:
    """Return the optimizer updates that a process made; where it made none, its backwards."""
    codes = process.records["code"]
    return int((codes == UPDATE).sum()) or int((codes == BACKWARD).sum())


def _further_trainers(processes: Sequence[Recorded]) -> list[Recorded]:
    """Return the children that are to be ranks of their own, in order of their start."""
    if any(process.header.role == "spawned" for process in processes):
        return []
    trainers = [process for process in processes if process.header.role == "child" and updates_of(process)]
    trainers.sort(key=lambda process: (process.header.clock_ns, process.header.pid))
    parent_trains = any(process.header.role == "main" and updates_of(process) for process in processes)
    return trainers if parent_trains else trainers[1:]


def _workers(process: Recorded) -> set[int]:
    """Return the process ids of its loader workers."""
    records = process.records
    return {int(pid) for pid in records["d"][records["code"] == WORKER]}
