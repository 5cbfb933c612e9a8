"""`headway trace`: convert, cut and describe traces.

`headway trace align`: put the clocks of all ranks on one.
"""

from __future__ import annotations

from pathlib import Path

from headway.core.errors import InputError
from headway.ledger.operations.compute_factors import meetings_of
from headway.ledger.operations.straggler import analyse
from headway.report.screens import render_trace_info
from headway.report.terminal import render_alignment
from headway.sim.observed import listed
from headway.sim.recorded.program import Program
from headway.trace.events.parts import Parts
from headway.trace.events.trace import Trace
from headway.trace.readers import chrome, perfetto
from headway.trace.readers.formats import TraceSlice, describe, moments, open_parts
from headway.trace.recording.runs import Run, is_run
from headway.trace.sync.alignment import Alignment
from headway.trace.sync.alignment import align as align_trace
from headway.trace.sync.clocks import on_common_clock
from headway.verbs.shared.output import AsJson, emit
from headway.verbs.shared.run_options import RunPath
from headway.why.explanation import ideal_of

STREAMED = (".pftrace", ".perfetto-trace")
"""Targets that are written a rank at a time."""

OWN, OTHER = ".parquet", ".straggler.parquet"
"""Suffixes to tell apart: of the two, only headway's own Parquet has room for clocks beside raw times."""


def import_(source: RunPath, target: Path, /, *, json: AsJson = False) -> int:
    """Convert SOURCE (profiler JSON or folder, Chakra, torchtitan, Flight Recorder, a run, ...) to headway's Parquet.

    Example: `headway trace import profile.json.gz profile.parquet`

    Args:
      source: Any trace headway reads; its content decides the format, not its name. NAME.et stands for NAME.<rank>.et.
      target:
        File to write; its suffix decides the format: .parquet, .straggler.parquet, .json, .json.gz, .pftrace or .et.
    """
    spare(source, target)
    trace = Trace.open(source)
    write(trace, target)
    answer = {"schema": "headway.trace-import/1", "source": str(source), "target": str(target), "events": len(trace)}
    return emit(answer, lambda _: f"{target}: {len(trace)} events from {source}", as_json=json)


def export(
    source: RunPath, target: Path, /, *, steps: str | None = None, ranks: str | None = None, lanes: str | None = None,
    names: str | None = None, kinds: str | None = None, between: str | None = None, ideal: bool = False,
    json: AsJson = False,
) -> int:  # fmt: skip
    """Write a slice of SOURCE for Perfetto (ui.perfetto.dev), chrome://tracing, or a simulator that takes Chakra.

    Example: `headway trace export headway-runs/train-1 window.json.gz --steps 100:110 --lanes "stream *"`

    Args:
      source: A run folder or any trace.
      target: .pftrace, .json or .json.gz to look at, .parquet to keep, .et for Chakra (one NAME.<rank>.et per rank).
      steps: FIRST:END, the end excluded; all steps by default.
      ranks: FIRST:END, the end excluded; all ranks by default.
      lanes: Pattern of lane names, as of file names: main, "stream *", "loader/*".
      names: Pattern of event names: "aten::*", "comm.*".
      kinds: Kinds, separated by commas: COMPUTE,COLL.
      between: FROM:TO after the first event, in ns or with a unit: 1.5s:1.6s. Rows that overlap it.
      ideal:
        Put the same slice, replayed without the losses, beside the real one (a run or an operation trace; .json only).
    """
    wanted = TraceSlice(
        steps=None if steps is None else interval(steps, "step"),
        ranks=None if ranks is None else interval(ranks, "rank"), lanes=lanes, names=names,
        kinds=None if kinds is None else tuple(kind.strip().upper() for kind in kinds.split(",")),
        between_ns=None if between is None else moments(between),
    )  # fmt: skip
    spare(source, target)
    whole = Trace.open(source) if ideal else None
    if whole is not None:
        trace: Trace | Parts = wanted.of(whole)
    else:
        by_rank = wanted == TraceSlice() and target.name.endswith(STREAMED)
        trace = open_parts([source]) if by_rank else wanted.read([source])
    given = (("step", steps), ("rank", ranks), ("lane", lanes), ("name", names), ("kind", kinds), ("moment", between))
    if not len(trace):
        chosen = " and ".join(f"{what}s {text}" for what, text in given if text)
        raise InputError(
            f"no event of {source} lies in {chosen or 'it'}. `headway trace info {source}` lists its steps and ranks."
        )
    if whole is not None:
        if not target.name.endswith((".json", ".json.gz")):
            raise InputError(f"--ideal is drawn beside a timeline, so {target} must end in .json.gz. Rename it.")
        ideally = on_common_clock(wanted.of(replayed(source, whole)))
        chrome.write(on_common_clock(wanted.of(whole)), target, ideal=ideally)
    elif isinstance(trace, Parts):
        perfetto.write(trace, target)
    else:
        write(trace, target)
    answer = {"schema": "headway.trace-export/1", "target": str(target), "events": len(trace), "ideal": ideal}
    written = target.name if target.exists() else f"{target.stem}.<rank>.et"  # Chakra: one file per rank
    return emit(answer, lambda _: f"{target.with_name(written)}: {len(trace)} events", as_json=json)


