"""Operations of a profiler trace, and the dependencies between them: one finder per class of edge.

`observed` calls these. A finder returns (source, target) pairs of operations;
the ones for waiting (synchronising calls, collectives, sends) also move the
begin of an operation to where its own work began. Times are int64 ns.

>>> sorted(EDGE_CLASSES) == sorted(FINDERS)
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.profiler.kineto_names import FORWARD, OP

EDGE_CLASSES: dict[str, str] = {
    "program": "operations of one thread or stream run in the order of their start",
    "launch": "a kernel starts after the call that launched it (same correlation)",
    "event": "a stream waits for an event that another stream recorded",
    "sync": "a synchronising call, a blocking copy or a finaliser returns after what it waits for",
    "collective": "all ranks of a collective have come before its own time begins",
    "p2p": "a receive begins its own time after the send has begun",
    "backward": "backward of an operation after its forward; the thread that asked for backward goes on after it",
    "loader": "what follows next(loader) on the thread follows the batch",
    "enqueue": "a collective of the host's own threads runs after the call that put it into the queue",
    "listed": "a dependency that the file itself lists (Chakra)",
}
"""Class of dependency -> what it says."""

WORK = tuple(KIND[name] for name in ("COMPUTE", "COLL", "SEND", "RECV", "HOST", "DATA", "OPTIM", "SYNC"))
"""Kinds of rows that are work."""

DEVICE = ("stream ", "device ")
"""Beginnings of the names of device lanes."""

DRAWN = ("annotation ", "sync ", "profiler")
"""Beginnings of the names of lanes that only draw over others."""


Ints = NDArray[np.int64]
Pair = tuple[Ints, Ints]
"""Sources and targets of edges."""


@dataclass(slots=True)
class Operations:
    """Operations as parallel arrays; `begin` moves when a finder learns that part of an operation was waiting."""

    trace: Trace
    row: Ints
    lane: Ints
    """[n] Dense number of (rank, lane)."""
    rank: Ints
    device: NDArray[np.bool_]
    begin: Ints
    end: Ints
    launches: Ints
    """[n] Operation that this one launched, -1 for none; set on the first part of a launch."""
    by_lane: dict[int, Ints]
    """Lane -> its operations in order."""
    came: Ints
    """[n] When each operation was there: its `begin`, or its arrival where it then waited for other ranks."""
    points: list[Ints]
    """Meeting points: the operations that meet, one array each."""

    @classmethod
    def of(cls, trace: Trace) -> Operations:
        """Take the leaves of host threads and the rows of streams; split launches where their kernel starts."""
        events = trace.events
        rows = leaves(trace)
        if not rows.size:
            raise InputError("the trace has no operation to order. Open a profiler window that holds whole steps.")
        lane_names = np.array([name.startswith(DEVICE) for name in trace.lanes] or [False])
        device = lane_names[events["lane"][rows]]
        kernel = _kernel_of(trace, rows, device)
        start, end = events["start_ns"][rows], events["start_ns"][rows] + events["duration_ns"][rows]
        # A kernel may start before the call that launches it returns: the call is cut there.
        parts = np.where(kernel >= 0, 2, 1)
        first = np.cumsum(parts) - parts
        source = np.repeat(np.arange(rows.size), parts)
        second = np.zeros(source.size, bool)
        second[first[kernel >= 0] + 1] = True
        cut = np.where(kernel >= 0, np.clip(start[kernel], start, end), end)
        begin = np.where(second, cut[source], start[source])
        ends = np.where(second, end[source], cut[source])
        launches = np.full(source.size, -1, np.int64)
        launches[first[kernel >= 0]] = first[kernel[kernel >= 0]]
        rank = events["rank"][rows][source].astype(np.int64)
        key = rank * len(trace.lanes) + events["lane"][rows][source]
        lane = np.unique(key, return_inverse=True)[1].astype(np.int64)
        order = np.lexsort((np.arange(source.size), begin, lane))
        cuts = np.flatnonzero(np.diff(lane[order])) + 1
        by_lane = {int(lane[part[0]]): part for part in np.split(order, cuts)}
        return cls(trace, rows[source], lane, rank, device[source], begin, ends, launches, by_lane, begin.copy(), [])

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the trace for each operation."""
        return self.trace.events[name][self.row]

    def last_before(self, lane: int, instant: Ints) -> Ints:
        """Return the last operation of `lane` that ended by each instant, -1 for none."""
        own = self.by_lane[lane]
        place = np.searchsorted(np.maximum.accumulate(self.end[own]), instant, side="right") - 1
        return np.where(place >= 0, own[np.maximum(place, 0)], -1)

    def first_after(self, lane: int, instant: Ints) -> Ints:
        """Return the first operation of `lane` that begins at or after each instant, -1 for none."""
        own = self.by_lane[lane]
        place = np.searchsorted(self.begin[own], instant)
        return np.where(place < own.size, own[np.minimum(place, own.size - 1)], -1)

    def host_lanes(self, rank: int) -> list[int]:
        """Return the lanes of a rank's threads."""
        return [lane for lane, own in self.by_lane.items() if self.rank[own[0]] == rank and not self.device[own[0]]]

    def device_lanes(self, rank: int) -> list[int]:
        """Return the lanes of a rank's streams."""
        return [lane for lane, own in self.by_lane.items() if self.rank[own[0]] == rank and self.device[own[0]]]


