"""Rates of jobs that were never run on a device type, from those that were: a low-rank table, completed.

log rates[m, j] is nearly a sum of a few products a_m . b_j: how heavy the job
is, how fast the type is, and how well the two suit each other. Rank `rank`,
by alternating ridge regressions (each solves for one side with the other
fixed), from several seeded starts: their spread says how far to trust it.
Gavel completes co-location tables likewise (OSDI 2020, section 6).

>>> rates, spread = fit_rates([[4.0, 2.0, 1.0], [8.0, 4.0, float("nan")], [2.0, 1.0, 0.5]])
>>> bool(1.8 < rates[1, 2] < 2.2)
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError
from headway.core.rng import stream

Values = NDArray[np.float64]

SWEEPS, RESTARTS = 60, 5


def fit_rates(samples: ArrayLike, *, rank: int = 1, ridge: float = 1e-3, seed: int = 0) -> tuple[Values, Values]:
    """Complete `samples` [n, W] (steps/s, NaN = not measured): rates [n, W], relative spread over restarts [n, W].

    Measured rates are returned as they are, with spread 0. A type measured on no
    job, or a job measured nowhere, is an `InputError`, as is a rate <= 0.
    """
    table = np.asarray(samples, np.float64)
    known = ~np.isnan(table)
    if table.ndim != 2 or not table.size:
        raise InputError(f"samples have shape {list(table.shape)}; pass rates [jobs, types], NaN = not measured.")
    if (table[known] <= 0).any() or np.isinf(table[known]).any():
        raise InputError("a measured rate is not a finite number above 0; leave out (NaN) what does not run.")
    for axis, what in ((1, "job"), (0, "type")):
        if not known.any(axis=axis).all():
            raise InputError(f"{what} {int(known.any(axis=axis).argmin())} was measured nowhere; measure it once.")
    logs = np.where(known, np.log(np.where(known, table, 1.0)), 0.0)
    # Row and column effects first: they are exact when types differ by a factor only.
    rows, columns = np.zeros(len(table)), np.zeros(table.shape[1])
    for _ in range(SWEEPS):
        rows = (known * (logs - columns)).sum(axis=1) / known.sum(axis=1)
        columns = (known * (logs - rows[:, None])).sum(axis=0) / known.sum(axis=0)
    rest = logs - rows[:, None] - columns
    fits = []
    for start in range(RESTARTS):
        b = stream(seed, "fit_rates", start).normal(size=(table.shape[1], rank)) * 0.1
        for _ in range(SWEEPS):
            a = _ridge(rest, known, b, ridge)
            b = _ridge(rest.T, known.T, a, ridge)
        fits.append(a @ b.T)
    found = np.exp(rows[:, None] + columns + np.mean(fits, axis=0))
    return np.where(known, table, found), np.where(known, 0.0, np.std(fits, axis=0))


def _ridge(rest: Values, known: NDArray[np.bool_], other: Values, ridge: float) -> Values:
    """Solve each row [rank] for the entries that are known: (O' O + ridge n) a = O' rest."""
    parts = known[:, :, None] * other
    gram = np.einsum("mjr,js->mrs", parts, other) + ridge * known.sum(axis=1)[:, None, None] * np.eye(other.shape[1])
    return np.asarray(np.linalg.solve(gram, np.einsum("mjr,mj->mr", parts, rest)[:, :, None])[:, :, 0])
