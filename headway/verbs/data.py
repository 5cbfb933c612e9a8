"""`headway data`: the input side of a run."""

from __future__ import annotations

from pathlib import Path

from headway.data.stalls import attribute
from headway.report.terminal import render_stalls
from headway.sim.program import Program
from headway.verbs.output import emit
from headway.verbs.source import run_at


def stalls(run: Path | None = None, /, *, json: bool = False) -> int:
    """Split a run's input stalls into fetch, prep and transfer, by replay without each; name the best remedy.

    Example: `headway data stalls headway-runs/train-1`

    Parameters
    ----------
    run
        A run folder; the newest one by default.
    json
        Print one JSON object instead of text.
    """
    answer = attribute(Program.from_run(run_at(run))).to_json()
    emit(answer, lambda screen: render_stalls(answer, **screen), as_json=json)
    return 0