def leaves(trace: Trace) -> Ints:
    """Return the rows that are operations: work without other work inside it, on its own lane."""
    events = trace.events
    drawn = np.array([name.startswith(DRAWN) for name in trace.lanes] or [False])
    rows = np.flatnonzero(np.isin(events["kind"], WORK) & ~drawn[events["lane"]])
    # In order of (rank, lane, start, longest first), a span holds another one exactly if the next row is on its lane
    # and starts before its end. Rows of streams count as leaves in any case.
    order = np.lexsort(
        (-events["duration_ns"][rows], events["start_ns"][rows], events["lane"][rows], events["rank"][rows])
    )
    rows = rows[order]
    end = events["start_ns"][rows] + events["duration_ns"][rows]
    same = (events["lane"][rows[1:]] == events["lane"][rows[:-1]]) & (
        events["rank"][rows[1:]] == events["rank"][rows[:-1]]
    )
    device = np.array([name.startswith(DEVICE) for name in trace.lanes] or [False])[events["lane"][rows[:-1]]]
    holds = same & (events["start_ns"][rows[1:]] < end[:-1]) & ~device
    return np.asarray(rows[np.concatenate([~holds, np.ones(min(1, rows.size), bool)])], dtype=np.int64)


def _kernel_of(trace: Trace, rows: Ints, device: NDArray[np.bool_]) -> Ints:
    """Return, for each host row, the device row (index into `rows`) that it launched, -1 for none."""
    corr = trace.events["corr"][rows]
    key = corr * (int(trace.events["rank"].max(initial=0)) + 2) + trace.events["rank"][rows]
    plain = (corr >= 0) & (corr < OP)
    kernels = np.flatnonzero(device & plain)
    kernels = kernels[np.argsort(key[kernels], kind="stable")]
    found = np.full(rows.size, -1, np.int64)
    hosts = np.flatnonzero(~device & plain)
    place = np.searchsorted(key[kernels], key[hosts])
    hit = (
        (place < kernels.size) & (key[kernels[np.minimum(place, kernels.size - 1)]] == key[hosts])
        if kernels.size
        else []
    )
    found[hosts[hit]] = kernels[place[hit]] if kernels.size else -1
    return found


_NONE: Pair = (np.empty(0, np.int64), np.empty(0, np.int64))


def _join(pairs: Iterable[Pair]) -> Pair:
    parts = [pair for pair in pairs if pair[0].size]
    return (np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])) if parts else _NONE


def _program(ops: Operations) -> Pair:
    return _join((own[:-1], own[1:]) for own in ops.by_lane.values())


def _launch(ops: Operations) -> Pair:
    calls = np.flatnonzero(ops.launches >= 0)
    return calls, ops.launches[calls]


def _event(ops: Operations) -> Pair:
    """Edges that stream waits make: as recorded by the profiler, else inferred from the calls."""
    recorded = _recorded_events(ops)
    return recorded if recorded[0].size else _inferred_events(ops)


def _launch_times(ops: Operations) -> Ints:
    """Return [n] when each device operation was launched; its own begin when that is not known."""
    launched = ops.begin.copy()
    calls = np.flatnonzero(ops.launches >= 0)
    launched[ops.launches[calls]] = ops.begin[calls]
    return launched


