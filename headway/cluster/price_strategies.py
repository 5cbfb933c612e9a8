"""Ways to choose an offer day by day, what each costs, and the least that any way could have cost.

The first five are those of the study (Narayanan et al., DISPA 2020), with the day's prices in dollars per step:

    baseline      the smallest instance of one device type, the cheapest zone of the first day, for good
    gpu_type      the smallest instance of any device type
    packed        any instance, paid per device
    multi_cloud   the same, of all clouds
    preemption    chosen again each day

`online` knows the past alone and moves where what is left would be cheaper by more than the move costs.
`hindsight` knows all prices: the shortest path over (day, offer). Offers differ in speed, so one label is (dollars,
steps left), and each (day, offer) keeps the labels that no other one beats in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.cluster.price_market import DAY_S, HOUR_S, ON_DEMAND, Flags, Market, MarketTerms
from headway.core.errors import FormatError, InputError
from headway.core.search import pareto

ENOUGH = 1e-12
"""Fraction of the steps that counts as none: rounding of sums."""


@dataclass(frozen=True, slots=True)
class Bought:
    """What a way of choosing came to."""

    usd: float
    """Dollars of the job and of its moves."""

    duration_s: float
    """Seconds from the start to the last step."""

    offers: tuple[int, ...]
    """Offer of each day."""

    @property
    def moves(self) -> int:
        """Return how often it changed offers."""
        return sum(a != b for a, b in zip(self.offers, self.offers[1:], strict=False))


Choice = Callable[[int, int, float, float], int]
"""(day, offer in use or -1, steps left, seconds since the start) -> offer."""

NONE = -1
"""No offer: the job has not begun."""


def follow(terms: MarketTerms, start: int, steps: float, choose: Choice) -> Bought:
    """Play a choice day by day from day `start` until `steps` are done; the first offer is no move."""
    usd, passed_s, left, held = 0.0, 0.0, steps, NONE
    path: list[int] = []
    for day in range(start, len(terms.usd_per_s)):
        offer = choose(day, held, left, passed_s)
        price, rate = float(terms.usd_per_s[day, offer]), float(terms.steps_per_s[offer])
        usd += float(terms.move_usd[day, offer]) if held not in (NONE, offer) else 0.0
        run_s = min(terms.length_s(day), left / rate)
        usd, passed_s, left, held = usd + run_s * price, passed_s + run_s, left - run_s * rate, offer
        path.append(offer)
        if left <= ENOUGH * steps:
            break
    return Bought(usd, passed_s, tuple(path))


def _smallest(market: Market, device_type: str | None = None) -> Flags:
    """[O] Offers of AWS with the fewest devices of their type; of one type alone where it is named."""
    aws = [offer for offer in market.offers if offer.cloud == "aws"]
    least = {kind: min(o.num_devices for o in aws if o.device_type == kind) for kind in {o.device_type for o in aws}}
    return np.array([
        offer.cloud == "aws" and offer.num_devices == least[offer.device_type]
        and device_type in (None, offer.device_type)
        for offer in market.offers
    ])  # fmt: skip


STUDY: dict[str, Callable[[Market, str], Flags]] = {
    "baseline": lambda market, reference: _smallest(market, reference),
    "gpu_type": lambda market, _: _smallest(market),
    "packed": lambda market, _: np.array([offer.cloud == "aws" for offer in market.offers]),
    "multi_cloud": lambda market, _: np.ones(len(market.offers), bool),
    "preemption": lambda market, _: np.ones(len(market.offers), bool),
}
"""Strategy of the study -> the offers [O] among which it chooses."""


def study(name: str, terms: MarketTerms, reference: str = "v100") -> Choice:
    """Return a strategy of the study. It raises `InputError` on a start day without an offer of its kind."""
    allowed, cost = STUDY[name](terms.market, reference), terms.usd_per_step()
    market = terms.market

    def choose(day: int, held: int, _left: float, _passed_s: float) -> int:
        if held != NONE and name != "preemption":
            return held
        offered = np.where(allowed & market.listed[day], cost[day], np.inf)
        best = int(offered.argmin())
        if np.isfinite(offered[best]):
            return best
        if held == NONE:
            raise InputError(f"{name}: nothing is offered on {market.day(day)}. Start on a day with records of prices.")
        return held

    return choose


def online(terms: MarketTerms, *, hysteresis: float = 0.1, due_s: float = math.inf) -> Choice:
    """Return the rule that knows the past alone.

    It moves where (dollars per step here - there) x steps left > cost of the move x (1 + `hysteresis`), prices taken
    to stay. With a deadline it uses offers on which a day still leaves time to finish on demand, on the fastest type;
    it goes there for good once there is none. Raises `InputError` on a negative hysteresis, or a deadline without
    devices on demand.
    """
    if not hysteresis >= 0:
        raise InputError(f"--hysteresis is {hysteresis}; pass a number >= 0.")
    market, cost, rates = terms.market, terms.usd_per_step(), terms.steps_per_s
    sure = np.array([offer.cloud == ON_DEMAND for offer in market.offers]) & (rates > 0)
    last_resort = int(np.where(sure, rates, 0.0).argmax())
    if math.isfinite(due_s) and not sure.any():
        raise InputError("a deadline needs prices on demand. Add a table on_demand to the folder of prices.")

    def choose(day: int, held: int, left: float, passed_s: float) -> int:
        usable = np.isfinite(cost[day]) & (market.open[day] | (np.arange(len(rates)) == held))
        if math.isfinite(due_s):
            if held == last_resort and passed_s:
                return held
            length_s = terms.length_s(day)
            with np.errstate(divide="ignore", invalid="ignore"):
                run_s = np.where(rates * length_s >= left, left / rates, length_s)
            rest_s = np.maximum(left - rates * run_s, 0.0) / rates[last_resort]
            usable &= passed_s + run_s + rest_s <= due_s
        offered = np.where(usable, cost[day] * left, np.inf)
        if held != NONE and np.isfinite(offered[held]):
            moves = np.arange(len(rates)) != held
            offered = offered + np.where(moves, (1 + hysteresis) * terms.move_usd[day], 0.0)
            best = int(offered.argmin())
            return best if offered[best] < offered[held] else held
        best = int(offered.argmin())
        if np.isfinite(offered[best]):
            return best
        if math.isfinite(due_s):
            return last_resort
        raise InputError(f"nothing is offered on {market.day(day)}. Start on a day with records of prices.")

    return choose


@dataclass(frozen=True, slots=True)
class _Label:
    """A way to have come to a day: dollars spent, steps left, offer of the day before."""

    usd: float
    left: float
    offer: int
    before: _Label | None


def hindsight(
    terms: MarketTerms, start: int, steps: float, *, due_s: float = math.inf, most_usd: float = math.inf
) -> Bought:
    """Return the cheapest choice for known prices, exactly: one offer a day, no day without one.

    `most_usd` is the price of any way that is known (a bound, which may be loose). Raises `InputError` where no way
    ends in time.
    """
    num_days, cost = len(terms.usd_per_s), terms.usd_per_step()
    # Least dollars per step from each day on: what a label can still cost at the least.
    floor = np.minimum.accumulate(cost.min(axis=1)[::-1])[::-1]
    best, best_label, best_s = most_usd * (1 + 1e-9), None, math.inf
    labels: dict[int, list[_Label]] = {NONE: [_Label(0.0, steps, NONE, None)]}
    for day in range(start, num_days):
        length_s, passed_s, after = terms.length_s(day), (day - start) * DAY_S, floor[min(day + 1, num_days - 1)]
        pool = _front([label for of_offer in labels.values() for label in of_offer], steps)
        found: dict[int, list[_Label]] = {}
        for offer in np.flatnonzero(np.isfinite(cost[day])).tolist():
            arrivals = [(label.usd, label) for label in labels.get(offer, ())]
            if terms.market.open[day, offer]:
                move = 0.0 if day == start else float(terms.move_usd[day, offer])
                arrivals += [(label.usd + move, label) for label in pool]
            price, rate = float(terms.usd_per_s[day, offer]), float(terms.steps_per_s[offer])
            next_labels = []
            for usd, label in arrivals:
                run_s = min(length_s, label.left / rate)
                made = _Label(usd + run_s * price, label.left - run_s * rate, offer, label)
                if made.left > ENOUGH * steps:
                    if made.usd + made.left * after < best:
                        next_labels.append(made)
                elif made.usd < best and passed_s + run_s <= due_s:
                    best, best_label, best_s = made.usd, made, passed_s + run_s
            if next_labels:
                found[offer] = _front(next_labels, steps)
        labels = found
    if best_label is None:
        raise InputError(f"no choice of offers ends within {due_s / HOUR_S:g} h. Pass a later --due-hours.")
    return Bought(best, best_s, tuple(_chain(best_label)))


def _front(labels: Sequence[_Label], steps: float) -> list[_Label]:
    """Keep the labels that no other one beats in dollars and in steps left.

    The same days in another order leave the same steps but for rounding, so steps are compared to 12 digits.
    """
    return [labels[i] for i in pareto([(label.usd, round(label.left / steps, 12)) for label in labels])]


def _chain(label: _Label) -> list[int]:
    """Return the offers that led to a label, in order of days."""
    found: list[int] = []
    step: _Label | None = label
    while step is not None and step.offer != NONE:
        found.append(step.offer)
        step = step.before
    return found[::-1]


# A job with a deadline on instances that come and go: spot while there is time, on demand once the slack is used up.
#
# Recorded availability is a table of events (unix_s, event, instance, device_type, zone): `created` and `up` = the
# instance ran at that moment, `gone`, `deleted` and `refused` = it did not. It is looked at now and then only, so an
# instance counts as up from where it was created to the last look that found it up, and is paid for until the look
# that found it gone.
#
#     time          0        1        2        3 h
#     zone a   up ==========                          work on a, restart (r), work on b while a is gone,
#     zone b              =========================   on demand from the moment at which the slack is r
#     job      rrwwwwwwwwwrrwwwwwwwwwwwwwwwwww
#
# Slack is what is left until the deadline less the work that is left. Running keeps it, waiting and restarting use it
# up. A restart on spot needs slack for itself and one more, on demand; so no deadline is missed that can be met, even
# where nothing ever comes up (the rule of "Can't Be Late", Wu et al., NSDI 2024, without its hysteresis).


@dataclass(frozen=True, slots=True)
class UptimeSpan:
    """A time in which an instance of one zone could be used."""

    zone: str
    """Zone that it is in."""

    start_s: float
    """When it came up."""

    end_s: float
    """When it was last seen up."""

    gone_s: float
    """When it was first seen gone: it is paid for until then."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a job with a deadline went."""

    usd: float
    """Dollars, on spot and on demand."""

    end_s: float
    """When its last step was done."""

    spot_s: float
    """Seconds of work on spot."""

    restarts: int
    """Times that it started, on spot or on demand."""


