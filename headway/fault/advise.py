"""What would have made the failures of a run cheaper: how often it saves, how later attempts start, a guard of losses.

The first two are judged by the ETTR that is measured (`AttemptTimes`): no step is faster for them, so a plan
holds them as what protects the job, and a run that applies it says the ETTR before, predicted, and now. A run without
failures gets no such advice. The guard is proposed where a loss was NaN, infinite or a spike; it changes results.

>>> bool(BROKEN.search("rank 0: exit code 1, ValueError: loss is NaN")), BROKEN.search("NameError: finance")
(True, None)

What the failures of a run cost it, and the ETTR it would have had with shorter restarts or rarer rework.

The measured ETTR is the wall time of the steps that were kept / that of the run. A prediction is the same run with the
same failures, by the same definition: only the wall is shorter, by what later attempts need less to start, and by the
steps that are not done again. Start-up and the end stay in it.

    predicted = kept / (wall - restarts saved - rework saved + saves added)

>>> times = AttemptTimes(100.0, 40.0, lost_s=(10.0, 10.0), down_s=(15.0, 15.0), cold=2, import_s=5.0)
>>> times.ettr, round(times.ettr_with(warm=True), 4), round(times.ettr_with(interval_s=4.0), 4)
(0.4, 0.4444, 0.472)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.units import NS_PER_S, format_fraction, format_seconds, plural
from headway.fault.remedies import FOLLOWS_FAILURES, INTERVAL, WARM
from headway.ledger.answers.ledger import Ledger
from headway.ledger.answers.metrics import ettr_of_steps, optimal_interval_s
from headway.ledger.cause import Cause
from headway.ledger.runs.attempts import RunBook, book_run
from headway.plan.proposal import MIN_SPEEDUP, Proposal, Refusal
from headway.plan.setup import Setup
from headway.sim.recorded.program import Program
from headway.trace.recording.incident import Incident
from headway.trace.recording.run_facts import BadLoss
from headway.trace.recording.runs import Run

SAVES = ("checkpoint.snapshot", "checkpoint.save")
"""Recorded names of a save: of headway's own, of torch's."""

SAVE_S = 0.05
"""What a save costs where the run made none: the copy of a small state, and its share of the writing."""


SCRIPT_SHARE = 0.5
"""Share of `script_s` that a warm process is taken to save; a range holds none and all of it."""


@dataclass(frozen=True, slots=True)
class AttemptTimes:
    """A run with failures, in seconds of its wall."""

    wall_s: float
    """From the launcher's start to its end."""

    kept_s: float
    """Steps whose result was kept."""

    lost_s: tuple[float, ...]
    """[failures] Steps that were done again."""

    down_s: tuple[float, ...]
    """[failures that an attempt came back from] From the detection to the first step of all ranks."""

    cold: int = 0
    """Of these, attempts that started cold."""

    import_s: float = 0.0
    """Of a cold attempt's start, its launch and the import of torch: what a warm process has done before."""

    script_s: float = 0.0
    """Of a cold attempt's start, what is neither that nor the process group nor state: a warm process has done the part
    of it that imports what torch itself imports when a model is wrapped, which no record tells apart."""

    saves: int = 0
    """Saves that each rank took part in."""

    save_s: float = SAVE_S
    """What one of them held training up for."""

    own_saves: bool = False
    """Whether headway's Checkpointer made them."""

    @classmethod
    def of(cls, run: Run, ledger: Ledger) -> AttemptTimes | None:
        """Return the times of a run; None without a failure that it came back from, or a step that it kept.

        Raises as `book_run` does.
        """
        rows = run.facts.incidents
        if not any(row.downtime_s is not None for row in rows):
            return None
        book = book_run(run.attempts(), run.facts)
        kept_s, _ = stepped_s(book)
        if not kept_s:
            return None
        cold = sum(row.first_step_ns is not None and not row.warm for row in rows)
        saves, spent_s = saves_of(book), ledger.ledger_ns["checkpoint"] / NS_PER_S / max(ledger.devices, 1)
        each_ns = NS_PER_S * max(ledger.devices, 1) * max(cold, 1)
        launch_s, import_s, script_s = (
            ledger.sub_ns.get(f"restart.{phase}", 0) / each_ns for phase in ("launch", "import", "script")
        )
        return cls(
            (book.wall[1] - book.wall[0]) / NS_PER_S, kept_s, tuple(_lost_s(book, row) for row in rows),
            tuple(row.downtime_s for row in rows if row.downtime_s is not None), cold,
            launch_s + import_s, script_s, saves, spent_s / saves if saves else SAVE_S,
            any(SAVES[0] in attempt.spans for attempt in book.attempts),
        )  # fmt: skip

    @property
    def ettr(self) -> float:
        """Return the measured ETTR."""
        return ettr_of_steps(self.kept_s, wall_s=self.wall_s)

    @property
    def mtbf_s(self) -> float:
        """Return the wall time per failure."""
        return self.wall_s / len(self.lost_s)

    @property
    def interval_s(self) -> float | None:
        """Return the time of steps between two saves; None where there was none."""
        return (self.kept_s + sum(self.lost_s)) / self.saves if self.saves else None

    @property
    def best_interval_s(self) -> float:
        """Return the time between saves that loses least to saves and rework."""
        return optimal_interval_s(self.mtbf_s, save_s=max(self.save_s, 1e-4))

    def ettr_with(
        self, *, warm: bool = False, interval_s: float | None = None, script_share: float = SCRIPT_SHARE
    ) -> float:
        """Return the ETTR with the same failures where cold attempts start warm, and saves come every `interval_s`.

        A warm process saves `script_share` of `script_s`.
        """
        saved_s = self.cold * (self.import_s + script_share * self.script_s) if warm else 0.0
        if interval_s is not None:  # a failure loses half an interval on average
            added = (self.kept_s + sum(self.lost_s)) / interval_s - self.saves
            saved_s += max(sum(self.lost_s) - len(self.lost_s) * interval_s / 2, 0.0) - added * self.save_s
        return ettr_of_steps(self.kept_s, wall_s=max(self.wall_s - saved_s, self.kept_s))