def _recorded_events(ops: Operations) -> Pair:
    """Rows 'Stream Wait Event': `seq` = correlation of the record, `peer` = awaited stream."""
    events, trace = ops.trace.events, ops.trace
    waits = np.flatnonzero(trace.named("Stream Wait Event") & (events["seq"] >= 0) & (events["peer"] >= 0))
    launched = _launch_times(ops)
    names = {name: index for index, name in enumerate(trace.lanes)}
    pairs = []
    for row in waits.tolist():
        call = np.flatnonzero((events["corr"] == events["seq"][row]) & (events["rank"] == events["rank"][row]))
        own = trace.lanes[events["lane"][row]].removeprefix("sync ")
        source, target = names.get(f"stream {events['peer'][row]}"), names.get(f"stream {own}")
        if not call.size or source is None or target is None:
            continue
        mine = ops.device & (ops.rank == events["rank"][row])
        before = np.flatnonzero(mine & (ops.column("lane") == source) & (launched <= events["start_ns"][call[0]]))
        after = np.flatnonzero(mine & (ops.column("lane") == target) & (launched >= events["start_ns"][row]))
        if before.size and after.size:
            pairs.append((before[[launched[before].argmax()]], after[[launched[after].argmin()]]))
    return _join(pairs)


def _inferred_events(ops: Operations) -> Pair:
    """After a call of ...StreamWaitEvent the next kernel that its thread launches waits for what other streams had."""
    codes = [code for code, name in enumerate(ops.trace.names) if name.endswith("StreamWaitEvent")]
    calls = np.flatnonzero(np.isin(ops.column("name"), codes) & ~ops.device)
    launched = _launch_times(ops)
    pairs = []
    for lane in np.unique(ops.lane[calls]):
        own = ops.by_lane[int(lane)]
        launching = own[ops.launches[own] >= 0]
        mine = calls[ops.lane[calls] == lane]
        place = np.searchsorted(ops.begin[launching], ops.begin[mine])
        mine, place = mine[place < launching.size], place[place < launching.size]
        target = ops.launches[launching[place]]
        for stream in ops.device_lanes(int(ops.rank[own[0]])):
            there = ops.by_lane[stream]
            last = np.searchsorted(launched[there], ops.begin[mine]) - 1
            good = (last >= 0) & (ops.lane[target] != stream)
            source = there[np.maximum(last, 0)]
            good &= ops.end[source] <= ops.begin[target]
            pairs.append((source[good], target[good]))
    return _join(pairs)


def _sync(ops: Operations) -> Pair:
    """Kernel -> synchronising call, copy -> the call that blocks on it, collective -> the thread that awaits it."""
    launched = _launch_times(ops)
    names = np.array([name.startswith(("cudaMemcpy", "hipMemcpy")) for name in ops.trace.names] + [False])
    pairs = []
    for rank in np.unique(ops.rank):
        kernels = np.flatnonzero(ops.device & (ops.rank == rank))
        kernels = kernels[np.argsort(ops.end[kernels], kind="stable")]
        calls = np.flatnonzero((ops.rank == rank) & ~ops.device & (ops.column("kind") == KIND["SYNC"]))
        # The last kernel to end before a call returned is what the call waited for, if it was launched before the call
        # and was still running when the call began.
        place = np.searchsorted(ops.end[kernels], ops.end[calls], side="right") - 1
        for call, at in zip(calls.tolist(), place.tolist(), strict=True):
            if at >= 0 and launched[kernels[at]] < ops.begin[call] < ops.end[kernels[at]]:
                ops.begin[call] = ops.came[call] = ops.end[kernels[at]]
                pairs.append((kernels[[at]], np.array([call])))
        first = np.flatnonzero((ops.launches >= 0) & (ops.rank == rank) & names[ops.column("name")])
        target = ops.launches[first]
        # A launch is two operations, first and first + 1, cut where its kernel starts. A copy that ends during the
        # second one was waited for, and only what lies after its end is the call's own time.
        blocked = (ops.end[target] <= ops.end[first + 1]) & (ops.end[target] > ops.begin[first + 1])
        ops.begin[first[blocked] + 1] = ops.came[first[blocked] + 1] = ops.end[target[blocked]]
        pairs.append((target[blocked], first[blocked] + 1))
        pairs.append(_awaited(ops, int(rank)))
    return _join(pairs)


