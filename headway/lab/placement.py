"""Schemes for models of disk whose failure log has dates but no ages, or single drives: what to use now.

`place` looks at windows of totals: the AFR to plan with is the highest of the
upper ends of the last window and of all, and of the estimate of the last
window, with its trend when that is significant, over the policy's threshold.
`replay` lets a `DiskFleet` live through a log of single drives.

>>> from headway.lab.failure_logs import ObservationWindow
>>> log = [ObservationWindow("st4", 4e12, 90, 900_000, 25), ObservationWindow("new", 4e12, 90, 90_000, 2)]
>>> [(found.model, found.scheme, found.reason) for found in place([log])]
[('st4', '30-of-33', 'known'), ('new', '6-of-9', 'not enough disks: 1000 of 3000')]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from headway.core.errors import InputError
from headway.lab.afr import Floats, poisson_interval
from headway.lab.failure_logs import Lifetimes, ObservationWindow
from headway.lab.fleet import DiskFleet
from headway.lab.fleet_plan import POLICIES, Policy
from headway.lab.fleet_sim import step_days
from headway.lab.schemes import Transition


@dataclass(frozen=True, slots=True)
class DiskPlacement:
    """The scheme for one model of disk."""

    model: str
    """Make and model."""

    scheme: str
    """Name of the scheme."""

    afr: tuple[float, float, float]
    """AFR of the last window: lower end, estimate, upper end."""

    planned: float
    """AFR that the scheme had to tolerate; NaN where nothing is planned."""

    tolerated: float
    """AFR that it does tolerate."""

    saving: float
    """Space saved against the default scheme."""

    num_disks: float
    """In service during the last window."""

    capacity_bytes: float
    """Of one disk."""

    reason: str
    """`known`, or why the model stays under the default scheme."""

    def to_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)


def place(
    log: Sequence[Sequence[ObservationWindow]], policy: Policy = POLICIES["pacemaker"], *, ahead_days: float = 90.0
) -> list[DiskPlacement]:
    """Return a scheme for each model of the last of the windows `log` (oldest first), to hold for `ahead_days`.

    Raises `InputError` when `ahead_days` is negative or not finite.
    """
    if not 0 <= ahead_days < math.inf:
        raise InputError(f"ahead_days is {ahead_days:g}; pass a finite number of days >= 0.")
    past: dict[str, list[ObservationWindow]] = {}
    for windows in log:
        for window in windows:
            past.setdefault(window.model, []).append(window)
    return [_place(past[window.model], policy, ahead_days) for window in (log[-1] if log else ())]


def saved(placements: Sequence[DiskPlacement]) -> float:
    """Return the space saved over all disks, by capacity."""
    size = np.array([found.num_disks * found.capacity_bytes for found in placements])
    return float(size @ np.array([found.saving for found in placements]) / max(size.sum(), 1e-9))


def _place(windows: Sequence[ObservationWindow], policy: Policy, ahead_days: float) -> DiskPlacement:
    """Return the scheme for a model from its own windows, oldest first."""
    last, schemes = windows[-1], policy.schemes
    now = poisson_interval(last.failures, last.disk_days, confidence=policy.confidence)
    chosen, planned, reason = 0, math.nan, "known"
    if last.num_disks < policy.canary_disks:
        reason = f"not enough disks: {last.num_disks:.0f} of {policy.canary_disks}"
    else:
        planned = _planned(windows, now, policy, ahead_days)
        chosen = max([0, *np.flatnonzero(policy.tolerated() > planned).tolist()])
    return DiskPlacement(
        model=last.model, scheme=schemes[chosen].name, afr=now, planned=planned,
        tolerated=float(policy.tolerated()[chosen]), saving=float(policy.savings()[chosen]),
        num_disks=last.num_disks, capacity_bytes=last.capacity_bytes, reason=reason,
    )  # fmt: skip


def _planned(
    windows: Sequence[ObservationWindow], now: tuple[float, float, float], policy: Policy, ahead_days: float
) -> float:
    """Return the AFR that a scheme must tolerate for the days ahead."""
    failures, disk_days = sum(w.failures for w in windows), sum(w.disk_days for w in windows)
    _, _, ever = poisson_interval(failures, disk_days, confidence=policy.confidence)
    _, mid, hi = now
    rise = 0.0
    if len(windows) > 1:
        last, before = windows[-1], windows[-2]
        _, past, _ = poisson_interval(before.failures, before.disk_days)
        doubt = math.sqrt(sum(365.0**2 * w.failures / w.disk_days**2 for w in (last, before)))
        if mid - past > 2 * doubt:
            rise = (mid - past) * (last.days + ahead_days) / (last.days + before.days)
    return max(hi, ever, (mid + rise) / policy.threshold_fraction)


@dataclass(frozen=True, slots=True)
class Lived:
    """Disks of one model under one scheme, in a log that a fleet lived through."""

    model: str
    """Make and model."""

    scheme: str
    """Name of the scheme."""

    tolerated: float
    """AFR that it tolerates."""

    disk_days: float
    """Lived under it."""

    failures: float
    """While under it."""

    @property
    def exceeded(self) -> bool:
        """More failed than the scheme tolerates, beyond doubt."""
        return poisson_interval(self.failures, self.disk_days)[0] > self.tolerated


@dataclass(frozen=True, slots=True)
class Replayed:
    """A fleet that lived through a log of single drives."""

    io_frac: Floats
    """[days] Transition IO over what all disks could move."""

    savings: float
    """Space saved, mean over bytes of disk and days."""

    lived: tuple[Lived, ...]
    """By model and scheme."""

    transitions: tuple[Transition, ...]
    """Those that began."""


def replay(log: Lifetimes, policy: Policy = POLICIES["pacemaker"], *, disk_bytes_per_s: float = 100e6) -> Replayed:
    """Let a fleet live through `log`: drives come, fail and leave on the days that it says.

    The age of a drive counts from the day it was first seen.
    """
    fleet = DiskFleet(policy)
    steps = []
    for number, (name, size) in enumerate(zip(log.models, log.capacity_bytes, strict=True)):
        fleet.add(name, capacity_bytes=size, disk_bytes_per_s=disk_bytes_per_s)
        days, disks = np.unique(log.first[log.model == number], return_counts=True)
        steps.append(step_days(dict(zip(days.tolist(), disks.tolist(), strict=True))))
    shape = (len(log.models), len(fleet.state.schemes))
    lived, failed = np.zeros(shape), np.zeros(shape)
    io, begun, saved_bytes, all_bytes = [], [], 0.0, 0.0
    for day in range(log.num_days):
        for number in np.unique(log.model[log.first == day]):
            count = int(np.count_nonzero((log.model == number) & (log.first == day)))
            fleet.deploy(log.models[number], day, count, step=day in steps[number])
        gone = _live(fleet, log, day, lived, failed)
        begun += fleet.step(day)
        for number, born, sound in gone:
            fleet.state.lose(number, born, sound)
        state, capacity = fleet.state, fleet.state.capacity()
        saving = state.savings[state.of_rgroups([group.scheme for group in state.rgroups]).astype(np.int64)]
        saved_bytes, all_bytes = saved_bytes + float(capacity @ saving), all_bytes + float(capacity.sum())
        io.append(float(fleet.io_bytes.sum() / max(fleet.bandwidth.sum(), 1e-9)))
    return Replayed(np.array(io), saved_bytes / max(all_bytes, 1e-9), _lived(fleet, lived, failed), tuple(begun))


def _live(fleet: DiskFleet, log: Lifetimes, day: int, lived: Floats, failed: Floats) -> list[tuple[int, int, float]]:
    """Book a day of the log by model and scheme; return the drives that left sound: (model, day first seen, disks)."""
    here = (log.first <= day) & (log.last >= day)
    state = fleet.state
    scheme = state.of_rgroups([max(group.scheme, group.target) for group in state.rgroups]).astype(np.int64)
    gone = []
    for number in np.unique(log.model[here]):
        mine = here & (log.model == number)
        born, where = np.unique(log.first[mine], return_inverse=True)
        disks = np.bincount(where).astype(np.float64)
        fails = np.bincount(where, log.failed[mine] & (log.last[mine] == day))
        leaves = np.bincount(where, ~log.failed[mine] & (log.last[mine] == day) & (day < log.num_days - 1))
        # Drives of one model that came on one day are one cohort. They may be under several schemes: what they lived
        # and lost is booked to these in proportion to the disks under each.
        for first, num, lost in zip(born.tolist(), disks.tolist(), fails.tolist(), strict=True):
            rows = (state.cohorts["dgroup"] == number) & (state.cohorts["born"] == first)
            share = np.bincount(scheme[rows], state.cohorts["disks"][rows], minlength=lived.shape[1])
            share = share / max(share.sum(), 1e-9)
            lived[number] += num * share
            failed[number] += lost * share
        fleet.record(log.models[number], day, age_days=day - born[::-1], disk_days=disks[::-1], failures=fails[::-1])
        gone += [(int(number), int(b), float(n)) for b, n in zip(born, leaves, strict=True) if n > 0]
    return gone


def _lived(fleet: DiskFleet, lived: Floats, failed: Floats) -> tuple[Lived, ...]:
    """Return the books by model and scheme."""
    state = fleet.state
    return tuple(
        Lived(model.name, scheme.name, float(limit), float(lived[i, j]), float(failed[i, j]))
        for i, model in enumerate(state.models)
        for j, (scheme, limit) in enumerate(zip(state.schemes, state.tolerated, strict=True))
        if lived[i, j] > 0
    )
