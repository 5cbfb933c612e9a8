"""Compiled kernels of Dags: arrays in, arrays out, nothing else; `plan_kernels` has those that score plans.

Use them through `dag`, `replay`, `greedy`, `path` and `attribution`, which
check their input; a kernel checks nothing. Each has an obvious pure-Python
twin in `tests/oracles.py`. Durations are int64 (exact) or float64; lags are
int64 nanoseconds; an empty `lag` means none.

numba keeps the machine code beside this file or in the user's cache folder.
When it can write neither, the kernels are compiled anew in each process
(several seconds) and one warning says so: set NUMBA_CACHE_DIR to a folder
that can be written.

>>> csr(2, np.array([1, 0, 1]), np.array([7, 8, 9]), np.empty(0, np.int64))[:2]
(array([0, 1, 3]), array([8, 7, 9]))
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError

F = TypeVar("F", bound=Callable[..., object])
Ints = NDArray[np.int64]
Index = NDArray[np.int32]
Op = int | np.int32
Span = NDArray[np.int64] | NDArray[np.float64]

_log = logging.getLogger(__name__)


def kernel(function: F) -> F:
    """Compile on first call, keep the machine code on disk where that is possible, release the GIL."""
    try:
        compiled = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError as cause:
        if "cannot cache" not in str(cause):
            raise HeadwayError(f"numba refuses {function.__name__}: {cause}. Reinstall numba.") from cause
        _warn()
        return cast(F, numba.njit(nogil=True)(function))
    _load_without_compiler(getattr(compiled, "_cache", None))
    return cast(F, compiled)


KNOWN_LOAD = ("refresh", "_guard_against_spurious_io_errors", "_load_overload")
"""Names that numba's `load_overload` uses: it makes the context ready to compile, then reads the file."""

NEWEST_TRIED = (0, 68)
"""Machine code that misses a C function would end the process: a newer numba is not trusted to need the same ones."""


def _load_without_compiler(cache: Any) -> None:
    """Let a cache of numba's read machine code without what only compiling needs: 0.3 s of CPU, scipy among it.

    `refresh` imports how numba lowers all of numpy; when something is compiled, the compiler calls it itself. Machine
    code needs its runtime alone, and the addresses of C functions that numba knows from its import; those of hashing,
    which no kernel uses, come with `refresh`. A numba that loads in another way, or was not tried, is left as it is.
    """
    runtime = getattr(sys.modules.get("numba.core.runtime"), "rtsys", None)
    code = getattr(getattr(type(cache), "load_overload", None), "__code__", None)
    if runtime is None or getattr(code, "co_names", None) != KNOWN_LOAD or numba.version_info.short > NEWEST_TRIED:
        return

    def load_overload(signature: object, context: Any) -> Any:
        runtime.initialize(context)
        with cache._guard_against_spurious_io_errors():
            return cache._load_overload(signature, context)

    cache.load_overload = load_overload


@functools.cache
def _warn() -> None:
    """Say once per process that every process will compile anew."""
    _log.warning(
        "numba can keep no compiled code here: each process compiles. Set NUMBA_CACHE_DIR to a writable folder."
    )


@kernel
def csr(num_rows: int, row: Ints, value: Ints, lag: Ints) -> tuple[Ints, Ints, Ints]:
    """Group `value` (and `lag`) by `row` with a stable counting sort; return (indptr, indices, lag)."""
    indptr = np.zeros(num_rows + 1, np.int64)
    # Count, sum up, then fill: indptr[r] is where row r begins, fill[r] where its next entry goes.
    for r in row:
        indptr[r + 1] += 1
    for r in range(num_rows):
        indptr[r + 1] += indptr[r]
    fill = indptr[:-1].copy()
    indices = np.empty(row.size, np.int64)
    sorted_lag = np.empty(lag.size, np.int64)
    for e in range(row.size):
        slot = fill[row[e]]
        fill[row[e]] = slot + 1
        indices[slot] = value[e]
        if lag.size > 0:
            sorted_lag[slot] = lag[e]
    return indptr, indices, sorted_lag


