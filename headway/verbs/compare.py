"""`headway compare`: the second run against the first, as a gate for continuous integration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from headway.core.errors import HeadwayError
from headway.core.host_load import HostLoad
from headway.core.units import format_fraction, format_seconds
from headway.ledger.compare import compare as compare_ledgers
from headway.ledger.ledger import Ledger
from headway.report.figures import ending
from headway.report.terminal import render_compare
from headway.sim.program import Program
from headway.trace.runs import Run
from headway.verbs.output import emit
from headway.verbs.source import run_at
from headway.verbs.verified import withdrawn

LOAD_WORTH_NAMING = 0.15
"""Cores by which the other load of two runs has to differ before it is said: below, it is what sampling is off by."""


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
    loads = [HostLoad.from_facts(run.meta) for run in runs]
    notes = (*unfinished(*runs), *taken_away(runs[1]), *comparison.notes, *load_notes(*runs))
    comparison = replace(comparison, notes=notes)
    answer = {**comparison.to_json(), "host_load": [msgspec.to_builtins(load) for load in loads]}
    emit(answer, lambda screen: render_compare(answer, names=(str(before), str(after)), **screen), as_json=json)
    return comparison.exit_code


def taken_away(run: Run) -> list[str]:
    """Return a note per remedy that the second run applied and withdrew again."""
    return [f"the second run withdrew {name}: {why}" for name, why in withdrawn(run.path).items()]


def unfinished(*runs: Run) -> list[str]:
    """Return a note per run that did not end well: its steps are compared as far as it came."""
    ends = [(name, ending(run.meta.get("exit"))) for name, run in zip(("first", "second"), runs, strict=True)]
    return [f"the {name} run did not end well, its steps are those before that: {end}" for name, end in ends if end]


def load_notes(first: Run, second: Run) -> list[str]:
    """Return a note where the runs had other cores or other load beside them, and what that alone would do."""
    before, after = HostLoad.from_facts(first.meta), HostLoad.from_facts(second.meta)
    if before is None or after is None or not (before.readings and after.readings):
        return []
    notes, edits = [], []
    if abs(after.cores_available - before.cores_available) > 0.01:
        notes.append(f"the second run could use {after.cores_available:g} cores, the first {before.cores_available:g}")
        edits.append(f"cores={after.cores_available:.4g}")
    if abs(after.other_cores - before.other_cores) >= LOAD_WORTH_NAMING:
        notes.append(
            f"other processes took {after.other_cores:.2f} cores beside the second run, "
            f"{before.other_cores:.2f} beside the first ({after.other_cores - before.other_cores:+.2f})"
        )
        edits.append(f"other={after.demand:.4g}")
    if not notes:
        return []
    try:
        predicted = Program.from_run(first).predict(edits)
    except HeadwayError as reason:
        return [f"{'; '.join(notes)}; what that alone would change cannot be replayed: {reason}"]
    change = predicted.step_s / predicted.base_step_s - 1
    slower = f"{format_fraction(abs(change))} {'longer' if change > 0 else 'shorter'}"
    effect = f"{format_seconds(predicted.step_s)} per step instead of {format_seconds(predicted.base_step_s)}, {slower}"
    return [f"{'; '.join(notes)}. With that alone the first run is predicted to take {effect}"]
