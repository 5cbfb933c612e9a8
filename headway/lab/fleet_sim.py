"""A fleet over years, day by day: failures drawn from given AFR curves, a planner that sees only them, the account.

A fluid account in whole days fits where disks are many and transitions take
weeks: what counts are disk-days and bytes per day and Rgroup, in arrays over
cohorts, so that 450 000 disks for three years take seconds. (The event loop of `headway.sim.graph.process` is for
few things that happen at random instants.)

Failures of a cohort are Poisson draws from one seeded stream that does not
depend on the policy: two policies meet the same failures.

>>> wear = Dgroup("st12", arrivals=((0, 20_000),), afr=((0, 0.08), (40, 0.01), (600, 0.01), (1000, 0.03)))
>>> wear.true_afr(4).round(3).tolist(), wear.step_days()
([0.08, 0.078, 0.076, 0.075], {0})

Fleets made up for simulation, in the proportions of published ones: models, deployments, failure rates.

Each model has its infancy, a useful life of slowly changing AFR, and wear-out
that begins gradually, as PACEMAKER reports of 5.3 million disks. Everything
about them follows from the name and the seed.

>>> fleet = made("mixed", seed=1)
>>> len(fleet), sum(dgroup.num_disks for dgroup in fleet)
(9, 350000)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError, InputError
from headway.core.files.safe_files import read_toml
from headway.core.rng import stream
from headway.core.tables import pick
from headway.lab.afr import DAYS_PER_YEAR, Floats
from headway.lab.fleet_state import STEP_DAYS, STEP_GAP_DAYS
from headway.lab.schemes import Transition

if TYPE_CHECKING:
    from headway.lab.fleet import DiskFleet

MOST_DAYS = 36_500
"""That are simulated: a century."""

MOST_AFR, MOST_DISKS, NEVER = 1000.0, 10**9, 1 << 30
"""The highest failure rate (all disks in nine hours), the most disks of a model, and the day on which none retires."""


@dataclass(frozen=True, slots=True)
class Dgroup:
    """One model of disk: how many come when, and the AFR that its disks truly have."""

    name: str
    """Make and model."""

    arrivals: tuple[tuple[int, int], ...]
    """(day, disks) deployed; days rise."""

    afr: tuple[tuple[float, float], ...]
    """(age in days, AFR as a fraction per year); ages rise; straight lines between, level beyond."""

    capacity_bytes: float = 12e12
    """Of one disk."""

    disk_bytes_per_s: float = 100e6
    """What one disk moves."""

    retire_days: int | None = None
    """Age at which disks are taken out; None: not within the simulation."""

    def __post_init__(self) -> None:
        """Check the figures; raises `InputError` naming the model."""
        days, disks = zip(*self.arrivals, strict=True) if self.arrivals else ((), ())
        if not days or any(b <= a for a, b in itertools.pairwise(days)) or days[0] < 0 or min(disks) < 0:
            raise InputError(
                f"{self.name}: arrivals {self.arrivals[:3]}... ; write (day, disks) with rising days >= 0."
            )
        ages, rates = zip(*self.afr, strict=True) if self.afr else ((), ())
        if not ages or any(b <= a for a, b in itertools.pairwise(ages)) or ages[0] < 0:
            raise InputError(f"{self.name}: the ages of its AFR do not rise; write (age in days, AFR) in order of age.")
        if not all(0 <= rate <= MOST_AFR for rate in rates):
            raise InputError(
                f"{self.name}: an AFR is negative or above {MOST_AFR:.0f}; write fractions per year, 0.02 = 2 %."
            )
        if self.num_disks > MOST_DISKS:
            raise InputError(f"{self.name}: {self.num_disks:.3g} disks; write {MOST_DISKS:,} at most.")
        if not all(0 < each < math.inf for each in (self.capacity_bytes, self.disk_bytes_per_s)):
            raise InputError(f"{self.name}: capacity_bytes and disk_bytes_per_s must be positive; write numbers > 0.")
        if self.retire_days is not None and not 0 <= self.retire_days <= NEVER:
            raise InputError(f"{self.name}: retire_days is {self.retire_days}; write days from 0 to {NEVER}.")

    @property
    def num_disks(self) -> int:
        """Disks deployed in all."""
        return sum(disks for _, disks in self.arrivals)

    def true_afr(self, num_ages: int) -> Floats:
        """Return [num_ages] the AFR at each age in days."""
        ages, rates = zip(*self.afr, strict=True)
        return np.asarray(np.interp(np.arange(num_ages), ages, rates), np.float64)

    def step_days(self) -> set[int]:
        """Return the days whose disks are deployed in a step; those of all others trickle."""
        return step_days(dict(self.arrivals))


def step_days(
    arrivals: Mapping[int, int], *, min_disks: int = 3000, max_days: int = STEP_DAYS, max_gap: int = STEP_GAP_DAYS
) -> set[int]:
    """Return the days of `arrivals` (day -> disks, in order) that belong to a step: thousands of disks within days.

    >>> sorted(step_days({0: 2000, 1: 2000, 40: 500, 80: 500}))
    [0, 1]
    """
    found: set[int] = set()
    together: list[int] = []
    for day in [*arrivals, NEVER]:
        if together and day - together[-1] > max_gap:
            short = together[-1] - together[0] < max_days
            if short and sum(arrivals[d] for d in together) >= min_disks:
                found.update(together)
            together = []
        together.append(day)
    return found


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a fleet went through. All of it is simulated."""

    io_frac: Floats
    """[days] Transition IO over what all disks of the fleet could move that day."""

    savings: float
    """Space saved against the default scheme, as a fraction: mean over bytes of disk and days."""

    under_protected_disk_days: float
    """Disk-days under a scheme (other than the default) that tolerates less than the AFR the disks truly had."""

    rgroup_peak_io: float
    """Most of any Rgroup's bandwidth that transitions took on a day while its cap held."""

    valve_days: int
    """Rgroup-days on which the cap was lifted because the AFR was beyond the scheme."""

    oracle_savings: float
    """Savings of disks that always are under the best scheme for their true AFR, at no cost: the bound."""

    disk_days: float
    """Lived by all disks."""

    disk_days_by_scheme: Mapping[str, float]
    """Scheme -> disk-days under it (a step that is changing counts under the scheme before)."""

    savings_by_day: Floats
    """[days] Space saved on each day."""

    transitions: tuple[Transition, ...]
    """Those that began, in order."""

    @property
    def mean_io(self) -> float:
        """Mean over days of `io_frac`."""
        return float(self.io_frac.mean())

    @property
    def peak_io(self) -> float:
        """Highest day of `io_frac`."""
        return float(self.io_frac.max())

    def to_json(self) -> dict[str, object]:
        """Return the figures by name, without the transitions."""
        kinds = [f"{change.kind}, {change.method}" for change in self.transitions]
        return {
            "savings": self.savings, "oracle_savings": self.oracle_savings, "mean_io": self.mean_io,
            "peak_io": self.peak_io, "rgroup_peak_io": self.rgroup_peak_io, "valve_days": self.valve_days,
            "under_protected_disk_days": self.under_protected_disk_days, "disk_days": self.disk_days,
            "disk_days_by_scheme": dict(self.disk_days_by_scheme),
            "transitions": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        }  # fmt: skip


