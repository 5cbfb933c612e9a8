"""A job with a deadline on instances that come and go: spot while there is time, on demand once the slack is used up.

Recorded availability is a table of events (unix_s, event, instance, device_type, zone): `created` and `up` = the
instance ran at that moment, `gone`, `deleted` and `refused` = it did not. It is looked at now and then only, so an
instance counts as up from where it was created to the last look that found it up, and is paid for until the look
that found it gone.

    time          0        1        2        3 h
    zone a   up ==========                          work on a, restart (r), work on b while a is gone,
    zone b              =========================   on demand from the moment at which the slack is r
    job      rrwwwwwwwwwrrwwwwwwwwwwwwwwwwww

Slack is what is left until the deadline less the work that is left. Running keeps it, waiting and restarting use it
up. A restart on spot needs slack for itself and one more, on demand; so no deadline is missed that can be met, even
where nothing ever comes up (the rule of "Can't Be Late", Wu et al., NSDI 2024, without its hysteresis).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.cluster.prices.market import HOUR_S
from headway.core.errors import FormatError, InputError


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
