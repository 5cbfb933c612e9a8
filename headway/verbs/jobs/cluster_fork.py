"""`headway cluster fork`: how long jobs take with a copy of each on unlike devices, simulated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from headway.cluster.fork.answer import ForkAnswer, fork_answer, read_jobs, read_speeds
from headway.report.paper import ScreenOptions, add_row, draw, grid, paragraph, uncut
from headway.verbs.shared.output import emit


def fork(*, speeds: str, jobs: Path, slot_s: float = 0.0, slot_cost_s: float = 1.0, json: bool = False) -> int:
    """Simulate jobs that have a copy on each of several unlike devices, beside whole jobs under las.

    HadarE: in each slot the steps of a job are dealt to its copies by the speeds of their devices; at its end the
    copies become one state again. The fluid bound is all steps over the sum of all speeds. Nothing is run.

    Example: `headway cluster fork --speeds 4,2,1 --jobs jobs.json`

    Parameters
    ----------
    speeds
        Steps per second of each device, separated by commas; a device of 0 is left out.
    jobs
        JSON list of jobs, {"name": "a", "steps": 1000}, all there at the start.
    slot_s
        Longest time that copies train apart, in seconds; 0: 360, or 100 steps of the slowest device.
    slot_cost_s
        Seconds that a job pays in a slot in which it has several copies or starts again elsewhere.
    json
        Print one JSON object instead of text.
    """
    rates = read_speeds(speeds)
    for index, rate in enumerate(rates):
        if not rate:
            print(f"headway: device {index} does 0 steps/s and is left out", file=sys.stderr, flush=True)
    result = fork_answer(read_jobs(jobs), rates, slot_s=slot_s, slot_cost_s=slot_cost_s)
    emit(result, lambda screen: _screen(result, [rate for rate in rates if rate], screen), as_json=json)
    return 0


def _screen(result: ForkAnswer, rates: Sequence[float], screen: ScreenOptions) -> str:
    """Draw the three times, and a row per job."""
    totals = grid("left", "right", "right")
    add_row(totals, "all jobs done after", "seconds", "of las", style="dim")
    for name, key_s in (("copies", result["total_s"]), ("whole jobs, las", result["las_s"])):
        add_row(totals, name, f"{key_s:,.1f}", f"{key_s / result['las_s']:.2f}")
    add_row(
        totals, "no schedule sooner than", f"{result['bound_s']:,.1f}", f"{result['bound_s'] / result['las_s']:.2f}"
    )
    rows = grid("left", *["right"] * 6)
    add_row(rows, "job", "steps", "done, s", "las, s", "copies", "slots", "paid, s", style="dim")
    for row in result["rows"]:
        times = f"{row['end_s']:,.1f}", f"{row['las_end_s']:,.1f}"
        add_row(
            rows,
            row["name"],
            f"{row['steps']:,}",
            *times,
            f"{row['copies']}",
            f"{row['slots']}",
            f"{row['cost_s']:,.1f}",
        )
    note = "Simulated. Copies train apart between two averages of their states, which changes what is learned."
    head = Text(f"  {len(result['rows'])} jobs on {len(rates)} devices, {sum(rates):g} steps/s together")
    return draw([head, "", uncut(totals), "", uncut(rows), "", paragraph(note, style="dim")], **screen)
