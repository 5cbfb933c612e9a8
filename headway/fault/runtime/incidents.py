"""How far the ranks of an attempt have come, read from the records that the launcher drains anyway.

`AttemptProgress.add` is a listener of the drain and runs in its thread; everything
else is read in the launcher's main thread. Steps count updates of a rank's
first optimizer.

>>> AttemptProgress(attempt=0, world=2).steps
0
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.vocabulary import SPANS
from headway.trace.rings.records import RingHeader

_STEP, _RESTORE, _COMMIT, _SAVE, _LOAD, _SNAPSHOT = (
    SPANS[name].code
    for name in (
        "optimizer.step", "checkpoint.restore", "checkpoint.commit", "checkpoint.save", "checkpoint.load",
        "checkpoint.snapshot",
    )
)  # fmt: skip


@dataclass(slots=True)
class AttemptProgress:
    """One attempt as its records show it."""

    attempt: int
    """Its number; records of others are left out."""

    world: int
    """Ranks of this host."""

    counts: dict[int, int] = field(default_factory=dict)
    """Rank -> steps."""

    first_ns: dict[int, int] = field(default_factory=dict)
    """Rank -> end of its first step."""

    last_ns: int = 0
    """End of the newest step of any rank."""

    restored: int | None = None
    """The checkpoint of headway's own that it went on from."""

    source: str = "none"
    """Where it had its state from: memory, folder or none."""

    commit: int | None = None
    """The newest committed checkpoint of headway's own."""

    saved_after: int | None = None
    """Steps of this attempt before its newest save by torch."""

    sound: int | None = None
    """The newest checkpoint of headway's own, taken or restored, behind which an update has begun."""

    copied: list[tuple[int, int, int]] = field(default_factory=list)
    """Rank, when and number of those behind which that rank has not."""

    @property
    def base(self) -> int:
        """Steps that were done before this attempt began, as far as its checkpoint tells."""
        return self.restored or 0

    @property
    def steps(self) -> int:
        """Steps that all ranks have completed in this attempt."""
        return min(self.counts.values(), default=0) if len(self.counts) >= self.world else 0

    @property
    def first_step_ns(self) -> int | None:
        """When all ranks had made a step; None as long as one has not."""
        return max(self.first_ns.values()) if len(self.first_ns) >= self.world else None

    def add(self, header: RingHeader, records: NDArray[np.void]) -> None:
        """Take in what was drained from one process."""
        if header.attempt != self.attempt or header.role not in ("main", "spawned"):
            return
        code, rank = records["code"], header.rank
        steps = np.flatnonzero((code == _STEP) & (records["a"] == 0))
        if len(steps):
            ends = records["start_ns"][steps] + records["duration_ns"][steps]
            self.first_ns.setdefault(rank, int(ends[0]))
            self.last_ns = max(self.last_ns, int(ends[-1]))
        copies = records[np.isin(code, (_SNAPSHOT, _RESTORE))]
        self.copied += [(rank, int(row["start_ns"]), int(row["b"])) for row in copies]
        begun_ns = int(records["start_ns"][steps[-1]]) if len(steps) else 0
        for copied in [one for one in self.copied if one[0] == rank and one[1] < begun_ns]:
            self.copied.remove(copied)
            self.sound = copied[2]
        for row in np.flatnonzero(np.isin(code, (_RESTORE, _COMMIT, _SAVE, _LOAD))).tolist():
            self._state(int(code[row]), records[row], self.counts.get(rank, 0) + int((steps < row).sum()))
        self.counts[rank] = self.counts.get(rank, 0) + len(steps)

    def _state(self, code: int, record: np.void, steps: int) -> None:
        """Note what was saved or restored after so many steps."""
        if code == _RESTORE and not steps:
            self.restored, self.source = int(record["b"]), "memory" if record["d"] else "folder"
        elif code == _LOAD and not steps and self.source == "none":
            self.source = "folder"
        elif code == _COMMIT:
            self.commit = max(self.commit or 0, int(record["b"]))
        elif code == _SAVE:
            self.saved_after = steps

    def lost_to(self, following: AttemptProgress) -> int:
        """Return the steps of this attempt that the one after it does again."""
        if following.restored is not None:
            return max(self.base + self.steps - following.restored, 0)
        if following.source == "folder":
            return max(self.steps - (self.saved_after or 0), 0)
        return self.base + self.steps
