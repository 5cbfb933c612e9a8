"""The training thread of one rank as segments, and which recorded name owns an instant that several cover.

The innermost cause owns it: gc > checkpoint > logging and data that headway
reads again > input > comm and waits for a device > compile > the rest of
headway's own work > optimizer > code of the script between steps > the rest,
which is compute.

>>> LABELS[LABEL["compute"]], PRIORITY["host.gc"] > PRIORITY["checkpoint.save"] > PRIORITY["input.next"]
('compute', True)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRIORITY: dict[str, int] = {
    "compute": 0,
    "host.script": 1,
    "optimizer.step": 2,
    "host.recording": 3,
    "host.import": 5, "host.compile": 5,
    "host.sync": 6, "comm.init": 6, "comm.wait": 6, "comm.collective": 6, "comm.send": 6, "comm.recv": 6,
    "input.transfer": 7, "input.iter": 7, "input.next": 7,
    "host.logging": 8, "host.rereading": 8,
    "checkpoint.load": 9, "checkpoint.save": 9, "checkpoint.sync": 9, "checkpoint.rename": 9,
    "checkpoint.snapshot": 9, "checkpoint.wait": 9, "checkpoint.restore": 9,
    "host.gc": 10, "host.collect": 10,
}  # fmt: skip
"""Names of what the training thread does -> who owns an instant that several cover; the largest wins.

'host.rereading' are the forks among 'host.recording' that read data again: to see whether that gives the same, or to
compare a remedy's batch with the script's own.
'host.collect' are the collections among 'host.gc' that the script called for: no edit of the collector puts them off.
"""

LABELS: tuple[str, ...] = tuple(PRIORITY)
"""Values of `Lane.label`, by index."""

LABEL: dict[str, int] = {name: index for index, name in enumerate(LABELS)}
"""Name -> value of `Lane.label`."""

COMPUTE = np.isin(LABELS, ["compute", "optimizer.step"])
"""[LABELS] What the accelerator does."""

ON_THREAD = COMPUTE | np.isin(LABELS, ["host.script", "host.recording", "host.rereading"])
"""[LABELS] What the training thread runs itself; one share of it, for compute and script alike, is on a core.

Headway's own work keeps its recorded duration in a replay: the run that is predicted is recorded as well. That of
'host.rereading', which is done once, is left out of what was measured, and of every replay.
"""

GARBAGE = np.isin(LABELS, ["host.gc", "host.collect"])
"""[LABELS] Collections, which are CPU time of the training thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The training thread of one rank as `m` segments in the order of time, without gaps."""

    rank: int
    """Which rank."""

    label: NDArray[np.int64]
    """[m] Index into `LABELS`."""

    step: NDArray[np.int64]
    """[m] Step it belongs to; segments are cut where a step ends."""

    start_ns: NDArray[np.int64]
    """[m] Start."""

    duration_ns: NDArray[np.int64]
    """[m] Duration, >= 0."""

    row: NDArray[np.int64]
    """[m] Row of the rank's trace that owns it, -1 for compute. The last segment of a row ends that row."""

    step_end_ns: NDArray[np.int64]
    """[k + 1] Start of step 0, then the end of each step."""

    def once_ns(self, first_step: int) -> int:
        """Return how much of the steps from `first_step` on is work of headway's own that is done once in a run."""
        return int(self.duration_ns[(self.label == LABEL["host.rereading"]) & (self.step >= first_step)].sum())

    def compute_ns(self) -> NDArray[np.int64]:
        """Return [k] how long each step computes."""
        total, computing = np.zeros(self.step_end_ns.size - 1, np.int64), COMPUTE[self.label]
        np.add.at(total, self.step[computing], self.duration_ns[computing])
        return total

    def last_segment(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the last segment that each of `rows` owns, -1 for none."""
        owned = np.flatnonzero(self.row >= 0)
        found = np.full(int(max(self.row.max(initial=-1), rows.max(initial=-1))) + 1, -1, np.int64)
        found[self.row[owned]] = owned  # of equal indices the last assignment stays
        return found[rows]
