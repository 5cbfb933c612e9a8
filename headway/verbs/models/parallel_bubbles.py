"""`headway parallel bubbles`, `headway parallel fill`: what a pipeline waits, and chunks of other jobs in its gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.core.units import NS_PER_S, format_fraction, format_seconds, plural
from headway.parallel.advise import RecordedBubbles
from headway.parallel.fill.gaps import LARGE, lent
from headway.parallel.fill.queue import FillFile, PlacedFill, place_jobs
from headway.plan.fill_scores import SCORES
from headway.report.page.plots import Gantt, GanttSpan, picture_page, write_page
from headway.report.paper import ScreenOptions, add_row, draw, grid, headed, paragraph, title, uncut
from headway.sim.pipeline.actions import OPS
from headway.sim.recorded.program import Program
from headway.sim.recorded.recording import Recording
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import NewestRun, OutPath, RunPath, run_at

Facts = dict[str, Any]
"""An answer, as it is printed as JSON."""

WORDS = {
    "transfers": "messages between stages",
    "unequal": "stages of unequal time",
    "order": "the order of forwards and backwards",
    "work": "the mean stage's work, and all else",
}
"""Reason -> how it is printed."""

OP_WORDS = {
    "F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights", "R": "forward again",
}  # fmt: skip
"""Computation -> its name in a picture."""


def pipeline_gantt(title: str, lanes: Sequence[str], rows: NDArray[np.int64]) -> Gantt:
    """Return the chart of `n` computations of a pipeline.

    `rows` [5, n]: lane, a code of `COMPUTE`, microbatch, start and end in ns from 0.
    """
    spans = [
        GanttSpan(lane, start_ns / NS_PER_S, end_ns / NS_PER_S, OPS[op], str(microbatch))
        for lane, op, microbatch, start_ns, end_ns in rows.T.tolist()
    ]
    return Gantt(title, lanes, spans, float(rows[-1].max()) / NS_PER_S, OP_WORDS)


def bubbles(run: NewestRun = None, /, *, out: OutPath | None = None, json: bool = False) -> int:
    """Show what the stages of a recorded pipeline wait for each other, and why.

    Example: `headway parallel bubbles headway-runs/train-1`

    Args:
      out: Also write a page of a recorded step, what each stage computed when: -o page.html.
      json: Print one JSON object (schema headway.bubbles/1) instead of text.
    """
    recorded = run_at(run)
    program = Program.from_run(recorded)
    found = RecordedBubbles.of(recorded, program)
    answer = {
        "schema": "headway.bubbles/1", "step_s": found.step_s, "orders": list(found.orders),
        "kinds_s": {kind: list(values) for kind, values in found.kinds_s.items()}, "reasons_s": found.reasons_s,
    }  # fmt: skip
    if out is not None:
        chart = recorded_step(program.recording)
        answer["page"] = write_page(out, picture_page(str(recorded.path), "a step of the pipeline", [chart]))
    return emit(answer, lambda screen: _screen(answer, str(recorded.path), screen), as_json=json)


def recorded_step(recording: Recording) -> Gantt:
    """Return the chart of the pass of median length, its first computation at 0; blank is what a stage waited."""
    columns = []
    for lane, work in zip(recording.lanes, recording.stages, strict=True):
        if work is None:
            continue
        inside = work.part >= 0
        start_ns = np.full(work.op.size, np.iinfo(np.int64).max)
        end_ns = np.zeros(work.op.size, np.int64)
        np.minimum.at(start_ns, work.part[inside], lane.start_ns[inside])
        np.maximum.at(end_ns, work.part[inside], (lane.start_ns + lane.duration_ns)[inside])
        columns.append(np.stack([work.stage, work.op, work.microbatch, work.turn, start_ns, end_ns])[:, end_ns > 0])
    rows = np.concatenate(columns, axis=1)
    turn, start_ns, end_ns = rows[3:]
    turns = np.unique(turn[turn > 0]) if turn.max() > 0 else np.zeros(1, np.int64)
    lengths = [end_ns[turn == number].max() - start_ns[turn == number].min() for number in turns.tolist()]
    number = int(turns[np.argsort(lengths)[len(lengths) // 2]])
    rows = rows[:, turn == number]
    rows[4:] -= rows[4].min()
    title = f"Pass {number} as it was recorded, the one of median length: a row per stage, microbatches by number"
    lanes = [f"stage {stage}" for stage in range(int(rows[0].max()) + 1)]
    return pipeline_gantt(title, lanes, np.delete(rows, 3, axis=0))


def _screen(answer: Facts, source: str, screen: ScreenOptions) -> str:
    step_s, kinds = answer["step_s"], answer["kinds_s"]
    waits = headed("stage", *(kind.replace("_", " ") for kind in kinds), "of a step")
    for stage in range(len(answer["orders"])):
        own = [values[stage] for values in kinds.values()]
        add_row(waits, str(stage), *map(format_seconds, own), format_fraction(sum(own) / step_s))
    why = grid("right", "right", "left")
    for reason, seconds in answer["reasons_s"].items():
        add_row(why, format_seconds(seconds), format_fraction(seconds / step_s), WORDS[reason])
    listing = grid("left", "left")
    for stage, order in enumerate(answer["orders"]):
        add_row(listing, str(stage), order)
    head = title("headway parallel bubbles", f"{source} · {format_seconds(step_s)} per step", width=screen["width"])
    above = paragraph("Waits for other stages, per step")
    below = paragraph("What a step is made of: replayed without one after another")
    return draw([head, Text(), above, waits, Text(), below, why, Text(), uncut(listing)], **screen)


MOST_RANKS = 16
"""Ranks that are started here at most."""


def fill(
    *, jobs: Path, run: RunPath | None = None, schedule: str | None = None, score: str = "shortest",
    simulate: bool = False, blocks: int = 4, json: AsJson = False,
) -> int:  # fmt: skip
    """Run other jobs in the two large gaps of each pipeline stage (PipeFill).

    The file has the main job's stages, microbatches and times, and the fill jobs' chunks with their times and memory;
    docs/systems/parallel.md says how. Jobs are placed by the score. Then a pipeline whose stages sleep for these times
    runs here with a fill process beside each rank, steps with and without filling in turn: `used_fraction` is the share
    of the large gaps in which chunks ran, `main_slowdown` what the pipeline lost. Chunks without code of their own
    sleep too. With --simulate nothing runs: `used_fraction` is what was planned, and `main_slowdown` is 0, because what
    is planned ends inside the gaps.

    Example: `headway parallel fill --jobs jobs.json --simulate`

    Args:
      jobs: A JSON file: the main job and the fill jobs.
      run:
        A recorded run of a pipeline: its gaps are planned for, instead of those of the file's main job. Nothing runs.
      schedule: The main job's schedule, instead of that in the file.
      score: Which job goes first: shortest, makespan or deadline.
      simulate: Plan only.
      blocks: Blocks of 4 steps that are run with filling, and as many without.
    """
    pick(SCORES, score, "score")
    if blocks < 1:
        raise InputError(f"--blocks is {blocks}; give at least 1.")
    file = FillFile.read(jobs)
    if schedule is not None:
        file = file.under(schedule)
    step_ns, gaps = file.gaps(None if run is None else run_at(run))
    stages = file.main.stages if run is None else max((gap.rank for gap in gaps), default=-1) + 1
    simulate = simulate or run is not None
    placed = place_jobs(file.jobs, lent(gaps), file.main.free(), step_ns, score=score)
    large = [sum(gap.duration_ns for gap in gaps if gap.rank == r and gap.kind in LARGE) for r in range(stages)]
    idle_ns = sum(gap.duration_ns for gap in gaps)
    rows = [_row(r, large[r], [entry for entry in placed if entry.rank == r]) for r in range(stages)]
    used_ns = sum(row["planned_used_ns"] for row in rows)
    # What is planned ends inside the gaps: the step is as long as before.
    facts: Facts = {
        "schema": "headway.parallel.fill/1", "measured": not simulate,
        "used_fraction": used_ns / sum(large) if sum(large) else 0.0, "main_slowdown": 0.0, "step_ns": step_ns,
        "bubble_fraction": idle_ns / (step_ns * stages),
        "extra_work_fraction": used_ns / (step_ns * stages - idle_ns), "rows": rows,
    }  # fmt: skip
    if not simulate:
        if file.main.stages > MOST_RANKS:
            processes = f"{file.main.stages} stages would be as many processes here"
            raise InputError(f"{processes}; give at most {MOST_RANKS}, or --simulate.")
        from headway.parallel.fill.torch_rehearsal import measure  # torch

        jobs_of = [[entry.job for entry in placed if entry.rank == r] for r in range(file.main.stages)]
        measured = measure(file, jobs_of, blocks)
        facts |= {"used_fraction": measured.used_fraction, "main_slowdown": measured.main_slowdown}
        for row, rank in zip(rows, measured.ranks, strict=True):
            row |= {
                "measured_large_ns": rank.large_ns, "measured_used_ns": rank.used_ns, "late_ns": rank.late_ns,
                "chunks": rank.chunks, "ended": rank.ended,
            }  # fmt: skip
    return emit(facts, lambda screen: _fill_screen(facts, screen), as_json=json)


def _row(rank: int, large_ns: int, placed: Sequence[PlacedFill]) -> Facts:
    """Return a rank's gaps of one step, what its first job uses of them, and its jobs."""
    first = placed[0].fill if placed else None
    jobs = [
        {
            "name": entry.job, "configuration": entry.fill.configuration, "start_s": entry.start_s,
            "end_s": None if math.isinf(entry.end_s) else entry.end_s,
        }
        for entry in placed
    ]  # fmt: skip
    return {
        "rank": rank, "large_ns": large_ns, "planned_used_ns": first.used_ns if first else 0.0,
        "samples_per_step": first.samples if first else 0.0, "jobs": jobs,
    }  # fmt: skip


