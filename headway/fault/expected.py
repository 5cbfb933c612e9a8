"""What the ETTR of a run should have been, by its own times: the account of a run against the model of a fleet.

The failures of the run are played again on the simulated job, at the moments at which they came, with the times of
detection and restart that followed, and the run's interval between saves: what this predicts is the work that is lost.
Beside it stands the closed form, for failures at random with the same means. Where the measured ETTR is far from both,
something else costs time. A save is part of the step in which it blocks, as the measured ETTR counts it. What comes
before the first step and after the last one is taken from all of them alike.

>>> from headway.trace.recording.incident import Blamed
>>> rows = [Incident(number=0, attempt=0, cls="infra", suspects=Blamed([0]), detected_ns=20_000_000_000, located_ns=0,
...                  down_ns=0, decided_ns=0, action="restart", first_step_ns=22_000_000_000,
...                  trained_from_ns=10_000_000_000, trained_until_ns=19_500_000_000)]
>>> found = expected(rows, wall_s=100.0, stepped_s=87.5, interval_s=4.0)
>>> round(found.outside_s, 3), round(found.simulated, 4)
(10.0, 0.86)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.errors import InputError
from headway.fault.fleet import S_PER_DAY, FleetTimes, GivenFailure, Scenario, simulate
from headway.ledger.answers.metrics import ettr
from headway.trace.recording.incident import Incident


@dataclass(frozen=True, slots=True)
class Expected:
    """What the times of a run let expect."""

    simulated: float
    """ETTR of the simulated job with the same failures."""

    closed_form: float
    """ETTR of failures at random that are as frequent."""

    outside_s: float
    """Before the first step, and after the last one."""


def expected(
    incidents: Sequence[Incident], *, wall_s: float, stepped_s: float, interval_s: float | None
) -> Expected | None:
    """Return what is to be expected; None without a failure that the job came back from.

    `stepped_s` is the wall time of all steps, those done again included; `interval_s` that of the steps between two
    saves, None where nothing is saved. Raises `InputError` on times that contradict each other.
    """
    back = [one.downtime_s for one in incidents if one.downtime_s is not None]
    if not back or incidents[0].trained_from_ns is None:
        return None
    begin_ns = incidents[0].trained_from_ns
    failures = [
        GivenFailure(
            (_failed_ns(one) - begin_ns) / 1e9, (one.detected_ns - _failed_ns(one)) / 1e9, _down_s(one, following)
        )
        for one, following in zip(incidents, [*incidents[1:], None], strict=True)
    ]
    outside_s = max(wall_s - stepped_s - sum(one.detect_s + one.restart_s for one in failures), 0.0)
    inside_s = wall_s - outside_s
    if inside_s <= 0:
        raise InputError(f"a run of {wall_s:g} s cannot hold {stepped_s:g} s of steps; its times are not its own.")
    mtbf_s, every_s = inside_s / len(failures), inside_s if interval_s is None else interval_s
    # Failures cut some restarts short: until one succeeds takes M (exp(u / M) - 1) on average, if each needs u.
    down_s = sum(one.detect_s + one.restart_s for one in failures) / len(back)
    needed_s = down_s if len(back) == len(failures) else mtbf_s * math.log1p(down_s / mtbf_s)
    scenario = Scenario(
        hosts=1, devices_per_host=1, days=inside_s / S_PER_DAY, mtbf_s=mtbf_s, times=FleetTimes(save_every_s=every_s)
    )
    played = simulate(scenario, seed=0, failures=failures)
    closed = ettr(mtbf_s, restart_s=needed_s, interval_s=every_s, save_s=0.0)
    share = inside_s / wall_s
    return Expected(played.ettr * share, closed * share, outside_s)


def _failed_ns(incident: Incident) -> int:
    """Return when it came to a standstill: the end of its last step, or the detection where it had made none."""
    last = incident.trained_until_ns
    return incident.detected_ns if last is None else min(last, incident.detected_ns)


def _down_s(incident: Incident, following: Incident | None) -> float:
    """Return how long it was down; until the next failure where it did not come back before."""
    if incident.downtime_s is not None:
        return incident.downtime_s
    return 0.0 if following is None else (following.detected_ns - incident.detected_ns) / 1e9