@dataclass(slots=True)
class _Account:
    """Sums over the days so far."""

    afr: Floats
    """[models, ages] True AFR."""
    best: Floats
    """[models, ages] Savings of the best scheme for it."""
    retire: NDArray[np.int64]
    """[models] Age at which disks are taken out."""
    io: list[float]
    saved: list[float]
    under: float = 0.0
    peak: float = 0.0
    valve: int = 0
    byte_days: float = 0.0
    saved_byte_days: float = 0.0
    best_byte_days: float = 0.0
    disk_days: float = 0.0


def run(fleet: DiskFleet, clusters: Sequence[Dgroup], days: int, *, seed: int = 0) -> SimResult:
    """Let `fleet`, still empty, live for `days` days with these models of disk. Raises `InputError`."""
    if not 1 <= days <= MOST_DAYS or not clusters:
        raise InputError(
            f"{len(clusters)} models of disk for {days} days; pass at least one model and 1 to {MOST_DAYS:,} days."
        )
    strange = [each for each in clusters if not isinstance(each, Dgroup)]
    if strange:
        raise InputError(f"{strange[0]!r} is not a Dgroup. Pass headway.storage.Dgroup(name, arrivals=..., afr=...).")
    if len({dgroup.name for dgroup in clusters}) < len(clusters):
        raise InputError("two models of disk have one name; give each its own, or join their arrivals.")
    for dgroup in clusters:
        fleet.add(dgroup.name, capacity_bytes=dgroup.capacity_bytes, disk_bytes_per_s=dgroup.disk_bytes_per_s)
    account = _open(fleet, clusters, days)
    rng = stream(seed, "failures")
    arrivals: dict[int, list[tuple[str, int, bool]]] = {}
    for dgroup in clusters:
        steps = dgroup.step_days()
        for day, disks in dgroup.arrivals:
            arrivals.setdefault(day, []).append((dgroup.name, disks, day in steps))
    begun: list[Transition] = []
    by_scheme = np.zeros(len(fleet.state.schemes))
    for day in range(days):
        for name, disks, step in arrivals.get(day, ()):
            fleet.deploy(name, day, disks, step=step)
        cohorts = fleet.state.cohorts
        age = day - cohorts["born"]
        cohorts["disks"][age >= account.retire[cohorts["dgroup"]]] = 0.0
        rate = account.afr[cohorts["dgroup"], age] / DAYS_PER_YEAR
        failed = np.minimum(rng.poisson(cohorts["disks"] * rate).astype(np.float64), cohorts["disks"])
        fleet.live(day, failed)
        begun += fleet.step(day)
        _book(fleet, account, day, by_scheme)
    names = [scheme.name for scheme in fleet.state.schemes]
    return SimResult(
        io_frac=np.array(account.io), savings=account.saved_byte_days / max(account.byte_days, 1e-9),
        under_protected_disk_days=account.under, rgroup_peak_io=account.peak, valve_days=account.valve,
        oracle_savings=account.best_byte_days / max(account.byte_days, 1e-9), disk_days=account.disk_days,
        disk_days_by_scheme={name: float(x) for name, x in zip(names, by_scheme, strict=True) if x > 0},
        savings_by_day=np.array(account.saved), transitions=tuple(begun),
    )  # fmt: skip


