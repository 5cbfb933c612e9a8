"""What a fleet of disks is at one moment: models, cohorts, Rgroups, and the changes of scheme under way.

A Dgroup is one model of disk; a cohort is its disks deployed on one day; an
Rgroup is disks that share a scheme, and no stripe leaves it: each cohort is
in exactly one. Rgroup 0 is under the default scheme. Arrays over cohorts keep
a fleet of hundreds of thousands of disks small.

>>> from headway.lab.fleet_plan import POLICIES
>>> state = FleetState(POLICIES["pacemaker"])
>>> state.add("st12", capacity_bytes=12e12, disk_bytes_per_s=100e6)
>>> state.deploy("st12", 0, 5000, step=False)
>>> state.cohorts["disks"].tolist(), state.cohorts["canary"].tolist()
([3000.0, 2000.0], [True, False])
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.lab.afr import AfrModel, Floats
from headway.lab.fleet_plan import NEVER, Outlook, Policy, choose, outlook
from headway.lab.schemes import METHODS, SECONDS_PER_DAY, Transition

Rows = NDArray[np.int64]
Choices = NDArray[np.int64]

COHORT = np.dtype(
    [
        ("dgroup", np.int32), ("rgroup", np.int32), ("born", np.int32), ("disks", np.float64), ("canary", np.bool_),
        ("up", np.bool_), ("target", np.int32), ("due", np.int32), ("left_bytes", np.float64),
    ]
)  # fmt: skip
"""`target`: the Rgroup that a cohort is on the way to by type 1 (-1: none), by day `due`, `left_bytes` still to be
moved; `up`: it has once gone to more redundancy, and will not come down again."""

STEP_GAP_DAYS, STEP_DAYS = 3, 14
"""Deployments at most so far apart, over at most so long, are one step."""


@dataclass(slots=True)
class Rgroup:
    """Disks that share a scheme."""

    name: str
    """For people."""

    scheme: int
    """Index into the policy's schemes."""

    shared: bool
    """Trickle-deployed disks come and go; else the disks of one step."""

    target: int = -1
    """Scheme that it is on the way to as a whole; -1: none."""

    total_bytes: float = 0.0
    """IO of that change."""

    left_bytes: float = 0.0
    """What is left of it."""

    due: int = NEVER
    """Day by which it should be done; `NEVER` when it only saves space."""

    urgent: bool = False
    """The AFR is surely beyond what the scheme tolerates: the cap on IO does not hold."""

    filled: bool = False
    """It has once been large enough to place stripes well."""

    @property
    def done_fraction(self) -> float:
        """Part of the change of the whole Rgroup that is done."""
        return 1.0 - self.left_bytes / self.total_bytes if self.target >= 0 and self.total_bytes > 0 else 0.0


@dataclass(slots=True)
class Model:
    """One model of disk."""

    name: str
    capacity_bytes: float
    disk_bytes_per_s: float

    log: AfrModel
    """Its failures so far."""

    view: Outlook | None = None
    """What they tell; None: not enough."""

    choice: Choices = field(default_factory=lambda: np.zeros(0, np.int64))
    """[ages] Scheme that a disk of each age should move to by type 1."""

    trickled: int = 0
    """Disks deployed by trickle so far: the first of them are canaries."""


