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
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from headway.core.errors import InputError
from headway.data.fleet.rate import WorkerRate

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