@kernel
def compile_order(
    indptr: Ints, indices: Ints, lag: Ints, lane: Index, num_chained: int
) -> tuple[int, Index, Ints, Index, Ints]:
    """Order the ops topologically and list the predecessors of each, lane predecessor first.

    Lanes below `num_chained` run in index order. Returns (how many ops could
    be ordered, order[n], pred_ptr[n + 1], pred[.], pred_lag[.] or empty);
    `pred_ptr` is by position in the order, `pred` holds op indices.
    """
    n = lane.size
    # previous, following: neighbours on a lane. waits: predecessors that are not in the order yet.
    previous = np.full(n, -1, np.int32)
    following = np.full(n, -1, np.int32)
    last = np.full(num_chained, -1, np.int32)
    waits = np.zeros(n, np.int32)
    for op in range(n):
        on = lane[op]
        if 0 <= on < num_chained:
            before_it = last[on]
            if before_it >= 0:
                previous[op] = before_it
                following[before_it] = op
                waits[op] += 1
            last[on] = op
    for succ in indices:
        waits[succ] += 1
    # Kahn with a stack: it follows a lane as far as it can, which keeps neighbours in memory together.
    pred_ptr = np.zeros(n + 1, np.int64)
    needs = waits.copy()
    order = np.empty(n, np.int32)
    stack = np.empty(n, np.int32)
    size = 0
    for op in range(n - 1, -1, -1):
        if waits[op] == 0:
            stack[size] = op
            size += 1
    done = 0
    while size > 0:
        size -= 1
        op = stack[size]
        order[done] = op
        pred_ptr[done + 1] = pred_ptr[done] + needs[op]
        done += 1
        for e in range(indptr[op], indptr[op + 1]):
            succ = np.int32(indices[e])
            waits[succ] -= 1
            if waits[succ] == 0:
                stack[size] = succ
                size += 1
        succ = following[op]
        if succ >= 0:
            waits[succ] -= 1
            if waits[succ] == 0:
                stack[size] = succ
                size += 1
    if done < n:
        return done, order, pred_ptr, stack[:0], lag[:0]
    # The edges once more, turned round: pred[pred_ptr[i] : pred_ptr[i + 1]] are those of order[i], its lane's first.
    fill = np.empty(n, np.int64)
    pred = np.empty(pred_ptr[n], np.int32)
    pred_lag = np.zeros(pred_ptr[n] if lag.size > 0 else 0, np.int64)
    for i in range(n):
        op = order[i]
        fill[op] = pred_ptr[i]
        if previous[op] >= 0:
            pred[fill[op]] = previous[op]
            fill[op] += 1
    for i in range(n):
        op = order[i]
        for e in range(indptr[op], indptr[op + 1]):
            slot = fill[indices[e]]
            fill[indices[e]] = slot + 1
            pred[slot] = op
            if lag.size > 0:
                pred_lag[slot] = lag[e]
    return done, order, pred_ptr, pred, pred_lag


@kernel
def longest_path(
    order: Index, pred_ptr: Ints, pred: Index, pred_lag: Ints, duration: Span, start: Span, end: Span
) -> None:
    """Fill start[n] and end[n]: an op starts when its last predecessor, plus lag, is over; at 0 without any."""
    for i in range(order.size):
        op = order[i]
        # A zero of the type of the durations: numba has one type per variable.
        begin = duration[op] - duration[op]
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            ready = end[pred[e]]
            if pred_lag.size > 0:
                ready += pred_lag[e]
            begin = max(begin, ready)
        start[op] = begin
        end[op] = begin + duration[op]


@kernel
def longest_path_batch(
    order: Index, pred_ptr: Ints, pred: Index, pred_lag: Ints, duration: Span, start: Span, end: Span
) -> None:
    """Do `longest_path` for [n, k] durations, one scenario per column."""
    k = duration.shape[1]
    for i in range(order.size):
        op = order[i]
        for j in range(k):
            start[op, j] = 0
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            p = pred[e]
            extra = pred_lag[e] if pred_lag.size > 0 else 0
            for j in range(k):
                start[op, j] = max(start[op, j], end[p, j] + extra)
        for j in range(k):
            end[op, j] = start[op, j] + duration[op, j]