def stepped_s(book: RunBook) -> tuple[float, float]:
    """Return the wall time of the steps that were kept, and that of all."""
    walls = [attempt.step_wall_ns / NS_PER_S for attempt in book.attempts]
    counts = [attempt.kept_steps for attempt in book.attempts]
    kept_s = sum(float(steps[:count].sum()) for steps, count in zip(walls, counts, strict=True))
    return kept_s, sum(float(steps.sum()) for steps in walls)


def ettr_over_time(run: RunBook) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return moments [n] in s from the launcher's start, the ends of steps and of the run, and the ETTR until each."""
    rows = [(0.0, 0.0)]  # when, and what was kept of the step that ended then
    for attempt in run.attempts:
        begins = [book.first_ns for book in attempt.books if len(book.step_wall_ns)]
        at_ns = float(np.mean(begins)) - run.wall[0] if begins else 0.0
        for step, wall_ns in enumerate(attempt.step_wall_ns.tolist() if begins else ()):
            rows += [(at_ns, 0.0), (at_ns + wall_ns, wall_ns if step < attempt.kept_steps else 0.0)]
            at_ns += wall_ns
    rows.append((float(run.wall[1] - run.wall[0]), 0.0))
    end_s, kept_s = np.array(sorted(rows)).T / NS_PER_S
    return end_s, np.asarray(np.cumsum(kept_s) / np.maximum(end_s, 1e-9))


def saves_of(book: RunBook) -> int:
    """Return the saves that each rank took part in; a script may save on one rank alone."""
    began = [
        max((attempt.spans[name].count for name in SAVES if name in attempt.spans), default=0)
        for attempt in book.attempts
    ]
    return -(-sum(began) // len(book.ranks))


def _lost_s(book: RunBook, row: Incident) -> float:
    """Return the wall time of the steps of an attempt that a later one did again."""
    if row.attempt >= len(book.attempts):
        return 0.0
    failed = book.attempts[row.attempt]
    return float(failed.step_wall_ns[failed.kept_steps :].sum()) / NS_PER_S


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
    cold = next(row for row in incidents if row.first_step_ns is not None and not row.warm)
    reason = cold.cold_reason or "no warm process"
    applies = reason == COLD_BY_FLAG
    do = "leave out --warm off" if applies else f"undo what kept {times.cold} attempts cold: {reason}"
    return _proposal(WARM, times, times.ettr_with(warm=True), do, applies=applies)


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
    text = (
        warm.reason.partition(". Predicted")[0]
        if wins
        else "the script's own start-up is left: load less before the first step"
    )
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
