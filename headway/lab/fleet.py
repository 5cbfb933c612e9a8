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

A review of a fleet: which disks must go to more redundancy, which may come down, and how they get there.

Reads what is expected of each model, begins changes of scheme on a
`FleetState`; moves nothing itself. Steps change as a whole; disks in shared
Rgroups leave one cohort at a time, unless so many must that changing all is
cheaper.

>>> from headway.lab.fleet_plan import POLICIES
>>> review(FleetState(POLICIES["pacemaker"]), 0)
[]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.lab.afr import Floats
from headway.lab.fleet_plan import NEVER, POLICIES, Outlook, Policy, choose
from headway.lab.fleet_sim import Dgroup, SimResult, run
from headway.lab.fleet_state import Choices, FleetState, Rows
from headway.lab.schemes import Transition, cheaper_in_bulk

# A review of a fleet: which disks must go to more redundancy, which may come down, and how they get there.


def review(state: FleetState, day: int) -> list[Transition]:
    """Look at the failure logs as of `day`, begin what they ask for, and return it."""
    state.update()
    begun: list[Transition] = []
    for index in range(len(state.rgroups)):
        rows = np.flatnonzero((state.cohorts["rgroup"] == index) & (state.cohorts["disks"] > 0))
        if not len(rows):
            continue
        group = state.rgroups[index]
        # The safety valve: an AFR surely beyond what the scheme tolerates goes before the cap on IO.
        beyond = bool(np.any(state.surely(rows, day) >= state.tolerated[group.scheme]))
        group.urgent = beyond and group.scheme > 0 and state.policy.looks_ahead
        if group.target >= 0:
            begun += _of_changing(state, index, rows, day)
        else:
            begun += (_of_shared if group.shared else _of_step)(state, index, rows, day)
    return begun


def _of_changing(state: FleetState, index: int, rows: Rows, day: int) -> list[Transition]:
    """Send an Rgroup that changes as a whole further up, when where it is going will not do any more."""
    group = state.rgroups[index]
    due, _, later = state.look(rows, day, group.target)
    lead = state.capacity(rows).sum() * state.cost("type 2", group.target, 0) / _budget(state, rows)
    if group.target == 0 or due.min() - day > lead + state.policy.margin_days:
        return []
    target = min(int(later[np.argmin(due)]), _roomy(state, group.target))
    return [state.begin_bulk(index, rows, target, day, "up", float(due.min()))]


def _of_step(state: FleetState, index: int, rows: Rows, day: int) -> list[Transition]:
    """Begin the change of a step's Rgroup that is due, or worth it."""
    group = state.rgroups[index]
    model = state.models[int(state.cohorts["dgroup"][rows[0]])]
    view = model.view
    if view is None:
        return []
    wanted = choose(view, state.policy, state.least_days(model, "type 2", group.scheme))
    ages = day - state.cohorts["born"][rows]
    due = float(state.look(rows, day, group.scheme)[0].min())
    lead = state.capacity(rows).sum() * state.cost("type 2", group.scheme, 0) / _budget(state, rows)
    if due - day <= lead + state.policy.margin_days:
        then = view.at(np.array([ages.max() + due - day]).astype(np.int64))
        target = min(int(wanted[then][0]), _roomy(state, group.scheme))
        return [state.begin_bulk(index, rows, target, day, "up", due)]
    target = int(wanted[view.at(ages.max(keepdims=True))][0])
    if not _may_come_down(state, rows, np.full(len(rows), target), day, group.scheme).all():
        return []
    return [state.begin_bulk(index, rows, target, day, "down", NEVER)]


def _of_shared(state: FleetState, index: int, rows: Rows, day: int) -> list[Transition]:
    """Begin what disks of a shared Rgroup need: to leave in time, to come down; or give it up when it is too small."""
    group, policy = state.rgroups[index], state.policy
    due, choice, later = state.look(rows, day, group.scheme)
    begun: list[Transition] = []
    if group.scheme > 0:
        disks = float(state.cohorts["disks"][rows].sum())
        group.filled |= disks >= policy.min_rgroup_disks
        if group.filled and disks < policy.min_rgroup_disks and not (state.cohorts["target"] == index).any():
            return [state.begin_bulk(index, rows, _next_shared(state, group.scheme), day, "purge", float(due.min()))]
        leaving = _leaving(state, index, rows, due, day)
        upward = np.minimum(later, _roomy(state, group.scheme))
        if leaving.any() and _most_leave(state, index, rows, leaving):
            return [state.begin_bulk(index, rows, int(upward[leaving].min()), day, "up", float(due.min()))]
        begun = _send(state, index, rows[leaving], upward[leaving], due[leaving], day)
        rows, choice = rows[~leaving], choice[~leaving]
    down = _may_come_down(state, rows, choice, day, group.scheme)
    return begun + _send(state, index, rows[down], choice[down], np.full(int(down.sum()), float(NEVER)), day)


def _budget(state: FleetState, rows: Rows) -> float:
    """Return the bytes a day that transitions may move on these disks."""
    return state.policy.peak_io_fraction * float(state.bandwidth(rows).sum())


