"""Lines that join at the borders of windows, fitted to differences of clocks; windows chosen by the data.

A clock's drift counts as constant in a window. Windows begin equally long. A
window is divided where the residuals of some pair of clocks do not scatter
around its line but lie above it and below it in turn, by more than their
noise explains: the drift changes inside, and the new border is put where a
line that bends once fits best. Dividing ends when the lines fit or too few
meetings are left on a side to show more.

>>> rng = np.random.default_rng(0)
>>> when = np.linspace(0, 60e9, 600)  # 0 ppm for 37 s, then 30 ppm, known with a noise of 20 us
>>> value = 30e-6 * np.maximum(when - 37e9, 0) + rng.laplace(0, 20e3, 600)
>>> found = Differences(np.zeros(600, np.int64), when, value, np.array([20e3]))
>>> border, fitted = fit_windows(found, np.array([0.0, 60e9]))
>>> bool(len(border) > 2 and abs(fitted[0, -1] - 30e-6 * 23e9) < 20e3)
True
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.trace.sync.meetings import Ints

Floats = NDArray[np.float64]

DRIFT, DRIFT_CHANGE = 50e-6, 10e-6
"""Standard deviation of a clock's drift, and of its change between windows, ns per ns: crystals and their warmth."""

ROUNDS = 20
"""Rounds of reweighting: from least squares to least absolute deviations."""

BLOCKS = 8
"""Parts of a window whose mean residuals are compared."""

CLIP = 3.0
"""Residuals count up to so many times their scatter."""

LEAST_MISFIT, LEAST_MISFIT_NS = 26.0, 1_000.0
"""Chi-square of the parts' means above which a line does not fit (2 log of the lines is added), and the largest mean
below which it always does."""

LEAST_POINTS = 4
"""Meetings that both sides of a new border must hold."""

PLACES = 16
"""Parts of a window between which it may be divided."""