def spans(events: Sequence[Mapping[str, object]], device_type: str) -> list[UptimeSpan]:
    """Return when instances of one device type were up, by start; raises `FormatError` on an unknown event."""
    kinds = {str(row["instance"]): row for row in events if row["event"] == "created"}
    found: list[UptimeSpan] = []
    state: dict[str, tuple[float, float]] = {}
    for row in sorted(events, key=lambda row: float(str(row["unix_s"]))):
        name, at_s = str(row["instance"]), float(str(row["unix_s"]))
        if name not in kinds or kinds[name]["device_type"] != device_type:
            continue
        if row["event"] in ("created", "up"):
            state[name] = (state.get(name, (at_s, at_s))[0], at_s)
        elif row["event"] in ("gone", "deleted", "refused"):
            if name in state:
                found.append(UptimeSpan(str(kinds[name]["zone"]), *state.pop(name), at_s))
        else:
            raise FormatError(f"event {row['event']!r} is unknown. Write created, up, gone, deleted or refused.")
    found += [UptimeSpan(str(kinds[name]["zone"]), first, last, last) for name, (first, last) in state.items()]
    return sorted((span for span in found if span.end_s > span.start_s), key=lambda span: span.start_s)


def run_until(
    available: Sequence[UptimeSpan], spot_usd_per_h: Mapping[str, float], on_demand_usd_per_h: float, *, start_s: float,
    work_s: float, due_s: float, restart_s: float,
) -> Finished:  # fmt: skip
    """Run `work_s` seconds of work from `start_s` on, due `due_s` later, with what is available.

    Every start costs `restart_s` seconds without progress. Raises `InputError` where even devices on demand would be
    late, or a zone has no price.
    """
    if not (work_s > 0 and restart_s >= 0 and due_s >= work_s + restart_s):
        raise InputError(
            f"{work_s / HOUR_S:g} h of work and a restart of {restart_s / HOUR_S:g} h do not fit into "
            f"{due_s / HOUR_S:g} h. Pass a later deadline."
        )
    missing = {span.zone for span in available} - set(spot_usd_per_h)
    if missing:
        raise InputError(f"zone {min(missing)} has no price. Add its price to the table of prices.")
    end_s, now_s, left_s, usd, spot_s, restarts = start_s + due_s, start_s, work_s, 0.0, 0.0, 0
    while True:
        # From here on a start on spot that comes to nothing would leave no time for one on demand.
        latest_s = end_s - left_s - 2 * restart_s
        begin_s = min((max(s.start_s, now_s) for s in available if s.end_s > now_s), default=math.inf)
        if begin_s > latest_s:
            break
        up = [span for span in available if span.start_s <= begin_s < span.end_s]
        span = min(up, key=lambda span: (spot_usd_per_h[span.zone], span.start_s))
        done_s = min(left_s, max(span.end_s - begin_s - restart_s, 0.0))
        left_s, spot_s, restarts = left_s - done_s, spot_s + done_s, restarts + 1
        now_s = begin_s + restart_s + done_s if left_s <= 0 else span.end_s
        usd += ((now_s if left_s <= 0 else span.gone_s) - begin_s) / HOUR_S * spot_usd_per_h[span.zone]
        if left_s <= 0:
            return Finished(usd, now_s, spot_s, restarts)
    begin_s = max(now_s, latest_s)
    usd += (left_s + restart_s) / HOUR_S * on_demand_usd_per_h
    return Finished(usd, begin_s + restart_s + left_s, spot_s, restarts + 1)


def hourly_starts(available: Sequence[UptimeSpan], due_s: float) -> list[float]:
    """Return a start each hour for which the whole time until the deadline is recorded."""
    if not available:
        return []
    first_s, last_s = available[0].start_s, max(span.gone_s for span in available)
    return [first_s + hour * HOUR_S for hour in range(math.floor((last_s - first_s - due_s) / HOUR_S) + 1)]
