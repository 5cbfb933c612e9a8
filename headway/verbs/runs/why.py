"""`headway why`: the ledger, the ranked causes, the next best action."""

from __future__ import annotations

from pathlib import Path

from headway.report.terminal import render_why
from headway.verbs.runs.views import why_object
from headway.verbs.shared.explain import explain
from headway.verbs.shared.model_flops import ModelSpec
from headway.verbs.shared.output import emit
from headway.verbs.shared.source import newest_run


def why(*source: Path, model: str | None = None, json: bool = False) -> int:
    """Explain where the device time of a run or a trace went: ledger, ranked causes, next best action.

    Example: `headway why headway-runs/train-1` or `headway why trace.parquet`

    Parameters
    ----------
    source
        A run folder (the newest one by default), the run folders of several hosts, or any trace: Kineto or Chrome
        JSON, straggler Parquet, headway Parquet.
    model
        Shape of the model, for MFU: layers=96,hidden=12288,heads=96,sequence=2048,vocabulary=64000,batch=768,dtype=bf16
        (batch = sequences per step of all ranks). More keys: ffn, kv_heads, gated, tied, devices, device, peak (FLOP/s
        of one device), recompute (none, selective, full).
    json
        Print one JSON object (schema headway.why/2) instead of text.
    """
    spec = None if model is None else ModelSpec.parse(model)
    explanation = explain(list(source) or [newest_run()])
    answer = why_object(explanation, spec)
    emit(answer, lambda screen: render_why(answer, source=explanation.source, **screen), as_json=json)
    return 0
