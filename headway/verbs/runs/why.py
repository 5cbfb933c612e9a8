"""`headway why`: the ledger, the ranked causes, the next best action.

What a job of many ranks shows beside its ledger: machines by speed, cost of its groups, MFU, where it hung.

`why_object` is the `headway.why/2` object with these entries: `machines`,
`group_creation`, `mfu` (when the model is named) and `hang` (when the hang
watch of the run reported). What is not known is None.

`summarise` is the end of `headway run`: its rate, its goodput, predicted beside measured, and what to type next.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import structs

from headway.cluster.adaptive.recorded import BATCH, NOISE, learned
from headway.cluster.advise import batch_command
from headway.compute.advise import classes_json
from headway.core.files.planfile import PlanFile
from headway.ledger.answers.compare import compare, steps_per_s, whole_speedup
from headway.ledger.answers.ledger import Ledger
from headway.ledger.machines import creation, machine_times
from headway.report.screens import WHOLE_PLAN
from headway.report.terminal import render_why
from headway.runtime.run_folder.recording import write_json
from headway.trace.events import loader_facts
from headway.trace.events.loader_facts import AppliedRow
from headway.trace.recording.run_facts import outcomes_of
from headway.trace.recording.runs import Run
from headway.verbs.shared.output import emit
from headway.verbs.shared.run_options import RunPath, newest_run
from headway.why.explanation import Explanation, explain, explain_run
from headway.why.fixes import outcomes, verified, withdrawn
from headway.why.model_flops import ModelSpec, mfu_entry, run_flops

if TYPE_CHECKING:
    from headway.report.page.charts import HeatMap


def why_object(explanation: Explanation, model: ModelSpec | None = None) -> dict[str, object]:
    """Return the `headway.why/2` object of a run or a trace with the views of a job of many ranks.

    Raises `InputError` when `model` lacks what MFU needs.
    """
    answer = explanation.to_json()
    groups, times = creation(explanation.parts), machine_times(explanation.parts)
    answer["machines"] = None if times is None else times.to_json()
    answer["group_creation"] = None if groups is None else groups.to_json()
    answer["mfu"] = None if model is None else mfu_of(explanation, model)
    answer["hang"] = hang_of(explanation)
    if explanation.run is not None and answer["compute"] is not None:
        operations = run_flops(explanation.parts, explanation.ledger, explanation.run.facts)
        flops, dtype = operations["flops_per_step"], str(operations["dtype"])
        classes = classes_json(explanation.ledger, flops if isinstance(flops, int) else None, dtype)
        answer["compute"] = {**answer["compute"], **operations, "classes": classes}
    elif explanation.ledger.kernels.ns:
        answer["compute"] = {"facts": {}, "classes": classes_json(explanation.ledger)}
    return answer


def mfu_of(explanation: Explanation, model: ModelSpec) -> dict[str, object]:
    """Return the `mfu` entry at the rate of the run's steady steps."""
    facts = explanation.run.facts if explanation.run else explanation.ledger.facts
    rate = steps_per_s(explanation.ledger)
    return mfu_entry(model, steps_per_s=rate, facts=facts, ranks=explanation.ledger.devices)


def hang_of(explanation: Explanation) -> dict[str, object] | None:
    """Return the `headway.hang/1` object of the run's newest report of its hang watch, None without one."""
    run = explanation.run
    if run is None or not (run.path / "hang").is_dir():
        return None
    from headway.verbs.jobs.fault import verdict_of, watch_reports, watched

    if not (reports := watch_reports(run.path)):
        return None
    end, newest = run.facts.exit, watched(reports[-1])
    # One that was stopped from outside hung to its end where no step came behind the report.
    steps = max((row.step or 0 for row in newest.ranks), default=0) if newest else 0
    stopped = end is not None and end.cls == "preempted" and steps >= explanation.ledger.steps
    ended = stopped or (end is not None and end.cls == "hang")
    return {**verdict_of([run.path]).to_json(), "ended_the_run": ended}


