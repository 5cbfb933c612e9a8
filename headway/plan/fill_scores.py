"""Which fill job goes into the bubbles of which stage first: one score per (job, stage), the largest wins.

Source: *PipeFill* (MLSys 2025), scheduling of fill jobs. `end_s` [m, W] is in how many seconds stage w would be done
with job j, infinite where it cannot run it; `deadline_s` [m] is when each job has to be done.

>>> end_s = np.array([[4.0, 2.0], [3.0, 9.0]])
>>> [int(score(end_s, np.array([7.0, 5.0])).argmax()) for score in SCORES.values()]
[1, 2, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

ScoreFn = Callable[[Values, Values], Values]
"""(seconds until each stage is free if it took the job [m, W], deadlines [m]) -> scores [m, W], larger = sooner."""


def shortest(end_s: Values, deadline_s: Values) -> Values:
    """The job that would be done first on its best stage (shortest job first)."""
    return np.asarray(-end_s.min(axis=1, keepdims=True) - 1e-9 * end_s)


def least_makespan(end_s: Values, deadline_s: Values) -> Values:
    """The longest job, where it ends first: the last job of all ends early."""
    return np.asarray(end_s.min(axis=1, keepdims=True) - 1e-9 * end_s)


def earliest_deadline(end_s: Values, deadline_s: Values) -> Values:
    """The job that has to be done first."""
    return np.asarray(-deadline_s[:, None] - 1e-9 * end_s)


SCORES: Mapping[str, ScoreFn] = {"shortest": shortest, "makespan": least_makespan, "deadline": earliest_deadline}
"""Scores of jobs by name."""


def best_pair(score: ScoreFn, end_s: Values, deadline_s: Values, may: NDArray[np.bool_]) -> tuple[int, int]:
    """Return (job, stage) with the best score of those that `may` [m, W] allows; at least one has to be."""
    with np.errstate(invalid="ignore"):  # inf - inf of stages that are not possible
        scores = np.nan_to_num(score(end_s, deadline_s), nan=-1e300, neginf=-1e300)
    values = np.where(may, scores, -np.inf)
    row, stage = (int(i) for i in np.unravel_index(int(values.argmax()), values.shape))
    return row, stage