MOST_WINDOWS = 256
"""Windows are divided into up to so many: more cost time and memory, and no clock changes so often."""


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences [n] between pairs of clocks, series by series."""

    owner: Ints
    """[n] Series that each belongs to, ascending."""

    when: Floats
    """[n] Time, ns."""

    value: Floats
    """[n] Difference, ns."""

    noise: Floats
    """[S] Scatter of each series, ns."""


def fit_windows(data: Differences, border: Floats) -> tuple[Floats, Floats]:
    """Return the borders [Q] of the windows that fit, which hold all of `border`, and the fits [S, Q] there."""
    while True:
        fitted = least_absolute(data.owner, data.when, data.value, data.noise, border)
        added = _bends(data, border, fitted)[: max(MOST_WINDOWS - len(border) + 1, 0)]
        if not added:
            return border, fitted
        border = np.sort(np.append(border, added))


def _bends(data: Differences, border: Floats, fitted: Floats) -> list[float]:
    """Return where to divide each window that has a series which its line does not fit."""
    windows, count = len(border) - 1, len(data.noise)
    at, after = _places(data.when, border)
    most = CLIP * data.noise[data.owner]
    away = data.value - (1 - after) * fitted[data.owner, at] - after * fitted[data.owner, at + 1]
    away = np.clip(away, -most, most)
    cell = (data.owner * windows + at) * BLOCKS + np.clip((after * BLOCKS).astype(np.int64), 0, BLOCKS - 1)
    shape = (count, windows, BLOCKS)
    number = np.bincount(cell, minlength=count * windows * BLOCKS).reshape(shape)
    total = np.bincount(cell, away, minlength=count * windows * BLOCKS).reshape(shape)
    # The line is a median, the parts have means: what noise of one sign puts between the two is no misfit.
    middle = total.sum(axis=2, keepdims=True) / np.maximum(number.sum(axis=2, keepdims=True), 1)
    mean = np.where(number > 0, total / np.maximum(number, 1) - middle, 0.0)
    misfit = (number * (mean / data.noise[:, None, None]) ** 2).sum(axis=2)
    wrong = (misfit > LEAST_MISFIT + 2 * np.log(count * windows)) & (np.abs(mean).max(axis=2) > LEAST_MISFIT_NS)
    wrong &= number.sum(axis=2) >= 2 * LEAST_POINTS
    found = []
    for window in np.flatnonzero(wrong.any(axis=0)).tolist():
        series = int(np.argmax(np.where(wrong[:, window], misfit[:, window], 0.0)))
        own = (data.owner == series) & (at == window)
        bend = _bend(after[own], away[own])
        if bend is not None:
            found.append(float(np.rint(border[window] + bend * (border[window + 1] - border[window]))))
    return found


def _bend(when: Floats, value: Floats) -> float | None:
    """Return the place in 0..1 at which a line that bends once fits best; None where too few points are either side."""
    tried = [k / PLACES for k in range(1, PLACES)]
    enough = [at for at in tried if min(np.count_nonzero(when < at), np.count_nonzero(when >= at)) >= LEAST_POINTS]
    lines = [np.stack([np.ones_like(when), when, np.maximum(when - at, 0.0)], axis=1) for at in enough]
    rest = [float(((value - line @ np.linalg.lstsq(line, value, rcond=None)[0]) ** 2).sum()) for line in lines]
    return enough[int(np.argmin(rest))] if enough else None


def _places(when: Floats, border: Floats) -> tuple[Ints, Floats]:
    """Return the window [n] of each time, and how far in it the time lies (outside 0..1 beyond the borders)."""
    at = np.clip(np.searchsorted(border, when, side="right") - 1, 0, len(border) - 2)
    return at, (when - border[at]) / (border[at + 1] - border[at])


def least_absolute(owner: Ints, when: Floats, value: Floats, noise: Floats, border: Floats) -> Floats:
    """Fit lines that join at `border` [Q] to the values [n] at times `when` [n] of each owner; returns [S, Q].

    Least absolute deviations by reweighting, with `noise` [S] as the scale of
    a deviation, held by the priors `DRIFT` and `DRIFT_CHANGE`.
    """
    width, count = len(border), len(noise)
    at, after = _places(when, border)
    before = 1.0 - after
    middle = np.array([np.median(part) for part in np.split(value, np.searchsorted(owner, np.arange(1, count)))])
    value = value - middle[owner]
    prior = _prior(border)
    # In window w the fit is before * f[w] + after * f[w + 1], where f [Q] are its values at the borders. So the normal
    # equations of each owner are a band: window w adds sums of before^2 at (w, w), before * after at (w, w + 1) and
    # after^2 at (w + 1, w + 1), and the prior reaches one diagonal further. bands[k] holds the entries (w, w + k),
    # [Q, S]. Weights of 1 / |residual| turn least squares into least absolute deviations.
    cell = owner * width + at
    fitted: Floats = np.zeros((count, width))
    weight = 1.0 / noise[owner] ** 2
    floor = 0.05 * noise[owner]
    for _ in range(ROUNDS):
        sums = [np.bincount(cell, weights=weight * part, minlength=count * width).reshape(count, width).T for part in (
            before * before, before * after, after * after, before * value, after * value)]  # fmt: skip
        bands = [np.repeat(band[:, None], count, axis=1) for band in prior]
        bands[0] += sums[0]
        bands[0][1:] += sums[2][:-1]
        bands[1] += sums[1]
        right: Floats = np.array(sums[3], np.float64)
        right[1:] += sums[4][:-1]
        fitted = np.asarray(_solved(bands, right).T)
        away = np.abs(value - before * fitted[owner, at] - after * fitted[owner, at + 1])
        weight = 1.0 / (noise[owner] * np.maximum(away, floor))
    return np.asarray(fitted + middle[:, None])


def _prior(border: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the diagonals [Q] of the precision of the priors on drifts and on their changes; the last are shorter."""
    width, length = len(border), np.diff(border)
    drift = np.diff(np.eye(width), axis=0) / length[:, None]
    change = np.diff(drift, axis=0) / DRIFT_CHANGE
    matrix = (drift.T @ drift) / (DRIFT**2 * (width - 1)) + change.T @ change
    first, second, third = (np.append(np.diagonal(matrix, k), np.zeros(min(k, width))) for k in range(3))
    return first, second, third[:width]


def _solved(bands: list[Floats], right: Floats) -> Floats:
    """Return [Q, S] the solutions of S symmetric systems; `bands[k][i]` [S] holds their entries (i, i + k), k <= 2.

    Gaussian elimination within the band. Works in its arguments.
    """
    width = len(right)
    for i in range(width):
        for k in range(1, min(3, width - i)):
            factor = bands[k][i] / bands[0][i]
            for j in range(k, 3):
                bands[j - k][i + k] -= factor * bands[j][i]
            right[i + k] -= factor * right[i]
    for i in range(width - 1, -1, -1):
        for k in range(1, min(3, width - i)):
            right[i] -= bands[k][i] * right[i + k]
        right[i] /= bands[0][i]
    return right
