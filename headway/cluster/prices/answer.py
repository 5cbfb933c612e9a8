"""What a job would have cost by each strategy, over many start days or from one day on; where it is cheapest now."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from headway.cluster.prices.market import DAY_S, HOUR_S, Market, MarketTerms
from headway.cluster.prices.read import read_events
from headway.cluster.prices.strategies import (
    STUDY,
    Bought,
    follow,
    hindsight,
    hourly_starts,
    online,
    run_until,
    spans,
    study,
)
from headway.core.errors import InputError

AZURE_REGIONS = {"us_east": "eastus", "us_north_central": "northcentralus", "us_south_central": "southcentralus"}
"""Region as the study writes it -> Azure's own name."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The rest of a job, and how it may be bought."""

    steps: float
    """Steps that are left."""

    reference: str
    """Device type of the baseline."""

    hysteresis: float = 0.1
    """Fraction of a move's cost that the online rule wants to win on top."""

    due_s: float = math.inf
    """Deadline, in seconds after the start."""


def buy(terms: MarketTerms, start: int, rest: Rest) -> dict[str, Bought]:
    """Buy the rest of a job from a day on, by every strategy, the online rule and in hindsight."""
    found = {name: follow(terms, start, rest.steps, study(name, terms, rest.reference)) for name in STUDY}
    rule = online(terms, hysteresis=rest.hysteresis, due_s=rest.due_s)
    found["online"] = follow(terms, start, rest.steps, rule)
    known = min((way.usd for way in found.values() if way.duration_s <= rest.due_s), default=math.inf)
    found["hindsight"] = hindsight(terms, start, rest.steps, due_s=rest.due_s, most_usd=known)
    return found


def history(
    terms: MarketTerms, calendar: Sequence[date], rest: Rest, day: date | None, *, hold: bool
) -> dict[str, Any]:
    """Buy on the study's start days (all but the last 5, at most 30), and, where it is named, from one day on.

    A calendar of fewer than 6 days starts on its first one; raises `InputError` where the job is longer than it and
    `hold` does not carry the last prices on.
    """
    starts = [terms.market.index(start) for start in calendar[-35:-5]]
    if not starts:
        fastest = float(terms.steps_per_s.max())
        check_length(terms.market, calendar[0], rest.steps / fastest, hold=hold)
    found = over_starts(terms, starts or [terms.market.index(calendar[0])], rest)
    return found | ({"from": from_day(terms, day, rest, hold=hold)} if day else {})


def over_starts(terms: MarketTerms, starts: Sequence[int], rest: Rest) -> dict[str, Any]:
    """Return mean, least and most dollars of each strategy over start days, `hindsight_usd` and `online_usd`.

    As in the study, a job that is not done on the last day of the calendar pays that day's price until it is.
    """
    bought = [buy(terms, start, rest) for start in starts]
    rows = []
    for name in STUDY:
        usd = [ways[name].usd for ways in bought]
        rows.append({"name": name, "mean_usd": float(np.mean(usd)), "min_usd": min(usd), "max_usd": max(usd)})
    ends = [s * DAY_S + max(w.duration_s for w in ways.values()) for s, ways in zip(starts, bought, strict=True)]
    return {
        "starts": [str(terms.market.day(starts[0])), str(terms.market.day(starts[-1]))],
        "num_starts": len(starts),
        "strategies": rows,
        "hindsight_usd": float(np.mean([ways["hindsight"].usd for ways in bought])),
        "online_usd": float(np.mean([ways["online"].usd for ways in bought])),
        "online_moves": float(np.mean([ways["online"].moves for ways in bought])),
        "starts_past_last_day": sum(end > len(terms.usd_per_s) * DAY_S for end in ends),
    }


def from_day(terms: MarketTerms, day: date, rest: Rest, *, hold: bool) -> dict[str, Any]:
    """Buy from one day on: what that day's prices predicted, and what the days after it made of it.

    Raises `InputError` where prices end before the job and `hold` does not carry the last ones on.
    """
    start, cost = terms.market.index(day), terms.usd_per_step()
    bought, rows = buy(terms, start, rest), []
    for name, way in bought.items():
        check_length(terms.market, day, way.duration_s, hold=hold)
        rows.append({
            "name": name, "predicted_usd": float(cost[start, way.offers[0]] * rest.steps), "paid_usd": way.usd,
            "hours": way.duration_s / HOUR_S, "moves": way.moves,
            "offers": [terms.market.offers[index].name for index in dict.fromkeys(way.offers)],
        })  # fmt: skip
    return {"day": str(day), "rows": rows}