def _roomy(state: FleetState, scheme: int) -> int:
    """Return the scheme that saves most of those with headroom over `scheme`; the default one if none has."""
    enough = np.flatnonzero(state.tolerated >= state.policy.headroom * state.tolerated[scheme])
    enough = enough[enough < scheme]
    return int(enough[-1]) if len(enough) else 0


def _leaving(state: FleetState, index: int, rows: Rows, due: Floats, day: int) -> NDArray[np.bool_]:
    """Tell which cohorts must set out now so that they, and all that are due before them, are away in time."""
    away = (state.cohorts["target"][rows] >= 0) & (state.cohorts["due"][rows] < NEVER)
    due = np.where(away, np.minimum(state.cohorts["due"][rows], due), due)
    order = np.argsort(due, kind="stable")
    size = state.capacity(rows)
    days = size.sum() / _budget(state, rows)
    fraction = np.minimum(np.cumsum(size[order]) / size.sum(), 1 - 1e-9)
    # Those who stay behind do the work: emptying a fraction u takes -ln(1 - u) of the time that all would take.
    alone = state.cost("type 1", state.rgroups[index].scheme, 0) * days * -np.log1p(-fraction)
    whole = state.cost("type 2", state.rgroups[index].scheme, 0) * days
    late = np.flatnonzero(due[order] - day <= np.minimum(alone, whole) + state.policy.margin_days)
    leaving = np.zeros(len(rows), np.bool_)
    if len(late):
        leaving[order[: int(late[-1]) + 1]] = True
    return leaving & ~away


def _most_leave(state: FleetState, index: int, rows: Rows, leaving: NDArray[np.bool_]) -> bool:
    """Tell whether changing the whole Rgroup is cheaper than emptying those that must leave or are leaving."""
    size = state.capacity(rows)
    away = (state.cohorts["target"][rows] >= 0) | leaving
    source = state.schemes[state.rgroups[index].scheme]
    return cheaper_in_bulk(float(size[away].sum() / size.sum()), source, state.schemes[0])


def _next_shared(state: FleetState, scheme: int) -> int:
    """Return the scheme of the shared Rgroup that saves most of the larger, more redundant ones."""
    sizes = np.bincount(state.cohorts["rgroup"], state.cohorts["disks"], minlength=len(state.rgroups))
    found = [
        group.scheme
        for group, size in zip(state.rgroups, sizes, strict=True)
        if group.shared and group.scheme < scheme and group.target < 0 and size >= state.policy.min_rgroup_disks
    ]
    return max(found, default=0)


def _may_come_down(state: FleetState, rows: Rows, choice: Choices, day: int, scheme: int) -> NDArray[np.bool_]:
    """Tell which cohorts are past infancy, known, idle, never went up, and save enough by the scheme `choice`."""
    cohorts = state.cohorts[rows]
    age = day - cohorts["born"]
    ready = ~cohorts["canary"] & ~cohorts["up"] & (cohorts["target"] < 0)
    for number, model in enumerate(state.models):
        mine, view = cohorts["dgroup"] == number, model.view
        if view is None or not view.settled:
            ready &= ~mine
        else:
            seen = (age >= view.infancy_end) & (age <= view.frontier + state.policy.review_days)
            ready &= ~mine | (seen & _worth(state, choice, scheme, view))
    return np.asarray(ready)


def _worth(state: FleetState, choice: Choices, scheme: int, view: Outlook) -> NDArray[np.bool_]:
    """Tell whether going down from `scheme` saves enough; before the data is ripe, only to what saves most of all."""
    least = max(state.policy.min_gain, 1e-9)
    best = state.savings[choice] > state.savings.max() - least / 2
    return np.asarray((state.savings[choice] - state.savings[scheme] >= least) & (view.ripe | best))


def _send(state: FleetState, index: int, rows: Rows, choice: Choices, due: Floats, day: int) -> list[Transition]:
    """Set cohorts on the way by type 1, each to the shared Rgroup of its scheme or of the next that there is."""
    begun = []
    for scheme in np.unique(choice):
        mine = choice == scheme
        place = _place(state, int(scheme), float(state.cohorts["disks"][rows[mine]].sum()), index)
        if place is None and due[mine].min() < NEVER:
            place = 0  # who must leave and fits nowhere goes back to the default scheme
        if place is not None:
            begun.append(state.set_out(index, rows[mine], place, due[mine], day))
    return begun


def _place(state: FleetState, scheme: int, disks: float, source: int) -> int | None:
    """Return a shared Rgroup for disks that should be under `scheme`: its own if there is or can be one, or one near.

    Near is one that is more redundant and saves at most half of `min_gain` less, and not the one that they leave.
    """
    least = state.savings[scheme] - state.policy.min_gain / 2
    found = [
        (group.scheme, -index)
        for index, group in enumerate(state.rgroups)
        if group.shared and index != source and group.target < 0
        and group.scheme <= scheme and state.savings[group.scheme] >= least
    ]  # fmt: skip
    if found and (max(found)[0] == scheme or disks < state.policy.min_rgroup_disks):
        return -max(found)[1]
    if disks >= state.policy.min_rgroup_disks:
        return state.new_rgroup(state.schemes[scheme].name, scheme, shared=True)
    return None


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
