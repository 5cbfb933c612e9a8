"""`headway why`: the ledger, the ranked causes, the next best action.

What a job of many ranks shows beside its ledger: machines by speed, cost of its groups, MFU, where it hung.

`why_object` is the `headway.why/2` object with these entries: `machines`,
`group_creation`, `mfu` (when the model is named) and `hang` (when the hang
watch of the run reported). What is not known is None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.compute.advise import classes_json
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.machines import creation, machine_times
from headway.report.terminal import render_why
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import RunPath, newest_run
from headway.why.explanation import Explanation, explain
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
    from headway.verbs.jobs.hang import verdict_of, watch_reports, watched

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
    from headway.report.page.machines import machine_heat_maps
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