class FleetState:
    """Models, cohorts and Rgroups under a policy, and the elementary changes to them."""

    def __init__(self, policy: Policy) -> None:
        """Begin with no disks."""
        self.policy = policy
        self.schemes = policy.schemes
        self.tolerated = policy.tolerated()
        """[schemes] AFR that each tolerates."""
        self.savings = policy.savings()
        """[schemes] Space that each saves."""
        self.names: dict[str, int] = {}
        """Model -> its index."""
        self.models: list[Model] = []
        self.rgroups = [Rgroup("default", 0, shared=True)]
        self.cohorts = np.zeros(0, COHORT)

    # -- disks come and fail ------------------------------------------------------------------------------------

    def add(self, dgroup: str, *, capacity_bytes: float, disk_bytes_per_s: float) -> None:
        """Make a model known; raises `InputError` when it is known already or a number is not positive."""
        if dgroup in self.names:
            raise InputError(f"model {dgroup!r} is known already; deploy more of its disks with `deploy`.")
        if not (capacity_bytes > 0 and disk_bytes_per_s > 0):
            raise InputError(
                f"{dgroup}: capacity_bytes={capacity_bytes}, disk_bytes_per_s={disk_bytes_per_s}; pass numbers > 0."
            )
        self.names[dgroup] = len(self.models)
        self.models.append(Model(dgroup, float(capacity_bytes), float(disk_bytes_per_s), self.policy.model()))

    def deploy(self, dgroup: str, day: int, num_disks: int, *, step: bool) -> None:
        """Add new disks; raises `InputError` on a negative count, `UnknownNameError` on an unknown model."""
        number = pick(self.names, dgroup, "model of disk")
        if num_disks < 0 or day < 0:
            raise InputError(f"{num_disks} disks of {dgroup} on day {day}: pass a count and a day >= 0.")
        if step:
            self._append(number, self._step_rgroup(number, day), day, num_disks, canary=False)
            return
        model = self.models[number]
        canaries = min(num_disks, max(0, self.policy.canary_disks - model.trickled))
        model.trickled += num_disks
        self._append(number, 0, day, canaries, canary=True)
        self._append(number, 0, day, num_disks - canaries, canary=False)

    def _append(self, number: int, rgroup: int, day: int, disks: int, *, canary: bool) -> None:
        """Add a cohort, if there are disks in it."""
        if disks > 0:
            row = np.array([(number, rgroup, day, disks, canary, False, -1, NEVER, 0.0)], COHORT)
            self.cohorts = np.concatenate([self.cohorts, row])

    def _step_rgroup(self, number: int, day: int) -> int:
        """Return the Rgroup of a step that still goes on, or a new one."""
        mine = self.cohorts[self.cohorts["dgroup"] == number]
        for index in np.unique(mine["rgroup"])[::-1]:
            born = mine["born"][mine["rgroup"] == index]
            near = day - born.max() <= STEP_GAP_DAYS and day - born.min() < STEP_DAYS
            if near and not self.rgroups[index].shared:
                return int(index)
        return self.new_rgroup(f"{self.models[number].name}, day {day}", 0, shared=False)

    def new_rgroup(self, name: str, scheme: int, *, shared: bool) -> int:
        """Begin an Rgroup and return its index."""
        self.rgroups.append(Rgroup(name, scheme, shared))
        return len(self.rgroups) - 1

    def lose(self, number: int, born: int, failed: float) -> None:
        """Take failed disks out of the cohorts of a model deployed on day `born`, in proportion."""
        rows = np.flatnonzero((self.cohorts["dgroup"] == number) & (self.cohorts["born"] == born))
        disks = self.cohorts["disks"][rows]
        if disks.sum() > 0:
            self.cohorts["disks"][rows] = disks * max(0.0, 1.0 - failed / disks.sum())

    # -- what can be asked --------------------------------------------------------------------------------------

    def of_models(self, values: list[float], rows: Rows | slice = slice(None)) -> Floats:
        """Return a figure of each cohort's model."""
        found: Floats = np.array(values, np.float64)[self.cohorts["dgroup"][rows]]
        return found

    def of_rgroups(self, values: list[int] | list[float]) -> NDArray[np.float64]:
        """Return [cohorts] a figure of each one's Rgroup."""
        found: Floats = np.array(values, np.float64)[self.cohorts["rgroup"]]
        return found

    def capacity(self, rows: Rows | slice = slice(None)) -> Floats:
        """Return the bytes of disk of each cohort."""
        sizes = self.of_models([model.capacity_bytes for model in self.models], rows)
        disks: Floats = self.cohorts["disks"][rows]
        return disks * sizes

    def bandwidth(self, rows: Rows | slice = slice(None)) -> Floats:
        """Return the bytes that each cohort's disks can move in a day."""
        rates = [model.disk_bytes_per_s * SECONDS_PER_DAY for model in self.models]
        disks: Floats = self.cohorts["disks"][rows]
        return disks * self.of_models(rates, rows)

    def cost(self, method: str, source: int, target: int) -> float:
        """Return bytes moved per byte of disk that changes by that method, or by what the policy does instead."""
        name = "re-encode" if self.policy.reencodes else method
        return METHODS[name](self.schemes[source], self.schemes[target])

    def least_days(self, model: Model, method: str, source: int) -> Floats:
        """Return [schemes] the days that a stay under each must last to be worth going there."""
        return np.array(
            [
                self.policy.least_residency_days(
                    self.cost(method, source, target), model.capacity_bytes, model.disk_bytes_per_s
                )
                for target in range(len(self.schemes))
            ]
        )

    def look(self, rows: Rows, day: int, scheme: int) -> tuple[Floats, Choices, Choices]:
        """Return of cohorts under `scheme`: the day each must have left it, where it may go now, and from then on."""
        due, choice, later = (np.full(len(rows), fill) for fill in (float(NEVER), 0, 0))
        for number, model in enumerate(self.models):
            mine = self.cohorts["dgroup"][rows] == number
            if model.view is None or not mine.any():
                continue
            age = (day - self.cohorts["born"][rows[mine]]).astype(np.int64)
            at = model.view.at(age)
            crossing = model.view.crossing[scheme][at].astype(np.int64)
            due[mine] = np.where(crossing == NEVER, NEVER, day + np.maximum(crossing - age, 0))
            then = model.view.at(np.where(crossing == NEVER, age, np.maximum(crossing, age)))
            choice[mine], later[mine] = model.choice[at], model.choice[then]
        return due, choice, later

    def surely(self, rows: Rows, day: int) -> Floats:
        """Return the AFR that the disks of each cohort have at least; 0 where nothing is known."""
        found = np.zeros(len(rows))
        for number, model in enumerate(self.models):
            mine = self.cohorts["dgroup"][rows] == number
            if model.view is not None:
                found[mine] = model.view.sure[model.view.at(day - self.cohorts["born"][rows[mine]])]
        return found

    def update(self) -> None:
        """Look at the failure logs again; what was known of a model stays known."""
        for model in self.models:
            fresh = outlook(model.log, self.policy)
            if fresh is not None:
                model.view = fresh
                model.choice = choose(fresh, self.policy, self.least_days(model, "type 1", 0))

    # -- changes of scheme begin --------------------------------------------------------------------------------

    def begin_bulk(self, index: int, rows: Rows, target: int, day: int, kind: str, due: float) -> Transition:
        """Set a whole Rgroup (its cohorts are `rows`) on the way to another scheme; from the start if it was on one."""
        group = self.rgroups[index]
        group.target, group.due = target, int(min(due, NEVER))
        group.total_bytes = float(self.capacity(rows).sum()) * self.cost("type 2", group.scheme, target)
        group.left_bytes = group.total_bytes
        self.cohorts["target"][rows] = -1  # who was about to leave changes with the rest
        inbound = self.cohorts["target"] == index  # who was about to come goes elsewhere
        self.cohorts["target"][inbound] = np.where(self.cohorts["due"][inbound] < NEVER, 0, -1)
        return self._told(index, rows, target, day, kind, "type 2", group.total_bytes, group.due)

    def set_out(self, index: int, rows: Rows, place: int, due: Floats, day: int) -> Transition:
        """Set cohorts of Rgroup `index` on the way to Rgroup `place` by type 1."""
        source, target = self.rgroups[index].scheme, self.rgroups[place].scheme
        size = self.capacity(rows) * self.cost("type 1", source, target)
        self.cohorts["target"][rows] = place
        self.cohorts["left_bytes"][rows] = size
        self.cohorts["due"][rows] = np.minimum(due, NEVER)
        kind = "up" if target < source else "down"
        return self._told(index, rows, target, day, kind, "type 1", float(size.sum()), int(due.min()))

    def _told(
        self, index: int, rows: Rows, target: int, day: int, kind: str, method: str, size: float, due: int
    ) -> Transition:
        """Return the record of a change that begins."""
        group = self.rgroups[index]
        return Transition(
            day=day, kind=kind, method="re-encode" if self.policy.reencodes else method,
            dgroups=tuple(self.models[number].name for number in np.unique(self.cohorts["dgroup"][rows])),
            rgroup=group.name, source=self.schemes[group.scheme].name, target=self.schemes[target].name,
            num_disks=round(float(self.cohorts["disks"][rows].sum())), io_bytes=size,
            due_day=None if due >= NEVER else due, urgent=group.urgent,
        )  # fmt: skip
