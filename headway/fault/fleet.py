"""A job on many hosts over months, simulated: failures of several causes, what each costs, and the share that is left.

Failures come at random, exponential in wall time, at any moment: in a save and
in a restart too. The job saves every `save_every_s` of work, which blocks it
for `save_s`; after a failure it is down for detection, location and restart,
and does again what was not saved. A cause that takes the host needs another
one: a standby, or where none is left, one that comes after `replace_s`.
Everything here is simulated, on `headway.sim.graph.process.Process`.

>>> scenario = Scenario(hosts=100, devices_per_host=8, days=30.0, mtbf_s=10_000.0, times=FleetTimes(restart_s=600.0,
...                     save_s=10.0, save_every_s=300.0))
>>> round(simulate(scenario, seed=1).ettr, 2)
0.9
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.core.errors import FormatError, InputError
from headway.sim.graph.process import Process, SimulationEvent

S_PER_DAY = 86400.0

PUBLISHED = "published"
"""As a mix: the failures of a published fleet, incidents.toml."""

MOST_FAILURES = 100_000
"""Failures that are simulated: each takes 0.1 ms."""

PARTS = ("detect", "locate", "restart", "wait", "rework", "save")
"""What takes time from a job: until a failure is seen, until its place is known, until training goes on; waiting for
another host; work that was not saved; saving."""


class FailureCause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of failure; times that are None are those of the scenario."""

    weight: float = 1.0
    """Its part of all failures, relative to the others'."""

    takes_host: bool = False
    """Whether the host is lost, and another one is needed."""

    detect_s: float | None = None
    locate_s: float | None = None
    restart_s: float | None = None


class FleetTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long things take, s."""

    detect_s: float = 0.0
    locate_s: float = 0.0
    restart_s: float = 0.0
    save_s: float = 0.0
    """How long a save blocks training."""

    save_every_s: float = 1800.0
    """Work between two saves."""

    standby_hosts: int = 0
    """Hosts that wait."""

    replace_s: float = 0.0
    """How long another host takes to come where no standby waits."""

    refill_s: float = S_PER_DAY
    """How long a standby that was used takes to be replaced."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet, its failures, and how it is run."""

    hosts: int
    devices_per_host: int
    days: float
    mtbf_s: float | None = None
    """Mean time between failures of the job, s; or the next one."""

    per_1000_host_days: float | None = None
    """Failures per 1,000 hosts and day."""

    mix: dict[str, FailureCause | float] | str = {}
    """Cause -> its weight, or all of it; empty = one cause; or `PUBLISHED`."""

    times: FleetTimes = FleetTimes()

    def __post_init__(self) -> None:
        """Check the numbers."""
        if (self.mtbf_s is None) == (self.per_1000_host_days is None):
            raise InputError("a scenario has mtbf_s, or per_1000_host_days, and not both. Give one of them.")
        positive = {"hosts": self.hosts, "devices_per_host": self.devices_per_host, "days": self.days}
        positive |= {"mtbf_s": self.job_mtbf_s, "save_every_s": self.times.save_every_s}
        for name, value in positive.items():
            if not 0 < value < float("inf"):
                raise InputError(f"{name} is {value}; it must be above 0. Pass a positive number.")
        if self.days * S_PER_DAY > MOST_FAILURES * self.job_mtbf_s:
            raise InputError(
                f"{self.days:g} days hold some {self.days * S_PER_DAY / self.job_mtbf_s:.3g} failures; at most "
                f"{MOST_FAILURES:,} are simulated. Pass fewer days."
            )
        for name in self.times.__struct_fields__:
            if not 0 <= getattr(self.times, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self.times, name)}; it must be at least 0. Pass seconds.")
        weights = [cause.weight for cause in self.causes.values()]
        if not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
            raise InputError(
                "the weights of the mix must be at least 0, and one of them above. Pass counts of failures."
            )

    @property
    def job_mtbf_s(self) -> float:
        """Mean time between failures of the whole job, s."""
        if self.mtbf_s is not None:
            return self.mtbf_s
        rate = (self.per_1000_host_days or 0.0) * self.hosts / 1000
        return S_PER_DAY / rate if rate > 0 else float("inf")

    @property
    def causes(self) -> dict[str, FailureCause]:
        """Cause -> what it is like."""
        if isinstance(self.mix, str):
            if self.mix != PUBLISHED:
                raise InputError(f"the mix is {self.mix!r}; write a table of causes, or mix = {PUBLISHED!r}.")
            return published_mix()
        every = self.mix or {"failure": FailureCause()}
        return {name: one if isinstance(one, FailureCause) else FailureCause(float(one)) for name, one in every.items()}

    @classmethod
    def read(cls, path: Path) -> Scenario:
        """Read a TOML file. Raises `InputError`, `FormatError`."""
        try:
            return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), cls)
        except OSError as cause:
            raise InputError(f"{path} cannot be read: {cause}. Name a scenario file.") from cause
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, RecursionError) as cause:
            raise FormatError(
                f"{path} is no scenario: {str(cause).rstrip('.')}. Its keys are in docs/systems/fault.md."
            ) from cause


