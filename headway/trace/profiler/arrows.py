"""Which row of a trace made which other row possible, for drawing.

Use it for the arrows of a timeline: from the call that launched a kernel to
the kernel, from a forward op to its backward op, from a send to its receive,
and from the rank that came last to a collective to each rank that waited.
Times are int64 nanoseconds on the trace's clock.

>>> trace = Trace.from_columns(
...     {"rank": [0, 1], "start_ns": [0, 30], "duration_ns": [50, 20], "group": [0, 0], "seq": [4, 4]},
...     kind=[KIND["COLL"]] * 2)
>>> [(arrow.source, arrow.target, arrow.leave_ns, arrow.arrive_ns) for arrow in arrows(trace)]
[(1, 0, 30, 30)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND
from headway.trace.profiler.kineto_names import FORWARD


@dataclass(frozen=True, slots=True)
class Arrow:
    """One arrow between two rows."""

    name: str
    """'launch', 'backward', 'collective' or 'message'."""

    source: int
    """Row it leaves."""

    target: int
    """Row it points at."""

    leave_ns: int
    """Time at which it leaves, inside the source row."""

    arrive_ns: int
    """Time at which it arrives, inside the target row."""


def arrows(trace: Trace) -> list[Arrow]:
    """Return every arrow of `trace`, launches first."""
    return [*_launches(trace), *_backwards(trace), *_collectives(trace), *_messages(trace)]


def _launches(trace: Trace) -> Iterator[Arrow]:
    """Pair device rows with the host call that bears their correlation id."""
    corr = trace.events["corr"]
    device = np.isin(trace.events["lane"], [code for code, lane in enumerate(trace.lanes) if "stream " in lane])
    callers = np.isin(trace.events["kind"], [KIND["HOST"], KIND["SYNC"]]) & ~device & (corr >= 0)
    source_of = {key: row for row, key in _keyed(trace, np.flatnonzero(callers)[::-1])}
    for row, key in _keyed(trace, np.flatnonzero(device & (corr >= 0))):
        if key in source_of:
            yield _arrow(trace, "launch", source_of[key], row)


def _backwards(trace: Trace) -> Iterator[Arrow]:
    """Pair the two ends of the profiler's forward-backward links."""
    first: dict[tuple[int, int], int] = {}
    rows = np.flatnonzero(trace.events["corr"] >= FORWARD)
    for row, key in _keyed(trace, rows[np.argsort(trace.events["start_ns"][rows], kind="stable")]):
        if first.setdefault(key, row) != row:
            yield _arrow(trace, "backward", first[key], row)


def _keyed(trace: Trace, rows: NDArray[np.int64]) -> list[tuple[int, tuple[int, int]]]:
    """Return (row, (rank, corr)) of each row."""
    keys = zip(trace.events["rank"][rows].tolist(), trace.events["corr"][rows].tolist(), strict=True)
    return list(zip(rows.tolist(), keys, strict=True))


def _collectives(trace: Trace) -> Iterator[Arrow]:
    """Point from the last rank that came to a collective at the others."""
    for rows in _matched(trace, "COLL").values():
        of_rank = {int(trace.events["rank"][row]): row for row in reversed(rows)}
        if len(of_rank) < 2:
            continue
        last = max(of_rank.values(), key=lambda row: int(trace.events["start_ns"][row]))
        for row in of_rank.values():
            if row != last:
                yield _arrow(trace, "collective", last, row, leave_ns=int(trace.events["start_ns"][last]))


def _messages(trace: Trace) -> Iterator[Arrow]:
    """Point from each send at the receive of its peer."""
    receives = _matched(trace, "RECV")
    rank, peer = trace.events["rank"], trace.events["peer"]
    for key, rows in _matched(trace, "SEND").items():
        for send in rows:
            for receive in receives.get(key, []):
                if rank[receive] == peer[send] and peer[receive] in (rank[send], -1):
                    yield _arrow(trace, "message", send, receive)
                    break


def _matched(trace: Trace, kind: str) -> dict[tuple[int, int], list[int]]:
    """Return the rows of one kind by (group, seq), where both are known."""
    group, seq = trace.events["group"], trace.events["seq"]
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero((trace.events["kind"] == KIND[kind]) & (group >= 0) & (seq >= 0)).tolist():
        found[int(group[row]), int(seq[row])].append(row)
    return found


def _arrow(trace: Trace, name: str, source: int, target: int, *, leave_ns: int | None = None) -> Arrow:
    """Build an arrow that leaves at the source's start and arrives inside the target, no earlier if it can."""
    start_ns, duration_ns = trace.events["start_ns"], trace.events["duration_ns"]
    leave = int(start_ns[source]) if leave_ns is None else leave_ns
    begin = int(start_ns[target])
    arrive = min(max(begin, leave), begin + int(duration_ns[target]))
    return Arrow(name, source, target, leave, arrive)
