"""A review of a fleet: which disks must go to more redundancy, which may come down, and how they get there.

Reads what is expected of each model, begins changes of scheme on a
`FleetState`; moves nothing itself. Steps change as a whole; disks in shared
Rgroups leave one cohort at a time, unless so many must that changing all is
cheaper.

>>> from headway.storage.disks.plan import POLICIES
>>> review(FleetState(POLICIES["pacemaker"]), 0)
[]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.storage.disks.afr import Floats
from headway.storage.disks.plan import NEVER, Outlook, choose
from headway.storage.disks.state import Choices, FleetState, Rows
from headway.storage.disks.transitions import Transition, cheaper_in_bulk


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