def _awaited(ops: Operations, rank: int) -> Pair:
    """A thread that did nothing until a collective of another thread had ended waited for it."""
    lanes = ops.host_lanes(rank)
    coll = ops.column("kind") == KIND["COLL"]
    carriers = [lane for lane in lanes if coll[ops.by_lane[lane]].any()]
    return _join(_idle_until(ops, carrier, lane) for carrier in carriers for lane in lanes if lane not in carriers)


def _idle_until(ops: Operations, source: int, target: int) -> Pair:
    """Return edges from what ended on lane `source` inside a gap of lane `target` to what follows the gap."""
    own = ops.by_lane[target]
    before, after = own[:-1], own[1:]
    last = ops.last_before(source, ops.begin[after])
    good = (last >= 0) & (ops.end[last] > ops.end[before])
    return last[good], after[good]


def _collective(ops: Operations) -> Pair:
    """Ranks of a collective meet; its own time is what is left after the last arrival."""
    kind = ops.column("kind")
    mine = np.flatnonzero(kind == KIND["COLL"])
    if np.unique(ops.rank[mine]).size < 2:
        return _NONE
    group, seq, size = ops.column("group"), ops.column("seq"), ops.column("bytes")
    turn = np.zeros(kind.size, np.int64)
    for rank in np.unique(ops.rank[mine]):
        for which in np.unique(group[mine]):
            own = mine[(ops.rank[mine] == rank) & (group[mine] == which)]
            turn[own[np.argsort(ops.begin[own], kind="stable")]] = np.arange(own.size)
    key = np.where(seq >= 0, seq, turn)
    meetings: dict[tuple[int, bool, int], list[int]] = {}
    for op in mine.tolist():
        meetings.setdefault((int(group[op]), bool(seq[op] >= 0), int(key[op])), []).append(op)
    for (which, exact, number), members in meetings.items():
        sizes = {int(size[op]) for op in members}
        if not exact and len(sizes) > 1:
            raise InputError(
                f"collective {number} of group {which} has sizes {sorted(sizes)} on its ranks: they are not the same "
                "one. Take windows of the same steps from each rank."
            )
        _meet(ops, members)
    return _NONE


def _p2p(ops: Operations) -> Pair:
    """The n-th send from a rank to another meets the n-th receive there."""
    kind, peer = ops.column("kind"), ops.column("peer")
    sides: list[dict[tuple[int, int], list[int]]] = [{}, {}]
    for op in np.flatnonzero(np.isin(kind, [KIND["SEND"], KIND["RECV"]]) & (peer >= 0)).tolist():
        sends = kind[op] == KIND["SEND"]
        ends = (int(ops.rank[op]), int(peer[op])) if sends else (int(peer[op]), int(ops.rank[op]))
        sides[0 if sends else 1].setdefault(ends, []).append(op)
    seen = set(np.unique(ops.rank).tolist())
    for ends in sides[0].keys() | sides[1].keys():
        sent, received = sides[0].get(ends, []), sides[1].get(ends, [])
        if not set(ends) <= seen:
            continue
        if len(sent) != len(received):
            raise InputError(
                f"rank {ends[0]} sends {len(sent)} times to rank {ends[1]}, which receives {len(received)} times. "
                "Take windows of the same steps from both ranks."
            )
        for pair in zip(
            sorted(sent, key=ops.begin.__getitem__), sorted(received, key=ops.begin.__getitem__), strict=True
        ):
            _meet(ops, list(pair))
    return _NONE


def _meet(ops: Operations, members: list[int]) -> None:
    """Make `members` meet: each begins its own time when the last one has come, or at its own end if that is sooner."""
    if len({int(ops.rank[op]) for op in members}) < 2:
        return
    index = np.array(members)
    arrival = ops.came[index].max()
    if (ops.end[index] < arrival).any():
        return  # It ended somewhere before another began: not one meeting, whatever its number says.
    ops.begin[index] = arrival
    ops.points.append(index)