def heat_maps_of(explanation: Explanation, why: dict[str, Any]) -> list[HeatMap]:
    """Return the heat maps of compute time, behind that of the what-if analysis of an operation trace."""
    from headway.report.page.charts import worker_heat_map
    from headway.report.page.ranks import machine_heat_maps
    from headway.why.answer import Why

    ranks = explanation.parts.ranks
    where = {rank: (row["dp"], row["pp"]) for rank, row in ranks.items() if "dp" in row and "pp" in row}
    worker = worker_heat_map(Why.of(why).straggler)
    return [*([worker] if worker else []), *machine_heat_maps(machine_times(explanation.parts), where)]


def why(*source: RunPath, model: str | None = None, json: bool = False) -> int:
    """Explain where the device time of a run or a trace went: ledger, ranked causes, next best action.

    Example: `headway why headway-runs/train-1` or `headway why trace.parquet`

    Args:
      source:
        A run folder (the newest one by default), the run folders of several hosts, or any trace: Kineto or Chrome
        JSON, straggler Parquet, headway Parquet.
      model:
        Shape of the model, for MFU: layers=96,hidden=12288,heads=96,sequence=2048,vocabulary=64000,batch=768,dtype=bf16
        (batch = sequences per step of all ranks). More keys: ffn, kv_heads, gated, tied, devices, device, peak (FLOP/s
        of one device), recompute (none, selective, full).
      json: Print one JSON object (schema headway.why/2) instead of text.
    """
    spec = None if model is None else ModelSpec.parse(model)
    explanation = explain(list(source) or [newest_run()])
    answer = why_object(explanation, spec)
    return emit(answer, lambda screen: render_why(answer, source=explanation.source, **screen), as_json=json)


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
    plan: PlanFile, found: Mapping[str, AppliedRow], measured_speedup: float | None,
    taken_away: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, object]]:  # fmt: skip
    """Return one row per remedy, and one for the whole plan: only what ran alone has a measured gain of its own.

    A remedy that was `taken_away` while the job ran has none: neither the steps with it nor those without are its gain.
    """
    rows: list[dict[str, Any]] = []
    for remedy in plan.remedies:
        outcome = found.get(remedy.name)
        reason = "no rank reported on it" if outcome is None else outcome.reason_not_applied or outcome.unused or None
        is_alone = len(plan.remedies) == 1 and not reason and remedy.name not in taken_away
        rows.append({
            "name": remedy.name, "parameters": dict(remedy.parameters),
            "facts": outcome.facts or {} if outcome is not None else {}, "predicted_speedup": remedy.predicted_speedup,
            "interval": list(remedy.interval) if remedy.interval else None,
            "measured_speedup": measured_speedup if is_alone else None, "reason_not_applied": reason,
            "withdrawn": taken_away.get(remedy.name),
        })  # fmt: skip
    nothing = all(row["reason_not_applied"] for row in rows)
    rows.append({
        "name": WHOLE_PLAN, "predicted_speedup": plan.predicted_speedup,
        "interval": list(plan.interval) if plan.interval else None,
        "measured_speedup": None if any(row["withdrawn"] for row in rows) or nothing else measured_speedup,
        "reason_not_applied": "none of its remedies could be" if nothing else None, "withdrawn": None,
    })  # fmt: skip
    return rows


def next_command(command: str, source: str, baseline: Path | None = None, plan: PlanFile | None = None) -> str:
    """Return what to type after the run `source`: what compares it with a `baseline`; else the verdict's `command`.

    A run under a plan that only measures is followed by the command that the measurement is for.
    """
    if plan is not None and [remedy.name for remedy in plan.remedies] == [NOISE]:
        return batch_command(source, lossy=True)
    return command if baseline is None else shlex.join(["headway", "compare", str(baseline), source])
