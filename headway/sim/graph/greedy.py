"""Greedy replay: list scheduling on lanes with a capacity, for what-ifs that change the order.

Use it when nobody has fixed the order yet: workers taking batches, CPU cores
shared by processes, links shared by transfers. A lane of capacity `c` runs
`c` operations at once and is never idle while one of its operations is ready
(work conserving); who goes first is `order`. Edges with their lags always
hold; operations on no lane start as soon as their edges allow. An operation
that has started is never interrupted.

>>> from headway.sim.graph.dag import Dag
>>> dag = Dag.from_edges(3, [], [], lane=[0, 0, 0], priority=[1, 0, 0])
>>> greedy(dag, [5, 7, 3]).start_ns.tolist()
[10, 0, 7]
>>> greedy(dag, [5, 7, 3], capacity=[2]).start_ns.tolist()
[3, 0, 0]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.sim.graph.dag import Dag, kernels
from headway.sim.graph.replay import ReplayTimes, checked_durations

ORDERS: dict[str, int] = {"priority,ready,index": 0, "ready,priority,index": 1, "priority,index": 2}
"""Rule by which a lane picks among its ready operations, ties going to the next word -> mode of the kernel."""


def greedy(
    dag: Dag, duration_ns: ArrayLike, *, capacity: ArrayLike | None = None, order: str = "priority,ready,index"
) -> ReplayTimes:
    """Return when each operation runs under list scheduling.

    `duration_ns` [n], int64 (exact) or float64; `capacity` [num_lanes], how
    many operations each lane runs at once (1 by default); `order` is one of
    `ORDERS`, smallest first. Raises `InputError` on wrong shapes, negative or
    non-finite durations, and a lane without capacity that has operations.
    """
    mode = pick(ORDERS, order, "order")
    duration = checked_durations(dag, duration_ns)
    free = _capacities(dag, capacity)
    start, end = np.zeros_like(duration), np.zeros_like(duration)
    if dag.n == 0:
        return ReplayTimes(start, end)
    lag = np.empty(0, np.int64) if dag.lag_ns is None else dag.lag_ns
    priority = np.empty(0) if dag.priority is None else dag.priority
    waits = np.bincount(dag.indices, minlength=dag.n).astype(np.int64)
    queue_ptr = np.zeros(free.size + 1, np.int64)
    np.cumsum(np.bincount(dag.lane[dag.lane >= 0], minlength=free.size), out=queue_ptr[1:])
    edges = (dag.indptr, dag.indices, lag)
    kernels().list_schedule(edges, waits, (dag.lane, queue_ptr, free), mode, priority, duration, start, end)
    return ReplayTimes(start, end)


def _capacities(dag: Dag, values: ArrayLike | None) -> NDArray[np.int64]:
    """Check the capacities and return a copy that the kernel may use up."""
    num_lanes = dag.num_lanes
    if values is None:
        return np.ones(num_lanes, np.int64)
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InputError(f"capacity is {given.dtype} of shape {list(given.shape)}; pass one integer per lane.")
    capacity = given.astype(np.int64)
    if capacity.size < num_lanes:
        raise InputError(
            f"capacity has {capacity.size} entries, but operations use lane {num_lanes - 1}; pass {num_lanes} of them."
        )
    used = np.bincount(dag.lane[dag.lane >= 0], minlength=capacity.size) > 0
    if (capacity[used] < 1).any():
        lane = int(np.flatnonzero(used & (capacity < 1))[0])
        raise InputError(f"lane {lane} has capacity {capacity[lane]} but operations to run; give it at least 1.")
    return capacity
