"""What `why`, `run`, `plan` and `report` all need: a source opened, booked, explained, and planned for."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from headway.catalog import ADVISERS
from headway.comm.compression.advise import GRANT, NOT_GRANTED, UNKNOWN
from headway.comm.compression.advise import NAME as COMPRESS
from headway.compute.advise import causes as compute_causes
from headway.compute.advise import words as kernels_in_words
from headway.compute.causes import causes as causes_by_hand
from headway.core.errors import BarMissedError, InputError
from headway.core.units import format_bytes
from headway.fault.advise import causes as failure_causes
from headway.ledger.answers.causes import find_causes
from headway.ledger.answers.comm_causes import same_batches
from headway.ledger.answers.ledger import Ledger
from headway.ledger.cause import Cause
from headway.plan.planner import Plan
from headway.plan.setup import Setup
from headway.sim.ddp.ddp_window import windows_of
from headway.sim.recorded.ideal import replayed_trace
from headway.sim.recorded.program import Program
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.readers.formats import open_parts
from headway.trace.recording.incident import Incident
from headway.trace.recording.run_facts import RunFacts, memory_headroom, outcomes_of
from headway.trace.recording.runs import Run, is_described, is_run, merge
from headway.trace.rings.rank_tables import rank_tables
from headway.why.answer import Json, Verdict
from headway.why.fixes import (
    fixes_of_run,
    notes_of,
    refusals,
    refuted,
    run_command,
    with_doubt,
    with_draws,
    with_reasons,
)
from headway.why.verdict import verdict

if TYPE_CHECKING:
    from headway.ledger.operations.straggler import StragglerReport

TRY_FROM = 0.5
"""Share of useful time in the steps from which on a run's notes say how to look inside it."""

WINDOW_AT = 20
"""Step at which a deep window is opened for a replay: the start-up of the first steps is over."""


@dataclass(frozen=True)
class Explanation:
    """A run or a trace, and everything the rooms have to say of it."""

    source: str
    """What was opened, as the caller named it."""

    parts: Parts
    """Its events by rank; those in Parquet are not held in memory."""

    ledger: Ledger
    """Where the time went."""

    causes: tuple[Cause, ...]
    """Why, largest first."""

    run: Run | None = None
    """The run folder, None for a bare trace."""

    program: Program | None = None
    """The run as it can be replayed, None where it cannot."""

    plan: Plan | None = None
    """What to do, None where nothing can be predicted."""

    straggler: StragglerReport | None = None
    """The what-if analysis of an operation trace."""

    notes: tuple[str, ...] = ()
    """Why something is missing."""

    paths: tuple[Path, ...] = ()
    """What was opened."""

    @functools.cached_property
    def trace(self) -> Trace:
        """All its events, in memory."""
        return self.run.trace if self.run is not None else self.parts.whole()

    def to_json(self) -> dict[str, Any]:
        """Return the `headway.why/2` object."""
        return dict(self._json)

    @functools.cached_property
    def _json(self) -> Json:
        fidelity = self.program.fidelity if self.program else self.straggler.fidelity if self.straggler else None
        straggler = self.straggler.to_json() if self.straggler else None
        answer = self.ledger.to_json(causes=self.causes, straggler=straggler, fidelity=fidelity)
        compute = self.run.facts.compute if self.run else None
        answer["compute"] = {"facts": msgspec.to_builtins(compute)} if compute else None
        computes = [f"the script computes with: {compute.words()}{self._try()}"] if compute else []
        computes += [of_kernels] if (of_kernels := kernels_in_words(self.ledger)) else []
        memory = memory_headroom(self.run.facts) if self.run else {}
        answer["memory"] = memory
        answer["exit"] = self.run.meta.get("exit") if self.run else None
        attempts = [*attempt_notes(self.run.facts, self.source), *undescribed(self.run)] if self.run else []
        answer["notes"] = [*answer["notes"], *attempts, *self.notes, *computes, *memory_notes(memory)]
        found = verdict(answer)
        answer["verdict"] = {**structs.asdict(found), "command": self.next_command(found)}
        return answer

    def _try(self) -> str:
        """Return how to measure what a few lines would win inside useful time, where that is large enough."""
        script = self.run.meta.get("script") if self.run else None
        several = self.run is not None and self.run.meta.get("world_size", 1) > 1
        if not script or several or self.ledger.step_goodput < TRY_FROM:
            return ""
        command = [
            "headway",
            "try",
            *(["--recorded", str(self.run.path)] if self.run and self.ledger.kernels.ns else []),
        ]
        return f"; what a few lines would win there: {shlex.join([*command, '--', *map(str, script)])}"

    def next_command(self, found: Verdict) -> str:
        """Return what to type next after a verdict: the plan where it wins something (of one run), else the report.

        The consent that the fix needs stands in the command. For a save that stalls, where no remedy applies, it is
        the advice on checkpoints.
        """
        paths = [str(path) for path in self.paths]
        if self.plan is not None and len(paths) == 1:
            consent = ["--allow", found.allow] if found.allow else []
            if self.plan.chosen or found.remedy:
                return shlex.join(["headway", "plan", *paths, *consent])
            if found.cause == "checkpoint.stall":
                return shlex.join(["headway", "ckpt", "advise", *paths])
            if self.program is not None and found.cause == "comm.exposed":
                command = towards_compression(self.plan, self.program)
                return command or shlex.join(["headway", "report", *paths, "-o", "report.html"])
        return shlex.join(["headway", "report", *paths, "-o", "report.html"])


