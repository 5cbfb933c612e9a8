"""Offers of instances and what each cost on each day; what a day of one job costs on each of them.

    usd_per_h[e, o]    offer 0   offer 1      one row per UTC day, the last one without end;
    day 0               0.90       nan        NaN = no price was ever recorded before that day;
    day 1               0.90       0.27       a day without a record keeps the price before it

Prices are dollars per hour of a whole instance, rates steps per second of the whole job, times seconds.

>>> market = Market.of([Offer("aws", "r", "ra", "p3.2xlarge", "v100", 1)], {0: {date(2020, 3, 1): 0.9}})
>>> terms = MarketTerms.of(market, {"v100": 2.0})
>>> terms.usd_per_step().round(6).tolist()
[[0.000125]]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
from numpy.typing import NDArray

from headway.cluster.model import Values
from headway.core.errors import InputError

Flags = NDArray[np.bool_]

HOUR_S, DAY_S = 3600.0, 86_400.0

ON_DEMAND = "on demand"
"""Cloud of devices that can always be had, at a price that does not change."""

MOST_DAYS = 10_000
"""Days that a record of prices may span."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One thing that can be rented: an instance type in a zone of a cloud."""

    cloud: str
    """aws, azure, or on demand."""

    region: str
    """Name of the region in that cloud."""

    zone: str
    """Name of the zone; the region again where the cloud has one price per region."""

    instance_type: str
    """Name in that cloud."""

    device_type: str
    """Type of its devices."""

    num_devices: int
    """Devices of the instance."""

    @property
    def name(self) -> str:
        """Return cloud, zone and type as one text."""
        return " ".join(word for word in (self.cloud, self.zone, self.instance_type) if word)


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """Prices of `O` offers on `E` consecutive days; the last day has no end."""

    offers: tuple[Offer, ...]
    """[O] What can be rented."""

    first: date
    """Day 0."""

    usd_per_h: Values
    """[E, O] Price of the whole instance: the day's own, or the last one before it; NaN = none yet."""

    listed: Flags
    """[E, O] The day has a record of its own."""

    open: Flags
    """[E, O] The offer can be begun on that day. One that is in use stays in use at its last price."""

    @classmethod
    def of(
        cls, offers: Sequence[Offer], prices: Mapping[int, Mapping[date, float]], *, last: date | None = None,
        daily: frozenset[str] = frozenset({"azure"}),
    ) -> Market:  # fmt: skip
        """Lay prices[offer][day] out on a calendar that ends with `last` (default: the last record).

        Clouds in `daily` list what they offer each day: without a record an offer cannot be begun. Others record
        changes of prices: an offer stays open. Raises `InputError` without records, or where they span too many days.
        """
        days = sorted({day for record in prices.values() for day in record if last is None or day <= last})
        if not days:
            raise InputError("the price records are empty. Pass records of at least one offer and day.")
        first, num_days = days[0], ((last or days[-1]) - days[0]).days + 1
        if num_days > MOST_DAYS:
            raise InputError(f"the price records span {num_days} days; at most {MOST_DAYS} are read. Cut them.")
        usd_per_h = np.full((num_days, len(offers)), math.nan)
        for index, record in prices.items():
            for day, usd in record.items():
                if day <= days[-1] and (day - first).days < num_days:
                    usd_per_h[(day - first).days, index] = usd
        listed = ~np.isnan(usd_per_h)
        # Index of the last day with a record, per day and offer; day 0 where there is none, which is NaN then.
        known = np.maximum.accumulate(np.where(listed, np.arange(num_days)[:, None], 0), axis=0)
        filled = np.take_along_axis(usd_per_h, known, axis=0)
        changes = np.array([offer.cloud not in daily for offer in offers])
        return cls(tuple(offers), first, filled, listed, np.where(changes, ~np.isnan(filled), listed))

    def with_on_demand(self, usd_per_h: Mapping[str, float]) -> Market:
        """Add single devices on demand, by their dollars per hour: open on every day, listed on none."""
        offers = [Offer(ON_DEMAND, "", "", kind, kind, 1) for kind in usd_per_h]
        shape = (len(self.usd_per_h), len(offers))
        prices = np.broadcast_to(np.array(list(usd_per_h.values()), np.float64), shape)
        return Market(
            (*self.offers, *offers), self.first, np.hstack([self.usd_per_h, prices]),
            np.hstack([self.listed, np.zeros(shape, bool)]), np.hstack([self.open, np.ones(shape, bool)]),
        )  # fmt: skip

    @property
    def last(self) -> date:
        """Return the last day of the calendar."""
        return self.day(len(self.usd_per_h) - 1)

    def day(self, index: int) -> date:
        """Return the date of a day by its index."""
        return self.first + timedelta(index)

    def index(self, day: date) -> int:
        """Return the index of a date; raises `InputError` outside of the calendar."""
        if not self.first <= day <= self.last:
            raise InputError(f"no prices of {day} are recorded. Name a day from {self.first} to {self.last}.")
        return (day - self.first).days


@dataclass(frozen=True, slots=True, eq=False)
class MarketTerms:
    """What one job pays and how fast it runs, on each offer of a market."""

    market: Market
    """The offers and their prices."""

    usd_per_s: Values
    """[E, O] Dollars per second of what the job rents."""

    steps_per_s: Values
    """[O] Speed of the job; 0 = it does not run there."""

    move_usd: Values
    """[E, O] Dollars of moving to the offer on that day."""

    @classmethod
    def of(
        cls, market: Market, steps_per_s: Mapping[str, float], *, num_devices: int = 1, whole: bool = False,
        move_usd: float = 0.0, move_s: float = 0.0,
    ) -> MarketTerms:  # fmt: skip
        """Price a job of `num_devices` devices by its speed on each device type.

        Instances are shared (the job pays for its devices) or, with `whole`, rented as a whole. A move costs
        `move_usd` and `move_s` seconds of the price on the new offer: spin-up and lost work. Raises `InputError` on
        values below 0, or where the job runs on no offer.
        """
        for name, value in {"num_devices": num_devices - 1, "move_usd": move_usd, "move_s": move_s}.items():
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}; pass a finite number that is not negative.")
        sizes = np.array([offer.num_devices for offer in market.offers])
        rented = np.ceil(num_devices / sizes) if whole else num_devices / sizes
        usd_per_s = market.usd_per_h * rented / HOUR_S
        rates = np.array([steps_per_s.get(offer.device_type, 0.0) for offer in market.offers])
        if not (rates > 0).any():
            types = sorted({offer.device_type for offer in market.offers})
            raise InputError(f"the job runs on no offer: no speed is known on {', '.join(types)}. Pass --device-type.")
        return cls(market, usd_per_s, rates, move_usd + move_s * usd_per_s)

    def usd_per_step(self) -> Values:
        """[E, O] Dollars per step; infinite where there is no price or the job does not run."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self.usd_per_s / self.steps_per_s
        return np.where(np.isnan(self.usd_per_s) | (self.steps_per_s <= 0), np.inf, found)

    def length_s(self, day: int) -> float:
        """Return the seconds of a day: the last one has no end."""
        return DAY_S if day < len(self.usd_per_s) - 1 else math.inf