@kernel
def attribute_columns(
    preds: tuple[Ints, Index, Ints],
    position: Index,
    groups: tuple[Ints, Ints],
    component: Index,
    common: Span,
    other: Span,
    code: Index,
    finish: NDArray[np.bool_],
    columns: tuple[int, int, int],
    components: tuple[int, int],
    row: Index,
    makespan: Span,
) -> int:
    """Fill makespan[C, :] for some components and columns; return -1, or an op with a predecessor elsewhere.

    Every op takes `common` in every column, but `other` in column `code` and
    in column `columns[2]`. `groups` lists the ops of each component in
    topological order; `row[n]` is scratch space shared by all calls.
    """
    pred_ptr, pred, pred_lag = preds
    group_ptr, group_ops = groups
    low, high, whole = columns
    width = high - low
    largest = 0
    for c in range(components[0], components[1]):
        largest = max(largest, group_ptr[c + 1] - group_ptr[c])
    end = np.empty((largest, width), common.dtype)
    for c in range(components[0], components[1]):
        for i in range(group_ptr[c + 1] - group_ptr[c]):
            op = group_ops[group_ptr[c] + i]
            row[op] = i
            ours = end[i]
            ours[:] = 0
            # at: the place of op in the order of the whole Dag, which pred_ptr goes by; i: its row in this component.
            at = position[op]
            for e in range(pred_ptr[at], pred_ptr[at + 1]):
                if component[pred[e]] != c:
                    return int(op)
                theirs = end[row[pred[e]]]
                extra = pred_lag[e] if pred_lag.size > 0 else 0
                for j in range(width):
                    ours[j] = max(ours[j], theirs[j] + extra)
            # Set aside the starts of the two columns that differ: base is added to them, never a difference.
            mine = code[op] - low if low <= code[op] < high else -1
            all_other = whole - low if low <= whole < high else -1
            begin_mine = ours[mine] if mine >= 0 else ours[0]
            begin_all = ours[all_other] if all_other >= 0 else ours[0]
            for j in range(width):
                ours[j] += common[op]
            if mine >= 0:
                ours[mine] = begin_mine + other[op]
            if all_other >= 0:
                ours[all_other] = begin_all + other[op]
            if finish[op]:
                for j in range(width):
                    makespan[c, low + j] = max(makespan[c, low + j], ours[j])
    return -1


@kernel
def latest_end(order: Index, pred_ptr: Ints, pred: Index, pred_lag: Ints, duration: Span, latest: Span) -> None:
    """Lower latest[n], filled with the makespan, to the latest end of each op that delays nothing after it."""
    for i in range(order.size - 1, -1, -1):
        op = order[i]
        # Backwards: an op may end as late as the earliest of its successors may begin, minus the lag between them.
        begin = latest[op] - duration[op]
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            bound = begin - pred_lag[e] if pred_lag.size > 0 else begin
            latest[pred[e]] = min(latest[pred[e]], bound)


@kernel
def walk_back(order: Index, pred_ptr: Ints, pred: Index, pred_lag: Ints, start: Span, end: Span, last: int) -> Ints:
    """Follow, from op `last` backwards, the predecessor that each op waited for; return the ops in time order."""
    n = order.size
    position = np.empty(n, np.int64)
    for i in range(n):
        position[order[i]] = i
    path = np.empty(n, np.int64)
    size = 0
    op = last
    while op >= 0:
        path[n - 1 - size] = op
        size += 1
        at = position[op]
        found = -1
        for e in range(pred_ptr[at], pred_ptr[at + 1]):
            ready = end[pred[e]]
            if pred_lag.size > 0:
                ready += pred_lag[e]
            # Exact, also for floats: `longest_path` took the start from this very sum.
            if ready == start[op]:
                found = pred[e]
                break
        op = found
    return path[n - size :].copy()


@kernel
def before(a: Op, b: Op, mode: int, priority: NDArray[np.float64], when: Span) -> bool:
    """Say whether op `a` comes first.

    Mode 0: by priority, when, index; 1: when, priority, index; 2: priority, index; 3: when, index.
    """
    if (mode == 1 or mode == 3) and when[a] != when[b]:
        return bool(when[a] < when[b])
    if mode != 3 and priority.size > 0 and priority[a] != priority[b]:
        return bool(priority[a] < priority[b])
    if mode == 0 and when[a] != when[b]:
        return bool(when[a] < when[b])
    return bool(a < b)


