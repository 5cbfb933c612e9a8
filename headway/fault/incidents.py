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

Who is to blame for a hang, from what all ranks are doing: groups of equal stacks, and the odd ones out.

Healthy ranks of one kind stand at the same place. Stacks are normalised
(paths, numbers and addresses cut off) and grouped; the groups that dominate
are healthy, the rest are outliers; the smallest parallel group that holds all
outliers is suspected whole, for those that wait for a faulty rank look odd
too (ByteRobust, section 4.2). The verdict of who waits for whom
(`headway.ledger.hang`) narrows it where it names ranks of that group.

    stacks   A A A A | A B B A | A A A A       ranks 5, 6 are outliers: their tensor group, ranks 4-7, is suspected

Nobody is blamed where more than half are outliers, or no group dominates.

>>> mesh = Mesh({"tp": 2, "dp": 4})
>>> stacks = {rank: ["all_reduce (comm.py:10)", "main (train.py:5)"] for rank in range(8)}
>>> suspects({**stacks, 4: ["read (data.py:3)"], 5: ["broadcast (comm.py:9)"]}, mesh).ranks
[4, 5]
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.mesh import Mesh
from headway.fault.fleet import S_PER_DAY, FleetTimes, GivenFailure, Scenario, simulate
from headway.ledger.answers.metrics import ettr
from headway.ledger.hang import HangVerdict
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
