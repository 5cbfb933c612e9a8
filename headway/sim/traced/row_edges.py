"""Dependencies between the rows of a trace: written down from what `observe` infers, or taken as a Dag as they stand.

Use `listed` before handing a trace to a format that carries dependencies
(Chakra): every kernel then names what it waits for, and what waits for it on
its stream or at a synchronising call. Edges stay within a rank; ranks meet in
the collective itself. `listed_dag` is for traces that hold dependencies but no
times. Times are int64 ns.

>>> trace = Trace.from_columns({"start_ns": [0, 9], "duration_ns": [5, 2], "kind": [0, 0]}, names=["a"], name=[0, 0])
>>> listed(trace).edges.tolist(), listed_dag(listed(trace)).indices.tolist()
([[0], [1]], [1])
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.core.errors import InputError
from headway.sim.graph.dag import Dag
from headway.sim.traced.observed_edges import FINDERS, Ints, Operations
from headway.trace.events.trace import Trace, in_order


def listed(trace: Trace) -> Trace:
    """Return `trace` with its dependencies in `edges`; one that lists its own is returned as it is.

    Raises `InputError` as `observe` does.
    """
    if trace.edges is not None:
        return trace
    ops = Operations.of(trace)
    pairs = [finder(ops) for finder in FINDERS.values()]
    src, dst = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    good = (ops.end[src] <= ops.came[dst]) & (ops.rank[src] == ops.rank[dst])
    src, dst = src[good], _behind_calls(ops, src[good], dst[good])
    known = dst >= 0
    source, target = ops.row[src[known]], ops.row[dst[known]]
    place = _order(trace)
    forward = place[source] < place[target]
    return replace(trace, edges=in_order(np.stack([source[forward], target[forward]]), len(trace)))


def _behind_calls(ops: Operations, src: Ints, dst: Ints) -> Ints:
    """Return targets that are whole rows, -1 where there is none.

    A call that launches stands for two operations. What its second half waits for (a blocking copy waits for the copy
    that it launched itself) cannot come before the whole row, so the next operation of the thread waits instead.
    """
    n = ops.row.size
    follows = np.full(n + 1, -1, np.int64)
    for own in ops.by_lane.values():
        follows[own[:-1]] = own[1:]
    second = np.zeros(n, bool)
    second[1:] = (ops.row[1:] == ops.row[:-1]) & (ops.launches[:-1] >= 0)
    moved: Ints = np.where(second[dst] & (ops.row[src] != ops.row[dst]), follows[dst], dst)
    return moved


def _order(trace: Trace) -> Ints:
    """Return each row's place by start, then end, then row: an order that no dependency may contradict."""
    start = trace.events["start_ns"]
    place = np.empty(len(trace), np.int64)
    place[np.lexsort((start + trace.events["duration_ns"], start))] = np.arange(len(trace))
    return place


def listed_dag(trace: Trace) -> Dag:
    """Return the Dag of the edges that `trace` lists, an operation per row, on no lane; durations are the rows' own.

    Raises `InputError` when it lists none, `CycleError` when they form a cycle.
    """
    if trace.edges is None:
        raise InputError("the trace lists no dependencies. Use Dag.from_trace, which infers them from its times.")
    return Dag.from_edges(len(trace), *trace.edges)
