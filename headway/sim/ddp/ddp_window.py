"""Deep windows of a data-parallel job, all ranks joined: what each thread did, and which collective was which.

Use it before `ddp_thread`. A window's Kineto file has no rank, and on the CPU no
sizes and no sequence numbers of collectives; the Flight Recorder's entries
beside it have both. They are joined by the moment at which the call was made,
which lies inside the call's span. Times are int64 ns, as recorded.

>>> flight_path(Path("windows/r0-w3.json.gz")).name
'r0-w3.flight.json.gz'

The computing stream of one rank's device in a deep window, read as `ddp_thread` reads a training thread.

What the host does takes effect when the stream has done what was launched before. So a gradient is ready, and a
collective may begin, where the stream gets to what the host did then:

    host     | grad | call | grad |  ...               launches, and is far ahead
    stream   ....[ kernels of grad ]C[ kernels of grad ]..W[ copies ]
    NCCL                            [    all-reduce       ]

C = the call in the stream's order; W = the stream waits for the collective. Times are int64 ns.

>>> stream = Stream(np.array([10, 20]), np.array([100, 150]), np.array([140, 190]))
>>> stream.at(np.array([5, 15, 25, 300])).tolist()
[5, 140, 190, 300]
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
from headway.trace.events.vocabulary import MOVING
from headway.trace.profiler.kineto_names import OP
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


# The computing stream of one rank's device in a deep window, read as `ddp_thread` reads a training thread.

MARKS = ("DistributedDataParallel.forward",)
"""Operations of the host whose moment counts, whatever they launch."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The `k` kernels and copies of a device that are no communication, as the host launched them."""

    launched_ns: Ints
    """[k] When the host launched each, in order."""

    start_ns: Ints
    """[k] When each began."""

    reach_ns: Ints
    """[k] When all up to each were done."""

    def at(self, moment_ns: Ints) -> Ints:
        """Return [n] when the stream gets to what the host did at each moment."""
        before = np.searchsorted(self.launched_ns, moment_ns)
        done = np.concatenate([[np.iinfo(np.int64).min], self.reach_ns])[before]
        return np.asarray(np.maximum(moment_ns, done))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWindow:
    """What `ddp_thread` asks of a window in which a device computes."""

    host: Trace
    """Rows of the threads that launched, on the host's clock."""

    main: Trace
    """Kernels, and the operations that launched them, on the lane 'main', when the stream ran them."""

    stream: Stream
    """Puts moments of `host` on the clock of `main`."""

    calls: Ints
    """[c] Rows of the whole window that put a collective into a queue, in order."""

    ran: Ints
    """[c] Row of the kernel that ran each; -1 where it is not in the window."""

    @classmethod
    def of(cls, trace: Trace) -> DeviceWindow | None:
        """Read one rank's window; None where no row stands on a device, or none says who launched it."""
        events = trace.events
        device = np.array(["stream " in lane for lane in trace.lanes] + [False])[events["lane"]]
        launches = np.flatnonzero(~device & (events["corr"] >= 0) & (events["corr"] < OP))
        launched = np.flatnonzero(device & (events["corr"] >= 0) & (events["corr"] < OP))
        if not launches.size or not launched.size:
            return None
        # Join on the correlation: `by` is the host row that launched each device row; `known` drops device rows whose
        # launch is not in the window (the clip only keeps the look-up inside the array).
        launches = launches[np.argsort(events["corr"][launches], kind="stable")]
        corr = events["corr"][launches]
        at = np.minimum(np.searchsorted(corr, events["corr"][launched]), corr.size - 1)
        known = corr[at] == events["corr"][launched]
        launched, by = launched[known], launches[at[known]]
        order = np.argsort(events["start_ns"][by], kind="stable")
        launched, launched_ns = launched[order], events["start_ns"][by[order]]
        moves = np.isin(events["kind"][launched], MOVING)
        own = launched[~moves]
        end = events["start_ns"][own] + events["duration_ns"][own]
        stream = Stream(launched_ns[~moves], events["start_ns"][own], np.maximum.accumulate(end))
        hosts = np.isin(events["lane"], np.unique(events["lane"][launches])) & ~device
        calls = _calls(trace, hosts)
        ran = _first_inside(launched_ns[moves], launched[moves], trace, calls)
        return cls(trace.where(hosts), _main(trace, hosts, own, stream), stream, calls, ran)


def rows_of(trace: Trace) -> Trace:
    """Return one rank's window, the rows of its lane 'main' when its device ran them where it has one."""
    device = DeviceWindow.of(trace)
    return trace if device is None else device.main


def _calls(trace: Trace, hosts: NDArray[np.bool_]) -> Ints:
    """Return the rows that put a collective into a queue, in order."""
    called = np.array([name.startswith(CALL) for name in trace.names] + [False])[trace.events["name"]]
    calls = np.flatnonzero(called & hosts)
    return np.asarray(calls[np.argsort(trace.events["start_ns"][calls], kind="stable")])


def _first_inside(launched_ns: Ints, rows: Ints, trace: Trace, calls: Ints) -> Ints:
    """Return [c] the first of `rows` that was launched inside each call, -1 for none."""
    start = trace.events["start_ns"][calls]
    at = np.searchsorted(launched_ns, start)
    inside = np.append(launched_ns, np.iinfo(np.int64).max)[at] < start + trace.events["duration_ns"][calls]
    return np.where(inside, np.append(rows, -1)[at], -1)


def _main(trace: Trace, hosts: NDArray[np.bool_], own: Ints, stream: Stream) -> Trace:
    """Return kernels and operations as rows of one lane, when the stream ran them."""
    events = trace.events
    rows = np.flatnonzero(hosts)
    begin, end = events["start_ns"][rows], events["start_ns"][rows] + events["duration_ns"][rows]
    # A host row launched kernels first .. last - 1 of the stream. On `main` it reaches from the start of the first of
    # them to when the stream had done the last. A mark that launched none is an instant, when the stream got to it.
    first, last = np.searchsorted(stream.launched_ns, [begin, end])
    marks = np.array([name in MARKS for name in trace.names] + [False])[events["name"][rows]]
    kept = (last > first) | marks
    rows, first, last = rows[kept], first[kept], last[kept]
    reached = stream.at(begin[kept])
    works = last > first
    start = np.where(works, np.append(stream.start_ns, 0)[first], reached)
    until = np.where(works, stream.reach_ns[np.maximum(last, 1) - 1], reached)
    picked = np.concatenate([rows, own])
    moments = np.concatenate([start, events["start_ns"][own]])
    ends = np.concatenate([until, events["start_ns"][own] + events["duration_ns"][own]])
    main = trace.lanes.index("main") if "main" in trace.lanes else 0
    columns = {
        **{name: values[picked] for name, values in events.items()},
        "start_ns": moments,
        "duration_ns": np.maximum(ends - moments, 0),
        "lane": np.full(picked.size, main, events["lane"].dtype),
    }
    return Trace.from_columns(columns, names=trace.names, lanes=trace.lanes, groups=trace.groups, ranks=trace.ranks)
