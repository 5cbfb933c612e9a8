"""`headway report`: one self-contained HTML page of a run or a trace."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.core.files.safe_files import check_replaceable, file_in_folder
from headway.core.units import NS_PER_S, format_bytes
from headway.ledger.answers.compare import steps_per_s
from headway.ledger.buckets import BUCKETS
from headway.ledger.waited_for import waited_for
from headway.report.answers import created, facts_of
from headway.report.page.charts import HeatMap
from headway.report.page.html import ReportData, write_report
from headway.report.page.timeline import Timeline, rank_groups, timeline
from headway.sim.recorded.ideal import replayed_trace
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import BY_EVENTS
from headway.trace.recording.run_facts import RunFacts
from headway.trace.sync.clocks import on_common_clock
from headway.verbs.runs.why import heat_maps_of, why_object
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import OutPath, RunPath, newest_run
from headway.why.explanation import Explanation, explain, ideal_of
from headway.why.model_flops import ModelSpec

HEAT_BINS = 48
"""Columns of the heat map at most."""

WINDOW_STEPS = 6
"""Steps shown in the timeline."""

WAITS = ("comm.wait", "comm.collective", "comm.recv")
"""Rows in which a rank waits for others."""

Seconds = NDArray[np.float64]


def report(
    *source: RunPath, out: OutPath = Path("report.html"), steps: str | None = None, model: str | None = None,
    json: AsJson = False,
) -> int:  # fmt: skip
    """Write one HTML page that needs nothing else: ledger, causes, step times, timeline, predicted beside measured.

    Example: `headway report headway-runs/train-1 -o report.html`

    Args:
      source: A run folder (the newest one by default) or any trace.
      out: The page to write.
      steps: FIRST:END of the steps in the timeline; some in the middle by default.
      model: Shape of the model, for MFU, as `headway why --help` says.
    """
    if out.is_dir():
        raise InputError(f"{out} is a folder; a report is a file. Name one in it: -o {out / 'report.html'}")
    file_in_folder(out)
    check_replaceable(out, b"<!doctype html", "page")
    spec = None if model is None else ModelSpec.parse(model)
    explanation = explain(list(source) or [newest_run()])
    size = write_report(report_data(explanation, steps, spec), out)
    answer = {"schema": "headway.report/1", "path": str(out), "bytes": size}
    return emit(answer, lambda _: f"{out}: {format_bytes(size)}, self-contained, works offline", as_json=json)


def report_data(explanation: Explanation, steps: str | None = None, model: ModelSpec | None = None) -> ReportData:
    """Gather what the page shows."""
    ledger = explanation.ledger
    ranks, durations, own = step_durations(explanation.parts)
    window, ideal = timelines(explanation, steps)
    meta, facts = (explanation.run.meta, explanation.run.facts) if explanation.run else ({}, RunFacts())
    why = why_object(explanation, model)
    clock = "" if ledger.facts.device_type == "cpu" else "host"
    clock = clock if ledger.spans.keys().isdisjoint(BY_EVENTS) else "device"
    return ReportData(
        title=explanation.source,
        why=why,
        run=run_object(explanation) if explanation.run else None,
        plan=explanation.plan.to_json() if explanation.plan else None,
        step_s=durations,
        step_clock=clock,
        marks=marks_of(explanation.parts),
        ranks=ranks,
        bucket_s={bucket: ledger.step_ns[code] / NS_PER_S for code, bucket in enumerate(BUCKETS)},
        rank_ledger={
            rank: {bucket: amount / NS_PER_S for bucket, amount in row.items()}
            for rank, row in ledger.by_rank_ns.items()
        },
        timeline=window,
        ideal=ideal,
        heat_maps=[*heat_maps(ranks, own), *heat_maps_of(explanation, why)],
        facts=facts_of(meta, explanation.parts.tables),
        host=facts.host_series,
        devices=facts.device_series,
        memory=facts.memory,
        created=created(facts),
    )


def step_durations(parts: Parts) -> tuple[list[int], Seconds | None, Seconds | None]:
    """Return ranks, the [ranks, steps] seconds of their steps, and those without waits for other ranks.

    The first are the device's where its events tell: from the end of its work for a step to that for the next. The
    others are the host's, which may run ahead. NaN where a rank recorded none; None where no rank did. One rank is read
    at a time.
    """
    size = int(known_steps(parts).max(initial=-1)) + 1
    ranks: list[int] = []
    whole = np.full((len(parts.numbers), size), np.nan)
    own = whole.copy()
    for rank in parts.numbers:
        part = parts.read({"rank": (rank, rank + 1)}, ["step", "name", "start_ns", "duration_ns"])
        steps = part.where(part.named("step")).events
        if len(steps["step"]):
            waits = part.where(part.named(*WAITS) & (part.events["step"] >= 0)).events
            row = len(ranks)
            pauses = part.where(part.named("pause") & (part.events["step"] >= 0)).events
            whole[row, steps["step"]] = steps["duration_ns"] / NS_PER_S
            whole[row] -= np.bincount(pauses["step"], pauses["duration_ns"] / NS_PER_S, size)
            own[row] = whole[row] - np.bincount(waits["step"], waits["duration_ns"] / NS_PER_S, size)
            worked = part.where(part.named(*BY_EVENTS) & (part.events["step"] >= 0)).events
            if len(worked["step"]):
                ends = np.full(size, -1)
                np.maximum.at(ends, worked["step"], worked["start_ns"] + worked["duration_ns"])
                whole[row, 1:] = np.where((ends[1:] >= 0) & (ends[:-1] >= 0), np.diff(ends) / NS_PER_S, np.nan)
                whole[row] -= np.bincount(pauses["step"], pauses["duration_ns"] / NS_PER_S, size)
            ranks.append(rank)
    if not ranks:
        return [], None, None
    end = int(np.flatnonzero(~np.isnan(whole[: len(ranks)]).all(axis=0))[-1]) + 1
    return ranks, whole[: len(ranks), :end], own[: len(ranks), :end]


def marks_of(parts: Parts) -> dict[str, list[int]]:
    """Return the steps in which epochs began and evaluations took place on the first rank.

    Without marks of the script's own, an epoch is a new iterator over a loader outside of evaluations.
    """
    if not len(parts.numbers):
        return {}
    first = parts.read({"rank": (parts.numbers[0], parts.numbers[0] + 1)}, ["step", "name"])

    def steps(*names: str) -> list[int]:
        found = first.where(first.named(*names)).events["step"]
        return [int(step) for step in np.unique(found[found >= 0])]

    evaluated = steps("eval", "eval.mark")
    begun = steps("epoch") or sorted(set(steps("input.iter")) - set(evaluated))
    return {"epoch": begun, "evaluation": evaluated}


def timelines(explanation: Explanation, steps: str | None) -> tuple[Timeline | None, Timeline | None]:
    """Return the window of the recorded trace, and beside it the ideal one where there is one."""
    from headway.verbs.runs.trace import interval

    parts, program = explanation.parts, explanation.program
    known = known_steps(parts)
    if steps is not None:
        first, end = interval(steps, "step")
        chosen = [step for step in known.tolist() if first <= step < end]
        if not chosen:
            held = f"steps {known[0]} to {known[-1]}" if len(known) else "no step"
            raise InputError(f"--steps is {steps}; {explanation.source} holds {held}. Choose steps among them.")
    else:
        size = 1 if explanation.straggler else WINDOW_STEPS
        replayable = known if program is None else known[known < program.recording.num_steps]
        middle = max(0, len(replayable) // 2 - size // 2)
        chosen = replayable[middle : middle + size].tolist()
    if not chosen:
        return (timeline(explanation.trace), None) if len(parts) else (None, None)
    if explanation.straggler:  # times of such a trace count from the start of their step: other steps would overlap
        ideal = ideal_of(explanation.trace, explanation.straggler, None)
        trace, ideal = explanation.trace.select(steps=chosen), None if ideal is None else ideal.select(steps=chosen)
    else:
        trace, ideal = window_of(parts, chosen), None if program is None else replayed_trace(program)
    window = timeline(trace, steps=chosen, links=links_of(trace, chosen), groups=rank_groups(parts.tables))
    replayed = ideal is not None and bool(np.isin(ideal.events["step"], chosen).any())
    return window, timeline(ideal, steps=chosen, ranks=window.ranks) if ideal is not None and replayed else None


def known_steps(parts: Parts) -> NDArray[np.int64]:
    """Return the numbers of the steps that any rank recorded something of, in order."""
    found = [np.unique(parts.read({"rank": (rank, rank + 1)}, ["step"]).events["step"]) for rank in parts.numbers]
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *found]))
    return np.asarray(steps[steps >= 0])


def window_of(parts: Parts, steps: Sequence[int]) -> Trace:
    """Return all that overlaps `steps` on any rank, on one clock; no more than one rank is read whole."""
    inside = on_common_clock(parts.read({"step": (min(steps), max(steps) + 1)}))
    low, high = inside.select(steps=steps).span_ns

    def overlaps(part: Trace) -> NDArray[np.bool_]:
        events = on_common_clock(part).events
        return np.asarray((events["start_ns"] < high) & (events["start_ns"] + events["duration_ns"] > low))

    return parts.where(overlaps)


def links_of(trace: Trace, steps: list[int]) -> NDArray[np.int64]:
    """Return which rows of these steps waited for which, as pairs of rows of `trace`."""
    row = np.flatnonzero(np.isin(trace.events["step"], steps))
    return np.asarray(row[waited_for(trace.where(row))])


def heat_maps(ranks: list[int], own_s: Seconds | None) -> list[HeatMap]:
    """Return each rank's own time per step (waits for other ranks taken out) against the median rank's, in bins."""
    if own_s is None or len(ranks) < 2 or not own_s.shape[1]:
        return []
    edges = np.unique(np.linspace(0, own_s.shape[1], min(HEAT_BINS, own_s.shape[1]) + 1).astype(int))
    with warnings.catch_warnings():  # a bin in which no rank recorded a step is NaN, and drawn as empty
        warnings.simplefilter("ignore", RuntimeWarning)
        binned = np.stack([np.nanmean(own_s[:, a:b], axis=1) for a, b in pairwise(edges)], axis=1)
        slowdown = binned / np.nanmedian(binned, axis=0)
    title = "Own time of each rank against the median rank, waits for others taken out"
    names = tuple(map(str, ranks)), tuple(map(str, edges[:-1]))
    return [HeatMap(title, slowdown, "rank", "from step", *names)]


def run_object(explanation: Explanation) -> dict[str, object]:
    """Return the `headway.run/1` object of a recorded run, from its run.json and its ledger."""
    assert explanation.run is not None, "only a recorded run has a run object"
    meta = explanation.run.meta
    applied = meta.get("applied")
    return {
        "schema": "headway.run/1", "run": str(explanation.run.path), "exit": meta.get("exit") or {},
        "goodput": explanation.ledger.goodput if explanation.ledger.tells_goodput else None,
        "steps_per_s": steps_per_s(explanation.ledger), "baseline": meta.get("baseline"),
        "applied": [row for row in (applied if isinstance(applied, list) else []) if isinstance(row, dict)],
    }  # fmt: skip
