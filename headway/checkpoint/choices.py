"""Ways to save one job's state, side by side: what each costs, and what a failure loses under it.

Use it when there is no recorded run to replay, or to lay the exposure of each
way beside its cost: as now, at the interval that the budget or the failure
rate asks for, and with a copy in memory that another process writes. Closed
forms; the redundancy of what is stored costs bytes, not time. Seconds, bytes.

>>> job = SavingJob(step_s=0.5, save_s=20.0, every_steps=100, state_bytes=10**10)
>>> [(way.name, way.every_steps, round(way.overhead_fraction, 3)) for way in ways(job)]
[('as now', 100, 0.4), ('interval', 1143, 0.035), ('async', 144, 0.035)]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.checkpoint.advise import BUDGET, COPY_BYTES_PER_S
from headway.checkpoint.policy.costs import CALL_S, DURABLE_S, Goal, behind_steps, best_steps, positive, wall_factor
from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import parse_bytes
from headway.storage.redundancy.stripes import scheme_of

REDUNDANCIES = ("none", "+1", "+2")
"""Schemes that are laid side by side."""


@dataclass(frozen=True, slots=True)
class SavingJob:
    """What must be known of a job to choose how it saves."""

    step_s: float
    """A step without saves."""
    save_s: float
    """What a save stops training for today."""
    every_steps: int
    """Steps between saves today."""
    state_bytes: int = 0
    """What one rank would copy per save; 0 = not known."""
    copy_bytes_per_s: float = COPY_BYTES_PER_S
    """Rate of a copy to host memory, per rank."""
    mtbf_s: float | None = None
    """Mean time between failures of the whole job; None = not known."""
    budget: float = BUDGET
    """Share of the time that saves may cost where no failure rate is known."""
    ranks: int = 1
    hosts: int = 1
    late_s: float = 0.0
    """How long after its copy a save is durable today; 0 = at once, as it is in stock saves."""

    def __post_init__(self) -> None:
        """Raise `InputError` on a job that cannot be."""
        for name in ("step_s", "every_steps", "copy_bytes_per_s", "budget"):
            positive(name, getattr(self, name))
        positive("save_s", self.save_s, zero=True)
        positive("late_s", self.late_s, zero=True)
        positive("state_bytes", self.state_bytes, zero=True)
        if self.mtbf_s is not None:
            positive("mtbf_s", self.mtbf_s)
        if not 1 <= self.hosts <= self.ranks:
            raise InputError(f"{self.ranks} ranks on {self.hosts} hosts: pass at least one rank per host.")

    @property
    def copy_s(self) -> float:
        """What a save behind the steps stops training for."""
        return self.state_bytes / self.copy_bytes_per_s + CALL_S


@dataclass(frozen=True, slots=True)
class SaveMethod:
    """One way to save."""

    name: str
    every_steps: int
    stall_s: float
    """What a save stops training for."""
    late_s: float
    """How long after that its bytes are durable."""
    overhead_fraction: float
    """Time of saves over that of steps."""
    speedup: float
    """Steps per second, over those of today's way."""
    exposure_s: float
    """Work that a failure loses on average."""
    worst_exposure_s: float
    """Work that it loses at worst."""
    lost_fraction: float | None
    """Share of the wall time that saves and work done twice take; None while no failure rate is known."""


@dataclass(frozen=True, slots=True)
class Protection:
    """What a redundancy scheme costs and survives, where every rank keeps its part on its host's own disk."""

    redundancy: str
    bytes_fraction: float
    """Parity bytes over saved bytes."""
    lost_ranks: int
    """Ranks whose parts may be lost at once, any of them."""
    lost_hosts: int
    """Hosts that may be lost at once, any of them, with stripes spread over all hosts."""


def ways(job: SavingJob) -> list[SaveMethod]:
    """Return today's way, the better interval for it, and a copy written in the background.

    The last one only where saves are not written so already, and their size is known.
    """
    goal: Goal = {"step_s": job.step_s, "budget": job.budget, "mtbf_s": job.mtbf_s}
    now = _way(job, "as now", job.every_steps, job.save_s, job.late_s)
    found = [now, _way(job, "interval", best_steps(job.save_s, **goal), job.save_s, job.late_s)]
    if job.state_bytes and not job.late_s:
        stall_s = min(job.copy_s, job.save_s)
        late_s = job.save_s + DURABLE_S
        every = behind_steps(stall_s, late_s=late_s, now=job.every_steps, goal=goal)
        found.append(_way(job, "async", every, stall_s, late_s))
    return [replace(way, speedup=(1 + now.overhead_fraction) / (1 + way.overhead_fraction)) for way in found]


def protections(job: SavingJob) -> list[Protection]:
    """Return what each of `REDUNDANCIES` costs and survives; those that the ranks are too few for are left out."""
    found = []
    for redundancy in REDUNDANCIES:
        scheme = scheme_of(redundancy, job.ranks)
        if scheme is None:
            found.append(Protection(redundancy, 0.0, 0, 0))
        elif scheme[1] < job.ranks:
            k, m = scheme
            found.append(Protection(redundancy, m / k, m, m // -(-(k + m) // job.hosts)))
    return found


def _way(job: SavingJob, name: str, every_steps: int, stall_s: float, late_s: float) -> SaveMethod:
    interval_s = every_steps * job.step_s
    lost = None
    if job.mtbf_s is not None:
        lost = 1 - 1 / wall_factor(interval_s, stall_s=stall_s, mtbf_s=job.mtbf_s, restart_s=late_s)
    return SaveMethod(
        name, every_steps, stall_s, late_s, stall_s / interval_s, 1.0, interval_s / 2 + late_s,
        interval_s + late_s, lost,
    )  # fmt: skip


SETTINGS: Mapping[str, tuple[str, str]] = {
    "step_s": ("step_s", "seconds of a step without saves"),
    "save_s": ("save_s", "seconds for which a save stops training"),
    "every": ("every_steps", "steps between saves"),
    "state": ("state_bytes", "bytes that a rank saves, such as 12GB"),
    "copy": ("copy_bytes_per_s", "bytes per second of a copy to host memory, such as 8GB"),
    "mtbf_s": ("mtbf_s", "mean seconds between failures of the job"),
    "budget": ("budget", "share of the time that saves may cost, such as 0.035"),
    "ranks": ("ranks", "ranks of the job"),
    "hosts": ("hosts", "hosts of the job"),
}
"""What `--set` takes -> the field of `SavingJob`, and one line for a person."""

_BYTES = ("state", "copy")
_COUNTS = ("every", "ranks", "hosts")


def job_with(settings: list[str], recorded: SavingJob | None = None) -> SavingJob:
    """Return the job that `settings` ("step_s=0.5") describe, on top of a recorded one.

    Raises `InputError` for a setting that is none, or when nothing says what a step and a save take.
    """
    given: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"{text!r} is no setting. Write name=value, for example step_s=0.5.")
        given[pick(SETTINGS, name.strip(), "setting")[0]] = _value(name.strip(), value.strip())
    if recorded is not None:
        return replace(recorded, **given)
    missing = [name for name in ("step_s", "save_s", "every") if SETTINGS[name][0] not in given]
    if missing:
        raise InputError(
            f"without a recorded run {', '.join(missing)} must be given. Pass --set {missing[0]}=..., or name a run."
        )
    return SavingJob(**given)


def _value(name: str, text: str) -> float | int:
    if name in _BYTES:
        return parse_bytes(text)
    try:
        return int(text) if name in _COUNTS else float(text)
    except ValueError:
        raise InputError(f"{name} is {text!r}, no number. Write {SETTINGS[name][1]}.") from None
