"""`headway trace`: convert, cut and describe traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway.core.errors import InputError
from headway.ledger.straggler import analyse
from headway.report.terminal import render_trace_info
from headway.sim.program import Program
from headway.trace import chrome
from headway.trace.formats import describe
from headway.trace.runs import Run, is_run
from headway.trace.trace import Trace
from headway.verbs.explain import ideal_of
from headway.verbs.output import emit


def import_(source: Path, target: Path, /, *, json: bool = False) -> int:
    """Convert SOURCE (Kineto or Chrome JSON, Flight Recorder dump, straggler Parquet, a run) to headway's Parquet.

    Example: `headway trace import profile.json.gz profile.parquet`

    Parameters
    ----------
    source
        Any trace headway reads; its content decides the format, not its name.
    target
        File to write; its suffix decides the format: .parquet, .straggler.parquet, .json or .json.gz.
    json
        Print one JSON object instead of text.
    """
    trace = Trace.open(source)
    trace.save(target)
    answer = {"schema": "headway.trace-import/1", "source": str(source), "target": str(target), "events": len(trace)}
    emit(answer, lambda _: f"{target}: {len(trace)} events from {source}", as_json=json)
    return 0


def export(
    source: Path,
    target: Path,
    /,
    *,
    steps: str | None = None,
    ranks: str | None = None,
    ideal: bool = False,
    json: bool = False,
) -> int:
    """Write a window of SOURCE for Perfetto (ui.perfetto.dev) or chrome://tracing.

    Example: `headway trace export headway-runs/train-1 window.json.gz --steps 100:110`

    Parameters
    ----------
    source
        A run folder or any trace.
    target
        .json or .json.gz to look at, .parquet to keep.
    steps
        FIRST:END, the end excluded; all steps by default.
    ranks
        FIRST:END, the end excluded; all ranks by default.
    ideal
        Put the same window, replayed without the losses, beside the real one (a run or an operation trace; .json only).
    json
        Print one JSON object instead of text.
    """
    whole = Trace.open(source)
    trace = window(whole, steps, ranks)
    if not len(trace):
        chosen = " and ".join(f"{name}s {text}" for name, text in (("step", steps), ("rank", ranks)) if text)
        raise InputError(
            f"no event of {source} lies in {chosen or 'it'}. `headway trace info {source}` lists its steps and ranks."
        )
    if ideal:
        if not target.name.endswith((".json", ".json.gz")):
            raise InputError(f"--ideal needs a timeline to stand beside, and {target} is none. End it with .json.gz.")
        chrome.write(trace, target, ideal=window(replayed(source, whole), steps, ranks))
    else:
        trace.save(target)
    answer = {"schema": "headway.trace-export/1", "target": str(target), "events": len(trace), "ideal": ideal}
    emit(answer, lambda _: f"{target}: {len(trace)} events", as_json=json)
    return 0


def window(trace: Trace, steps: str | None, ranks: str | None) -> Trace:
    """Return the events of these steps and ranks, both FIRST:END or None for all."""
    for column, text in (("step", steps), ("rank", ranks)):
        if text is not None:
            first, end = interval(text, column)
            values = trace.events[column]
            trace = trace.where(np.flatnonzero((values >= first) & (values < end)))
    return trace


def replayed(source: Path, trace: Trace) -> Trace:
    """Return the trace without its losses. Raises `InputError` where nothing can replay it."""
    program = Program.from_run(Run.open(source)) if is_run(source) else None
    straggler = analyse(trace) if trace.meta.get("source") == "straggler" else None
    ideal = ideal_of(trace, straggler, program)
    if ideal is None:
        raise InputError(f"{source} cannot be replayed, so it has no ideal timeline. Leave --ideal out.")
    return ideal


def info(source: Path, /, *, json: bool = False) -> int:
    """Say what a trace or a run holds: ranks, steps, kinds, lanes, groups, longest names, coverage.

    Example: `headway trace info profile.json.gz`

    Parameters
    ----------
    source
        A run folder or any trace.
    json
        Print one JSON object instead of text.
    """
    answer = describe(Trace.open(source))
    emit(answer, lambda screen: render_trace_info(answer, **screen), as_json=json)
    return 0


def interval(text: str, what: str) -> tuple[int, int]:
    """Parse FIRST:END. Raises `InputError` on anything else.

    >>> interval("3:10", "step"), interval("3", "step")
    ((3, 10), (3, 4))
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise InputError(f"{text!r} is no range of {what}s. Write FIRST:END, as in 100:110.")
    first = int(parts[0])
    end = int(parts[1]) if len(parts) == 2 else first + 1
    if end <= first:
        raise InputError(
            f"{text!r} is an empty range of {what}s: its end must exceed its start. Write {first}:{first + 1}."
        )
    return first, end
