"""The end of `headway run`: its rate, its goodput, predicted beside measured, and what to type next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import structs

from headway.cluster.adaptive.recorded import BATCH, NOISE, learned
from headway.cluster.advise import batch_command
from headway.core.files.planfile import PlanFile
from headway.ledger.answers.compare import compare, steps_per_s, whole_speedup
from headway.ledger.answers.ledger import Ledger
from headway.report.screens import WHOLE_PLAN
from headway.runtime.run_folder.recording import write_json
from headway.trace.events import loader_facts
from headway.trace.events.loader_facts import AppliedRow
from headway.trace.recording.run_facts import outcomes_of
from headway.trace.recording.runs import Run
from headway.why.explanation import Explanation, explain_run
from headway.why.fixes import outcomes, verified, withdrawn


def summarise(path: Path, plan: PlanFile | None, baseline: Path | None) -> tuple[dict[str, object], Explanation]:
    """Return the facts of `headway.run/1` that come from the ledger, and the explanation they rest on.

    Writes the outcome of an applied plan into run.json, so that a report of the run shows it later.
    """
    run = Run.open(path)
    applied = outcomes_of(path)
    found, taken_away = outcomes(applied), withdrawn(applied)
    if plan is not None:  # what this run made of the remedies is known before it is asked what to do next
        rows = loader_facts.applied_rows(applied_rows(plan, found, None, taken_away))
        run = replace(run, facts=structs.replace(run.facts, applied=rows))
    explanation = explain_run(run, str(path))
    first = Run.open(baseline) if baseline is not None and baseline.exists() else None
    before = Ledger.of(first) if first is not None else None
    rate = steps_per_s(explanation.ledger)
    account = explanation.ledger
    shares = (account.goodput, account.step_goodput) if account.tells_goodput else (None, None)
    facts: dict[str, Any] = {"goodput": shares[0], "step_goodput": shares[1], "steps_per_s": rate}
    facts["verdict"] = explanation.to_json()["verdict"]
    if plan is not None:
        batches = learned(first, run) if first is not None and BATCH in run.facts.in_force else None
        facts["batch"] = batches.sentence if batches is not None else None
        measured, other_job = None, _other_job(first, run)
        comparable = batches is None and not other_job  # steps of unlike batches are not
        if comparable and before is not None and steps_per_s(before):
            measured = rate / steps_per_s(before)
        facts["applied"] = applied_rows(plan, found, measured, taken_away)
        whole = before and whole_speedup(before, explanation.ledger)
        facts["applied"][-1]["measured_with_start"] = whole if facts["applied"][-1]["measured_speedup"] else None
        if first is not None and before is not None and before.steps and account.steps:
            loads = (first.facts.host_load, run.facts.host_load)
            why = compare(before, account, loads=loads).inconclusive
            facts["applied"] = [
                row | {"inconclusive": why if row["measured_speedup"] else other_job} for row in facts["applied"]
            ]
        facts["verified"] = verified(applied)
        meta = json.loads((path / "run.json").read_text())
        write_json(path / "run.json", {**meta, "applied": facts["applied"]})
    return facts, explanation


def _other_job(first: Run | None, run: Run) -> str:
    """Say that a plan was made of a run of another script, '' where it was not, or where that is not known."""
    if first is None or not first.facts.script or not run.facts.script:
        return ""
    planned, applied = (Path(facts.script[0]).name for facts in (first.facts, run.facts))
    return "" if planned == applied else f"{first.path} is a run of {planned}, and this one of {applied}"


def applied_rows(
    plan: PlanFile,
    found: Mapping[str, AppliedRow],
    measured_speedup: float | None,
    taken_away: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, object]]:
    """Return one row per remedy, and one for the whole plan: only what ran alone has a measured gain of its own.

    A remedy that was `taken_away` while the job ran has none: neither the steps with it nor those without are its gain.
    """
    rows: list[dict[str, Any]] = []
    for remedy in plan.remedies:
        outcome = found.get(remedy.name)
        reason = "no rank reported on it" if outcome is None else outcome.reason_not_applied or outcome.unused or None
        rows.append({
            "name": remedy.name,
            "parameters": dict(remedy.parameters),
            "facts": outcome.facts or {} if outcome is not None else {},
            "predicted_speedup": remedy.predicted_speedup,
            "interval": list(remedy.interval) if remedy.interval else None,
            "measured_speedup": measured_speedup
            if len(plan.remedies) == 1 and not reason and remedy.name not in taken_away
            else None,
            "reason_not_applied": reason,
            "withdrawn": taken_away.get(remedy.name),
        })  # fmt: skip
    nothing = all(row["reason_not_applied"] for row in rows)
    rows.append({
        "name": WHOLE_PLAN,
        "predicted_speedup": plan.predicted_speedup,
        "interval": list(plan.interval) if plan.interval else None,
        "measured_speedup": None if any(row["withdrawn"] for row in rows) or nothing else measured_speedup,
        "reason_not_applied": "none of its remedies could be" if nothing else None,
        "withdrawn": None,
    })  # fmt: skip
    return rows


def next_command(command: str, source: str, baseline: Path | None = None, plan: PlanFile | None = None) -> str:
    """Return what to type after the run `source`: what compares it with a `baseline`; else the verdict's `command`.

    A run under a plan that only measures is followed by the command that the measurement is for.
    """
    if plan is not None and [remedy.name for remedy in plan.remedies] == [NOISE]:
        return batch_command(source, lossy=True)
    return command if baseline is None else shlex.join(["headway", "compare", str(baseline), source])
