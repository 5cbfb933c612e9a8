"""`headway plan`: proposals of every room, ranked; the best set, written as a file for `headway run --apply`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headway.catalog import ADVISERS
from headway.core.errors import BarMissedError
from headway.core.planfile import granted
from headway.ledger.causes import find_causes
from headway.ledger.ledger import Ledger
from headway.ledger.loader_roles import evaluation_loaders
from headway.plan.loader_rows import loader_rows
from headway.plan.pace import step_seconds
from headway.plan.planner import SCHEMA, Plan
from headway.plan.setup import Setup
from headway.report.terminal import render_hints, render_plan
from headway.sim.program import Program
from headway.verbs.explain import is_launched
from headway.verbs.output import emit
from headway.verbs.script_terms import chosen_terms
from headway.verbs.source import run_at


def plan(
    run: Path | None = None,
    /,
    *,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    allow: str | None = None,
    json: bool = False,
) -> int:
    """Propose remedies for RUN, predict each and the best set of them, and write the plan file.

    Example: `headway plan headway-runs/train-1 -o plan.json`

    Parameters
    ----------
    run
        A run folder; the newest one by default.
    out
        The plan file; RUN/plan.json by default, RUN/next-plan.json where RUN applied a plan, which stays.
    allow
        'result-equivalent' admits remedies that change random draws, but no distribution; 'lossy' those that
        approximate. Several are separated by commas.
    json
        Print one JSON object (schema headway.plan/1) instead of text.
    """
    grants = granted(allow)
    recorded = run_at(run)
    ledger, setup = Ledger.of(recorded), Setup.from_facts(recorded.meta, allow=grants)
    try:
        made = Plan.of(ledger, Program.from_run(recorded), setup, ADVISERS)
    except BarMissedError as reason:  # no prediction can be trusted; what the causes say to do stands all the same
        text, why = str(reason), ledger.to_json(causes=find_causes(ledger))
        hints = {"schema": SCHEMA, "proposals": [], "chosen": [], "reason": text, "hints": why["causes"]}
        emit(
            hints,
            lambda screen: render_hints(why, reason=text, source=str(recorded.path), **screen),
            as_json=json,
        )
        return BarMissedError.exit_code
    loaders = loader_rows(
        made.proposals, made.refused, made.chosen, setup.loaders, evaluation=evaluation_loaders(ledger)
    )
    path = out or recorded.path / ("next-plan.json" if recorded.meta.get("plan") else "plan.json")
    made.save(path, baseline=str(recorded.path.resolve()), step_s=step_seconds(recorded.parts))
    by_hand = None if is_launched(recorded.meta) else chosen_terms(made.proposals, made.chosen)
    answer = {**made.to_json(), "loaders": loaders, "path": str(path), "in_script": by_hand}
    emit(
        answer,
        lambda screen: render_plan(answer, source=str(recorded.path), plan_path=str(path), **screen),
        as_json=json,
    )
    return 0
