"""How many workers a fleet needs: just so many that buffers stay non-empty while workers stay busy.

Once per period the fleet says what its workers made and how long they were
busy, what its readers took and how long they waited. Both sides are then
known as rates: a worker makes `prepared / busy_s` batches per second (averaged
for as long as it stays the same, see `rate`), readers would take `taken /
(time that they did not wait)`. Their ratio is the number of workers that
demand needs; DPP's signs (buffered batches, utilisation of workers) decide
when to believe it. Growing is urgent and is done at once; shrinking saves,
and waits for several periods that agree. Between the two lies a band of more
than one worker, so that noise changes nothing. When nobody reads, the fleet
shrinks to its least.

Batches per second, seconds, counts per fleet and period.

>>> scaler = Autoscaler(least=1, most=64)
>>> starving = Load(num_workers=4, prepared=40, busy_s=40.0, buffered=0, taken=40, waited_fraction=0.5, period_s=10.0)
>>> scaler.decide(starving)
8

How many batches per second one busy worker makes, averaged for as long as it stays the same.

A long average is precise, and wrong for long after the rate has changed (a
slower storage, longer examples). So the newest periods are compared with
those before them, at every possible cut: where the two rates differ by more
than chance explains, the older periods are forgotten. This is adaptive
windowing (ADWIN; Bifet and Gavalda 2007) with the deviation of sums of batch
times in place of Hoeffding's bound. What chance explains is measured from
consecutive periods, of which a change spoils one pair only.

>>> rate = WorkerRate()
>>> for batches in [40.0] * 6 + [20.0]:
...     rate.add(batches, busy_s=20.0, period_s=10.0)
>>> rate.per_s
1.0
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.core.errors import InputError

# How many batches per second one busy worker makes, averaged for as long as it stays the same.

REMEMBERED = 20
"""Periods that are averaged at most."""
DEVIATIONS = 4.0
"""Standard deviations by which two rates must differ to count as different: some 100 comparisons are made per hour."""
LEAST_SPREAD = 0.5
"""Standard deviation of a batch's time over its mean that is assumed where less is seen."""


class Made(NamedTuple):
    """What workers made in one or several periods that follow each other."""

    batches: float
    busy_s: float
    """Time that they spent on it, summed over workers."""
    begun: float
    """Workers that were busy at the start: each had a batch half done, on average."""
    ended: float
    """Workers that were busy at the end."""

    @property
    def per_s(self) -> float:
        """Batches per second of one busy worker.

        Batches that are half done count as half a batch: at the end for it, at the start against it.
        """
        return max(self.batches + (self.ended - self.begun) / 2, 0.0) / self.busy_s

    def chance(self, spread: float) -> tuple[float, float]:
        """Return the relative standard deviation of the rate, and how far off it may be as whole batches are counted.

        All workers may begin in the same instant: then all counts are off by the same part of a batch.
        """
        batches = max(self.batches, 1.0)
        return spread / math.sqrt(batches), max(self.begun, self.ended) / batches


def _joined(periods: Sequence[Made]) -> Made:
    return Made(
        sum(period.batches for period in periods), sum(period.busy_s for period in periods),
        periods[0].begun, periods[-1].ended,
    )  # fmt: skip


@dataclass(slots=True)
class WorkerRate:
    """The rate of one worker over the periods since it last changed, at most `REMEMBERED` of them."""

    _periods: deque[Made] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _spreads: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Per pair of consecutive periods: difference of their rates in units of its deviation at a spread of 1."""

    def add(self, batches: float, *, busy_s: float, period_s: float) -> None:
        """Take note of one period; one in which no worker was busy says nothing."""
        if not busy_s > 0:
            return
        ended = busy_s / period_s
        now = Made(batches, busy_s, self._periods[-1].ended if self._periods else 0.0, ended)
        if self._periods:
            before = self._periods[-1]
            apart, deviation, grain = _difference(before, now, 1.0)
            self._spreads.append(max(apart - grain, 0.0) / deviation)
        self._periods.append(now)
        self._forget()

    @property
    def per_s(self) -> float:
        """Batches per second that one busy worker makes; 0 while unknown."""
        return _joined(self._periods).per_s if self._periods else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation of a batch's time over its mean, as consecutive periods show it (their median)."""
        # The median of |x| of a normal distribution is 0.6745 standard deviations.
        seen = statistics.median(self._spreads) / 0.6745 if self._spreads else 0.0
        return max(seen, LEAST_SPREAD)

    def _forget(self) -> None:
        """Drop the periods from before the rate changed, if it did."""
        periods, spread = list(self._periods), self.spread
        worst, cut = 0.0, 0
        for index in range(1, len(periods)):
            apart, deviation, grain = _difference(_joined(periods[:index]), _joined(periods[index:]), spread)
            excess = (apart - grain) / deviation
            if excess > max(worst, DEVIATIONS):
                worst, cut = excess, index
        for _ in range(cut):
            self._periods.popleft()


