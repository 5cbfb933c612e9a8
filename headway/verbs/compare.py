"""`headway compare`: the second run against the first, as a gate for continuous integration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headway.ledger.compare import compare as compare_ledgers
from headway.ledger.ledger import Ledger
from headway.report.figures import ending
from headway.report.terminal import render_compare
from headway.trace.runs import Run
from headway.verbs.output import emit
from headway.verbs.source import run_at


def compare(before: Path, after: Path, /, *, threshold: float = 0.05, whole: bool = False, json: bool = False) -> int:
    """Compare two runs of one job, bucket by bucket; exit 3 when the second lost more than the threshold allows.

    Judged are the steps after the first one: a bucket that grew by more than
    threshold x step time of the first run, or steps per second that fell by
    more than the threshold, is a regression. Start-up, restarts and rework
    come once per run: they are listed, and noted when they grew.

    Example: `headway compare headway-runs/train-1 headway-runs/train-2 --threshold 0.1`

    Parameters
    ----------
    before
        The run that sets the standard.
    after
        The run that is judged.
    threshold
        Fraction of the first run's step time that may be lost.
    whole
        Judge whole runs: what lies before, between and after the steps counts too, and start-up, restarts and rework
        are regressions when they grew by more than threshold x wall of the first run.
    json
        Print one JSON object instead of text.
    """
    runs = run_at(before), run_at(after)
    comparison = compare_ledgers(Ledger.of(runs[0]), Ledger.of(runs[1]), threshold, whole=whole)
    comparison = replace(comparison, notes=(*unfinished(*runs), *comparison.notes))
    answer = comparison.to_json()
    emit(answer, lambda screen: render_compare(answer, names=(str(before), str(after)), **screen), as_json=json)
    return comparison.exit_code


def unfinished(*runs: Run) -> list[str]:
    """Return a note per run that did not end well: its steps are compared as far as it came."""
    ends = [(name, ending(run.meta.get("exit"))) for name, run in zip(("first", "second"), runs, strict=True)]
    return [f"the {name} run did not end well, its steps are those before that: {end}" for name, end in ends if end]
