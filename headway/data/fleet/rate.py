"""How many batches per second one busy worker makes, averaged for as long as it stays the same.

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