def check_length(market: Market, day: date, duration_s: float, *, hold: bool) -> None:
    """Raise `InputError` where a job that starts on a day outlives the prices, and they may not be carried on."""
    needed = day + timedelta(math.ceil(duration_s / DAY_S) - 1)
    if needed > market.last and not hold:
        raise InputError(
            f"the trace ends at {market.last}, the job needs {needed}. Pass --extend hold to carry the last prices on, "
            "an earlier --from, or a longer record."
        )


def cheapest(terms: MarketTerms, day: int, steps: float) -> list[dict[str, Any]]:
    """Return what the rest of the job costs on each offer that is open on a day, cheapest first."""
    cost = np.where(terms.market.open[day], terms.usd_per_step()[day], np.inf)
    return [
        {
            "offer": terms.market.offers[index].name, "index": index, "usd": float(cost[index] * steps),
            "usd_per_h": float(terms.market.usd_per_h[day, index]), "steps_per_s": float(terms.steps_per_s[index]),
            "hours": float(steps / terms.steps_per_s[index] / HOUR_S),
        }
        for index in np.argsort(cost, kind="stable").tolist() if np.isfinite(cost[index])
    ]  # fmt: skip


def deadlines(
    folder: Path, usd_per_h: Mapping[str, float], reference: str, work_s: float, due_s: float, restart_s: float
) -> dict[str, Any] | None:  # fmt: skip
    """Play a deadline from each hour of the recorded availability on; None without a deadline or such a record."""
    if reference not in usd_per_h or not math.isfinite(due_s):
        return None
    on_demand = usd_per_h[reference]
    events, prices = read_events(folder, reference)
    up = [span for span in spans(events, reference) if span.zone in prices]
    starts = hourly_starts(up, due_s)
    if not starts:
        return None
    terms = {"work_s": work_s, "due_s": due_s, "restart_s": restart_s}
    ways = [run_until(up, prices, on_demand, start_s=start, **terms) for start in starts]
    usd, full = float(np.mean([way.usd for way in ways])), on_demand * work_s / HOUR_S
    return {
        "num_starts": len(starts),
        "num_met": sum(way.end_s <= start + due_s + 1e-6 for way, start in zip(ways, starts, strict=True)),
        "mean_usd": usd, "on_demand_usd": full, "cost_fraction": usd / full,
        "mean_restarts": float(np.mean([way.restarts for way in ways])),
        "without_spot_usd": run_until([], {}, on_demand, start_s=0.0, **terms).usd,
    }  # fmt: skip


def sky_task(market: Market, index: int, *, num_devices: int, script: Sequence[str], max_restarts: int) -> str:
    """Return a task of SkyPilot's (YAML) that runs a script on an offer: `sky jobs launch FILE`."""
    offer = market.offers[index]
    hosts, nproc = math.ceil(num_devices / offer.num_devices), min(num_devices, offer.num_devices)
    azure = offer.cloud == "azure"
    region = AZURE_REGIONS.get(offer.region, offer.region)
    kind = "Standard_" + offer.instance_type.replace(" ", "_") if azure else offer.instance_type
    several = (
        '--nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK '
        '--master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" --master-port 29500 '
    ) if hosts > 1 else ""  # fmt: skip
    return "\n".join([
        "name: headway-rest", f"num_nodes: {hosts}", "resources:",
        f"  infra: {offer.cloud}/{region}" + ("" if azure else f"/{offer.zone}"), f"  instance_type: {kind}",
        "  use_spot: true", "  job_recovery:", f"    max_restarts_on_errors: {max_restarts}", "run: |",
        f"  headway run --nproc-per-node {nproc} {several}-- {shlex.join(script)}", "",
    ])  # fmt: skip


def speeds_of(
    table: Mapping[str, float], reference: str, steps_per_s: float, peaks: Mapping[str, float]
) -> dict[str, float]:  # fmt: skip
    """Return steps per second on each type: measured on `reference`, elsewhere by the ratio of table or of peaks."""
    ratios = {kind: rate / table[reference] for kind, rate in table.items()} if table.get(reference) else peaks
    return {kind: steps_per_s * ratio for kind, ratio in ratios.items()} | {reference: steps_per_s}
