"""Attribution: the makespan when one group of operations keeps its observed durations, for all groups at once.

Use it to ask of a recorded job "what would a step take if everything were
ideal, but group g as it was?" (`keep`), or the reverse (`fix`). All groups,
the observed and the ideal case are columns of one pass over the Dag; no
[n, groups] input exists. Components (steps, say) are replayed independently,
each from 0.

>>> from headway.sim.graph.dag import Dag
>>> dag = Dag.from_edges(2, [0], [1])
>>> attribute(dag, base=[5, 9], ideal=[4, 6], code=[0, 1]).tolist()
[[11, 13, 14, 10]]

Why a replay takes as long as it does: its critical path, and the slack of everything else.

Use `critical_path` to name what to shorten, `slack` to see how late an
operation may end without harm. Both follow edges, lags and lane order, as
`replay` does; durations are int64 ns (exact) or float64.

>>> from headway.sim.graph.dag import Dag
>>> dag = Dag.from_edges(4, src=[0, 1, 2], dst=[1, 3, 3])
>>> critical_path(dag, [1, 5, 2, 1]).tolist()
[0, 1, 3]
>>> slack(dag, [1, 5, 2, 1]).tolist()
[0, 0, 4, 0]
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.machine.host import host_cores
from headway.core.tables import pick
from headway.sim.graph.dag import Dag, Span, checked_durations, kernels, replay

MODES: dict[str, bool] = {"keep": True, "fix": False}
"""What a group's column means -> whether the group keeps its base durations (else it alone becomes ideal)."""

PARALLEL_FROM = 1_000_000
"""Operations x columns from which threads pay: starting them made a small trace ten times slower."""

BLOCK_BYTES = 64 << 20
"""End times held at once by a thread; more columns than fit are done in several passes."""


def attribute(
    dag: Dag,
    *,
    base: ArrayLike,
    ideal: ArrayLike,
    code: ArrayLike,
    finish: ArrayLike | None = None,
    component: ArrayLike | None = None,
    mode: str = "keep",
) -> Span:
    """Return [C, G + 2] makespans: one row per component, columns = groups 0..G-1, all base, all ideal.

    `base`, `ideal` [n] durations in ns (int64 exact, or float64); `code` [n]
    group of each operation, -1 = none, G = largest + 1; `finish` = operations
    whose end counts, as indices or bool [n] (default all); `component` [n]
    from 0 (default one). `keep`: the group has base durations, all others
    ideal ones; `fix`: the reverse. Raises `InputError` on wrong shapes and
    values, a component that never finishes, edges or lanes across components.
    """
    keep = pick(MODES, mode, "mode")
    durations = [checked_durations(dag, base, what="base"), checked_durations(dag, ideal, what="ideal")]
    if any(d.dtype == np.float64 for d in durations):
        durations = [d.astype(np.float64) for d in durations]
    codes, parts = _labels(dag, code, "code", -1), _components(dag, component)
    ends = _finish(dag, finish, parts)
    num_groups, num_components = int(codes.max(initial=-1)) + 1, int(parts.max(initial=-1)) + 1
    shape = (num_components, num_groups + 2)
    makespan: Span = np.zeros(shape) if durations[0].dtype == np.float64 else np.zeros(shape, np.int64)
    # Column G takes the durations of no group's neighbours: all base (keep) or all ideal (fix).
    other, common = durations if keep else durations[::-1]
    _fill(dag, common, other, codes, ends, parts, makespan)
    if not keep:
        makespan[:, [num_groups, num_groups + 1]] = makespan[:, [num_groups + 1, num_groups]]
    return makespan


def _fill(
    dag: Dag,
    common: Span,
    other: Span,
    codes: NDArray[np.int32],
    ends: NDArray[np.bool_],
    parts: NDArray[np.int32],
    makespan: Span,
) -> None:
    """Run the kernel over blocks of components and columns, on threads when that pays."""
    num_components, width = makespan.shape
    order, kernel = dag.compiled, kernels()
    # position [n] is the place of an operation in topological order. A stable sort of that order by component gives, in
    # CSR form, the operations of each component in topological order. row [n] is scratch space, the place within the
    # component; threads may share it because all of them write the same values.
    position = np.empty(dag.n, np.int32)
    position[order.order] = np.arange(dag.n, dtype=np.int32)
    nothing = np.empty(0, np.int64)
    group_ptr, group_ops, _ = kernel.csr(
        num_components, parts[order.order].astype(np.int64), order.order.astype(np.int64), nothing
    )
    row = np.empty(dag.n, np.int32)

    def work(block: tuple[tuple[int, int], tuple[int, int]]) -> int:
        (first, last), (low, high) = block
        return int(
            kernel.attribute_columns(
                (order.pred_ptr, order.pred, order.pred_lag), position, (group_ptr, group_ops), parts,
                common, other, codes, ends, (low, high, width - 2), (first, last), row, makespan,
            )
        )  # fmt: skip

    threads = host_cores() if dag.n * width >= PARALLEL_FROM else 1
    blocks = _blocks(np.diff(group_ptr), width, threads)
    if threads == 1 or len(blocks) == 1:
        crossing = max(map(work, blocks), default=-1)
    else:
        with ThreadPoolExecutor(threads) as pool:
            crossing = max(pool.map(work, blocks))
    if crossing >= 0:
        raise InputError(
            f"operation {crossing} of component {parts[crossing]} waits for another component; components must be "
            "independent. Give each its own lanes, or drop the edge between them."
        )


