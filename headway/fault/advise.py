"""What would have made the failures of a run cheaper: how often it saves, how later attempts start, a guard of losses.

The first two are judged by the ETTR that is measured (`headway.fault.attempts`): no step is faster for them, so a plan
holds them as what protects the job, and a run that applies it says the ETTR before, predicted, and now. A run without
failures gets no such advice. The guard is proposed where a loss was NaN, infinite or a spike; it changes results.

>>> bool(BROKEN.search("rank 0: exit code 1, ValueError: loss is NaN")), BROKEN.search("NameError: finance")
(True, None)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from headway.core.units import NS_PER_S, format_fraction, format_seconds, plural
from headway.fault.attempts import SCRIPT_SHARE, AttemptTimes
from headway.fault.remedies import FOLLOWS_FAILURES, INTERVAL, WARM
from headway.ledger.answers.ledger import Ledger
from headway.ledger.cause import Cause
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.recording.incident import Incident
from headway.trace.recording.run_facts import BadLoss
from headway.trace.recording.runs import Run

GUARD = "fault.guard"

COLD_BY_FLAG = "--warm off"
"""Why attempts were cold where nothing but the command asked for it."""

APPLIED = "headway plan, then headway run --apply"

PHASES = ("detect", "locate", "decide", "down", "launch", "import", "init", "compile", "load", "script")
"""What the time between two attempts is made of."""

BROKEN = re.compile(r"\b(nan|inf|infinite|non-?finite)\b", re.IGNORECASE)
"""What an error says that a broken loss raised."""


def propose(ledger: Ledger, program: Program, setup: Setup) -> Iterator[Proposal | Refusal]:
    """Yield what would have made the failures of a run cheaper."""
    facts = program.facts
    incidents = facts.incidents
    yield from _guard(facts.bad_losses, incidents)
    times = AttemptTimes.of(program.run, ledger) if program.run is not None else None
    if times is not None:
        yield _warm(times, incidents)
        yield _interval(times)


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


def _warm(times: AttemptTimes, incidents: Sequence[Incident]) -> Proposal | Refusal:
    """Propose warm attempts where some were cold: by the plan where the run was asked to, else by the user."""
    if not times.cold:
        return Refusal(WARM, "fault", "all later attempts were warm", known="is in force already")
    reason = _cold_reason(incidents)
    applies = reason == COLD_BY_FLAG
    do = "leave out --warm off" if applies else f"undo what kept {times.cold} attempts cold: {reason}"
    return _proposal(WARM, times, times.ettr_with(warm=True), do, applies=applies)


def _cold_reason(incidents: Sequence[Incident]) -> str:
    """Return why the first cold attempt was cold."""
    cold = next(row for row in incidents if row.first_step_ns is not None and not row.warm)
    return cold.cold_reason or "no warm process"


def _interval(times: AttemptTimes) -> Proposal | Refusal:
    """Propose the interval between saves that loses least: by the plan where headway's Checkpointer saves."""
    every_s, best_s = times.interval_s, times.best_interval_s
    now = "never" if every_s is None else f"every {format_seconds(every_s)}"
    do = f"save every {format_seconds(best_s)}, not {now}"
    more = {"mtbf_s": times.mtbf_s} if times.own_saves else {}
    after = times.ettr_with(interval_s=best_s)
    return _proposal(INTERVAL, times, after, f"{do}: {saving_edit(times)}", applies=times.own_saves, **more)


def saving_edit(times: AttemptTimes) -> str:
    """Return what to write in the script so that a failure loses less."""
    if times.own_saves:
        return FOLLOWS_FAILURES
    return (
        'checkpoint = headway.Checkpointer("checkpoints", model=model, optimizer=optimizer); '
        "step = checkpoint.restore().step or 0; checkpoint.attach(optimizer)"
    )


def _proposal(
    name: str, times: AttemptTimes, after: float, do: str, *, applies: bool, **more: float
) -> Proposal | Refusal:
    """Return a proposal with the ETTR before and after, or why it is none."""
    shares = f"ETTR {format_fraction(times.ettr)} -> {format_fraction(after)} with a failure every "
    shares += format_seconds(times.mtbf_s)
    if after < MIN_SPEEDUP * times.ettr:
        return Refusal(name, "fault", f"{shares}: nothing to win")
    # What a plan applies is measured as steps per second too, and no step is faster for it; by hand the gain is ETTR's.
    gain = 1.0 if applies else after / times.ettr
    return Proposal(
        name, "fault", (), gain, (1 + (gain - 1) / 2, 1 + 2 * (gain - 1)), applies=applies, cost=shares,
        reason=f"{do}. Predicted {shares}", parameters={"ettr": after, "ettr_before": times.ettr, **more},
        protects=applies,
    )  # fmt: skip


def causes(ledger: Ledger, run: Run) -> Iterator[Cause]:
    """Yield what failures cost: starts of later attempts, and steps that they did again. The gain is that of ETTR."""
    times = AttemptTimes.of(run, ledger)
    if times is None:
        return
    count = plural(len(times.lost_s), "failure")
    rows = [(phase, ledger.sub_ns.get(f"restart.{phase}", 0) / NS_PER_S) for phase in PHASES]
    phases = ", ".join(f"{what} {format_seconds(s)}" for what, s in sorted(rows, key=lambda row: -row[1])[:3] if s)
    warm, interval = _warm(times, run.facts.incidents), _interval(times)
    wins = isinstance(warm, Proposal)
    by_plan = isinstance(warm, Proposal) and warm.applies
    text = _of(warm) if wins else "the script's own start-up is left: load less before the first step"
    text = f"{WARM}: {text} ({APPLIED})" if by_plan else text
    gains = [times.ettr_with(warm=True, script_share=share) / times.ettr for share in (0.0, SCRIPT_SHARE, 1.0)]
    yield Cause(
        "restart", "all ranks", ledger.ledger_ns["restart"] / NS_PER_S,
        f"{count}, {times.cold} cold starts; {format_seconds(sum(times.down_s))} until all ranks trained again; "
        f"device time: {phases}",
        text, gains[1] if wins else None, (gains[0], gains[2]) if wins else None, remedy=WARM if by_plan else "",
    )  # fmt: skip
    again_s = sum(times.lost_s)
    if again_s <= 0:
        return
    wins, gain, applies = isinstance(interval, Proposal), None, False
    if isinstance(interval, Proposal):
        gain, applies = interval.parameters["ettr"] / times.ettr, interval.applies
    every_s = times.interval_s
    saved = "nothing was saved" if every_s is None else f"it saved every {format_seconds(every_s)}"
    best = format_seconds(times.best_interval_s)
    how = f" ({APPLIED})" if applies else ""
    yield Cause(
        "rework", "all ranks", again_s * ledger.devices,
        f"{count} lost {format_seconds(again_s)} of steps that were done again; {saved}",
        f"save every {best}{how}" if wins else "fail less often: saves are as frequent as pays",
        gain, None if gain is None else (1 + (gain - 1) / 2, 1 + 2 * (gain - 1)),
        script=saving_edit(times) if wins else "", remedy=INTERVAL if applies else "",
    )  # fmt: skip


def _of(row: Proposal | Refusal) -> str:
    return row.reason.partition(". Predicted")[0]
