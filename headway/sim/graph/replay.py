"""Replay: the earliest start and end of every operation, by longest path.

Use it for what-ifs in which the order stays as it is. An operation starts
when the operation before it on its lane and all its edges (end + lag) allow
it, at 0 when nothing precedes it. int64 nanoseconds in, int64 nanoseconds
out, exact; float64 durations are allowed for means and stay float64.

>>> from headway.sim.graph.dag import Dag
>>> dag = Dag.from_edges(3, src=[0, 1], dst=[2, 2], lag_ns=[0, 4])
>>> replay(dag, [5, 2, 1]).end_ns.tolist()
[5, 2, 7]
>>> replay(dag, [[5, 0], [2, 9], [1, 1]]).makespan_ns.tolist()
[7, 14]

Greedy replay: list scheduling on lanes with a capacity, for what-ifs that change the order.

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

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.tables import pick
from headway.sim.graph.dag import Dag, kernels

Span = NDArray[np.int64] | NDArray[np.float64]
"""Nanoseconds: int64 (exact) or float64 (means)."""

POPULATE_FROM = 8 << 20
"""Bytes from which an array is worth a mapping of its own."""

LATEST_NS = 2**62
"""No replay may end later (146 years): beyond it int64 could overflow."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayTimes:
    """When each operation runs."""

    start_ns: Span
    """[n] or [n, k] Start of each operation (in each scenario)."""

    end_ns: Span
    """Same shape: its end."""

    @property
    def makespan_ns(self) -> int | float | Span:
        """End of the last operation: one number, or [k] of them; 0 without operations."""
        latest = self.end_ns.max(axis=0, initial=0)
        return latest.item() if latest.ndim == 0 else latest  # type: ignore[no-any-return]  # numpy's item() is Any


def replay(dag: Dag, duration_ns: ArrayLike) -> ReplayTimes:
    """Return when each operation runs, for one [n] or many [n, k] sets of durations.

    Column `j` of a batch equals the replay of that column alone, bit for bit.
    Raises `InputError` on a wrong shape, negative or non-finite durations.
    """
    duration = checked_durations(dag, duration_ns, batch=True)
    start, end = fresh_like(duration), fresh_like(duration)
    order = dag.compiled
    kernel = kernels().longest_path if duration.ndim == 1 else kernels().longest_path_batch
    kernel(order.order, order.pred_ptr, order.pred, order.pred_lag, duration, start, end)
    return ReplayTimes(start, end)


def fresh_like(array: Span) -> Span:
    """Return an uninitialised array of that shape and type.

    Large ones get their pages in one system call: touching them one by one
    costs more than a replay (measured: five times as much on a virtual machine).
    """
    if array.nbytes < POPULATE_FROM or not hasattr(mmap, "MAP_POPULATE"):
        return np.empty_like(array)
    memory = mmap.mmap(-1, array.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return np.ndarray(array.shape, array.dtype, memory)


def checked_durations(dag: Dag, values: ArrayLike, *, batch: bool = False, what: str = "duration_ns") -> Span:
    """Return durations as contiguous int64 or float64 of shape [n] (or [n, k] if `batch`), or raise `InputError`."""
    array = np.asarray(values)
    shape_ok = array.shape == (dag.n,) or (batch and array.ndim == 2 and array.shape[0] == dag.n)
    if not shape_ok:
        wanted = f"[{dag.n}] or [{dag.n}, k]" if batch else f"[{dag.n}]"
        raise InputError(f"{what} has shape {list(array.shape)}; pass {wanted}: one duration per operation.")
    if array.dtype.kind not in "iuf" and array.size:
        raise InputError(f"{what} is {array.dtype}; pass integers (ns, exact) or floats.")
    duration: Span
    if array.dtype.kind == "f" and array.size:
        duration = np.ascontiguousarray(array, np.float64)
    else:
        duration = np.ascontiguousarray(array, np.int64)
    if duration.size:
        _check_values(dag, duration, what)
    return duration


def _check_values(dag: Dag, duration: Span, what: str) -> None:
    """Refuse what a replay cannot hold: NaN, infinity, negative values, sums past int64."""
    least, most = duration.min(), duration.max()
    if not (np.isfinite(least) and np.isfinite(most)):
        op = int(np.argwhere(~np.isfinite(duration))[0][0])
        raise InputError(f"{what} of operation {op} is not finite. Measure it, or leave the operation out.")
    if least < 0:
        op = int(np.argwhere(duration < 0)[0][0])
        raise InputError(
            f"{what} of operation {op} is {duration[op].min()}; durations must be >= 0. Correct its clock."
        )
    lag = dag.compiled.pred_lag
    bound = float(most) * dag.n + (float(lag.max()) * dag.n if lag.size else 0.0)
    if duration.dtype == np.int64 and bound >= LATEST_NS:
        total = float(duration.sum(axis=0, dtype=np.float64).max()) + float(lag.sum(dtype=np.float64))
        if total >= LATEST_NS:
            raise InputError(f"{what} adds up to {total:.3g} ns, past {LATEST_NS} ns. Check its unit.")


# Greedy replay: list scheduling on lanes with a capacity, for what-ifs that change the order.

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