def _blocks(sizes: NDArray[np.int64], width: int, threads: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Cut components x columns so that every thread has work and no buffer exceeds `BLOCK_BYTES`."""
    if sizes.size == 0:
        return []
    columns = min(width, max(4, BLOCK_BYTES // (8 * max(1, int(sizes.max())))))
    if sizes.size < threads:
        columns = min(columns, -(-width // threads))
    wanted = min(sizes.size, 4 * threads if threads > 1 else 1)
    bounds = np.searchsorted(np.cumsum(sizes), np.linspace(0, sizes.sum(), wanted + 1)[1:-1]) + 1
    edges = sorted({0, int(sizes.size), *map(int, bounds)})
    return [
        ((first, last), (low, min(low + columns, width)))
        for first, last in itertools.pairwise(edges)
        for low in range(0, width, columns)
    ]


def _labels(dag: Dag, values: ArrayLike, what: str, least: int) -> NDArray[np.int32]:
    """Check an array of small integers, one per operation."""
    labels = np.asarray(values)
    if labels.shape != (dag.n,) or (labels.size and labels.dtype.kind not in "iu"):
        raise InputError(f"{what} is {labels.dtype} of shape {list(labels.shape)}; pass {dag.n} integers.")
    if labels.size and (int(labels.min()) < least or int(labels.max()) >= 2**31 - 2):
        op = int(np.flatnonzero((labels < least) | (labels >= 2**31 - 2))[0])
        raise InputError(f"{what}[{op}] is {labels[op]}; number from 0 (least value {least}).")
    return labels.astype(np.int32)


def _components(dag: Dag, values: ArrayLike | None) -> NDArray[np.int32]:
    """Check the components; None is a single one."""
    if values is None:
        return np.zeros(dag.n, np.int32)
    parts = _labels(dag, values, "component", 0)
    if parts.size and int(parts.max()) >= dag.n:
        raise InputError(f"component {int(parts.max())} leaves numbers unused; number the components 0, 1, 2, ...")
    return parts


def _finish(dag: Dag, values: ArrayLike | None, parts: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Turn indices or a mask into a mask, and see that every component finishes."""
    ends = np.ones(dag.n, bool)
    if values is not None:
        given = np.asarray(values)
        if given.dtype == np.bool_ and given.shape == (dag.n,):
            ends = given.copy()
        elif given.ndim == 1 and (given.size == 0 or given.dtype.kind in "iu"):
            if given.size and (int(given.min()) < 0 or int(given.max()) >= dag.n):
                raise InputError(f"finish names operation {int(given.max())}; use indices 0..{dag.n - 1}.")
            ends = np.zeros(dag.n, bool)
            ends[given.astype(np.int64)] = True
        else:
            raise InputError(f"finish is {given.dtype} of shape {list(given.shape)}; pass indices or {dag.n} booleans.")
    finished = np.zeros(int(parts.max(initial=-1)) + 1, bool)
    finished[parts[ends]] = True
    if not finished.all():
        raise InputError(f"component {int(finished.argmin())} has no operation in finish; name at least one of each.")
    return ends


# Why a replay takes as long as it does: its critical path, and the slack of everything else.


def critical_path(dag: Dag, duration_ns: ArrayLike) -> NDArray[np.int64]:
    """Return [m] operations, in time order, whose durations and lags add up to the makespan.

    Of several such paths it returns the one that ends in the lowest index.
    Raises `InputError` as `replay` does; empty without operations.
    """
    duration = checked_durations(dag, duration_ns)
    if dag.n == 0:
        return np.empty(0, np.int64)
    times, order = replay(dag, duration), dag.compiled
    last = int(np.argmax(times.end_ns))
    path: NDArray[np.int64] = kernels().walk_back(
        order.order, order.pred_ptr, order.pred, order.pred_lag, times.start_ns, times.end_ns, last
    )
    return path


def slack(dag: Dag, duration_ns: ArrayLike) -> Span:
    """Return [n] nanoseconds by which each operation may end later without moving the makespan.

    Never negative, zero on the critical path; exact for int64, within
    rounding for float64 (where it is zero on `critical_path` all the same).
    Raises `InputError` as `replay` does.
    """
    duration = checked_durations(dag, duration_ns)
    times, order = replay(dag, duration), dag.compiled
    latest = np.full_like(duration, times.makespan_ns)
    kernels().latest_end(order.order, order.pred_ptr, order.pred, order.pred_lag, duration, latest)
    spare: Span = np.maximum(latest - times.end_ns, 0)
    if duration.dtype == np.float64:
        spare[critical_path(dag, duration)] = 0.0
    return spare
