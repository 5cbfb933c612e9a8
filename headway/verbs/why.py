"""`headway why`: the ledger, the ranked causes, the next best action."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from headway.report.terminal import render_why
from headway.verbs.explain import Explanation, explain
from headway.verbs.model_flops import ModelSpec
from headway.verbs.output import emit
from headway.verbs.source import newest_run
from headway.verbs.views import why_object


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
    paths = list(source) or [newest_run()]
    explanation = explain(paths)
    answer, command = why_object(explanation, spec), next_command(explanation, paths)
    emit(
        answer,
        lambda screen: render_why(answer, source=explanation.source, next_command=command, **screen),
        as_json=json,
    )
    return 0


def next_command(explanation: Explanation, paths: Sequence[Path]) -> str:
    """Return what to type next about `paths`: the plan where there is one (it takes one run), else the report.

    What saves cost is not for a plan to mend where headway cannot apply it: the advice on checkpoints says how.
    """
    if explanation.plan is not None and len(paths) == 1:
        if explanation.plan.chosen:
            return shlex.join(["headway", "plan", str(paths[0])])
        if explanation.causes and explanation.causes[0].cause == "checkpoint.stall":
            return shlex.join(["headway", "ckpt", "advise", str(paths[0])])
    return shlex.join(["headway", "report", *map(str, paths), "-o", "report.html"])