def _fill_screen(facts: Facts, screen: ScreenOptions) -> str:
    table = headed("rank", "large gaps", "planned", "measured", "jobs", align="right right right right left")
    for row in facts["rows"]:
        gaps = row["large_ns"] / NS_PER_S
        planned = format_fraction(row["planned_used_ns"] / row["large_ns"]) if row["large_ns"] else "-"
        lent_large_ns = row.get("measured_large_ns")
        used = format_fraction(row["measured_used_ns"] / lent_large_ns) if lent_large_ns else "-"
        jobs = ", ".join(f"{job['name']} ({job['configuration']})" for job in row["jobs"]) or "none fits"
        add_row(table, str(row["rank"]), format_seconds(gaps), planned, used, jobs)
    verb = "Measured" if facts["measured"] else "Planned"
    text = (
        f"{verb}: {format_fraction(facts['used_fraction'])} of the large gaps are used, and the main job takes "
        f"{format_fraction(facts['main_slowdown'])} longer. {format_fraction(facts['bubble_fraction'])} of its "
        f"devices' time is bubble; the plan does {format_fraction(facts['extra_work_fraction'])} of its work in "
        f"addition, on {plural(len(facts['rows']), 'rank')}."
    )
    ended = [f"Rank {row['rank']}: {row['ended']}." for row in facts["rows"] if row.get("ended")]
    return draw([uncut(table), "", paragraph(" ".join([text, *ended]))], **screen)
