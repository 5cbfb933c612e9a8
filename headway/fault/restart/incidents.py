"""How far the ranks of an attempt have come, read from the records that the launcher drains anyway.

`AttemptProgress.add` is a listener of the drain and runs in its thread; everything
else is read in the launcher's main thread. Steps count updates of a rank's
first optimizer.

>>> AttemptProgress(attempt=0, world=2).steps
0

What the ETTR of a run should have been, by its own times: the account of a run against the model of a fleet.

The failures of the run are played again on the simulated job, at the moments at which they came, with the times of
detection and restart that followed, and the run's interval between saves: what this predicts is the work that is lost.
Beside it stands the closed form, for failures at random with the same means. Where the measured ETTR is far from both,
something else costs time. A save is part of the step in which it blocks, as the measured ETTR counts it. What comes
before the first step and after the last one is taken from all of them alike.

>>> from headway.trace.recording.incident import Blamed
>>> rows = [Incident(number=0, attempt=0, cls="infra", suspects=Blamed([0]), detected_ns=20_000_000_000, located_ns=0,
...                  down_ns=0, decided_ns=0, action="restart", first_step_ns=22_000_000_000,
...                  trained_from_ns=10_000_000_000, trained_until_ns=19_500_000_000)]
>>> found = expected(rows, wall_s=100.0, stepped_s=87.5, interval_s=4.0)
>>> round(found.outside_s, 3), round(found.simulated, 4)
(10.0, 0.86)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.fault.fleet import S_PER_DAY, FleetTimes, GivenFailure, Scenario, simulate
from headway.ledger.answers.metrics import ettr
from headway.trace.events.vocabulary import SPANS
from headway.trace.recording.incident import Incident
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


# What the ETTR of a run should have been, by its own times: the account of a run against the model of a fleet.


@dataclass(frozen=True, slots=True)
class Expected:
    """What the times of a run let expect."""

    simulated: float
    """ETTR of the simulated job with the same failures."""

    closed_form: float
    """ETTR of failures at random that are as frequent."""

    outside_s: float
    """Before the first step, and after the last one."""


def expected(
    incidents: Sequence[Incident], *, wall_s: float, stepped_s: float, interval_s: float | None
) -> Expected | None:
    """Return what is to be expected; None without a failure that the job came back from.

    `stepped_s` is the wall time of all steps, those done again included; `interval_s` that of the steps between two
    saves, None where nothing is saved. Raises `InputError` on times that contradict each other.
    """
    incidents = [one for one in incidents if one.ended_attempt]
    back = [one.downtime_s for one in incidents if one.downtime_s is not None]
    if not back or incidents[0].trained_from_ns is None:
        return None
    begin_ns = incidents[0].trained_from_ns
    failures = [
        GivenFailure(
            (_failed_ns(one) - begin_ns) / 1e9, (one.detected_ns - _failed_ns(one)) / 1e9, _down_s(one, following)
        )
        for one, following in zip(incidents, [*incidents[1:], None], strict=True)
    ]
    outside_s = max(wall_s - stepped_s - sum(one.detect_s + one.restart_s for one in failures), 0.0)
    inside_s = wall_s - outside_s
    if inside_s <= 0:
        raise InputError(f"a run of {wall_s:g} s cannot hold {stepped_s:g} s of steps; its times are not its own.")
    mtbf_s, every_s = inside_s / len(failures), inside_s if interval_s is None else interval_s
    # Failures cut some restarts short: until one succeeds takes M (exp(u / M) - 1) on average, if each needs u.
    down_s = sum(one.detect_s + one.restart_s for one in failures) / len(back)
    needed_s = down_s if len(back) == len(failures) else mtbf_s * math.log1p(down_s / mtbf_s)
    scenario = Scenario(
        hosts=1, devices_per_host=1, days=inside_s / S_PER_DAY, mtbf_s=mtbf_s, times=FleetTimes(save_every_s=every_s)
    )
    played = simulate(scenario, seed=0, failures=failures)
    closed = ettr(mtbf_s, restart_s=needed_s, interval_s=every_s, save_s=0.0)
    share = inside_s / wall_s
    return Expected(played.ettr * share, closed * share, outside_s)


def _failed_ns(incident: Incident) -> int:
    """Return when it came to a standstill: the end of its last step, or the detection where it had made none."""
    last = incident.trained_until_ns
    return incident.detected_ns if last is None else min(last, incident.detected_ns)


def _down_s(incident: Incident, following: Incident | None) -> float:
    """Return how long it was down; until the next failure where it did not come back before."""
    if incident.downtime_s is not None:
        return incident.downtime_s
    return 0.0 if following is None else (following.detected_ns - incident.detected_ns) / 1e9