def _backward(ops: Operations) -> Pair:
    """Forward -> backward by the profiler's arrows; and threads that hand over to each other around backward."""
    events = ops.trace.events
    arrows = np.flatnonzero(events["corr"] >= FORWARD)
    # Both ends of an arrow have its number as `corr`: in order of (rank, corr, start) they are neighbours, forward
    # first. Arrows are then taken by pair of lanes; within one lane the order of the program says the same.
    arrows = arrows[np.lexsort((events["start_ns"][arrows], events["corr"][arrows], events["rank"][arrows]))]
    same = (np.diff(events["corr"][arrows]) == 0) & (np.diff(events["rank"][arrows]) == 0)
    first, second = arrows[:-1][same], arrows[1:][same]
    lane_of = {(int(ops.rank[own[0]]), int(ops.column("lane")[own[0]])): lane for lane, own in ops.by_lane.items()}
    pairs, engines = [], set()
    for here, there in {
        (
            lane_of.get((int(events["rank"][a]), int(events["lane"][a]))),
            lane_of.get((int(events["rank"][b]), int(events["lane"][b]))),
        )
        for a, b in zip(first.tolist(), second.tolist(), strict=True)
    }:
        if here is None or there is None or here == there:
            continue
        row_lane = (events["lane"][first] == ops.column("lane")[ops.by_lane[here][0]]) & (
            events["lane"][second] == ops.column("lane")[ops.by_lane[there][0]]
        )
        end = (events["start_ns"] + events["duration_ns"])[first[row_lane]]
        source, target = ops.last_before(here, end), ops.first_after(there, events["start_ns"][second[row_lane]])
        good = (source >= 0) & (target >= 0)
        pairs.append((source[good], target[good]))
        engines.add((here, there))
    for rank in np.unique(ops.rank).tolist():
        engines |= _launching_threads(ops, rank)
    for here, there in engines:
        pairs += [_idle_until(ops, here, there), _idle_until(ops, there, here)]
    return _join(pairs)


def _launching_threads(ops: Operations, rank: int) -> set[tuple[int, int]]:
    """Return (main thread, other thread) for each other thread that launches kernels: autograd runs there."""
    hosts = ops.host_lanes(rank)
    main = [lane for lane in hosts if ops.trace.lanes[ops.column("lane")[ops.by_lane[lane][0]]] == "main"]
    others = [lane for lane in hosts if lane not in main and (ops.launches[ops.by_lane[lane]] >= 0).any()]
    return {(main[0], lane) for lane in others} if main else set()


def _loader(ops: Operations) -> Pair:
    """DATA on a host thread -> the next operation of that thread."""
    pairs = []
    data = ops.column("kind") == KIND["DATA"]
    for own in ops.by_lane.values():
        at = np.flatnonzero(data[own[:-1]] & ~ops.device[own[:-1]])
        pairs.append((own[at], own[at + 1]))
    return _join(pairs)


def _enqueue(ops: Operations) -> Pair:
    """The n-th c10d call of a rank -> the n-th collective that its own threads ran (gloo), if their numbers agree."""
    events, trace = ops.trace.events, ops.trace
    codes = [code for code, name in enumerate(trace.names) if name.startswith("c10d::")]
    pairs = []
    for rank in np.unique(ops.rank):
        calls = np.flatnonzero(np.isin(events["name"], codes) & (events["rank"] == rank))
        calls = calls[np.argsort(events["start_ns"][calls], kind="stable")]
        work = np.flatnonzero((ops.column("kind") == KIND["COLL"]) & ~ops.device & (ops.rank == rank))
        work = work[np.argsort(ops.begin[work], kind="stable")]
        if calls.size != work.size:
            continue
        lanes = {int(ops.column("lane")[own[0]]): lane for lane, own in ops.by_lane.items() if ops.rank[own[0]] == rank}
        for row, op in zip(calls.tolist(), work.tolist(), strict=True):
            lane = lanes.get(int(events["lane"][row]))
            if lane is not None:
                begun = ops.last_before(lane, events["start_ns"][[row]] + events["duration_ns"][[row]])
                pairs.append((begun[begun >= 0], np.full(int((begun >= 0).sum()), op)))
    return _join(pairs)


def _listed(ops: Operations) -> Pair:
    """Return the edges of the trace itself between rows that are operations; a launch is left by its first half."""
    if ops.trace.edges is None:
        return _NONE
    first = np.full(len(ops.trace), -1, np.int64)
    first[ops.row[::-1]] = np.arange(ops.row.size)[::-1]
    source, target = first[ops.trace.edges]
    known = (source >= 0) & (target >= 0)
    return source[known], target[known]


FINDERS: dict[str, Callable[[Operations], Pair]] = {
    "sync": _sync, "collective": _collective, "p2p": _p2p, "program": _program, "launch": _launch, "event": _event,
    "backward": _backward, "loader": _loader, "enqueue": _enqueue, "listed": _listed,
}  # fmt: skip
"""Class -> finder. Those that shorten operations by what they waited come first."""