def _open(fleet: DiskFleet, clusters: Sequence[Dgroup], days: int) -> _Account:
    """Begin the account: what is true of each model at each age."""
    afr = np.array([dgroup.true_afr(days) for dgroup in clusters])
    enough = afr[:, :, None] <= fleet.state.tolerated
    enough[:, :, 0] = True
    best = np.max(np.where(enough, fleet.state.savings, 0.0), axis=2)
    retire = np.array([NEVER if dgroup.retire_days is None else dgroup.retire_days for dgroup in clusters])
    return _Account(afr, best, retire, [], [])


def _book(fleet: DiskFleet, account: _Account, day: int, by_scheme: Floats) -> None:
    """Add one day."""
    state, cohorts = fleet.state, fleet.state.cohorts
    disks, capacity = cohorts["disks"], state.capacity()
    scheme = state.of_rgroups([group.scheme for group in state.rgroups]).astype(np.int64)
    target = state.of_rgroups([max(group.scheme if group.target < 0 else group.target, 0) for group in state.rgroups])
    target = target.astype(np.int64)
    done = state.of_rgroups([group.done_fraction for group in state.rgroups])
    weakest = np.maximum(scheme, target)  # while an Rgroup changes, its weaker scheme is what protects it
    age = day - cohorts["born"]
    truth = account.afr[cohorts["dgroup"], age]
    account.under += float(disks[(truth > state.tolerated[weakest]) & (weakest > 0)].sum())
    saved = float(capacity @ ((1 - done) * state.savings[scheme] + done * state.savings[target]))
    account.byte_days += float(capacity.sum())
    account.saved_byte_days += saved
    account.best_byte_days += float(capacity @ account.best[cohorts["dgroup"], age])
    account.disk_days += float(disks.sum())
    by_scheme += np.bincount(scheme, disks, minlength=len(by_scheme))
    account.saved.append(saved / max(float(capacity.sum()), 1e-9))
    account.io.append(float(fleet.io_bytes.sum()) / max(float(fleet.bandwidth.sum()), 1e-9))
    capped = (fleet.bandwidth > 0) & ~fleet.valve_open
    account.peak = max(account.peak, float(np.max(fleet.io_bytes[capped] / fleet.bandwidth[capped], initial=0.0)))
    account.valve += int(fleet.valve_open.sum())


