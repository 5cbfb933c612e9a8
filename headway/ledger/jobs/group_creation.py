"""What creating process groups cost a job: seconds of start-up and how many groups.

Where `new_group` ends in a barrier of all ranks at the store (torch before
2023, and with TORCH_DIST_INIT_BARRIER=1), a job whose groups grow with its
ranks does O(n^2) store operations; MegaScale (arXiv 2402.15627, section 3.5)
spent 1,047 s on that at 2,048 GPUs. `headway bench group_creation` counts them.

>>> rows = {"rank": [0, 1, 0, 1], "duration_ns": [5, 7, 10**9, 9], "group": [0, 0, 1, -1], "name": [0] * 4}
>>> creation(Trace.from_columns(rows, names=["comm.init"]))
Creation(groups=2, calls=2, seconds=1.000000005)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headway.core.units import NS_PER_S
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace


@dataclass(frozen=True, slots=True)
class Creation:
    """The creation of all process groups of a run."""

    groups: int
    """Groups that some rank is in."""

    calls: int
    """Calls of the rank with most of them: a rank also takes part for groups that it is not in."""

    seconds: float
    """What they took on the rank where they took longest."""

    def to_json(self) -> dict[str, Any]:
        """Return the `group_creation` entry of `headway.why/2`."""
        return asdict(self)


def creation(source: Trace | Parts) -> Creation | None:
    """Return what the `comm.init` rows of a recorded run tell, None when it created no group.

    A trace in files is read a rank at a time.
    """
    parts = Parts.of(source)
    if "comm.init" not in parts.tables.names:
        return None
    groups: set[int] = set()
    calls, longest_ns = 0, 0
    for rank in parts.numbers:
        part = parts.read({"rank": (rank, rank + 1)}, ("rank", "name", "duration_ns", "group"))
        events = part.where(part.named("comm.init")).events
        groups |= set(events["group"][events["group"] >= 0].tolist())
        calls = max(calls, len(events["rank"]))
        longest_ns = max(longest_ns, int(events["duration_ns"].sum()))
    return Creation(len(groups), calls, longest_ns / NS_PER_S) if calls else None
