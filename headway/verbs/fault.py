"""`headway fault incidents`: the failures of a run, and what each cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from headway.core.errors import HeadwayError
from headway.core.units import format_fraction, format_seconds
from headway.fault.incident import SCHEMA, Incident, read_incidents
from headway.ledger.metrics import ettr_of_steps
from headway.report.paper import ScreenOptions, add_row, draw, grid
from headway.trace.runs import Run
from headway.verbs.output import emit
from headway.verbs.source import run_at


def incidents(run: Path | None = None, /, *, json: bool = False) -> int:
    """List the failures of a run: who failed, what was done, how long each phase took, what was lost.

    Example: `headway fault incidents headway-runs/train-1`

    Parameters
    ----------
    run
        A run folder; the newest one by default.
    json
        Print one JSON object (schema headway.incidents/1) instead of text.
    """
    recorded = run_at(run)
    answer = incidents_of(recorded)
    emit(answer, lambda screen: _screen(answer, str(recorded.path), screen), as_json=json)
    return 0


def incidents_of(run: Run) -> dict[str, Any]:
    """Return the object that `--json` prints; `ettr` is None where the run's steps are not known."""
    rows = read_incidents(run.path)
    try:
        ettr = measured_ettr(run)
    except HeadwayError:
        ettr = None
    return {"schema": SCHEMA, "incidents": [row_of(row) for row in rows], "ettr": ettr}


def row_of(incident: Incident) -> dict[str, Any]:
    """Return an incident as JSON shows it, with the seconds of its phases."""
    row: dict[str, Any] = msgspec.to_builtins(incident)
    return {**row, "phases_s": incident.phases_s(), "downtime_s": incident.downtime_s}


def measured_ettr(run: Run) -> float | None:
    """Return the wall time of the steps that were kept / the wall time of the run; None without a step."""
    from headway.ledger.attempts import book_run

    booked = book_run(run.attempts(), run.meta)
    kept_ns = sum(int(one.step_wall_ns[: one.kept_steps].sum()) for one in booked.attempts)
    wall_ns = booked.wall[1] - booked.wall[0]
    return ettr_of_steps(kept_ns / 1e9, wall_s=wall_ns / 1e9) if wall_ns and kept_ns else None


def _screen(answer: dict[str, Any], source: str, screen: ScreenOptions) -> str:
    rows = answer["incidents"]
    told = "nothing failed" if not rows else f"{len(rows)} failure{'s' if len(rows) > 1 else ''}"
    ettr = answer["ettr"]
    share = f" · ETTR {format_fraction(ettr)}" if ettr is not None else ""
    parts: list[Any] = [Text(f"headway fault incidents   {source}"), Text(f"{told}{share}\n")]
    for row in rows:
        blamed = row["suspects"]
        who = ", ".join(f"rank {rank}" for rank in blamed["ranks"]) or "nobody in particular"
        parts.append(Text(f"{row['number'] + 1}  attempt {row['attempt']}, step {row['step']}: {row['class']}, {who}"))
        table = grid("left", "fold", indent=3)
        for name, value in _facts(row):
            add_row(table, name, value)
        parts += [table, Text("")]
    return draw(parts, **screen)


def _facts(row: dict[str, Any]) -> list[tuple[str, str]]:
    phases = " · ".join(f"{name} {format_seconds(seconds)}" for name, seconds in row["phases_s"].items())
    start = "warm" if row["warm"] else f"cold: {row['cold_reason']}" if row["cold_reason"] else "cold"
    facts = [("seen", row["evidence"]), ("action", f"{row['action']}: {row['reason']}"), ("phases", phases)]
    if row["first_step_ns"] is not None:
        lost = "" if row["lost_steps"] is None else f", {row['lost_steps']} steps done again"
        facts += [("start", start), ("state", f"from {row['restored']}{lost}")]
        facts.append(("cost", f"{format_seconds(row['downtime_s'])} from detection to the first step of all ranks"))
    return [(name, value) for name, value in facts if value]
