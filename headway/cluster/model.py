"""A queue of training jobs, the devices they share, and the state that a policy decides on.

Arrays, one row per job, one column per device type:

                v100  p100  k80          rates[m, j]  steps per second of the whole job m
    job 0      [ 8.0   4.0   1.0 ]                    when it runs on `scale[m]` devices of
    job 1      [ 3.0   0.0   2.0 ]                    type j; 0 = it does not run there

Times are seconds, rates steps per second of the whole job, prices dollars per device and hour.

>>> cluster = Cluster.parse("v100=2,k80=4")
>>> cluster.names, cluster.count.tolist(), cluster.usd_per_h.tolist()
(('v100', 'k80'), [2, 4], [2.85, 0.52])
>>> Cluster.parse("v100")
Traceback (most recent call last):
headway.core.errors.InputError: 'v100' says no number of devices. Write type=count, such as v100=8.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick

Values = NDArray[np.float64]
Indices = NDArray[np.int64]

USD_PER_H: dict[str, float] = {"v100": 2.85, "p100": 1.68, "k80": 0.52}
"""Dollars per device and hour on demand: the table of Gavel's study of prices (Narayanan et al., DISPA 2020)."""


MOST_DEVICES = 10**9
"""Devices of one type, or of one job."""


def parse_numbers(text: str, what: str) -> dict[str, float]:
    """Read "v100=2.85,k80=0.52", device types and finite numbers above 0; raises `InputError`."""
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise InputError(f"{part!r} cannot be read as {what}. Write type=number, such as v100=1.5.") from None
        if not 0 < found[name.strip()] < math.inf:
            raise InputError(f"{part!r} is out of range for {what}: give a finite number above 0.")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Pools of devices, one per type, fastest first where that is known."""

    names: tuple[str, ...]
    """[W] Device types."""

    count: Indices
    """[W] Devices of each type."""

    usd_per_h: Values
    """[W] Price of a device; NaN where it is unknown."""

    @classmethod
    def parse(cls, text: str, prices: str = "") -> Cluster:
        """Read "v100=36,k80=36" and, likewise, dollars per device and hour; raises `InputError`."""
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        bare = [name for name, sign, value in pairs if not (sign and value.strip().isdecimal())]
        if bare:
            raise InputError(f"{bare[0]!r} says no number of devices. Write type=count, such as v100=8.")
        names = [name.strip() for name, _, _ in pairs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InputError(f"device type {twice[0]!r} is given twice in {text!r}. Add its devices up.")
        counts = [int(value) for _, _, value in pairs]
        return cls.of(dict(zip(names, counts, strict=True)), parse_numbers(prices, "prices"))

    @classmethod
    def of(cls, count: Mapping[str, int], usd_per_h: Mapping[str, float] | None = None) -> Cluster:
        """Make a cluster of type -> number of devices; raises `InputError` when it is empty or a count is below 0."""
        sizes = [int(value) for value in count.values()]
        if any(not 0 <= size <= MOST_DEVICES for size in sizes) or not sum(sizes):
            raise InputError(
                f"the cluster has devices {dict(count)}; give at least one type a count above 0, and none above "
                f"{MOST_DEVICES:,}."
            )
        prices = {**USD_PER_H, **(usd_per_h or {})}
        price = np.array([prices.get(name, math.nan) for name in count], np.float64)
        if (price < 0).any():
            raise InputError(f"prices are {price.tolist()}; give dollars per device and hour >= 0.")
        return cls(tuple(count), np.array(sizes, np.int64), price)

    @property
    def share(self) -> Values:
        """[W] Fraction of all devices that are of each type."""
        return np.asarray(self.count / self.count.sum())

    def priced(self) -> Values:
        """Return the prices; raises `InputError` where a type has none or its price is 0."""
        missing = [name for name, usd in zip(self.names, self.usd_per_h, strict=True) if not usd > 0]
        if missing:
            raise InputError(f"device type {missing[0]!r} has no price above 0. Pass --usd-per-h {missing[0]}=1.20.")
        return self.usd_per_h


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """`n` jobs in the order of their arrival; columns that are left out get the value that changes nothing."""

    ids: Sequence[str]
    """[n] Unique names."""

    scale: Indices
    """[n] Devices that run the job together (a gang)."""

    steps: Values
    """[n] Steps that it takes."""

    arrival_s: Values
    """[n] When it was submitted, ascending."""

    model: Sequence[str] = ()
    """[n] What it trains: with `scale`, the key into a table of rates."""

    entity: Sequence[str] = ()
    """[n] Who submitted it."""

    weight: Values = field(default_factory=lambda: np.zeros(0))
    """[n] Share relative to other jobs, > 0."""

    deadline_s: Values = field(default_factory=lambda: np.zeros(0))
    """[n] When it must be done; infinity = no deadline."""

    restart_s: Values = field(default_factory=lambda: np.zeros(0))
    """[n] Time lost each time it is moved or resumed."""

    limit_s: Values = field(default_factory=lambda: np.zeros(0))
    """[n] Time limit that its submitter gave it; infinity = none, or not known."""

    def __post_init__(self) -> None:
        """Fill in defaults and check; raises `InputError` that names the job and the field."""
        n = len(self.ids)
        columns = {"scale": 1, "steps": 0, "arrival_s": 0, "weight": 1.0, "deadline_s": math.inf, "restart_s": 0.0,
            "limit_s": math.inf}  # fmt: skip
        for name, default in columns.items():
            value = np.asarray(getattr(self, name), np.int64 if name == "scale" else np.float64)
            value = value if value.size or not n else np.full(n, default)
            if value.shape != (n,):
                raise InputError(f"{name} has shape {list(value.shape)}; there are {n} jobs: give one number per job.")
            object.__setattr__(self, name, value)
        for name in ("model", "entity"):
            object.__setattr__(self, name, tuple(getattr(self, name)) or ("",) * n)
        self._check("scale", self.scale < 1, "a job needs at least 1 device")
        self._check("steps", ~(self.steps > 0) | np.isinf(self.steps), "give a finite number above 0")
        self._check("arrival_s", ~np.isfinite(self.arrival_s), "give seconds")
        self._check("weight", ~(self.weight > 0), "give a number above 0")
        self._check("restart_s", ~(self.restart_s >= 0), "give seconds >= 0")
        self._check("limit_s", ~(self.limit_s > 0), "give seconds above 0")
        late = ~(self.deadline_s > self.arrival_s)
        self._check("deadline_s", late, "it has passed when the job arrives; give a later one")
        unsorted = np.diff(self.arrival_s, prepend=-math.inf) < 0
        self._check("arrival_s", unsorted, "it is before that of the job in front; sort the jobs by arrival")
        if len(set(self.ids)) < n:
            seen: set[str] = set()
            twice = next(name for name in self.ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]  # add returns None
            raise InputError(f"job id {twice!r} occurs twice; give each job an id of its own.")

    def _check(self, column: str, wrong: NDArray[np.bool_], rule: str) -> None:
        """Name the first job whose value breaks a rule."""
        if wrong.any():
            at = int(wrong.argmax())
            raise InputError(f"job {self.ids[at]!r} has {column} {getattr(self, column)[at]:g}: {rule}.")

    def __len__(self) -> int:
        """Return the number of jobs."""
        return len(self.ids)

    def take(self, rows: NDArray[np.int64] | slice) -> Jobs:
        """Return some of the jobs, in the given order."""
        at = np.arange(len(self))[rows]
        ids, model, entity = ([column[i] for i in at] for column in (self.ids, self.model, self.entity))
        own = self.weight[at], self.deadline_s[at], self.restart_s[at], self.limit_s[at]
        return Jobs(ids, self.scale[at], self.steps[at], self.arrival_s[at], model, entity, *own)

    def with_more(self, other: Jobs) -> Jobs:
        """Return these jobs and others that came later."""
        ids, model, entity = ([*getattr(self, name), *getattr(other, name)] for name in ("ids", "model", "entity"))
        numbers = ("scale", "steps", "arrival_s", "weight", "deadline_s", "restart_s", "limit_s")
        columns = {name: np.concatenate((getattr(self, name), getattr(other, name))) for name in numbers}
        return Jobs(ids, model=model, entity=entity, **columns)


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """Steps per second of each job on each device type, alone and sharing the devices with another one."""

    alone: Values
    """[n, W] Of the whole job; 0 = it does not run there."""

    kind: Indices
    """[n] Jobs of one kind have equal rows, also in `shared`."""

    shared: Values
    """[K, K, W] Of a job of kind a while it shares its devices with one of kind b; [0, 0, W] = never shared."""

    @classmethod
    def of(cls, rates: ArrayLike | Rates, jobs: Jobs, cluster: Cluster) -> Rates:
        """Check rates [n, W]; raises `InputError` on NaN, rates < 0, and jobs that fit no pool."""
        given = rates if isinstance(rates, Rates) else None
        alone = given.alone if given else np.asarray(rates, np.float64)
        if alone.shape != (len(jobs), len(cluster.names)):
            raise InputError(
                f"rates have shape {list(alone.shape)}; pass steps/s of {len(jobs)} jobs on each of {cluster.names}."
            )
        wrong = ~(alone >= 0) | np.isinf(alone)
        if wrong.any():
            m, j = (int(index[0]) for index in np.nonzero(wrong))
            raise InputError(
                f"job {jobs.ids[m]!r} has {alone[m, j]:g} steps/s on {cluster.names[j]}; give a number >= 0 (0 = no)."
            )
        return given or cls(alone, np.unique(alone, axis=0, return_inverse=True)[1].reshape(-1), np.zeros((0, 0, 0)))


@dataclass(frozen=True, slots=True)
class Resize:
    """A pool that has another size from a moment on: devices that leave, or come back."""

    at_s: float
    """When, on the clock of the arrivals."""

    device_type: str
    """Which pool."""

    count: int
    """Its devices from then on."""

    @classmethod
    def parse(cls, text: str) -> tuple[Resize, ...]:
        """Read "36000:v100=4,72000:v100=8"; raises `InputError`."""
        found = []
        for part in filter(None, map(str.strip, text.split(","))):
            try:
                when, _, pool = part.partition(":")
                name, _, count = pool.partition("=")
                found.append(cls(float(when), name.strip(), min(int(count), MOST_DEVICES)))
            except ValueError:
                raise InputError(
                    f"{part!r} cannot be read as a change of a pool. Write seconds:type=count, as 36000:v100=4."
                ) from None
        return tuple(found)

    def of(self, cluster: Cluster) -> Cluster:
        """Return the cluster after the change."""
        here = np.array([name == self.device_type for name in cluster.names])
        return replace(cluster, count=np.where(here, self.count, cluster.count))


def check_resizes(cluster: Cluster, resizes: Sequence[Resize]) -> None:
    """Raise `InputError` for an unknown pool, a time or size below 0, and where no device would be left."""
    for resize in sorted(resizes, key=lambda resize: resize.at_s):
        pick(dict.fromkeys(cluster.names, True), resize.device_type, "device type of the cluster")
        if not (0 <= resize.at_s < math.inf and resize.count >= 0):
            raise InputError(
                f"{resize.device_type} has {resize.count} devices from {resize.at_s:g} s on; pass both >= 0."
            )
        cluster = resize.of(cluster)
        if not cluster.count.any():
            raise InputError(f"the cluster has no device left at {resize.at_s:g} s; keep one.")


def pools_that_fit(jobs: Jobs, cluster: Cluster, alone: Values, *, mixed: bool) -> NDArray[np.bool_]:
    """[n] Whether a job, with steps/s `alone` [n, W], has a pool as large as its gang; `mixed`: all pools together."""
    if mixed:
        return np.asarray(((alone > 0) * cluster.count).sum(axis=1) >= jobs.scale)
    return np.asarray(((alone > 0) & (jobs.scale[:, None] <= cluster.count)).any(axis=1))


def check_fits(jobs: Jobs, cluster: Cluster, alone: Values, *, mixed: bool = False) -> None:
    """Raise `InputError` for a job that no pool can run: at submission, not after a silent wait for ever."""
    lost = ~pools_that_fit(jobs, cluster, alone, mixed=mixed)
    if not lost.any():
        return
    m = int(lost.argmax())
    runs = [name for name, rate in zip(cluster.names, alone[m], strict=True) if rate > 0]
    if not runs:
        raise InputError(f"job {jobs.ids[m]!r} runs on none of {', '.join(cluster.names)}; add a device type for it.")
    largest = int(np.where(alone[m] > 0, cluster.count, 0).argmax())
    raise InputError(
        f"job {jobs.ids[m]!r} needs {jobs.scale[m]} devices of one type; the largest pool that runs it, "
        f"{cluster.names[largest]}, has {cluster.count[largest]}. Reduce the gang, or take hadar, which mixes types."
    )


class Adapting(Protocol):
    """Jobs whose speed depends on their devices, batch and progress: the engine and policies ask it, not the rates."""

    aligned: bool
    """Rounds begin at multiples of their length; otherwise each begins where the one before it ends."""

    def work(self, jobs: Indices, devices: Values, seconds: Values) -> tuple[Values, Values]:
        """Let jobs [k] run on devices [k, W] for a time [k]: steps done (infinity = all), seconds used."""
        ...

    def most(self, jobs: Indices) -> Indices:
        """[k] Most devices that each may have."""
        ...

    def speedup(self, jobs: Indices, num_hosts: Indices, num_devices: Indices, fair: int) -> Values:
        """[k, c] Useful progress on each (hosts, devices) [c], over that on `fair` devices of one host."""
        ...

    def left_s(self, job: int, num_devices: int) -> float:
        """Seconds that a job still needs on so many devices."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class QueueState:
    """The jobs that are in the system now: `m` rows, in order of arrival."""

    index: Indices
    """[m] Their rows in the whole list of jobs."""

    rates: Values
    """[m, W] Steps per second."""

    kind: Indices
    """[m] Jobs of one kind have equal rows."""

    shared: Values
    """[K, K, W] Rates of kinds that share devices (`Rates.shared`)."""

    left: Values
    """[m] Steps that remain."""

    scale: Indices
    """[m] Devices each needs."""

    weight: Values
    """[m] Shares."""

    entity: Indices
    """[m] Number of the submitter."""

    arrival_s: Values
    """[m] When each arrived."""

    deadline_s: Values
    """[m] When each must be done."""

    isolated_s: Values
    """[m] Time that the steps done so far would have taken with an equal share of its own (finish-time fairness)."""

    restart_s: Values
    """[m] Time lost when it is moved."""

    previous: Values
    """[m, W] The last decision, fractions or whole devices; 0 for jobs that came after it."""

    partner: Indices
    """[m] Row of the job that shared its devices at the last decision, or -1."""

    rng: np.random.Generator
    """Random choices of policies that make some."""

    moves: Indices = field(default_factory=lambda: np.zeros(1, np.int64))
    """[m] Times that each was moved or resumed."""

    served_s: Values = field(default_factory=lambda: np.zeros(1))
    """[m] Device-seconds that each has had."""

    memory: Values = field(default_factory=lambda: np.zeros(1))
    """[m] What the policy noted of each at its last decision; 0 for new jobs."""

    adapting: Adapting | None = None
    """Jobs that may change their size; None = each runs on `scale` devices or not at all."""

    limit_s: Values = field(default_factory=lambda: np.full(1, math.inf))
    """[m] Time limit of each; infinity = none."""

    draws: random.Random = field(default_factory=random.Random)
    """Random choices of policies that draw as released code does: Python's stream of the simulation's seed."""

    type_of: dict[int, int] = field(default_factory=dict)
    """Job -> index of a type: what such a policy noted, to be found at its next decision, of jobs that ended too."""


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """What a policy decides: fractions of time per type, or whole devices for this round."""

    x: Values
    """[m, W] Fraction of time that each job should spend alone on each type."""

    pairs: Indices = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[P, 2] Rows of two jobs that share devices."""

    pair_x: Values = field(default_factory=lambda: np.zeros((0, 0)))
    """[P, W] Fraction of time that each pair should spend on each type."""

    devices: Indices | None = None
    """[m, W] Devices of each type for whole picks; a job may mix types, at the rate of its slowest."""

    strict: bool = False
    """Jobs without a share wait, even when devices are free."""

    aware: bool = True
    """The policy knows the rates: the fastest types are filled first, otherwise types in random order."""

    late: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    """[l] Jobs (rows of the whole list) whose deadlines cannot all be met."""

    prices: Values = field(default_factory=lambda: np.zeros(0))
    """[W] Prices after the last admission (Hadar)."""

    memory: Values | None = None
    """[m] What the policy notes of each job, for its next decision."""
