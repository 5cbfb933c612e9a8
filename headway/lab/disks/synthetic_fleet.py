"""Fleets made up for simulation, in the proportions of published ones: models, deployments, failure rates.

Each model has its infancy, a useful life of slowly changing AFR, and wear-out
that begins gradually, as PACEMAKER reports of 5.3 million disks. Everything
about them follows from the name and the seed.

>>> fleet = made("mixed", seed=1)
>>> len(fleet), sum(dgroup.num_disks for dgroup in fleet)
(9, 350000)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.core.rng import stream
from headway.core.tables import pick
from headway.lab.disks.sim import Dgroup

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
