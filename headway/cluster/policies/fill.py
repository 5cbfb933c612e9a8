"""Filling the bubbles of a pipelined job with other jobs: the policy side of PipeFill.

A stage of the main job is a pool of one device that is free for `bubble_s`
of every step. A job that fits its free memory runs there at

    rate = work per second alone x (bubble_s - switch_s) / step_s

where switching in and out costs `switch_s` once per step; bubbles that a job
could not use, or that would take the switches above the budget, are closed.
A score decides which job goes to which stage; the main job is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from headway.cluster.model import Allocation, Cluster, QueueState, Values
from headway.core.errors import InputError
from headway.core.tables import pick

ScoreFn = Callable[[QueueState, Values], Values]
"""(state, seconds until each stage is free if it took the job [m, W]) -> scores [m, W], larger = sooner."""


def shortest(state: QueueState, end_s: Values) -> Values:
    """The job that would be done first on its best stage (shortest job first)."""
    return np.asarray(-end_s.min(axis=1, keepdims=True) - 1e-9 * end_s)


def least_makespan(state: QueueState, end_s: Values) -> Values:
    """The longest job, where it ends first: the last job of all ends early."""
    return np.asarray(end_s.min(axis=1, keepdims=True) - 1e-9 * end_s)


def earliest_deadline(state: QueueState, end_s: Values) -> Values:
    """The job that has to be done first."""
    return np.asarray(-state.deadline_s[:, None] - 1e-9 * end_s)


SCORES: Mapping[str, ScoreFn] = {"shortest": shortest, "makespan": least_makespan, "deadline": earliest_deadline}
"""Scores of jobs by name."""


def fill(state: QueueState, cluster: Cluster, now_s: float, score: str | ScoreFn = "shortest") -> Allocation:
    """Give free devices to the job with the best score, one after the other; what runs stays to its end."""
    scored = pick(SCORES, score, "score") if isinstance(score, str) else score
    x = np.where(state.previous > 0.5, 1.0, 0.0)
    free = cluster.count - (x * state.scale[:, None]).sum(axis=0).astype(np.int64)
    with np.errstate(divide="ignore"):
        end_s = state.left[:, None] / state.rates
    end_s[x.any(axis=1)] = np.inf
    while True:
        may = np.isfinite(end_s) & (state.scale[:, None] <= free)
        if not may.any():
            return Allocation(x, strict=True)
        with np.errstate(invalid="ignore"):  # inf - inf of stages that are not possible
            values = np.where(may, np.nan_to_num(scored(state, end_s), nan=-1e300, neginf=-1e300), -np.inf)
        row, j = (int(i) for i in np.unravel_index(int(values.argmax()), values.shape))
        x[row, j] = 1.0
        free[j] -= state.scale[row]
        end_s[row] = np.inf


fill_makespan, fill_deadline = partial(fill, score="makespan"), partial(fill, score="deadline")


def bubbles(
    bubble_s: ArrayLike, free_bytes: ArrayLike, step_s: float, rates: ArrayLike, bytes_needed: ArrayLike,
    *, switch_s: float = 0.0, budget: float = 0.02,
) -> tuple[Cluster, Values]:  # fmt: skip
    """Return one pool per stage [S] and rates [m, S] of fill jobs in its bubbles.

    `rates` [m] alone on such a device, `bytes_needed` [m], `free_bytes` [S].
    All switches together may cost at most `budget` of a step of the main job:
    the stages with the longest bubbles are kept. Raises `InputError`.
    """
    bubble, free = np.asarray(bubble_s, np.float64), np.asarray(free_bytes, np.float64)
    if not (step_s > 0 and (bubble >= 0).all() and (bubble <= step_s).all() and switch_s >= 0):
        raise InputError(f"bubbles of {bubble.tolist()} s in a step of {step_s} s; give 0 <= bubble <= step, step > 0.")
    used = np.maximum(bubble - switch_s, 0.0)
    order = np.argsort(-used, kind="stable")
    allowed = int(budget * step_s / switch_s) if switch_s > 0 else len(bubble)
    used[order[allowed:]] = 0.0
    fits = np.asarray(bytes_needed, np.float64)[:, None] <= free
    rate = np.asarray(rates, np.float64)[:, None] * fits * used / step_s
    return Cluster.of({f"bubble:{stage}": 1 for stage in range(len(bubble))}), rate
