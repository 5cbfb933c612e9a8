"""Which rows of a trace waited for which others, over all ranks: the dependencies behind a merged timeline.

Operation traces take them from the order that the straggler analysis infers,
profiler windows from the Dag that they are replayed with, recorded runs from
what matches: a collective waits for its last arrival, a receive for its send,
and each thread runs in order (loads of batches are not matched). The pairs are
rows of the trace, so a picture can show them on selection. Only starts on
one clock decide who came last (`headway.ledger.operations.operation_table.clock_ns`).

>>> rows = {"rank": [0, 1, 2], "start_ns": [0, 7, 3], "duration_ns": [9, 2, 6], "name": [0] * 3, "group": [4] * 3,
...         "seq": [1] * 3, "kind": [KIND["COLL"]] * 3}
>>> trace = Trace.from_columns(rows, names=["comm.wait"], meta={"source": "headway"})
>>> waited_for(trace).tolist()
[[1, 1], [0, 2]]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError
from headway.ledger.operations.dependencies import infer
from headway.ledger.operations.operation_table import arrange, clock_ns
from headway.sim.observed import observe
from headway.trace.events.trace import Trace
from headway.trace.events.vocabulary import KIND, SPANS

Pairs = NDArray[np.int64]
"""[2, e] Rows: the first ended, or came, before the second could go on."""


def waited_for(trace: Trace) -> Pairs:
    """Return the dependencies between rows of `trace`, [2, 0] where nothing is known of them.

    A window that cuts the other half of a transfer off knows fewer.
    """
    if trace.edges is not None:
        return np.asarray(trace.edges, dtype=np.int64)
    if trace.meta.get("source") == "straggler":
        return _of_operations(trace)
    if trace.named(*SPANS).any():
        return _of_recording(trace)
    return _of_window(trace)


def _of_operations(trace: Trace) -> Pairs:
    """Return the inferred order of every step and DP rank; of a group, all others wait for its last arrival."""
    table = arrange(trace, unknown_as_compute=True)
    order = infer(table)
    found = [_pairs(table.row[:, :, order.source], table.row[:, :, order.target])]
    clock = clock_ns(trace)
    for group, joint in zip(order.groups, order.synchronised, strict=True):
        rows = table.row[:, :, list(group)]
        meeting = rows.reshape(len(rows), -1) if joint else rows.reshape(-1, len(group))
        last = np.take_along_axis(meeting, clock[meeting].argmax(axis=1)[:, None], axis=1)
        found.append(_pairs(np.broadcast_to(last, meeting.shape), meeting))
    return _joined(found)


def _pairs(source: NDArray[np.integer], target: NDArray[np.integer]) -> Pairs:
    return np.stack([source.ravel(), target.ravel()]).astype(np.int64)


def _joined(found: list[Pairs]) -> Pairs:
    """Return all pairs once, without rows that would wait for themselves."""
    pairs = np.concatenate([np.zeros((2, 0), dtype=np.int64), *found], axis=1)
    return np.asarray(np.unique(pairs[:, pairs[0] != pairs[1]], axis=1))


def _of_window(trace: Trace) -> Pairs:
    """Return the Dag's edges between rows; those through a meeting point lead from its last arrival to each member."""
    try:
        seen = observe(trace)
    except HeadwayError:
        return np.zeros((2, 0), dtype=np.int64)  # no operations, or collectives that do not match: nothing to show
    dag = seen.dag
    source = np.repeat(np.arange(len(dag.indptr) - 1), np.diff(dag.indptr))
    target = dag.indices.astype(np.int64)
    point = seen.row < 0
    point[0] = False  # the origin of time
    plain = ~point[source] & ~point[target]
    found = [np.stack([seen.row[source[plain]], seen.row[target[plain]]])]
    into, out = point[target] & ~point[source], point[source] & ~point[target]
    ends = seen.start_ns + seen.duration_ns
    order = np.lexsort((ends[source[into]], target[into]))
    points, ordered = target[into][order], source[into][order]
    last = np.full(len(point), -1, dtype=np.int64)
    last[points] = ordered  # of equal indices the last one stays: the latest arrival
    found.append(np.stack([seen.row[last[source[out]]], seen.row[target[out]]]))
    joined = np.concatenate(found, axis=1)
    return _joined([joined[:, (joined >= 0).all(axis=0)]])


def _of_recording(trace: Trace) -> Pairs:
    """Return what matches in the rows that headway records."""
    events = trace.events
    clock = clock_ns(trace)
    name, rank, group, seq = (events[column].astype(np.int64) for column in ("name", "rank", "group", "seq"))
    collective = trace.named("comm.wait", "comm.collective") & (group >= 0) & (seq >= 0)
    found = [_last_arrivals(np.stack([name, group, seq]), np.flatnonzero(collective), clock)]
    sends, receives = (np.flatnonzero(trace.named(f"comm.{way}") & (seq >= 0)) for way in ("send", "recv"))
    peer = events["peer"].astype(np.int64)
    # (group, sender, receiver, seq) is the key of a message: at the receiver `peer` is the sender, so the two change
    # places.
    found.append(_matched(np.stack([group, rank, peer, seq]), sends, np.stack([group, peer, rank, seq]), receives))
    own = np.flatnonzero((events["depth"] == 0) & (events["duration_ns"] > 0) & (events["kind"] != KIND["MARK"]))
    # In order of (rank, lane, start), neighbours on one lane follow each other.
    order = own[np.lexsort((clock[own], events["lane"][own], rank[own]))]
    same = (rank[order][1:] == rank[order][:-1]) & (events["lane"][order][1:] == events["lane"][order][:-1])
    found.append(np.stack([order[:-1][same], order[1:][same]]))
    return _joined(found)


def _last_arrivals(keys: Pairs, rows: NDArray[np.int64], clock: NDArray[np.int64]) -> Pairs:
    """Return, for rows with equal keys, pairs from the one that started last to all of them."""
    if not len(rows):
        return np.zeros((2, 0), dtype=np.int64)
    _, meeting = np.unique(keys[:, rows], axis=1, return_inverse=True)
    meeting = meeting.reshape(-1)
    last = np.zeros(int(meeting.max()) + 1, dtype=np.int64)
    order = np.argsort(clock[rows], kind="stable")
    last[meeting[order]] = rows[order]
    return np.stack([last[meeting], rows])


def _matched(source_keys: Pairs, sources: NDArray[np.int64], target_keys: Pairs, targets: NDArray[np.int64]) -> Pairs:
    """Return pairs of a source and a target row with equal keys."""
    if not len(sources) or not len(targets):
        return np.zeros((2, 0), dtype=np.int64)
    both = np.concatenate([source_keys[:, sources], target_keys[:, targets]], axis=1)
    _, number = np.unique(both, axis=1, return_inverse=True)
    number = number.reshape(-1)
    place = np.full(int(number.max()) + 1, -1, dtype=np.int64)
    place[number[: len(sources)]] = sources
    source = place[number[len(sources) :]]
    return np.stack([source[source >= 0], targets[source >= 0]])