@kernel
def heap_push(heap: Index, size: int, op: Op, mode: int, priority: NDArray[np.float64], when: Span) -> None:
    """Insert `op` into the binary heap heap[:size]."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if not before(op, heap[parent], mode, priority, when):
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = op


@kernel
def heap_pop(heap: Index, size: int, mode: int, priority: NDArray[np.float64], when: Span) -> int:
    """Remove and return the first op of the binary heap heap[:size]."""
    first = heap[0]
    op = heap[size - 1]
    at = 0
    while True:
        # The hole at the top moves down along the smaller child until the last op fits.
        child = 2 * at + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and before(heap[child + 1], heap[child], mode, priority, when):
            child += 1
        if not before(heap[child], op, mode, priority, when):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = op
    return first  # type: ignore[no-any-return]  # int() would make it int64: one more heap_push to compile


@kernel
def release(
    edges: tuple[Ints, Ints, Ints],
    op: Op,
    waits: Ints,
    priority: NDArray[np.float64],
    when: Span,
    later: tuple[Index, int],
    settle: tuple[Index, int],
) -> tuple[int, int]:
    """Tell the successors of `op` that it has ended; return the new sizes of the heap `later` and stack `settle`.

    `when` holds ends of started and ready times of other ops; a successor
    that waits for nothing more is ready now (settle) or after its lag (later).
    """
    indptr, indices, lag = edges
    heap, num_later = later
    stack, size = settle
    now = when[op]
    for e in range(indptr[op], indptr[op + 1]):
        succ = np.int32(indices[e])
        # Of several predecessors the latest decides: `when` of the successor only rises.
        ready = now + lag[e] if lag.size > 0 else now
        when[succ] = max(when[succ], ready)
        waits[succ] -= 1
        if waits[succ] == 0 and when[succ] > now:
            heap_push(heap, num_later, succ, 3, priority, when)
            num_later += 1
        elif waits[succ] == 0:
            stack[size] = succ
            size += 1
    return num_later, size


@kernel
def list_schedule(
    edges: tuple[Ints, Ints, Ints],
    waits: Ints,
    queues: tuple[Index, Ints, Ints],
    mode: int,
    priority: NDArray[np.float64],
    duration: Span,
    start: Span,
    end: Span,
) -> None:
    """Fill start[n] and end[n] (given as zeros) by work-conserving list scheduling.

    At each instant everything that ends or becomes ready is settled first;
    then each lane with a free place takes its first waiting op. `waits[n]` counts predecessors,
    `queues` = (lane[n], queue_ptr[num_lanes + 1], free places[num_lanes]); counts and places are used up.
    """
    lane, queue_ptr, free = queues
    n = lane.size
    queue = np.empty(n, np.int32)
    queued = np.zeros(free.size, np.int64)
    touched = np.zeros(free.size, np.bool_)
    lanes = np.empty(free.size, np.int32)  # those touched: the next dispatch looks at them
    num_touched = 0
    # 0: becomes ready next; 1: its lane has given it a place; 2: ends next.
    state = np.zeros(n, np.int8)
    # `end` holds the ready time until an op starts, so one heap orders whatever happens later.
    later = np.empty(n, np.int32)
    num_later = 0
    settle = np.empty(n, np.int32)
    size = 0
    for op in range(n):
        if waits[op] == 0:
            settle[size] = op
            size += 1
    now = duration[0] - duration[0]
    while True:
        while size > 0:
            size -= 1
            op = settle[size]
            on = lane[op]
            if on >= 0 and state[op] == 0:
                heap_push(queue[queue_ptr[on] : queue_ptr[on + 1]], queued[on], op, mode, priority, end)
                queued[on] += 1
            elif state[op] < 2:
                state[op] = 2
                start[op] = now
                end[op] = now + duration[op]
                if end[op] > now:
                    heap_push(later, num_later, op, 3, priority, end)
                    num_later += 1
                    continue
            if on >= 0 and not touched[on]:
                touched[on] = True
                lanes[num_touched] = on
                num_touched += 1
            if state[op] == 0:
                continue
            if on >= 0:
                free[on] += 1
            num_later, size = release(edges, op, waits, priority, end, (later, num_later), (settle, size))
        for t in range(num_touched):
            on = lanes[t]
            touched[on] = False
            while free[on] > 0 and queued[on] > 0:
                op = heap_pop(queue[queue_ptr[on] : queue_ptr[on + 1]], queued[on], mode, priority, end)
                queued[on] -= 1
                free[on] -= 1
                state[op] = 1
                settle[size] = op
                size += 1
        num_touched = 0
        if size > 0:
            continue
        if num_later == 0:
            return
        now = end[later[0]]
        while num_later > 0 and end[later[0]] == now:
            settle[size] = heap_pop(later, num_later, 3, priority, end)
            num_later -= 1
            size += 1