def published_mix() -> dict[str, FailureCause]:
    """Return the causes of a published fleet."""
    text = Path(__file__).with_name("incidents.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, FailureCause])


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """What became of the time of a job."""

    ettr: float
    """Productive time / wall time."""

    unproductive_s: Mapping[str, float]
    """One of `PARTS` -> seconds."""

    num_incidents: int
    """Failures."""

    longest_unproductive_s: float
    """The longest stretch from a failure until the work that it lost was done again."""

    over_time: Sequence[tuple[float, float]] = ()
    """Time in s and ETTR until then, at each change."""

    def to_json(self) -> dict[str, object]:
        """Return the object of `headway fault sim --json`."""
        return {
            "ettr": self.ettr,
            "unproductive_s": dict(self.unproductive_s),
            "num_incidents": self.num_incidents,
            "longest_unproductive_s": self.longest_unproductive_s,
        }


@dataclass(frozen=True, slots=True)
class GivenFailure:
    """A failure that is given, s."""

    at_s: float
    """When it strikes, from the start of the training."""

    detect_s: float
    """Until it is seen."""

    restart_s: float
    """From then until training goes on; a failure before that begins anew."""


class _FailingJob:
    """A job that runs, fails and comes back. Between two failures nothing is random: that stretch is a closed form."""

    def __init__(self, process: Process, scenario: Scenario, failures: Sequence[GivenFailure] | None) -> None:
        self.process, self.times = process, scenario.times
        self._failures = None if failures is None else iter(failures)
        self._given = GivenFailure(0.0, 0.0, 0.0)
        """The failure that comes next, where they are given."""
        self.causes = list(scenario.causes.values())
        self.mtbf_s = scenario.job_mtbf_s
        total = sum(cause.weight for cause in self.causes)
        self.weights = [cause.weight / total for cause in self.causes]
        self.lost = dict.fromkeys(PARTS, 0.0)
        self.num_incidents = 0
        self.over_time: list[tuple[float, float]] = []
        self.longest_s = 0.0
        self.standbys = scenario.times.standby_hosts
        self._phase: str | None = None
        """What the job waits for, one of `PARTS`; None while it trains."""
        self._since_s = 0.0
        """When that began."""
        self._next: SimulationEvent | None = None
        self._bad_since_s = -1.0
        """The failure whose lost work is not done again yet; -1 = there is none."""
        self._behind_s = 0.0
        """Work that was lost and is not done again."""
        self._fail_later()

    def _fail_later(self) -> None:
        if self._failures is None:
            self.process.after(float(self.process.rng("failures").exponential(self.mtbf_s)), self._fail)
        elif (given := next(self._failures, None)) is not None:
            self.process.after(max(given.at_s - self.process.now_s, 0.0), self._fail_as, given)

    def _fail_as(self, given: GivenFailure) -> None:
        self._given = given
        self._fail()

    def book(self, *, lost: bool) -> None:
        """Account for what the job has done since the last change; what is not saved is `lost`, or counts.

        work | save | work | save | wo          two saved intervals, and work that is lost
        """
        spent_s, self._since_s = self.process.now_s - self._since_s, self.process.now_s
        if self._phase is not None:
            self.lost[self._phase] += spent_s
        else:
            self._book_training(spent_s, lost=lost)
        if self.process.now_s > 0:
            self.over_time.append((self.process.now_s, max(1 - sum(self.lost.values()) / self.process.now_s, 0.0)))

    def _book_training(self, spent_s: float, *, lost: bool) -> None:
        """Account for training: saves, and what was not saved where that is `lost`."""
        every_s, save_s = self.times.save_every_s, self.times.save_s
        cycles, rest_s = divmod(spent_s, every_s + save_s)
        self.lost["save"] += cycles * save_s + max(rest_s - every_s, 0.0)
        if spent_s >= self._behind_s and self._bad_since_s >= 0:
            self.longest_s = max(self.longest_s, self.process.now_s - spent_s + self._behind_s - self._bad_since_s)
            self._bad_since_s, self._behind_s = -1.0, 0.0
        if lost:
            unsaved_s = min(rest_s, every_s)
            self.lost["rework"] += unsaved_s
            self._behind_s = max(self._behind_s - cycles * every_s, 0.0) + unsaved_s

    def _fail(self) -> None:
        """A failure strikes, whatever the job does."""
        self.book(lost=True)
        if self._next is not None:
            self._next.cancel()
        self.num_incidents += 1
        if self._bad_since_s < 0:
            self._bad_since_s = self.process.now_s
        given = self._given
        self._fail_later()
        if self._failures is not None:
            self._recover([("detect", given.detect_s), ("restart", given.restart_s)])
            return
        cause = self.causes[int(self.process.rng("causes").choice(len(self.causes), p=self.weights))]
        steps = [(part, _or(getattr(cause, f"{part}_s"), getattr(self.times, f"{part}_s"))) for part in PARTS[:3]]
        if cause.takes_host:
            steps.insert(2, ("wait", self._wait_for_host()))
        self._recover(steps)

    def _wait_for_host(self) -> float:
        """Take a standby, which is replaced later; returns how long to wait for a host where there is none."""
        if not self.standbys:
            return self.times.replace_s
        self.standbys -= 1
        self.process.after(self.times.refill_s, self._refill)
        return 0.0

    def _refill(self) -> None:
        self.standbys += 1

    def _recover(self, steps: list[tuple[str, float]]) -> None:
        """Go through the rest of a recovery, then train."""
        if self._phase is not None:
            self.book(lost=False)
        if not steps:
            self._phase = None
            return
        (self._phase, duration_s), *rest = steps
        self._next = self.process.after(duration_s, self._recover, rest)

    def end(self) -> None:
        """Account for the end of the time: what is not saved then counts, for nothing takes it away."""
        self.book(lost=False)
        if self._bad_since_s >= 0:
            self.longest_s = max(self.longest_s, self.process.now_s - self._bad_since_s)


def _or(own: float | None, common: float) -> float:
    return common if own is None else own


def simulate(scenario: Scenario, seed: int, *, failures: Sequence[GivenFailure] | None = None) -> FleetOutcome:
    """Play a scenario once. The same seed gives the same failures, whatever the times are.

    With `failures`, in order of time, these come in place of random ones, whatever the times of the scenario.
    """
    process = Process(seed)
    job = _FailingJob(process, scenario, failures)
    wall_s = scenario.days * S_PER_DAY
    process.run(wall_s)
    job.end()
    ettr = max(1 - sum(job.lost.values()) / wall_s, 0.0)
    return FleetOutcome(ettr, job.lost, job.num_incidents, job.longest_s, job.over_time)
