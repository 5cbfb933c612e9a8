"""When a disk changes scheme, and to which: PACEMAKER's rules as functions of what is known of its model's AFR.

A policy is a bundle of limits; an outlook is one model of disk seen through
it: the AFR to plan with at each age, where it was observed and 2 years
beyond. Disks come down once infancy is over, to the scheme that saves most of
those in which they will stay long enough to be worth the IO of going there; they go up early
enough to be done, under the cap on IO, before the AFR comes near what the
scheme tolerates.

>>> policy = POLICIES["pacemaker"]
>>> policy.schemes[0].name, policy.least_residency_days(2.0, 8e12, 100e6)
('6-of-9', 123.4567901234568)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.lab.afr import AfrModel, Floats
from headway.lab.schemes import DEFAULT, SCHEMES, SECONDS_PER_DAY, Scheme, Viability

CLEARLY = 0.8
"""Part of what is planned with that a disk's AFR must have fallen to before it comes down."""

NEVER = 1 << 30
"""A day that does not come."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a fleet is run."""

    default: tuple[int, int, float] = DEFAULT
    """(k, n, AFR) of the scheme of new disks, and the AFR that it is trusted with."""

    mttr_h: float = 24.0
    """Hours of one repair."""

    viability: Viability = field(default_factory=Viability)
    """What every scheme must keep."""

    peak_io_fraction: float = 0.05
    """Most of an Rgroup's bandwidth that transitions take on a day; infinity: they take no time."""

    average_io_fraction: float = 0.015
    """Most of a disk's bandwidth that a change may cost on average over the stay it leads to; infinity: no limit.

    PACEMAKER has 0.01; a little more wins space and leaves the mean over a fleet's life below 0.4 %.
    """

    threshold_fraction: float = 0.7
    """Part of the tolerated AFR that the estimate must stay below; 1: move when it is reached.

    PACEMAKER has 0.75; at that, one of twenty made-up fleets met failures rare enough to hide a rise for a month.
    """

    canary_disks: int = 3000
    """First disks of a model deployed by trickle: they stay under the default scheme and teach its AFR."""

    min_rgroup_disks: int = 1000
    """Disks below which an Rgroup is not begun, and is purged."""

    min_gain: float = 0.05
    """Fraction of space that a change to less redundancy must save; half of it is no difference."""

    headroom: float = 1.25
    """A rising AFR goes on: a disk that goes up gets a scheme that tolerates so many times what the one it left did."""

    review_days: int = 7
    """Days between two looks at the failure log."""

    margin_days: int = 14
    """Days that a transition is begun earlier than its IO takes."""

    settle_days: int = 28
    """Days of age that a disk waits after infancy's end as estimated: what fades ends later than it can be seen to."""

    trend_days: int = 240
    """Days of age that the trend is read from: over 60 days even 15 000 disks tell little of it."""

    horizon_days: int = 730
    """Days beyond the oldest known age for which the trend is believed."""

    window_days: int = 60
    """Days of age each way that an AFR is smoothed over; three times as many where as many older ones are known."""

    ripe_days: int = 60
    """Days of age beyond infancy to have seen before a disk goes to any scheme but the one that saves most."""

    confidence: float = 0.8
    """Of the intervals whose upper ends are planned with."""

    looks_ahead: bool = True
    """Plan with upper bounds and with the future; else act on the estimate of today when it is too late (HeART)."""

    reencodes: bool = False
    """Move data by conventional re-encoding instead of by type 1 and 2."""

    def __post_init__(self) -> None:
        """Check the limits; raises `InputError`."""
        for name in ("peak_io_fraction", "average_io_fraction", "threshold_fraction", "mttr_h"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; pass a number > 0.")
        for name in ("canary_disks", "min_rgroup_disks", "margin_days", "horizon_days", "settle_days", "min_gain"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)}; pass a number >= 0.")
        if self.review_days < 1 or self.threshold_fraction > 1:
            raise InputError(
                f"review_days={self.review_days}, threshold_fraction={self.threshold_fraction}: "
                "pass at least one day, and a fraction of at most 1."
            )

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The default scheme first, then what may replace it: viable, and saving space; the most redundant first."""
        base = Scheme(*self.default[:2])
        rest = [scheme for scheme in SCHEMES.values() if self.viability.allows(scheme) and scheme.saving(base) > 0]
        return (base, *sorted(rest, key=lambda scheme: scheme.saving(base)))

    def tolerated(self) -> Floats:
        """[schemes] AFR that each tolerates."""
        each = [scheme.tolerated_afr(default=self.default, mttr_h=self.mttr_h) for scheme in self.schemes]
        return np.array(each)

    def savings(self) -> Floats:
        """[schemes] Fraction of the space under the default scheme that each saves."""
        return np.array([scheme.saving(self.schemes[0]) for scheme in self.schemes])

    def least_residency_days(self, cost: float, capacity_bytes: float, disk_bytes_per_s: float) -> float:
        """Return the days that a disk must stay under a scheme to be worth moving `cost` bytes per byte of it."""
        busy_days = cost * capacity_bytes / (disk_bytes_per_s * SECONDS_PER_DAY)
        return max(busy_days / self.average_io_fraction, float(self.review_days))

    def model(self) -> AfrModel:
        """Return an empty failure log that asks for as many disks as there are canaries."""
        return AfrModel(min_disks=max(self.canary_disks, 1), window_days=self.window_days, confidence=self.confidence)


POLICIES: dict[str, Policy] = {
    "pacemaker": Policy(),
    "instant": Policy(peak_io_fraction=math.inf, average_io_fraction=math.inf),
    "reactive": Policy(
        peak_io_fraction=1.0, average_io_fraction=math.inf, threshold_fraction=1.0, looks_ahead=False, reencodes=True,
        margin_days=0, min_gain=0.0,
    ),
    "static": Policy(canary_disks=NEVER),
}  # fmt: skip
"""`pacemaker`; the same with infinite IO; HeART-like: moves when the estimate says so, all at once; never moves."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known and expected of one model of disk, `n` ages of it: those observed and the horizon beyond."""

    infancy_end: int
    """Age in days from which on disks may come down."""

    frontier: int
    """Highest age that is known."""

    settled: bool
    """The AFR at the oldest ages does not fall any more."""

    ripe: bool
    """A whole window beyond infancy has been seen."""

    sure: Floats
    """[n] AFR that it has at least: lower ends of the intervals."""

    planned: Floats
    """[n] AFR that schemes must tolerate: the estimate over `threshold_fraction`, or its upper end if that is more."""

    crossing: NDArray[np.int32]
    """[schemes, n] First age, at or after each age, whose planned AFR is more than the scheme tolerates; or `NEVER`."""

    def at(self, ages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `ages` as indices into the arrays: beyond the horizon its end stands for what is not known."""
        return np.clip(ages, 0, len(self.planned) - 1)


def outlook(model: AfrModel, policy: Policy) -> Outlook | None:
    """Return what `model` tells a planner; None while it is not enough to leave the default scheme on."""
    since, w = model.infancy_end(), model.window_days
    if since is None:
        return None
    curve, wide, whole = model.curve(since=since), model.lines(since=since, window_days=3 * w), model.curve()
    known = np.flatnonzero(curve.known)
    if not len(known):
        return None
    frontier = int(known[-1])
    flat = max(since, frontier + 1 - w)  # nearer to the oldest age, a window reaches further back than ahead
    lo, mid, hi = (
        np.concatenate([young[:since], grown[since:flat], old[flat : frontier + 1]])
        for young, grown, old in zip(*((c.lo, c.mid, c.hi) for c in (whole, wide, curve)), strict=True)
    )
    rise = _rise(model, frontier, since, policy) if policy.looks_ahead else 0.0
    ahead = rise * np.arange(1, policy.horizon_days + 1)
    estimate = np.concatenate([mid, mid[-1] + ahead])
    planned = estimate / policy.threshold_fraction
    if policy.looks_ahead:
        planned = np.maximum(planned, np.concatenate([hi, hi[-1] + ahead]))
    falling, error = model.slope(frontier, since=since, window_days=60)
    return Outlook(
        infancy_end=_settled(model.fading(), planned, since + policy.settle_days), frontier=frontier,
        settled=falling >= -error,
        ripe=frontier - since >= policy.ripe_days, sure=np.concatenate([lo, lo[-1] + ahead]), planned=planned,
        crossing=_crossings(planned, policy),
    )  # fmt: skip


def _settled(fading: Floats, planned: Floats, since: int) -> int:
    """Return the first age from `since` on at which the AFR, not smoothed, is clearly below what is planned."""
    clear = np.flatnonzero(fading[since:] <= CLEARLY * planned[since : len(fading)])
    return since + int(clear[0]) if len(clear) else max(since, len(fading))


def _rise(model: AfrModel, frontier: int, since: int, policy: Policy) -> float:
    """Return the AFR per day that is to be expected beyond the oldest age: a trend that cannot be chance, 0 if none is.

    Wear-out shows in the long run; a sudden rise in the short one, which must be surer, for it is looked at more often.
    """
    trends = [(policy.trend_days, 3.0), (model.window_days, 4.0)]
    slopes = [(model.slope(frontier, since=since, window_days=days), sure) for days, sure in trends]
    return max([0.0, *(slope for (slope, error), sure in slopes if slope > sure * error)])


def _crossings(planned: Floats, policy: Policy) -> NDArray[np.int32]:
    """Return [schemes, n] the first age from each age on at which a scheme is no longer enough."""
    ages = np.arange(len(planned), dtype=np.int32)
    too_much = planned >= policy.tolerated()[:, None]
    if not policy.looks_ahead:
        first = np.where(too_much, ages, NEVER).astype(np.int32)
    else:
        first = np.minimum.accumulate(np.where(too_much, ages, NEVER)[:, ::-1], axis=1)[:, ::-1].astype(np.int32)
    first[0] = NEVER  # nothing is more redundant than the default scheme
    return first


def choose(view: Outlook, policy: Policy, least_days: Floats) -> NDArray[np.int64]:
    """Return [n] which scheme a disk of each age should go to: the one that saves most among those worth it.

    `least_days` [schemes] is what each must last to be worth its IO. 0, the
    default scheme, where none is.
    """
    ages = np.arange(len(view.planned))
    worth = view.crossing - ages >= np.maximum(least_days, 1)[:, None]
    worth[0] = True
    return np.asarray(len(worth) - 1 - np.argmax(worth[::-1], axis=0), np.int64)
