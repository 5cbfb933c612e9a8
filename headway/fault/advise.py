"""What would have made the failures of a run cheaper: how often it saves, how later attempts start, a guard of losses.

The gain of the first two is a ratio of ETTR, not of step times: both are done
by hand, with a flag of `headway run` or the policy of `headway.Checkpointer`.
A run without failures gets no such advice. The guard is proposed where a loss
was NaN, infinite or a spike; it makes no step faster, and changes results.
Seconds; `dt` between saves follows from the steps that were lost, which are
half of it on average.

>>> print(rates_of([Incident(first_step_ns=4_000_000_000, lost_steps=50)], wall_s=600.0, step_s=0.1))
FailureRates(mtbf_s=600.0, restart_s=4.0, lost_s=5.0)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.core.units import format_fraction, format_seconds
from headway.ledger.answers.ledger import Ledger
from headway.ledger.answers.metrics import ettr, optimal_interval_s
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.recording.incident import Incident
from headway.trace.recording.run_facts import BadLoss

WARM_S = 0.5
"""From a failure to the first step of a warm attempt, where this run had none: without loading a large state."""

GUARD = "fault.guard"

BROKEN = re.compile(r"\b(nan|inf|infinite|non-?finite)\b", re.IGNORECASE)
"""What an error says that a broken loss raised."""

SPREAD = 2.0
"""Factor either way by which a gain from so few failures may be wrong."""


@dataclass(frozen=True, slots=True)
class FailureRates:
    """What the failures of a run were like."""

    mtbf_s: float
    """Wall time per failure."""

    restart_s: float
    """Mean time from a failure's detection to the first step of all ranks."""

    lost_s: float
    """Mean time of the steps that a failure lost."""


def rates_of(incidents: Sequence[Incident], *, wall_s: float, step_s: float) -> FailureRates | None:
    """Return the rates, None where no attempt came back after a failure."""
    back = [
        (row.downtime_s, row.lost_steps)
        for row in incidents
        if row.downtime_s is not None and row.lost_steps is not None
    ]
    if not back or wall_s <= 0:
        return None
    restart_s, lost_steps = (sum(values) / len(back) for values in zip(*back, strict=True))
    return FailureRates(wall_s / len(incidents), restart_s, lost_steps * step_s)


def propose(ledger: Ledger, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield what would have made the failures of a run cheaper."""
    facts = program.facts
    incidents = facts.incidents
    yield from _guard(facts.bad_losses, incidents)
    rates = rates_of(incidents, wall_s=ledger.wall_ns / 1e9, step_s=program.measured_s) if incidents else None
    if rates is None:
        return
    # A job that lost nothing saves at every step, about.
    now_s = max(2 * rates.lost_s, program.measured_s)
    save_s = _save_s(ledger, now_s)
    yield _warm(incidents, rates, now_s, save_s)
    yield _interval(rates, now_s, save_s)


def _guard(bad_losses: Mapping[int, Sequence[BadLoss]], incidents: Sequence[Incident]) -> Iterator[Proposal]:
    """Propose to look at losses before each update, where this run met a bad one."""
    seen = [(row.step, rank, row.what) for rank, rows in bad_losses.items() for row in rows]
    errors = [row.evidence for row in incidents if BROKEN.search(row.evidence)]
    if seen:
        step, rank, what = min(seen)
        found = f"the loss of rank {rank} was {what} at step {step}"
    elif errors:
        found = f"an attempt failed with {errors[0]}"
    else:
        return
    yield Proposal(
        GUARD, "fault", (), 1.0, (1.0, 1.0), applies=True, parameters={"action": "skip"}, allow="lossy", protects=True,
        cost="one all-reduce of two numbers per rank and step", risk="an update with a bad loss is left out",
        reason=found,
    )  # fmt: skip


def _save_s(ledger: Ledger, interval_s: float) -> float:
    """Return how long a save held training up: the ledger's checkpoint time, over the saves that fit the wall."""
    spent_s = ledger.ledger_ns.get("checkpoint", 0) / 1e9 / max(ledger.devices, 1)
    return max(spent_s * interval_s / (ledger.wall_ns / 1e9), 1e-4)


def _warm(incidents: Sequence[Incident], rates: FailureRates, now_s: float, save_s: float) -> Proposal | Refusal:
    """Propose warm attempts where some were cold."""
    cold = [row for row in incidents if row.first_step_ns is not None and not row.warm]
    if not cold:
        return Refusal("fault.warm", "fault", "all later attempts were warm", known="is in force already")
    warm_s = _warm_s(incidents, rates)
    reason = cold[0].cold_reason or "no warm process"
    do = "headway run --warm auto" if reason == "--warm off" else f"undo what kept {len(cold)} attempts cold: {reason}"
    return _proposal("fault.warm", rates, now_s, save_s, (warm_s, now_s, save_s), do)


def _warm_s(incidents: Sequence[Incident], rates: FailureRates) -> float:
    """Return how long a warm restart takes: as in this run, where it had one."""
    warm = [row.downtime_s for row in incidents if row.warm and row.downtime_s is not None]
    return min(sum(warm) / len(warm) if warm else WARM_S, rates.restart_s)


def predicted_ettr(ledger: Ledger, incidents: Sequence[Incident], *, step_s: float) -> float | None:
    """Return the ETTR of a run as frequently failing that does all that is proposed; None without a failure."""
    rates = rates_of(incidents, wall_s=ledger.wall_ns / 1e9, step_s=step_s)
    if rates is None:
        return None
    save_s = _save_s(ledger, max(2 * rates.lost_s, step_s))
    best_s = optimal_interval_s(rates.mtbf_s, save_s=save_s)
    return ettr(rates.mtbf_s, restart_s=_warm_s(incidents, rates), interval_s=best_s, save_s=save_s)


def _interval(rates: FailureRates, now_s: float, save_s: float) -> Proposal | Refusal:
    """Propose the interval between saves that loses least."""
    best_s = optimal_interval_s(rates.mtbf_s, save_s=save_s)
    do = (
        f"save every {format_seconds(best_s)}, not every {format_seconds(now_s)}: "
        'headway.Checkpointer(policy=CheckpointPolicy(mode="goodput")) follows the measured failure rate'
    )
    return _proposal("fault.interval", rates, now_s, save_s, (rates.restart_s, best_s, save_s), do)


def _proposal(
    name: str, rates: FailureRates, now_s: float, save_s: float, then: tuple[float, float, float], do: str
) -> Proposal | Refusal:
    """Return a proposal with the ETTR before and after, or why it is none; `then` is (restart, interval, save)."""
    before = ettr(rates.mtbf_s, restart_s=rates.restart_s, interval_s=now_s, save_s=save_s)
    after = ettr(rates.mtbf_s, restart_s=then[0], interval_s=then[1], save_s=then[2])
    gain = after / before if before else 1.0
    shares = f"ETTR {format_fraction(before)} -> {format_fraction(after)} at a failure every "
    shares += format_seconds(rates.mtbf_s)
    if gain < MIN_SPEEDUP:
        return Refusal(name, "fault", f"{shares}: nothing to win")
    low, high = 1 + (gain - 1) / SPREAD, 1 + (gain - 1) * SPREAD
    return Proposal(
        name, "fault", (), gain, (low, high), applies=False, cost=shares, reason=f"{do}. Predicted {shares}",
        parameters={"ettr": after, "ettr_before": before},
    )  # fmt: skip