def read_clusters(path: Path) -> list[Dgroup]:
    """Read models of disk from a TOML file: tables [[dgroup]] with the fields of `Dgroup`.

    Raises `InputError` when it cannot be read, `FormatError` naming the table
    when it is not what it should be.
    """
    content = read_toml(path)
    tables = content.get("dgroup")
    if not isinstance(tables, list) or not tables or set(content) != {"dgroup"}:
        raise FormatError(f"{path} must hold tables [[dgroup]] and nothing else; write one for each model of disk.")
    found = []
    for number, table in enumerate(tables):
        try:
            found.append(msgspec.convert(table, Dgroup))
        except (msgspec.ValidationError, InputError) as cause:
            raise FormatError(f"{path}: dgroup {number}: {cause}. Correct that key.") from cause
    return found


TERABYTES = (4e12, 4e12, 6e12, 8e12, 10e12)


@dataclass(frozen=True, slots=True)
class Mix:
    """What a made-up fleet consists of."""

    num_disks: int
    """In all."""

    num_trickle: int
    """Models whose disks come a few a day, for months."""

    num_step: int
    """Models whose disks come thousands at a time."""

    days: int = 1095
    """Span that deployments are spread over: the last third sees none begin."""


MIXES: dict[str, Mix] = {
    "trickle": Mix(110_000, num_trickle=4, num_step=1),
    "step": Mix(160_000, num_trickle=1, num_step=6),
    "mixed": Mix(350_000, num_trickle=4, num_step=5),
    "large": Mix(450_000, num_trickle=7, num_step=5),
}
"""Every made-up fleet, from a quarter of a warehouse to several: 110 to 450 thousand disks."""


def made(name: str, *, seed: int = 0) -> list[Dgroup]:
    """Return the models of the fleet `name` of `MIXES`; raises `UnknownNameError`."""
    mix = pick(MIXES, name, "made-up fleet")
    rng = stream(seed, "fleet", name)
    num = mix.num_trickle + mix.num_step
    shares = rng.uniform(0.5, 1.5, num)
    counts = np.floor(shares / shares.sum() * mix.num_disks).astype(int)
    counts[0] += mix.num_disks - counts.sum()
    return [
        Dgroup(
            name=f"{'trickle' if index < mix.num_trickle else 'step'}-{index}",
            arrivals=_trickle(rng, int(counts[index]), mix.days) if index < mix.num_trickle
            else _steps(rng, int(counts[index]), mix.days),
            afr=_bathtub(rng),
            capacity_bytes=float(rng.choice(TERABYTES)),
        )
        for index in range(num)
    ]  # fmt: skip


def _trickle(rng: np.random.Generator, num_disks: int, days: int) -> tuple[tuple[int, int], ...]:
    """Disks every day for most of a year or longer, more on some days than on others."""
    first = int(rng.integers(0, days // 4))
    length = int(rng.integers(days // 4, days // 2))
    weights = rng.gamma(2.0, size=length)
    counts = np.floor(weights / weights.sum() * num_disks).astype(int)
    counts[0] += num_disks - counts.sum()
    return tuple((first + day, int(count)) for day, count in enumerate(counts) if count)


def _steps(rng: np.random.Generator, num_disks: int, days: int) -> tuple[tuple[int, int], ...]:
    """One to three batches, each within a few days."""
    num = int(rng.integers(1, 1 + min(3, max(1, num_disks // 6000))))
    starts = np.sort(rng.choice(np.arange(0, 2 * days // 3, 30), size=num, replace=False))
    found = []
    for batch, start in enumerate(starts):
        size = num_disks // num + (num_disks % num if batch == 0 else 0)
        length = int(rng.integers(1, 6))
        found += [(int(start) + day, size // length + (size % length if day == 0 else 0)) for day in range(length)]
    return tuple(found)


def _bathtub(rng: np.random.Generator) -> tuple[tuple[float, float], ...]:
    """An AFR over age: infancy that fades, a useful life in one to three phases, wear-out that comes slowly."""
    base, infant = rng.uniform(0.006, 0.02), rng.uniform(0.04, 0.12)
    fade = rng.uniform(8, 30)
    knots = [(float(age), float(base + (infant - base) * np.exp(-age / fade))) for age in range(0, 151, 5)]
    age, rate = 150.0, knots[-1][1]
    for _ in range(int(rng.integers(1, 4))):
        age, rate = age + rng.uniform(250, 500), rate * rng.uniform(1.0, 1.3)
        knots.append((age, rate))
    worn = rate * rng.uniform(2.0, 5.0)
    knots.append((age + rng.uniform(500, 1000), worn))
    return tuple((float(a), float(r)) for a, r in knots)
