"""`headway compare`: the second run against the first, as a gate for continuous integration."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np
from cyclopts import Parameter

from headway.cluster.adaptive.recorded import BatchesCompared, learned
from headway.ledger.answers.compare import SCHEMA, by_useful_examples, unlike_loads
from headway.ledger.answers.compare import compare as compare_ledgers
from headway.ledger.answers.ledger import Ledger
from headway.report.paper import draw, paragraph
from headway.report.screens import WHOLE_PLAN, render_compare
from headway.trace.recording.run_facts import outcomes_of
from headway.trace.recording.runs import Run
from headway.verbs.jobs.fault import ettr_beside, ettr_sentence
from headway.verbs.models.cost import judged, sentence
from headway.verbs.models.model_grow import growth_sentence, judged_growth, losses_of, trained_parameters
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import RunPath, fraction, run_at
from headway.why.fixes import withdrawn
from headway.why.verdict import ending

SENT_LOSSY = ("comm.compress", "comm.loose")
"""Remedies that change what is learned: the loss of their runs is shown beside the speed."""


def compare(
    before: RunPath, after: RunPath, /, *,
    threshold: Annotated[float, Parameter(alias="--gate", converter=fraction)] = 0.05, whole: bool = False,
    json: AsJson = False,
) -> int:  # fmt: skip
    """Compare two runs of one job, bucket by bucket; exit 3 when the second surely lost more than the threshold.

    Judged are the steps after the first one: a bucket that grew by more than
    threshold x step time of the first run, or steps per second that fell by
    more than the threshold, is a regression where the spread of the steps
    leaves no doubt. What other load on the host explains is inconclusive.
    Start-up, restarts and rework come once per run: they are listed, and noted
    when they grew.

    Example: `headway compare headway-runs/train-1 headway-runs/train-2 --threshold 0.1`

    Args:
      before: The run that sets the standard.
      after: The run that is judged.
      threshold: Share of the first run's step time that may be lost: 5% or 0.05.
      whole:
        Judge whole runs: what lies before, between and after the steps counts too, and start-up, restarts and rework
        are regressions when they grew by more than threshold x wall of the first run.
    """
    runs = run_at(before), run_at(after)
    loads = runs[0].facts.host_load, runs[1].facts.host_load
    ledgers = Ledger.of(runs[0]), Ledger.of(runs[1])
    predicted = judged(*runs, ledgers[1])
    if predicted is not None and not ledgers[0].steps:  # the prediction is all there is to compare with
        text = sentence(predicted)
        only = {"schema": SCHEMA, "predicted": predicted, "notes": [text], "exit_code": 0}
        return emit(only, lambda screen: draw([paragraph(text[0].upper() + text[1:] + ".")], **screen), as_json=json)
    sizes = (trained_parameters(runs[0]), trained_parameters(runs[1]))
    comparison = compare_ledgers(*ledgers, threshold, whole=whole, loads=loads, parameters=sizes)
    notes = [*unfinished(*runs), *taken_away(runs[1]), *unapplied(runs[1]), *comparison.notes]
    notes += ["" if comparison.inconclusive else unlike_loads(*loads)[0], *drifts(runs[1])]
    other, ettr, grown = learned(*runs), ettr_beside(*runs), judged_growth(*runs, int(ledgers[1].steps))
    if other is not None and other.useful_examples_per_s[0] > 0:
        comparison = by_useful_examples(comparison, other.useful_examples_per_s)
    notes += ["" if other is None else other.sentence, *losses_beside(*runs, other)]
    notes += ["" if ettr is None else ettr_sentence(ettr), "" if predicted is None else sentence(predicted)]
    notes += ["" if grown is None else growth_sentence(grown)]
    comparison = replace(comparison, notes=tuple(filter(None, notes)))
    answer = {**comparison.to_json(), "host_load": [msgspec.to_builtins(load) for load in loads], "ettr": ettr}
    answer["predicted"], answer["growth"] = predicted, grown
    emit(answer, lambda screen: render_compare(comparison, names=(str(before), str(after)), **screen), as_json=json)
    return comparison.exit_code


def losses_beside(before: Run, after: Run, batches: BatchesCompared | None) -> list[str]:
    """Return a note of both runs' losses at equal progress, where batches differ or gradients were sent with a loss.

    Progress is examples where the batches are known, else steps; the median of a tenth of the shorter run's losses.
    """
    lossy = not after.facts.in_force.keys().isdisjoint(SENT_LOSSY)
    points = losses_of(before), losses_of(after)
    if not (batches is not None or lossy) or not all(points):
        return []
    sizes = batches.batch_size if batches is not None and batches.batch_size[0] else (1, 1)
    end = min(rows[-1][0] * size for rows, size in zip(points, sizes, strict=True))
    ends = [
        [loss for step, loss in rows if 0.9 * end <= step * size <= end]
        for rows, size in zip(points, sizes, strict=True)
    ]
    if not all(ends):
        return []
    first, second = (float(np.median(losses)) for losses in ends)
    what = f"{end:,} examples" if batches is not None and batches.batch_size[0] else f"{end:,} steps"
    return [f"loss after {what}: {first:.4g} -> {second:.4g} (median of the last tenth)"]


def taken_away(run: Run) -> list[str]:
    """Return a note per remedy that the second run applied and withdrew again."""
    return [f"the second run withdrew {name}: {why}" for name, why in withdrawn(outcomes_of(run.path)).items()]


def unapplied(run: Run) -> list[str]:
    """Return a note where the second run was given a plan and applied nothing of it."""
    rows = [row for row in run.facts.applied if row.name != WHOLE_PLAN]
    if not rows or not all(row.reason_not_applied for row in rows):
        return []
    names = ", ".join(row.name for row in rows)
    return [f"the second run applied nothing of its plan ({names}): a difference is no gain of that"]


def drifts(run: Run) -> list[str]:
    """Return a note of loosely synchronised replicas: the setting at the end, and what models lost at each travel."""
    rows = [row.facts for row in run.facts.applied if row.name == "comm.loose" and not row.reason_not_applied]
    facts = (rows[0] if rows else None) or {}
    if not facts:
        return []
    losses = ", ".join(f"{travel['accuracy_loss']:.2f} ({travel['theta']:g})" for travel in facts.get("travels", []))
    travels = f"accuracy lost per travel, and setting: {losses}" if losses else "no model has travelled"
    return [f"replicas of the second run were loosely synchronised, {facts['rule']} at the end; {travels}"]


def unfinished(*runs: Run) -> list[str]:
    """Return a note per run that did not end well: its steps are compared as far as it came."""
    ends = [(name, ending(run.facts.exit)) for name, run in zip(("first", "second"), runs, strict=True)]
    return [f"the {name} run did not end well, its steps are those before that: {end}" for name, end in ends if end]
