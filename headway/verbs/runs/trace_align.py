"""`headway trace align`: put the clocks of all ranks on one."""

from __future__ import annotations

from pathlib import Path

from headway.core.errors import InputError
from headway.ledger.operations.compute_factors import meetings_of
from headway.report.alignment import render_alignment
from headway.trace.events.trace import Trace
from headway.trace.sync.alignment import WINDOW_S, Alignment
from headway.trace.sync.alignment import align as align_trace
from headway.verbs.runs.trace import spare, write
from headway.verbs.shared.output import emit


def align(
    source: Path,
    target: Path,
    /,
    *,
    window_s: float = WINDOW_S,
    tolerate: bool = False,
    json: bool = False,
) -> int:
    """Put the clocks of all ranks of SOURCE on that of its first rank, by what the ranks did together.

    Example: `headway trace align profiles/ aligned.parquet`

    Ends of matched collectives and messages give offset and drift of each rank.

    The order of calls limits them: none ends before its last start.

    In .parquet the raw times stay and the clocks stand beside them.

    All other formats get aligned times.

    Parameters
    ----------
    source
        A run, a trace with several ranks, or a folder of profiler files, one or more per rank.
    target
        File to write; its suffix decides the format.
    window_s
        Longest time in seconds over which a clock's drift counts as constant; windows in which it changes are divided,
        steps are found. 0 = offsets alone, without drift.
    tolerate
        Where no clocks fulfil the order, set wrong records aside and take the least violation instead of an error.
    json
        Print one JSON object instead of text.
    """
    spare(source, target)
    trace = Trace.open(source)
    ranks = sorted(set(trace.events["rank"][trace.events["rank"] >= 0].tolist()))
    if len(ranks) == 1:
        raise InputError(
            f"{source} holds rank {ranks[0]} only, so there is nothing to align it with. "
            "Put the files of all ranks into one folder and name that, or name the run."
        )
    found = aligned(trace, window_s, tolerate=tolerate)
    write(found.apply(trace), target)
    answer = {
        "schema": "headway.trace-align/1",
        "source": str(source),
        "target": str(target),
        "events": len(trace),
        **found.to_json(),
    }
    emit(answer, lambda s: render_alignment(answer, source=str(source), target=str(target), **s), as_json=json)
    return 0


def aligned(trace: Trace, window_s: float, *, tolerate: bool = False) -> Alignment:
    """Align any trace; an operation trace counts each step from zero, so its clocks have offsets and no drift."""
    if trace.meta.get("source") == "straggler":
        return align_trace(trace, None, tolerate=tolerate, meetings=meetings_of(trace))
    return align_trace(trace, window_s or None, tolerate=tolerate)
