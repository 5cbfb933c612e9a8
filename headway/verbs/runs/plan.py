"""`headway plan`: proposals of every room, ranked; the best set, written as a file for `headway run --apply`.

`headway whatif`: predict the step time after edits, by replaying the recorded run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.catalog import causes_of
from headway.core.errors import BarMissedError, InputError
from headway.core.files.planfile import granted
from headway.core.files.safe_files import file_in_folder
from headway.ledger.cause import Cause
from headway.ledger.runs.recorded import evaluation_loaders
from headway.parallel.elastic_plan import loss_costs
from headway.plan.planner import SCHEMA
from headway.plan.setup import step_seconds
from headway.report.screens import render_plan, render_whatif
from headway.report.terminal import render_hints
from headway.sim.recorded.program import Program
from headway.sim.whatif import EDITS
from headway.verbs.models.cost import TABLE, in_words, learned_step, save
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import NewestRun, OutPath, Settings, run_at
from headway.why.explanation import explain_run
from headway.why.fixes import chosen_terms, loader_rows, run_command


def plan(
    run: NewestRun = None, /, *, out: OutPath | None = None, allow: str | None = None, steps: int | None = None,
    all: bool = False, model: str | None = None, batch: int = 0, costs: Path = TABLE, threads: int = 1,
    json: bool = False,
) -> int:  # fmt: skip
    """Propose remedies for RUN, predict each and the best set of them, and write the plan file.

    Example: `headway plan headway-runs/train-1 -o plan.json`

    Args:
      out: The plan file; RUN/plan.json by default, RUN/next-plan.json where RUN applied a plan, which stays.
      allow:
        What may change results: 'same-distribution' (other random draws of it), 'data.threads' (threads that share the
        dataset's objects with the loop), 'lossy' (approximations). Several are separated by commas.
      steps:
        Length of the job to plan for, in optimizer steps: what costs more at the start than it wins in so many is left
        out. As many as were recorded by default.
      all: Show too what no cause of this run asks for, and what headway cannot apply.
      model:
        MODULE:BUILD as for `headway cost predict`: where the run recorded too few steps to predict from, the time of
        a step is learned from --costs.
      batch: What BUILD is called with.
      costs: The table that `headway cost calibrate` wrote on this host.
      threads: Threads of one operator, as calibrated.
      json: Print one JSON object (schema headway.plan/1) instead of text.
    """
    grants = granted(allow)
    if out is not None:
        file_in_folder(out)  # before the work of seconds
    recorded = run_at(run)
    source = str(recorded.path)
    explanation = explain_run(recorded, source, allow=grants, steps=steps)
    ledger, made, why = explanation.ledger, explanation.plan, explanation.to_json()
    if made is None:  # no prediction can be trusted; what the causes say to do stands all the same
        text = explanation.notes[0]
        hints = {"schema": SCHEMA, "proposals": [], "chosen": [], "reason": text, "hints": why["causes"]}
        if model is not None:
            step = learned_step(model, batch, costs, threads)
            save(step, recorded.path)
            hints |= {"learned": msgspec.to_builtins(step), "note": in_words(step)}
            text = f"{text} {hints['note']}"
        hints["verdict"] = why["verdict"]
        emit(hints, lambda screen: render_hints(why, reason=text, source=source, **screen), as_json=json)
        return BarMissedError.exit_code
    loaders = recorded.facts.effective_loaders
    rows = loader_rows(made.proposals, made.refused, made.chosen, loaders, evaluation=evaluation_loaders(ledger))
    path = out or recorded.path / ("next-plan.json" if recorded.facts.plan else "plan.json")
    made.save(path, baseline=str(recorded.path.resolve()), step_s=step_seconds(recorded.parts))
    by_hand = None if recorded.facts.launched else chosen_terms(made.proposals, made.chosen)
    answer = {**made.to_json(), "verdict": why["verdict"], "loaders": msgspec.to_builtins(rows)}
    answer |= {"path": str(path), "in_script": by_hand, "failures": loss_costs(explanation.program)}
    if model is not None:  # a recording knows better than a table
        answer["note"] = " ".join([answer["note"], f"Step times are those recorded; {costs} is not used."]).strip()
    apply = run_command(recorded.facts, "--apply", str(path))
    shown = answer if all else asked_for(answer, explanation.causes)
    return emit(answer, lambda screen: render_plan(shown, source=source, apply=apply, **screen), as_json=json)


def asked_for(answer: Mapping[str, Any], causes: Sequence[Cause]) -> dict[str, object]:
    """Return the plan without what no cause of the run asks for, and how much that is.

    What headway cannot apply is for a run without anything to apply. What the user can change stands: a remedy against
    a cause of this run that was refused says why.
    """
    found = {cause.cause for cause in causes}
    protecting = {row["name"] for row in answer["proposals"] if row["protects"]}

    def matters(row: Mapping[str, Any]) -> bool:
        name = row["name"]
        return name in answer["chosen"] or name in protecting or bool(found & set(causes_of(name)))

    proposals = [row for row in answer["proposals"] if not answer["chosen"] or (row["applies"] and matters(row))]
    refused = [row for row in answer["refused"] if matters(row)]
    hidden = len(answer["proposals"]) + len(answer["refused"]) - len(proposals) - len(refused)
    return {**answer, "proposals": proposals, "refused": refused, "hidden": hidden}


def whatif(run: NewestRun = None, /, *, set_: Settings = None, json: AsJson = False) -> int:
    """Predict the step time of RUN after edits; several edits are replayed together.

    Example: `headway whatif headway-runs/train-1 --set input=instant --set workers=4`

    Args:
      set_:
        EDIT, as target=value. A factor on durations, none, instant or 0.5x: straggler, input (input.fetch, input.prep,
        input.transfer), comm, checkpoint, host (host.gc, host.logging, script), op:GLOB. A speed, 2x: bandwidth,
        storage (or shared, parallel), accelerator. The loader: workers=4, threads=true, prefetch=4,
        persistent=true, watched=false, cache_fraction=0.5, cache_cold=1, cache_shards=2, cores=8, other=0.5,
        compute_threads=1. The rest: bucket_mb=25 (or default), compress=topk:0.01, logging=buffered, gc=frozen:100. A
        pipeline: schedule=1f1b, bubble=none, stage:NUMBER=0.5x.
    """
    if not set_:
        raise InputError(f"no edit was given. Pass --set target=value with one of: {', '.join(sorted(EDITS))}.")
    found = Program.from_run(run_at(run)).predict(set_)
    return emit(found.to_json(), lambda screen: render_whatif(found, **screen), as_json=json)
