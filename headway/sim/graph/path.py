"""Why a replay takes as long as it does: its critical path, and the slack of everything else.

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

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.sim.graph.dag import Dag, kernels
from headway.sim.graph.replay import Span, checked_durations, replay


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
