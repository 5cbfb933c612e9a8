"""Deep windows of a data-parallel job, all ranks joined: what each thread did, and which collective was which.

Use it before `ddp_thread`. A window's Kineto file has no rank, and on the CPU no
sizes and no sequence numbers of collectives; the Flight Recorder's entries
beside it have both. They are joined by the moment at which the call was made,
which lies inside the call's span. Times are int64 ns, as recorded.

>>> flight_path(Path("windows/r0-w3.json.gz")).name
'r0-w3.flight.json.gz'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import FormatError
from headway.trace.events.trace import Trace, concat
from headway.trace.recording.runs import Run
from headway.trace.rings.rank_tables import DdpModel, RankTables, json_object

Ints = NDArray[np.int64]

MOST_WINDOWS, MOST_FILES = 8, 32
"""Windows of a run that are read, the newest ones, and files of all ranks together: more tell little more and each
costs a parse. One window is read in any case."""

CALL = "c10d::"
"""Beginning of the names of the calls that put a collective into the queue."""

GLOO = "gloo:"
"""Beginning of the names of collectives that a thread of the host runs."""

CLOCK_SLACK_NS = 50_000
"""How far the Flight Recorder's reading of the realtime clock may lie outside the call's span."""


@dataclass(frozen=True, slots=True, eq=False)
class StepWindow:
    """A few whole steps of all ranks."""

    trace: Trace
    """Rows of all ranks; collectives of host threads have group, seq and bytes where the Flight Recorder had them."""

    num_steps: int
    """Optimizer steps in it."""

    number: int = -1
    """Which of the run's windows it is, -1 for one that stands alone."""


def windows_of(run: Run) -> list[StepWindow]:
    """Return the newest windows of `run` that every rank wrote whole; those with a damaged file are left out."""
    ranks = sorted({row.rank for row in run.facts.ranks} or run.parts.numbers)
    files: dict[int, dict[int, Path]] = {}
    for path in run.windows():
        rank, number = (int(found) for found in re.findall(r"\d+", path.name)[:2])
        files.setdefault(number, {})[rank] = path
    whole = [number for number in sorted(files) if sorted(files[number]) == ranks]
    if not whole:
        return []
    most = max(1, min(MOST_WINDOWS, MOST_FILES // len(ranks)))
    steps = _num_steps(run.parts.select(ranks[:1]).whole())
    found = [_window(files[number], steps.get(number, 0), number) for number in whole[-most:]]
    return [window for window in found if window is not None]


def models_of(run: Run) -> tuple[DdpModel, ...]:
    """Return what the ranks noted of each DistributedDataParallel: parameters, order of readiness, bucket sizes.

    Empty for a run without one, or recorded before this was noted.
    """
    for path in sorted({file.parent.parent / "tables" for file in run.windows()} or [run.path / "tables"]):
        if models := RankTables.of(json_object(path / "r0.json")).ddp:
            return models
    return ()


def flight_path(path: Path) -> Path:
    """Return where the Flight Recorder's entries of a window's Kineto file stand."""
    stem, suffix = path.name.split(".", 1)
    return path.with_name(f"{stem}.flight.{suffix}")


def joined(kineto: Trace, flight: Trace | None, rank: int) -> Trace:
    """Return the rows of one rank's window under its rank, host collectives with the group, seq and bytes of `flight`.

    A collective is the n-th of its name that the rank's threads ran, a call the n-th of its name on the main thread.
    Rows whose partner is missing stay as they are.
    """
    events = dict(kineto.events)
    events["rank"] = np.full(len(kineto), rank, np.int32)
    own = {rank: dict(next(iter(kineto.ranks.values()), {}))}
    trace = replace(kineto, events=events, ranks=own)
    if flight is None or not len(flight):
        return trace
    calls, runs = collectives(trace)
    entry = _entries(trace, calls, flight)
    known = np.flatnonzero((entry >= 0) & (runs >= 0))
    for column in ("group", "seq", "bytes"):
        values = events[column].copy()
        values[runs[known]] = flight.events[column][entry[known]]
        events[column] = values
    return replace(trace, events=events, groups={**kineto.groups, **flight.groups})


def collectives(trace: Trace) -> tuple[Ints, Ints]:
    """Return [c] rows of the calls of one rank in order, and [c] the row that ran each on a thread (-1: not seen)."""
    start = trace.events["start_ns"]
    names = np.array([*trace.names, ""])
    # [names + 1] What a call and its run have in common: 'c10d::allreduce_' and 'gloo:all_reduce' are both 'allreduce'.
    # The last entry is for rows without a name (code -1).
    plain = np.char.replace(np.char.lower(np.char.replace(np.char.replace(names, CALL, ""), GLOO, "")), "_", "")
    called = np.array([name.startswith(CALL) for name in names])[trace.events["name"]]
    ran = np.array([name.startswith(GLOO) for name in names])[trace.events["name"]]
    calls = np.flatnonzero(called)
    calls = calls[np.argsort(start[calls], kind="stable")]
    found = np.full(calls.size, -1, np.int64)
    for what in np.unique(plain[trace.events["name"][calls]]):
        mine = np.flatnonzero(plain[trace.events["name"][calls]] == what)
        rows = np.flatnonzero(ran & (plain[trace.events["name"]] == what))
        rows = rows[np.argsort(start[rows], kind="stable")]
        # What ran before the first call was called before the window. From there on, the n-th call is the n-th run.
        rows = rows[start[rows] >= (start[calls[mine[0]]] if mine.size else 0)]
        both = min(mine.size, rows.size)
        found[mine[:both]] = rows[:both]
    return calls, found


def _entries(trace: Trace, calls: Ints, flight: Trace) -> Ints:
    """Return [c] the entry that was made inside each call, -1 for none."""
    made = np.argsort(flight.events["start_ns"], kind="stable")
    created = flight.events["start_ns"][made]
    start = trace.events["start_ns"][calls]
    end = start + trace.events["duration_ns"][calls]
    found, free = np.full(calls.size, -1, np.int64), 0
    for call, at in enumerate(np.searchsorted(created, start - CLOCK_SLACK_NS).tolist()):
        at = max(at, free)  # Calls may follow each other within the slack: each entry is of one call.
        if at < created.size and created[at] <= end[call] + CLOCK_SLACK_NS:
            found[call], free = made[at], at + 1
    return found


def _window(files: Mapping[int, Path], num_steps: int, number: int) -> StepWindow | None:
    """Read one window of all ranks; None when a file is damaged."""
    parts = []
    try:
        for rank, path in sorted(files.items()):
            beside = flight_path(path)
            flight = Trace.open(beside) if beside.exists() else None
            parts.append(joined(Trace.open(path), flight, rank))
    except FormatError:
        return None
    return StepWindow(concat(parts), num_steps, number)


def _num_steps(recorded: Trace) -> dict[int, int]:
    """Return window number -> recorded steps of one rank that ended inside it."""
    events = recorded.events
    window = np.flatnonzero(recorded.named("window"))
    end = np.sort((events["start_ns"] + events["duration_ns"])[recorded.named("step")])
    low = np.searchsorted(end, events["start_ns"][window], side="right")
    high = np.searchsorted(end, (events["start_ns"] + events["duration_ns"])[window], side="right")
    return dict(zip(events["seq"][window].tolist(), (high - low).tolist(), strict=True))


def runs_on_threads(trace: Trace) -> bool:
    """Say whether the training thread queues collectives that threads of the host run (gloo)."""
    names = [trace.names[code] for code in np.unique(trace.events["name"]) if code >= 0]
    return all(any(name.startswith(start) for name in names) for start in (CALL, GLOO))
