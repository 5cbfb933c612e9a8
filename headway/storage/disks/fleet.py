"""A fleet of disks whose redundancy follows its failure rates, day by day (PACEMAKER, OSDI 2020).

New disks start under the default scheme. Those deployed in steps are Rgroups
of their own, which change as a whole; those that trickle in share Rgroups, and are taught by the
first disks of their model, the canaries, which stay where they are.
Transitions take at most a share of each Rgroup's bandwidth.

Feed it the failure log and call `step` once a day; `simulate` does both
against models of disk whose AFR is given.

>>> fleet = DiskFleet()
>>> fleet.add("st12", capacity_bytes=12e12)
>>> fleet.deploy("st12", 0, 20_000, step=True)
>>> for day in range(0, 150):
...     fleet.record("st12", day, age_days=[day], disk_days=[20_000], failures=[4 if day < 30 else day % 2])
...     for change in fleet.step(day):
...         print(change.day, change.kind, change.method, change.source, "->", change.target)
63 down type 2 6-of-9 -> 30-of-33
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.storage.disks.afr import Floats
from headway.storage.disks.plan import NEVER, POLICIES, Outlook, Policy
from headway.storage.disks.review import review
from headway.storage.disks.sim import Dgroup, SimResult, run
from headway.storage.disks.state import FleetState, Rows
from headway.storage.disks.transitions import Transition


class DiskFleet:
    """A planner with the fleet it plans for: `add` models, `deploy` disks, `record` their failures, `step` each day."""

    def __init__(self, policy: Policy | str = "pacemaker") -> None:
        """Start with no disks, under a policy or a line of `POLICIES`; raises `UnknownNameError`."""
        self.policy = pick(POLICIES, policy, "policy") if isinstance(policy, str) else policy
        self.state = FleetState(self.policy)
        self.io_bytes: Floats = np.zeros(1)
        """[rgroups] What transitions moved on the last day."""
        self.bandwidth: Floats = np.zeros(1)
        """[rgroups] What their disks could have moved that day."""
        self.valve_open: NDArray[np.bool_] = np.zeros(1, np.bool_)
        """[rgroups] Whether the cap was lifted on the last day."""
        self._reviewed: int | None = None
        self._today = -1

    def add(self, dgroup: str, *, capacity_bytes: float, disk_bytes_per_s: float = 100e6) -> None:
        """Make a model of disk known. Raises `InputError` when it is known, or a number is not positive."""
        self.state.add(dgroup, capacity_bytes=capacity_bytes, disk_bytes_per_s=disk_bytes_per_s)

    def deploy(self, dgroup: str, day: int, num_disks: int, *, step: bool = False) -> None:
        """Add new disks on `day`; those of a `step` (thousands within days) become an Rgroup of their own.

        A step goes on over calls at most 3 days apart, for two weeks. Raises
        `InputError` on negative numbers, `UnknownNameError` on an unknown model.
        """
        self.state.deploy(dgroup, day, num_disks, step=step)

    def record(self, dgroup: str, day: int, *, age_days: ArrayLike, disk_days: ArrayLike, failures: ArrayLike) -> None:
        """Count a day's failure log of one model, by age: disk-days lived, and failures, whose disks leave the fleet.

        Raises `InputError` as `AfrModel.add` does, `UnknownNameError` on an unknown model.
        """
        number = pick(self.state.names, dgroup, "model of disk")
        self.state.models[number].log.add(disk_days, failures, age_days)
        for age, failed in zip(np.atleast_1d(age_days), np.atleast_1d(failures), strict=True):
            if failed > 0:
                self.state.lose(number, day - int(age), float(failed))

    def live(self, day: int, failed: Floats) -> None:
        """Count a day of all that is deployed: `failed` [cohorts] disks of each, which leave the fleet."""
        cohorts = self.state.cohorts
        age, lived = day - cohorts["born"], cohorts["disks"].copy()
        for number, model in enumerate(self.state.models):
            mine = (cohorts["dgroup"] == number) & (lived > 0)
            if mine.any():
                ages, where = np.unique(age[mine], return_inverse=True)
                model.log.add(np.bincount(where, lived[mine]), np.bincount(where, failed[mine]), ages)
        cohorts["disks"] = lived - failed

    def outlook(self, dgroup: str) -> Outlook | None:
        """Return what is expected of a model as of the last review; None: not enough is known, stay in the default.

        Raises `UnknownNameError` on an unknown model.
        """
        return self.state.models[pick(self.state.names, dgroup, "model of disk")].view

    def step(self, day: int) -> list[Transition]:
        """Plan, when a review is due, and let a day's transitions run; return those that begin. Call it once a day.

        Raises `InputError` when `day` does not rise.
        """
        if day <= self._today:
            raise InputError(f"day {day} is not after day {self._today}; call step with rising days.")
        self._today = day
        begun: list[Transition] = []
        if self._reviewed is None or day - self._reviewed >= self.policy.review_days:
            self._reviewed = day
            begun = review(self.state, day)
        self._work()
        return begun

    def simulate(self, clusters: Sequence[Dgroup], days: int, *, seed: int = 0) -> SimResult:
        """Run a fleet of these models for `days` days under this fleet's policy, from its beginning.

        Failures are drawn from each model's AFR with `seed`; the planner sees
        only them. This object itself stays as it is. Raises `InputError`.
        """
        return run(DiskFleet(self.policy), clusters, days, seed=seed)

    def _work(self) -> None:
        """Let transitions move what the cap allows, those that are due first; bring home those that are done."""
        state, num = self.state, len(self.state.rgroups)
        self.io_bytes, self.valve_open = np.zeros(num), np.zeros(num, np.bool_)
        self.bandwidth = np.bincount(state.cohorts["rgroup"], state.bandwidth(), minlength=num).astype(np.float64)
        moving = np.flatnonzero(state.cohorts["target"] >= 0)
        leaves = state.cohorts["rgroup"][moving]  # a copy: those that come home today rest
        for index in np.unique(leaves):
            self._empty(int(index), moving[leaves == index])
        for index, group in enumerate(state.rgroups):
            if group.target >= 0:
                self._convert(index)

    def _allowed(self, index: int) -> float:
        """Return what an Rgroup may move today: its share, or all it can when the AFR is beyond its scheme."""
        share = self.policy.peak_io_fraction
        if math.isinf(share):
            return math.inf
        if self.state.rgroups[index].urgent and share < 1:
            share = 1.0
            self.valve_open[index] = True
        return (share - 1e-9) * float(self.bandwidth[index])  # what is rounded up later stays within the share

    def _empty(self, index: int, rows: Rows) -> None:
        """Type 1: empty cohorts one after the other, earliest due first, then oldest first."""
        cohorts = self.state.cohorts
        rows = rows[np.lexsort((cohorts["born"][rows], cohorts["due"][rows]))]
        left = cohorts["left_bytes"][rows]
        moved = np.diff(np.minimum(np.cumsum(left), self._allowed(index)), prepend=0.0)
        self.io_bytes[index] += float(moved.sum())
        cohorts["left_bytes"][rows] = left - moved
        home = rows[left - moved <= 1e-6 * left]
        schemes = np.array([group.scheme for group in self.state.rgroups])
        cohorts["up"][home] |= schemes[cohorts["target"][home]] < schemes[index]
        cohorts["rgroup"][home] = cohorts["target"][home]
        cohorts["target"][home], cohorts["due"][home] = -1, NEVER

    def _convert(self, index: int) -> None:
        """Type 2: go on with the change of a whole Rgroup; when done, a shared one joins the one of its scheme."""
        cohorts, group = self.state.cohorts, self.state.rgroups[index]
        moved = min(group.left_bytes, self._allowed(index) - float(self.io_bytes[index]))
        group.left_bytes -= moved
        self.io_bytes[index] += moved
        if group.left_bytes > 1e-6 * group.total_bytes:
            return
        rows = cohorts["rgroup"] == index
        cohorts["up"][rows] |= group.target < group.scheme and group.due < NEVER
        group.scheme, group.target, group.urgent, group.filled = group.target, -1, False, False
        if not group.shared:
            return
        group.name = self.state.schemes[group.scheme].name
        for other, twin in enumerate(self.state.rgroups):
            if other != index and twin.shared and twin.scheme == group.scheme and twin.target < 0:
                cohorts["rgroup"][rows] = other
                cohorts["target"][cohorts["target"] == index] = other
                group.shared = False  # empty from now on
                break