def towards_compression(plan: Plan, program: Program) -> str:
    """Return the command that lets compressed gradients be predicted, '' where none does.

    DDP starts its all-reduces in C++, where always-on records see a wait, but no size and no start. A run without a
    deep window is recorded once more with one; a window that can be replayed needs the grant alone.
    """
    refused = any(row.name == COMPRESS and row.reason == NOT_GRANTED for row in plan.refused)
    run = program.run
    if run is None:
        return ""
    if windows_of(run):
        try:
            busy = program.windows().busy
        except InputError:
            return ""
        granting = refused and not busy
        return shlex.join(["headway", "plan", str(run.path), "--allow", GRANT]) if granting else ""
    unknown = any(row.name == COMPRESS and row.reason.startswith(UNKNOWN) for row in plan.refused)
    facts = run.facts
    if not (refused or unknown) or not facts.launched or facts.nproc != facts.world_size:
        return ""
    step = min(WINDOW_AT, program.recording.recorded_steps // 2)
    return run_command(facts, "--windows", "0.05", "--window-at", f"{step}")


def ideal_of(trace: Trace, straggler: StragglerReport | None, program: Program | None) -> Trace | None:
    """Return `trace` as it would have been without its losses, None where nothing can replay it."""
    if straggler is not None:
        from headway.ledger.operations.straggler import ideal_trace

        return ideal_trace(trace, straggler)
    return replayed_trace(program) if program is not None else None


def memory_notes(memory: Mapping[str, int]) -> list[str]:
    """Say the headroom in words."""
    if not memory:
        return []
    host = f"the ranks' processes peaked at {format_bytes(memory['host_peak_bytes'])} of host memory"
    notes = [f"{host}, headroom {format_bytes(memory['host_headroom_bytes'])}"]
    if "device_peak_bytes" in memory:
        fullest = f"the fullest device peaked at {format_bytes(memory['device_peak_bytes'])}"
        notes.append(f"{fullest}, headroom {format_bytes(memory['device_headroom_bytes'])}")
    return notes


def attempt_notes(facts: RunFacts, source: str) -> list[str]:
    """Say how the attempt before the last one ended, and what is said of which, in a run that was restarted.

    >>> row = Incident(step=201, evidence="rank 0: exit code 1", action="restart")
    >>> attempt_notes(RunFacts(incidents=(row,)), "runs/a")[0].partition(": headway")[0]
    'Attempt 0 ended at step 201 (rank 0: exit code 1); the one after it left no events. Its failures'
    >>> attempt_notes(RunFacts(incidents=(Incident(action="stop"),)), "runs/a")
    []
    """
    last, rows = facts.attempt, facts.incidents
    row = max(rows, key=lambda row: row.attempt, default=Incident(attempt=last - 1))
    number, more = row.attempt, f"Its failures: headway fault incidents {shlex.quote(source)}."
    step = f" at step {row.step}" if row.step else ""
    ended = f"Attempt {number} ended{step}" + (f" ({row.evidence})" if row.evidence else "")
    if 0 <= number < last:
        return [f"{ended}. The ledger holds all {last + 1} attempts, steps and predictions are the last one's. {more}"]
    if rows and facts.exit is None and row.action != "stop":
        return [f"{ended}; the one after it left no events. {more}"]
    return []


def undescribed(run: Run) -> list[str]:
    """Say that a run folder lacks what its launcher writes."""
    if is_described(run.path):
        return []
    return [f"{run.path} has no run.json (removed, or not copied): its script, its hosts and its end are unknown."]


def explain(paths: Sequence[Path], *, allow: tuple[str, ...] = ()) -> Explanation:
    """Open `paths` (one run, the parts of one run by several hosts, or traces) and explain them."""
    source = ", ".join(map(str, paths))
    if all(is_run(path) for path in paths):
        return replace(explain_run(merge([Run.open(path) for path in paths]), source, allow=allow), paths=tuple(paths))
    parts = open_parts(paths)
    if parts.meta.get("source") == "straggler":
        from headway.ledger.operations.straggler import analyse, root_causes

        report = analyse(parts.whole())
        causes = tuple(root_causes(report))
        return Explanation(source, parts, Ledger.of(parts), causes, straggler=report, paths=tuple(paths))
    ledger = Ledger.of(parts)
    causes = tuple(find_causes(ledger, more=tuple(compute_causes(ledger))))
    return Explanation(source, parts, ledger, causes, paths=tuple(paths))


def explain_run(run: Run, source: str, *, allow: tuple[str, ...] = (), steps: int | None = None) -> Explanation:
    """Book a recorded run, replay it, and ask every room for remedies."""
    if steps is not None and steps < 1:
        raise InputError(f"--steps is {steps}; it must be at least 1. Leave it out for as many as were recorded.")
    ledger = Ledger.of(run)
    more = (*compute_causes(ledger), *failure_causes(ledger, run))
    warnings = same_batches(ledger, rank_tables(run.path))
    try:
        program = Program.from_run(run)
        plan = Plan.of(ledger, program, Setup.from_facts(run.facts, allow=allow, steps=steps), ADVISERS)
    except (InputError, BarMissedError) as reason:  # too short, or not replayable: the ledger needs no predictions
        causes = (*find_causes(ledger, more=(*more, *causes_by_hand(ledger))), *warnings)
        return Explanation(source, run.parts, ledger, causes, run, notes=(str(reason),), paths=(run.path,))
    applied = outcomes_of(run.path)
    more = (*more, *causes_by_hand(ledger, program.predict))
    fixes = fixes_of_run(plan, run.facts, refusals(applied), allow)
    found = find_causes(ledger, predict=program.predict, fixes=fixes, more=more)
    causes = tuple(with_draws(with_reasons(with_doubt(refuted(cause, plan)), program)) for cause in (*found, *warnings))
    notes = notes_of(plan, applied)
    return Explanation(source, run.parts, ledger, causes, run, program, plan, notes=notes, paths=(run.path,))