def write(trace: Trace, target: Path) -> None:
    """Save `trace`; a format that carries dependencies gets those that a replay would infer.

    Clocks that were aligned stand beside the times where the format has room for them, and are applied elsewhere.
    """
    apart = target.name.endswith(OWN) and not target.name.endswith(OTHER)
    trace = trace if apart else on_common_clock(trace)
    (listed(trace) if target.suffix == ".et" else trace).save(target)


def spare(source: Path, target: Path) -> None:
    """Raise `InputError` where writing `target` would replace what is read, or what a run recorded."""
    if not target.is_file():
        return
    if target.samefile(source) if source.is_file() else source.resolve() in target.resolve().parents:
        raise InputError(f"{target} is what is read: writing it would replace it. Name another file to write.")
    run = next((folder for folder in target.resolve().parents[1:3] if is_run(folder)), None)
    if run is not None:
        raise InputError(f"{target} is a file of the run {run.name}: writing it would replace it. Name another file.")


def replayed(source: Path, trace: Trace) -> Trace:
    """Return the trace without its losses. Raises `InputError` where nothing can replay it."""
    program = Program.from_run(Run.open(source)) if is_run(source) else None
    straggler = analyse(trace) if trace.meta.get("source") == "straggler" else None
    ideal = ideal_of(trace, straggler, program)
    if ideal is None:
        raise InputError(f"{source} cannot be replayed, so it has no ideal timeline. Leave --ideal out.")
    return ideal


def info(source: RunPath, /, *, json: AsJson = False) -> int:
    """Describe what a trace or a run holds: ranks, steps, kinds, lanes, groups, longest names, coverage.

    Example: `headway trace info profile.json.gz`

    Args:
      source: A run folder or any trace.
    """
    answer = describe(open_parts([source]))
    return emit(answer, lambda screen: render_trace_info(answer, **screen), as_json=json)


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
        fix = f"its end must exceed its start. Write {first}:{first + 1}."
        raise InputError(f"{text!r} is an empty range of {what}s: {fix}")
    return first, end


def align(source: RunPath, target: Path, /, *, tolerate: bool = False, json: AsJson = False) -> int:
    """Put the clocks of all ranks of SOURCE on that of its first rank, by what the ranks did together.

    Example: `headway trace align profiles/ aligned.parquet`

    Ends of matched collectives and messages give offset and drift of each rank.

    The order of calls limits them: none ends before its last start.

    In .parquet the raw times stay and the clocks stand beside them.

    All other formats get aligned times.

    Args:
      source: A run, a trace with several ranks, or a folder of profiler files, one or more per rank.
      target: File to write; its suffix decides the format.
      tolerate:
        Where no clocks fulfil the order, or one was set while it recorded, take the estimate instead of an error.
    """
    spare(source, target)
    trace = Trace.open(source)
    ranks = sorted(set(trace.events["rank"][trace.events["rank"] >= 0].tolist()))
    if len(ranks) == 1:
        raise InputError(
            f"{source} holds rank {ranks[0]} only, so there is nothing to align it with. "
            "Put the files of all ranks into one folder and name that, or name the run."
        )
    found = aligned(trace, tolerate=tolerate)
    write(found.apply(trace), target)
    answer = {"schema": "headway.trace-align/1", "source": str(source), "target": str(target), "events": len(trace)}
    answer |= found.to_json()
    return emit(answer, lambda s: render_alignment(answer, source=str(source), target=str(target), **s), as_json=json)


def aligned(trace: Trace, *, tolerate: bool = False) -> Alignment:
    """Align any trace; an operation trace counts each step from zero, so its clocks have offsets and no drift."""
    if trace.meta.get("source") == "straggler":
        return align_trace(trace, drift=False, tolerate=tolerate, meetings=meetings_of(trace))
    return align_trace(trace, tolerate=tolerate)
