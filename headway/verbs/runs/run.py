"""`headway run`: record a script and supervise it; the last lines on stderr are the verdict."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headway.catalog import RECORDS, REHEARSALS, REMEDIES
from headway.core.errors import HeadwayError, InputError, say_beside
from headway.core.files.planfile import PlanFile, read_plan
from headway.core.tables import pick
from headway.fault.remedies import WARM
from headway.runtime.launching.launch import launch
from headway.runtime.launching.run_of_ranks import ExitReport
from headway.trace.recording.runs import Run, is_run
from headway.verbs.shared.output import emit, emit_beside
from headway.verbs.shared.run_options import GivenScript, RecordingOptions

DEFAULTS = RecordingOptions()

TRACKER_S = 60.0
"""Seconds that a tracker may take to get the account of a run; the job is done meanwhile."""


def run(*, options: Annotated[RecordingOptions, Parameter(name="*")] = DEFAULTS, script: GivenScript = None) -> int:
    """Run a training script unmodified, record it, and show where its device time went.

    Everything behind `--` reaches the script unchanged, and stdout is the script's alone: what headway says goes to
    stderr. Exits with the first failing rank's code (128 + signal); with --verify, 3 when the script ended well and a
    batch under a remedy was not the script's own.

    Example: `headway run --nproc-per-node 2 -- train.py --lr 1e-3`
    """
    if not script:
        raise InputError("no script was given. Put it behind --, as in: headway run -- train.py --lr 1e-3")
    if options.baseline is not None and not is_run(options.baseline):
        raise InputError(f"--baseline {options.baseline} is not a run folder. Name one that headway run made.")
    check_importable(options.trackers)
    plan = read_plan(options.plan_path) if options.plan_path else None
    if plan is not None and not plan.remedies:
        raise InputError(
            f"the plan {options.plan_path} holds no remedy, and nothing would be applied. See why, and what could be "
            f"granted, with: headway plan {plan.baseline or 'RUN'}"
        )
    if options.verify and plan is None:
        raise InputError("--verify compares what a plan changed, and there is none. Name one: --apply PLAN.")
    for remedy in plan.remedies if plan else ():
        try:
            record = pick(RECORDS, remedy.name, "remedy")
            if not record.apply:
                raise InputError(f"{remedy.name} is only predicted, headway cannot apply it. Remove it from the plan.")
            record.read(remedy.parameters)
        except InputError as cause:
            raise InputError(f"{options.plan_path}: {cause}") from cause
    if options.warm == "off" and plan is not None and any(remedy.name == WARM for remedy in plan.remedies):
        raise InputError(f"--warm off starts later attempts cold, and {WARM} of the plan warm. Leave out --warm off.")
    baseline = options.baseline or (Path(plan.baseline) if plan and plan.baseline else None)
    report = launch(options.launch_options({**REHEARSALS, **(REMEDIES if plan else {})}, baseline), script)
    if options.json or (report.code == 0 and not options.quiet):  # of a failure, the launcher's traceback stands last
        try:
            tell(report, plan, baseline, as_json=options.json)
        except OSError:  # nobody reads it, or there is no room: how the job ended weighs more
            if report.code:
                return report.code
            raise
    if report.run is not None and report.is_first:
        hand_over(report.run, options.trackers)
    if report.by_ctrl_c:
        raise KeyboardInterrupt
    found = None
    if options.verify and report.run is not None:
        from headway.trace.recording.run_facts import outcomes_of
        from headway.why.fixes import verified

        found = verified(outcomes_of(report.run))
    return 3 if report.code == 0 and found is not None and found["unequal"] else report.code


def tell(report: ExitReport, plan: PlanFile | None, baseline: Path | None, *, as_json: bool) -> None:
    """Say on stderr how the run ended and what it was like, or print one JSON object on stdout.

    A run too broken to explain still gets its ending.
    """
    # Loaded after the run: until here nothing of the analysis has cost the launcher a start-up.
    from headway.report.screens import render_run

    end = {
        "code": report.code, "class": report.cls, "first_rank": report.first_rank, "traceback": report.traceback,
    }  # fmt: skip
    answer: dict[str, Any] = {
        "schema": "headway.run/1", "run": str(report.run) if report.run else None, "exit": end,
        **dict.fromkeys(("goodput", "step_goodput", "steps_per_s", "verdict")),
        "baseline": str(baseline) if baseline else None, "applied": [], "batch": None, "verified": None, "attempts": 0,
        "incidents": [], **dict.fromkeys(("ettr", "ettr_simulated", "ettr_closed_form", "ettr_predicted")),
    }  # fmt: skip
    why, command, notes = None, "", list[str]()
    try:
        from headway.verbs.jobs.fault import account_of, ettr_beside, ettr_sentence
        from headway.verbs.runs.why import next_command, summarise

        if report.run is None:
            raise InputError("no rank was started. Start it on every host.")
        facts, explanation = summarise(report.run, plan, baseline)
        answer.update(facts)
        if as_json:
            answer.update(account_of(report.run))
        before = baseline if baseline is not None and is_run(baseline) else None
        beside = None if before is None else ettr_beside(Run.open(before), Run.open(report.run))
        answer["ettr_predicted"] = beside and beside["predicted"]
        notes += [ettr_sentence(beside)] if beside else []
        notes += [answer["batch"]] if answer["batch"] else []
        if before is None and baseline is not None:
            notes.append(f"Nothing is measured: {baseline}, of which the plan was made, is no run any more. "
                         "--baseline RUN names another.")  # fmt: skip
        why = explanation.to_json()
        command = next_command(why["verdict"]["command"], explanation.source, before, plan)
    except HeadwayError as reason:
        notes.append(f"Nothing to account for: {reason if not report.problems else report.problems[0]}")
    except Exception as fault:  # our fault, and the job is done: its exit code stands
        notes.append(f"headway could not account for this run ({type(fault).__name__}: {fault}).")
        command = f"headway why {report.run}"
    if as_json:
        emit(answer, lambda _: "", as_json=True)
        return
    emit_beside(lambda screen: render_run(answer, why=why, command=command, notes=notes, **screen))


def check_importable(trackers: Sequence[str]) -> None:
    """Raise `InputError` for a library that is missing."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"--{name} needs the library {name}, which is missing. Install it, or leave out --{name}.")


def hand_over(run: Path, trackers: Sequence[str]) -> None:
    """Give the account of `run` to each of `trackers`, and say in one line each what came of it; raises nothing."""
    for name in trackers:
        command = [sys.executable, "-m", "headway.integrations.trackers", name, str(run)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TRACKER_S)
            outcome = done.stdout if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
        except (OSError, subprocess.TimeoutExpired) as cause:
            outcome = str(cause)
        say_beside(f"headway: --{name}: {outcome.strip().splitlines()[-1]}\n")
