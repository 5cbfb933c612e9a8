"""A DAG of timed operations: an order, compiled once, replayed as often as you like.

Use it for anything that has durations and an order: a recorded step, a
pipeline schedule, an input pipeline, a power trace. Operations on one lane (a
CUDA stream, a link, a worker) run in index order; edges order operations
across lanes, each with an optional lag in nanoseconds. Durations are never
stored here: they are given to `replay`, `greedy`, `attribute`,
`critical_path` and `slack`. Building costs O(n + e).

>>> from headway.sim.graph.dag import replay
>>> dag = Dag.from_edges(3, src=[0], dst=[2], lane=[0, 0, 1])
>>> replay(dag, [5, 7, 3]).start_ns.tolist()
[0, 5, 5]
>>> Dag.from_edges(2, src=[0, 1], dst=[1, 0])
Traceback (most recent call last):
headway.core.errors.CycleError: operations 0 -> 1 -> 0 wait for each other. Drop one of these edges.

Replay: the earliest start and end of every operation, by longest path.

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

import importlib
import mmap
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import CycleError, HeadwayError, InputError
from headway.core.tables import pick

if TYPE_CHECKING:
    from headway.trace.events.trace import Trace


SHOWN = 12
"""How many operations of a cycle a message spells out; `CycleError.operations` has them all."""


def kernels(name: str = "kernels") -> ModuleType:
    """Return a module of compiled kernels; numba is loaded on first use (150 ms), not on import of the library."""
    try:
        return importlib.import_module(f"headway.sim.graph.{name}")
    except ModuleNotFoundError as cause:
        raise HeadwayError(
            f"{cause.name} is missing; replays need it. Install headway with its dependencies."
        ) from cause


@dataclass(frozen=True, slots=True, eq=False)
class CompiledDag:
    """A topological order and, for each position in it, the predecessors (the lane's previous op among them)."""

    order: NDArray[np.int32]
    """[n] Operations in topological order."""

    pred_ptr: NDArray[np.int64]
    """[n + 1] Predecessors of `order[i]` are `pred[pred_ptr[i]:pred_ptr[i + 1]]`."""

    pred: NDArray[np.int32]
    """[e + lane edges] Operations (not positions)."""

    pred_lag: NDArray[np.int64]
    """[e + lane edges] Lag in ns of each; empty when there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Dag:
    """An order: `n` operations on lanes, plus `e` edges in CSR form. Build it with `from_edges`."""

    n: int
    """Number of operations."""

    lane: NDArray[np.int32]
    """[n] Lane of each operation; -1 = on none (bounded by its edges only)."""

    indptr: NDArray[np.int64]
    """[n + 1] Successors of operation `i` are `indices[indptr[i]:indptr[i + 1]]`."""

    indices: NDArray[np.int64]
    """[e] Successor operations; the lane order is not among them."""

    lag_ns: NDArray[np.int64] | None
    """[e] Time between the end of the source and the earliest start of the target; None = 0 everywhere."""

    priority: NDArray[np.float64] | None
    """[n] For `greedy`: the smallest goes first; None = all equal."""

    compiled: CompiledDag
    """What the kernels read."""

    lane_order: bool = True
    """Whether operations of one lane run in index order; False = lanes only limit `greedy`."""

    coverage: float | None = None
    """Share of the recorded time that the order explains, 0..1; None when it was not inferred from a trace."""

    fidelity: float | None = None
    """Observed makespan / replayed makespan of the trace it was inferred from; None as above."""

    @classmethod
    def from_edges(
        cls,
        n: int,
        src: ArrayLike,
        dst: ArrayLike,
        *,
        lane: ArrayLike | None = None,
        lag_ns: ArrayLike | None = None,
        priority: ArrayLike | None = None,
        lane_order: bool = True,
    ) -> Dag:
        """Build and compile: `src[e] -> dst[e]` means that the target starts after the source has ended.

        `lane` [n] int, -1 = none; `lag_ns` [e] int >= 0; `priority` [n], the
        smallest first. `lane_order=False` drops the rule that a lane runs in
        index order: such a Dag is for `greedy`, and `replay` sees its edges
        only. Raises `InputError` on wrong lengths and values, `CycleError`
        (naming one cycle) when edges and lane order contradict each other.
        """
        n = _count(n)
        sources, targets = _ends(src, n, "src"), _ends(dst, n, "dst")
        if sources.size != targets.size:
            raise InputError(f"src has {sources.size} edges, dst has {targets.size}; pass one target per source.")
        lanes = _lanes(lane, n)
        lags = _lags(lag_ns, sources.size)
        ranks = _priorities(priority, n)
        kernel = kernels()
        # edges as given        src 0 2 0    dst 1 1 2
        # CSR, by source        indptr 0 2 2 3    indices 1 2 1    (0 -> 1, 0 -> 2, 2 -> 1)
        indptr, indices, sorted_lag = kernel.csr(n, sources, targets, lags)
        num_chained = int(lanes.max(initial=-1)) + 1 if lane_order else 0
        done, *parts = kernel.compile_order(indptr, indices, sorted_lag, lanes, num_chained)
        # Kahn's algorithm: what could not be put into order waits for itself; `parts[0][:done]` is what could.
        if done < n:
            raise _cycle(n, sources, targets, lanes if lane_order else np.full(n, -1, np.int32), parts[0][:done])
        return cls(
            n=n,
            lane=lanes,
            indptr=indptr,
            indices=indices,
            lag_ns=None if lag_ns is None else sorted_lag,
            priority=ranks,
            compiled=CompiledDag(*parts),
            lane_order=lane_order,
        )

    @classmethod
    def from_trace(cls, trace: Trace, model: str = "auto") -> Dag:
        """Infer the order of a profiler trace; `.coverage` and `.fidelity` say how well (`sim.traced.observed`).

        `model` is 'auto', 'observed' or 'ddp'. Raises `InputError` for a trace without operations.
        """
        dag: Dag = importlib.import_module("headway.sim.observed").from_trace(trace, model)
        return dag

    @property
    def num_lanes(self) -> int:
        """One more than the largest lane in use."""
        return int(self.lane.max(initial=-1)) + 1

    def tile(self, copies: int) -> Dag:
        """Return `copies` independent copies side by side, without compiling again.

        Operation `i` of copy `c` is `c * n + i`; each copy has lanes of its own.
        Raises `InputError` when `copies` < 1.

        >>> Dag.from_edges(2, [0], [1], lane=[0, 0]).tile(2).lane.tolist()
        [0, 0, 1, 1]
        """
        if copies < 1:
            raise InputError(f"copies is {copies}; ask for at least 1.")
        own, num_edges, num_preds = self.compiled, self.indices.size, self.compiled.pred.size
        # copy 0: ops 0..n-1, lanes 0..L-1    copy 1: ops n..2n-1, lanes L..2L-1    no edge leads from one to another
        lanes = _shifted(self.lane, copies, self.num_lanes)
        lanes[np.tile(self.lane < 0, copies)] = -1
        return Dag(
            n=_count(self.n * copies),
            lane=lanes,
            indptr=_joined(self.indptr, copies, num_edges),
            indices=_shifted(self.indices, copies, self.n),
            lag_ns=None if self.lag_ns is None else np.tile(self.lag_ns, copies),
            priority=None if self.priority is None else np.tile(self.priority, copies),
            compiled=CompiledDag(
                order=_shifted(own.order, copies, self.n),
                pred_ptr=_joined(own.pred_ptr, copies, num_preds),
                pred=_shifted(own.pred, copies, self.n),
                pred_lag=np.tile(own.pred_lag, copies),
            ),
            lane_order=self.lane_order,
            coverage=self.coverage,
            fidelity=self.fidelity,
        )


def _count(n: int) -> int:
    """Check the number of operations."""
    if not 0 <= n < 2**31:
        raise InputError(f"n is {n}; pass a number of operations from 0 to {2**31 - 1}.")
    return int(n)


def _whole(values: ArrayLike, what: str, size: int | None = None) -> NDArray[np.int64]:
    """Return `values` as a flat int64 array of the given length."""
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{what} is {array.dtype} of shape {list(array.shape)}; pass a flat array of integers.")
    if size is not None and array.size != size:
        raise InputError(f"{what} has {array.size} entries; pass {size}.")
    return np.ascontiguousarray(array, np.int64)


def _ends(values: ArrayLike, n: int, what: str) -> NDArray[np.int64]:
    """Check one side of the edges."""
    ends = _whole(values, what)
    if ends.size and (int(ends.min()) < 0 or int(ends.max()) >= n):
        edge = int(np.flatnonzero((ends < 0) | (ends >= n))[0])
        raise InputError(f"{what}[{edge}] is {ends[edge]}, but there are {n} operations; use indices 0..{n - 1}.")
    return ends


def _lanes(values: ArrayLike | None, n: int) -> NDArray[np.int32]:
    """Check the lanes; None puts every operation on none."""
    if values is None:
        return np.full(n, -1, np.int32)
    lanes = _whole(values, "lane", n)
    if n and (int(lanes.min()) < -1 or int(lanes.max()) > n + 2**20):
        op = int(np.flatnonzero((lanes < -1) | (lanes > n + 2**20))[0])
        raise InputError(f"lane[{op}] is {lanes[op]}; number the lanes from 0, or write -1 for no lane.")
    return lanes.astype(np.int32)


def _lags(values: ArrayLike | None, num_edges: int) -> NDArray[np.int64]:
    """Check the lags; none at all is an empty array."""
    if values is None:
        return np.empty(0, np.int64)
    lags = _whole(values, "lag_ns", num_edges)
    if int(lags.min(initial=0)) < 0:
        edge = int(np.argmin(lags))
        raise InputError(f"lag_ns[{edge}] is {lags[edge]}; it must be >= 0. Turn the edge round or split its source.")
    return lags


def _priorities(values: ArrayLike | None, n: int) -> NDArray[np.float64] | None:
    """Check the priorities."""
    if values is None:
        return None
    priority = np.ascontiguousarray(values, np.float64)
    if priority.shape != (n,):
        raise InputError(f"priority has shape {list(priority.shape)}; pass one number for each of {n} operations.")
    if np.isnan(priority).any():
        raise InputError(f"priority[{int(np.isnan(priority).argmax())}] is NaN; pass numbers that can be compared.")
    return priority


def _shifted(values: NDArray, copies: int, step: int) -> NDArray:  # type: ignore[type-arg]  # any integer type
    """Repeat an index array, adding `step` more in each copy."""
    # [copies, 1] + [1, n] -> [copies, n] -> flat: copy after copy.
    shift = np.arange(copies, dtype=values.dtype)[:, None] * values.dtype.type(step)
    return np.asarray((values[None, :] + shift).reshape(-1))


def _joined(pointer: NDArray[np.int64], copies: int, step: int) -> NDArray[np.int64]:
    """Repeat a CSR pointer array."""
    return np.concatenate([np.zeros(1, np.int64), _shifted(pointer[1:], copies, step)])


def _cycle(
    n: int,
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    lane: NDArray[np.int32],
    ordered: NDArray[np.int32],
) -> CycleError:
    """Find one cycle among the operations that could not be ordered, and say which of its steps are lane order."""
    # awaited[i]: one operation that i waits for, first by the order of its lane, then, in its place, by an edge.
    left = np.ones(n, bool)
    left[ordered] = False
    awaited = np.full(n, -1, np.int64)
    by_lane = np.argsort(lane, kind="stable")
    # Neighbours in the stable order by lane are neighbours on the lane.
    same = (lane[by_lane[1:]] == lane[by_lane[:-1]]) & (lane[by_lane[1:]] >= 0)
    earlier, later = by_lane[:-1][same], by_lane[1:][same]
    inside = left[earlier] & left[later]
    awaited[later[inside]] = earlier[inside]
    from_lane = awaited >= 0
    inside = left[src] & left[dst]
    awaited[dst[inside]] = src[inside]
    from_lane[dst[inside]] = False
    # Each operation left waits for another one left, so walking back must return to one already seen.
    at, seen = int(np.flatnonzero(left)[0]), dict[int, int]()
    while at not in seen:
        seen[at] = len(seen)
        at = int(awaited[at])
    circle = list(seen)[seen[at] :][::-1]
    circle = circle[circle.index(min(circle)) :] + circle[: circle.index(min(circle))]
    shown = [*map(str, circle[:SHOWN]), *(["..."] if len(circle) > SHOWN else []), str(circle[0])]
    fix = "Drop one of these edges."
    if from_lane[circle].any():
        fix = (
            "Reorder the lane or drop an edge that points backwards, or pass lane_order=False when only greedy runs it."
        )
    return CycleError(f"operations {' -> '.join(shown)} wait for each other. {fix}", tuple(circle))


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
