"""Schemes of redundancy: how often disks may fail under each, what each costs, how long data then lives.

A scheme k-of-n cuts data into k chunks and adds n - k of parity; any k of the
n restore it. Rates are per hour, AFRs (annualised failure rates: failures per
disk and year) are fractions, 0.16 = 16 %. A scheme tolerates the AFR at which
it keeps two promises of the default scheme at that one's highest AFR: the
mean time to data loss, and the bytes read to rebuild failed disks.

>>> [f"{100 * tolerated_afr(k, k + 3):.1f}" for k in (6, 7, 15, 30)]
['16.0', '13.7', '6.4', '3.2']
>>> round(mttdl_hours(6, 9, 1e-5, 1 / 24) / mttdl_hours(7, 10, 1e-5, 1 / 24), 9)
1.666666667

What it costs to bring stored data from one scheme to another, and the record of one such change.

Three ways, in bytes moved per byte of disk capacity that changes:

- type 1, few disks of an Rgroup: empty them onto the rest, hand them over empty;
- type 2, a whole Rgroup under a systematic code: read the data, write only the new parities;
- re-encode, what a store does that knows neither: read and write whole stripes for each disk that leaves.

>>> from headway.lab.schemes import SCHEMES
>>> six, thirty = SCHEMES["6-of-9"], SCHEMES["30-of-33"]
>>> [round(METHODS[name](six, thirty), 3) for name in METHODS]
[2.0, 0.733, 12.0]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from headway.core.errors import InputError

HOURS_PER_YEAR = 8760.0
"""An AFR counts failures per 365 disk-days."""

DEFAULT = (6, 9, 0.16)
"""(k, n, AFR) of the scheme that new disks get, and the AFR it is trusted with (PACEMAKER, OSDI 2020)."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """`k` chunks of data and `n - k` of parity on `n` disks."""

    k: int
    """Chunks that restore the data, > 0."""

    n: int
    """Chunks in all, > k."""

    def __post_init__(self) -> None:
        """Check the two numbers; raises `InputError`."""
        if not 0 < self.k < self.n:
            raise InputError(
                f"{self.k}-of-{self.n} is no scheme: n counts data and parity. Choose 0 < k < n, such as 6-of-9."
            )

    @property
    def name(self) -> str:
        """As in `SCHEMES`."""
        return f"{self.k}-of-{self.n}"

    @property
    def num_parities(self) -> int:
        """Losses that it survives."""
        return self.n - self.k

    @property
    def overhead(self) -> float:
        """Bytes stored per byte of data, > 1."""
        return self.n / self.k

    def saving(self, default: Scheme) -> float:
        """Return the fraction of the space under `default` that this one saves; negative when it needs more.

        >>> round(Scheme(30, 33).saving(Scheme(6, 9)), 3)
        0.267
        """
        return 1.0 - self.overhead / default.overhead

    def tolerated_afr(self, *, default: tuple[int, int, float] = DEFAULT, mttr_h: float = 24.0) -> float:
        """Return the highest AFR at which it keeps the promises of `default`."""
        return tolerated_afr(self.k, self.n, default=default, mttr_h=mttr_h)


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(6, 9), Scheme(7, 10), Scheme(8, 11), Scheme(9, 12), Scheme(10, 13), Scheme(11, 14), Scheme(12, 15),
        Scheme(13, 16), Scheme(15, 18), Scheme(18, 21), Scheme(21, 24), Scheme(24, 27), Scheme(27, 30), Scheme(30, 33),
    )
}  # fmt: skip
"""Every scheme the planner may choose, from the most redundant. Adding one is adding a line."""


@dataclass(frozen=True, slots=True)
class Viability:
    """What a scheme must keep, whatever the AFR (PACEMAKER's constraints; its k <= 30 is from memory)."""

    min_parities: int = 3
    """Losses that it must survive at least."""

    max_k: int = 30
    """Chunks that a read may have to gather at most: wide stripes make degraded reads slow."""

    max_rebuild_h: float = math.inf
    """Hours within which the disks of one Rgroup must be able to rebuild one of theirs."""

    def allows(self, scheme: Scheme) -> bool:
        """Tell whether the shape of `scheme` is allowed."""
        return scheme.num_parities >= self.min_parities and scheme.k <= self.max_k

    def least_disks(self, scheme: Scheme, capacity_bytes: float, repair_bytes_per_s: float) -> int:
        """Return the disks that an Rgroup needs: `n`, and enough to rebuild one disk in time.

        `repair_bytes_per_s` is what each disk may spend on it: a rebuild reads k chunks per chunk lost and writes one.

        >>> Viability(max_rebuild_h=24).least_disks(Scheme(30, 33), 12e12, 5e6)
        862
        """
        per_disk_bytes = repair_bytes_per_s * 3600.0 * self.max_rebuild_h
        return max(scheme.n, math.ceil((scheme.k + 1) * capacity_bytes / per_disk_bytes))


def mttdl_hours(k: int, n: int, lam_per_h: float, mu_per_h: float) -> float:
    """Return the mean time to data loss of one stripe in hours, disks repaired one after the other.

    Birth-death chain with failure rate `lam_per_h` per disk and repair rate
    `mu_per_h` (>> n * lam): mu^m / prod(i * lam for i = k..n), m = n - k.
    Raises `InputError` on n <= k or rates that are not positive.
    """
    Scheme(k, n)
    _check_rates(lam_per_h, mu_per_h)
    return mu_per_h ** (n - k) / math.prod(i * lam_per_h for i in range(k, n + 1))


def mttdl_parallel_hours(k: int, lam_per_h: Sequence[float], mu_per_h: float) -> float:
    """Return the mean time to data loss in hours of a stripe on `n = len(lam_per_h)` unlike disks, repaired at once.

    Data goes when a disk fails while only k are up. In the steady state disk i
    is up with p_i = mu / (mu + lam_i); with X, the number that are up
    (Poisson-binomial), the chain falls to k - 1 as often as it is repaired
    from there: MTTDL = 1 / (mu * (m + 1) * P[X = k - 1]), m = n - k. For like
    disks this is m! times `mttdl_hours` (as lam / mu -> 0). Raises `InputError`.
    """
    Scheme(k, len(lam_per_h))
    for lam in lam_per_h:
        _check_rates(lam, mu_per_h)
    up = np.array([mu_per_h / (mu_per_h + lam) for lam in lam_per_h])
    chance = np.zeros(len(up) + 1)
    chance[0] = 1.0
    for p in up:  # one disk at a time: chance[j] that j of those seen are up
        chance[1:] = chance[1:] * (1 - p) + chance[:-1] * p
        chance[0] *= 1 - p
    return float(1.0 / (mu_per_h * (len(up) - k + 1) * chance[k - 1]))


def bounds_afr(
    k: int, n: int, *, default: tuple[int, int, float] = DEFAULT, mttr_h: float = 24.0
) -> Mapping[str, float]:
    """Return the AFR that each promise allows to k-of-n: `mttdl` and `rebuild`.

    `mttdl`: the mean time to data loss is at least that of `default`;
    `rebuild`: AFR * k, the bytes read per byte of disk and year, is at most
    that of `default`. Raises `InputError` on n <= k, an AFR or `mttr_h` <= 0.
    """
    Scheme(k, n)
    k0, n0, afr0 = default
    if not (math.isfinite(mttr_h) and mttr_h > 0):
        raise InputError(f"mttr_h is {mttr_h}; pass the hours of one repair, > 0.")
    mu = 1.0 / mttr_h
    wanted_h = mttdl_hours(k0, n0, afr0 / HOURS_PER_YEAR, mu)
    per_lam = mttdl_hours(k, n, 1.0, mu)  # mttdl = per_lam / lam^(m + 1)
    lam = (per_lam / wanted_h) ** (1.0 / (n - k + 1))
    return {"mttdl": lam * HOURS_PER_YEAR, "rebuild": afr0 * k0 / k}


def tolerated_afr(k: int, n: int, *, default: tuple[int, int, float] = DEFAULT, mttr_h: float = 24.0) -> float:
    """Return the highest AFR (fraction per year) under which k-of-n is as good as `default` = (k, n, its AFR).

    The least of `bounds_afr`. Rises with n, falls with k. Raises `InputError` on n <= k, an AFR or `mttr_h` <= 0.
    """
    return min(bounds_afr(k, n, default=default, mttr_h=mttr_h).values())


def _check_rates(lam_per_h: float, mu_per_h: float) -> None:
    """See that failures and repairs happen."""
    for name, value in (("failure rate", lam_per_h), ("repair rate", mu_per_h)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"the {name} is {value} per hour; pass a finite number > 0.")


# What it costs to bring stored data from one scheme to another, and the record of one such change.

SECONDS_PER_DAY = 86_400


class TransitionCost(Protocol):
    """A way to change schemes. Write a function of this shape; there is nothing to subclass."""

    def __call__(self, source: Scheme, target: Scheme) -> float:
        """Return bytes read and written per byte of disk capacity that changes from `source` to `target`."""
        ...


def empty_disks(source: Scheme, target: Scheme) -> float:
    """Type 1: each byte of a leaving disk is read once, and written to the rest of its Rgroup."""
    return 2.0


def new_parities(source: Scheme, target: Scheme) -> float:
    """Type 2: the k/n of capacity that is data is read once, m/k of it written as new parity; data stays."""
    return source.k / source.n * (1.0 + target.num_parities / target.k)


def reencode(source: Scheme, target: Scheme) -> float:
    """Conventional: for each chunk on a leaving disk its stripe's k chunks are read and written (the lower bound)."""
    return 2.0 * source.k


METHODS: dict[str, TransitionCost] = {"type 1": empty_disks, "type 2": new_parities, "re-encode": reencode}
"""Every way to change schemes. Adding one is adding a line."""


def cheaper_in_bulk(leaving_fraction: float, source: Scheme, target: Scheme) -> bool:
    """Tell whether changing a whole Rgroup (type 2) moves fewer bytes than emptying that fraction of it (type 1)."""
    return leaving_fraction * empty_disks(source, target) > new_parities(source, target)


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of scheme that a fleet's planner has begun."""

    day: int
    """When it was decided."""

    kind: str
    """`down` to less redundancy (infancy is over), `up` to more (wear-out is due), `purge` (too few disks to place)."""

    method: str
    """A line of `METHODS`."""

    dgroups: tuple[str, ...]
    """Models of the disks."""

    rgroup: str
    """Rgroup that they leave, or that changes as a whole."""

    source: str
    """Scheme before."""

    target: str
    """Scheme after."""

    num_disks: int
    """How many."""

    io_bytes: float
    """What it will move."""

    due_day: int | None
    """Day by which it should be done; None for a change that only saves space."""

    urgent: bool = False
    """The AFR is beyond what `source` tolerates: reliability goes before the cap on IO."""

    def to_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)