def _difference(one: Made, other: Made, spread: float) -> tuple[float, float, float]:
    """Return how far two rates are apart over their mean, the standard deviation of that by chance, and its grain."""
    (deviation, grain), (other_deviation, other_grain) = one.chance(spread), other.chance(spread)
    mean = (one.per_s + other.per_s) / 2
    apart = abs(one.per_s - other.per_s) / mean if mean else 0.0
    return apart, math.hypot(deviation, other_deviation), grain + other_grain


MOST_GROWTH = 4.0
"""Factor of one step up: readers that wait nearly all the time say little about their demand."""
STARVED = 0.01
"""Fraction of their time that readers may wait before one more worker is worth it."""
BUSY = 0.9
"""Fraction of their time that workers are busy when they can hardly do more."""
SLACK = 0.25
"""Workers above measured demand that shrinking leaves: a fleet that is busy to the last second has empty buffers."""
AGREEING = 3
"""Periods in a row that must agree before workers are drained."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a fleet did in one period."""

    num_workers: int
    """Workers that serve, without those that drain."""
    prepared: float
    """Batches that all of them made."""
    busy_s: float
    """Time that they spent on it and on batches that are not done, summed over workers."""
    buffered: float
    """Batches that are ready and wait for readers, per worker."""
    taken: float
    """Batches that all readers took."""
    waited_fraction: float
    """Fraction of their time that readers waited for batches, on average."""
    period_s: float

    def __post_init__(self) -> None:
        """Raise `InputError` on figures that cannot be."""
        if self.num_workers < 0 or not self.period_s > 0 or not 0 <= self.waited_fraction <= 1 + 1e-9:
            raise InputError(
                f"{self.num_workers} workers, {self.period_s} s, {self.waited_fraction} waited: pass counts >= 0, a "
                "period above 0 s and a fraction in 0..1."
            )

    @property
    def demand_per_s(self) -> float:
        """Batches per second that readers would take if they never waited."""
        return self.taken / (self.period_s * max(1 - self.waited_fraction, 1 / MOST_GROWTH))

    @property
    def num_busy(self) -> float:
        """Workers that were making a batch, on average."""
        return self.busy_s / self.period_s

    @property
    def starved(self) -> bool:
        """Whether readers waited because workers could not do more: no batches in their buffers, or no time to spare.

        Buffers may hold batches that readers want later than one that is not made yet.
        """
        spent = self.buffered < 1 or self.num_busy > BUSY * self.num_workers
        return self.waited_fraction > STARVED and spent


@dataclass(slots=True)
class Autoscaler:
    """Decides once per period; keeps what it saw lately."""

    least: int = 1
    most: int = 64
    _rate: WorkerRate = field(default_factory=WorkerRate)
    _needed: deque[float] = field(default_factory=lambda: deque(maxlen=AGREEING))
    """Workers that each of the last periods asked for; 0 where nobody read."""
    _demands: deque[float] = field(default_factory=lambda: deque(maxlen=AGREEING))
    """Batches per second that readers asked for in the last periods."""
    _starved_at: int = -1
    """Workers that there were in the last period, if readers waited for them to do more."""

    def __post_init__(self) -> None:
        """Raise `InputError` on bounds that leave no choice."""
        if not 1 <= self.least <= self.most:
            raise InputError(f"least is {self.least} and most {self.most}; pass 1 <= least <= most.")

    def decide(self, load: Load) -> int:
        """Return how many workers there should be from now on."""
        self._rate.add(load.prepared, busy_s=load.busy_s, period_s=load.period_s)
        now, rate = load.num_workers, self._rate.per_s
        again, self._starved_at = self._starved_at == now, now if load.starved else -1
        idle = not load.demand_per_s and load.waited_fraction <= STARVED
        if not idle and not (load.demand_per_s and rate):
            # Readers wait for a batch that takes longer than a period: neither rate is known.
            self._needed.clear()
            self._demands.clear()
            return self._bounded(now)
        needed = 0.0 if idle else load.demand_per_s / rate
        self._needed.append(needed)
        self._demands.append(load.demand_per_s)
        if load.starved:
            # Rounded, not up: what one period shows is a percent or two off. If that leaves readers waiting still, or
            # demand equals what workers make, which leaves no buffer, one more is the right number.
            return self._bounded(max(round(needed), now + 1 if again and needed > now - 0.5 else now))
        if len(self._needed) == AGREEING and max(self._needed) <= now - 1:
            # The newest rate is averaged over the most periods.
            most = max(self._demands) / rate if any(self._demands) else -SLACK
            if most <= now - 2 + SLACK:
                return self._bounded(math.ceil(most + SLACK))
        return self._bounded(now)

    def _bounded(self, workers: int) -> int:
        return min(max(workers, self.least), self.most)
