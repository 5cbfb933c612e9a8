"""The failure rate of a model of disk by age, learnt from its failure log, with what is not known said.

`AfrModel` counts disk-days and failures by age in days. An AFR is
365 * failures / disk-days, a fraction per year. It is smoothed over age with
an Epanechnikov kernel of 60 days each way; at the newest age only the last 60
days exist. Intervals are gamma intervals for weighted Poisson counts (Fay and
Feuer 1997) by the Wilson-Hilferty formula, two-sided: within 1 %, but for
lower ends of fewer than 5 failures, which are too low. Too few disk-days are
never a guess: `known` is False, and the planner leaves such disks under the
default scheme.

>>> model = AfrModel()
>>> model.add([5000.0] * 200, [2] * 60 + [0, 1] * 70, range(200))
>>> model.infancy_end(), [round(x, 3) for x in model.afr(150)]
(60, [0.027, 0.037, 0.049])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headway.core.errors import InputError

DAYS_PER_YEAR = 365.0
Floats = NDArray[np.float64]

LEAST_DAYS = 30
"""Days of age that something must have been seen for."""

WEEK = 7

CHANGE_GAIN = 6.0
"""Log-likelihood that the best of a few hundred days gains where nothing changes in about one case of a hundred."""


@dataclass(frozen=True, slots=True)
class AfrCurve:
    """AFR at every age 0..n-1 in days, a fraction per year."""

    lo: Floats
    """[n] Lower ends of the intervals; 0 where nothing was seen."""

    mid: Floats
    """[n] Estimates; NaN where nothing was seen."""

    hi: Floats
    """[n] Upper ends; infinity where nothing was seen."""

    known: NDArray[np.bool_]
    """[n] Whether enough disks have passed the last 60 days of that age."""


class AfrModel:
    """Failures and disk-days of one model of disk by age; ask for its AFR, where infancy ends, where it is going."""

    def __init__(self, *, min_disks: int = 3000, window_days: int = 60, confidence: float = 0.95) -> None:
        """Start with nothing seen.

        An age is known once `min_disks` disks have passed a month of the window before it.
        Raises `InputError` when an argument is out of its range.
        """
        if min_disks < 1 or window_days < 2 or not 0 < confidence < 1:
            raise InputError(
                f"min_disks={min_disks}, window_days={window_days}, confidence={confidence}: "
                "pass min_disks >= 1, window_days >= 2 and a confidence between 0 and 1."
            )
        self.window_days = window_days
        self.min_disk_days = float(min_disks * LEAST_DAYS)
        """Disk-days within a window from which on an age is known."""
        self._z = NormalDist().inv_cdf((1 + confidence) / 2)
        self._disk_days = np.zeros(0)
        self._failures = np.zeros(0)

    @property
    def num_ages(self) -> int:
        """Ages 0..num_ages-1 were seen, or younger ones were."""
        return len(self._disk_days)

    @property
    def disk_days(self) -> Floats:
        """[num_ages] Disk-days by age."""
        return self._disk_days.copy()

    @property
    def failures(self) -> Floats:
        """[num_ages] Failures by age."""
        return self._failures.copy()

    def add(self, disk_days: ArrayLike, failures: ArrayLike, age_days: ArrayLike) -> None:
        """Count `failures` among disks that lived `disk_days` at `age_days`: three numbers, or three arrays alike.

        Raises `InputError`, and counts nothing, on negative or non-finite
        numbers, more failures than disk-days (a disk that fails lived that
        day), ages that are not whole or do not rise, or unequal lengths.
        """
        days, fails, ages = (np.atleast_1d(np.asarray(x, np.float64)) for x in (disk_days, failures, age_days))
        _check(days, fails, ages)
        if not len(ages):
            return
        index = ages.astype(np.int64)
        if index[-1] >= self.num_ages:
            more = int(index[-1]) + 1 - self.num_ages
            self._disk_days = np.pad(self._disk_days, (0, more))
            self._failures = np.pad(self._failures, (0, more))
        self._disk_days[index] += days
        self._failures[index] += fails

    def afr(self, age: int) -> tuple[float, float, float]:
        """Return (lower end, estimate, upper end) of the AFR at `age` days.

        (0, NaN, infinity) where nothing was seen within a window of that age. Raises `InputError` on a negative age.
        """
        if not age >= 0 or int(age) != age:
            raise InputError(f"the age is {age} days; pass a whole number >= 0.")
        if age >= self.num_ages + self.window_days:
            return 0.0, math.nan, math.inf
        curve = self.curve(num_ages=max(self.num_ages, age + 1))
        return float(curve.lo[age]), float(curve.mid[age]), float(curve.hi[age])

    def curve(self, *, since: int = 0, num_ages: int | None = None) -> AfrCurve:
        """Return the AFR at ages 0..num_ages-1 (by default those seen): a constant through each window.

        Only what was seen at ages >= `since` counts.
        """
        size = self.num_ages if num_ages is None else num_ages
        days, fails = self._seen(since, size)
        kernel = self._kernels(self.window_days)[0]
        weight, count, square = (
            _smooth(values, weights) for values, weights in ((days, kernel), (fails, kernel), (fails, kernel**2))
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(weight > 1e-9, DAYS_PER_YEAR / weight, np.nan)
        known = (_trailing(days, self.window_days) >= self.min_disk_days) & (days > 0)
        return self._ends(scale * count, scale**2 * square, scale, known)

    def lines(self, *, since: int = 0, window_days: int) -> AfrCurve:
        """Return the AFR at all ages seen: a line through each window, for long ones.

        A line does not mind that fewer disks are old than young, but knows
        less at the ends; where the AFR bends upwards, it is on the high side.
        """
        days, fails = self._seen(since, self.num_ages)
        kernels = self._kernels(window_days)
        s0, s1, s2 = (_smooth(days, kernel) for kernel in kernels)
        f0, f1 = (_smooth(fails, kernel) for kernel in kernels[:2])
        q0, q1, q2 = (_smooth(fails, kernel * kernels[0]) for kernel in kernels)
        with np.errstate(divide="ignore", invalid="ignore"):
            determinant = s0 * s2 - s1**2
            inner = DAYS_PER_YEAR * np.where(determinant > 1e-9 * s0 * s2, s2 / determinant, np.nan)
            tilt = -inner * s1 / s2  # a failure at offset t counts kernel(t) * (inner + tilt * t)
        mid = np.maximum(inner * f0 + tilt * f1, 0.0)
        variance = inner**2 * q0 + 2 * inner * tilt * q1 + tilt**2 * q2
        known = (_trailing(days, self.window_days) >= self.min_disk_days) & (days > 0)
        return self._ends(mid, variance, inner, known)

    def _seen(self, since: int, size: int) -> tuple[Floats, Floats]:
        """Return [size] disk-days and failures by age, none below `since`."""
        days, fails = (np.zeros(size) for _ in range(2))
        days[since : self.num_ages] = self._disk_days[since:size]
        fails[since : self.num_ages] = self._failures[since:size]
        return days, fails

    def _kernels(self, window: int) -> list[Floats]:
        """Return the kernel times offset^0, ^1, ^2, as `_smooth` wants them: a higher age at a lower place."""
        offset = np.arange(window - 1, -window, -1, dtype=np.float64)
        return [(1 - (offset / window) ** 2) * offset**power for power in range(3)]

    def _ends(self, mid: Floats, variance: Floats, one: Floats, known: NDArray[np.bool_]) -> AfrCurve:
        """Return estimates with their intervals; `one`: what a failure of the largest weight counts, NaN: not seen."""
        return AfrCurve(
            lo=np.nan_to_num(self._quantile(mid, variance, -self._z)),
            mid=mid,
            # Fay and Feuer: the upper end counts one more failure.
            hi=np.nan_to_num(self._quantile(mid + one, variance + one**2, self._z), nan=np.inf),
            known=known,
        )

    def frontier(self) -> int | None:
        """Return the highest age that is known, None when no age is."""
        known = np.flatnonzero(self.curve().known)
        return int(known[-1]) if len(known) else None

    def infancy_end(self, *, last_day: int = 365) -> int | None:
        """Return the age in days from which on the AFR falls no further; None while too little was seen beyond it.

        The most likely change of a Poisson rate to a lower one, again in
        what follows, until none is likely enough (see `_fall`) or too little
        was seen beyond it. Looks at ages below `last_day`, so that wear-out
        is not mistaken for the level to fall to. 0: there is no infancy to be seen.
        """
        days, fails = self._disk_days[:last_day], self._failures[:last_day]
        start = 0
        while (cut := _fall(days[start:], fails[start:], self.min_disk_days)) is not None:
            start += cut
        passed = _trailing(days[start:], self.window_days).max(initial=0.0)
        return start if len(days) - start >= LEAST_DAYS and passed >= self.min_disk_days else None

    def fading(self, *, last_day: int = 365) -> Floats:
        """Return [ages below `last_day` that were seen] the AFR as a rate that only falls with age, by weeks.

        The most likely one (isotonic regression: weeks are joined until none is above the one before). No
        window smears infancy over what follows it; right only before wear-out.
        """
        size = min(self.num_ages, last_day)
        weeks = np.arange(size) // WEEK
        days, fails = (np.bincount(weeks, values[:size]) for values in (self._disk_days, self._failures))
        levels: list[tuple[float, float, int]] = []  # disk-days, failures, weeks
        for d, f in zip(days.tolist(), fails.tolist(), strict=True):
            here = (d, f, 1)
            while levels and here[1] * levels[-1][0] >= levels[-1][1] * here[0]:
                joined = levels.pop()
                here = (joined[0] + here[0], joined[1] + here[1], joined[2] + here[2])
            levels.append(here)
        rates = np.array([DAYS_PER_YEAR * f / max(d, 1e-9) for d, f, _ in levels])
        return np.repeat(np.repeat(rates, [num for _, _, num in levels]), WEEK)[:size]

    def slope(self, age: int, *, since: int = 0, window_days: int | None = None) -> tuple[float, float]:
        """Return (AFR per day, its standard error) at `age`: a line through the last window, weighted by the kernel.

        Its error falls with the window's length to the power of 1.5. (0,
        infinity) when fewer than two ages were seen within it.
        """
        window = self.window_days if window_days is None else window_days
        coefficients = self._line(age, since, window) if age < self.num_ages else None
        return (0.0, math.inf) if coefficients is None else self._weighed(coefficients[1], age)

    def projected(self, age: int, horizon: int) -> tuple[float, float, float]:
        """Return (lower end, estimate, upper end) of the AFR that a disk of `age` days will have `horizon` days later.

        Read off where older disks have been there; beyond the oldest known
        age the line through the last 60 days goes on, and its interval
        widens. (0, NaN, infinity) when no age is known. Raises `InputError`
        on negative arguments.
        """
        if age < 0 or horizon < 0:
            raise InputError(f"age={age}, horizon={horizon}: pass whole numbers of days >= 0.")
        frontier = self.frontier()
        if frontier is None:
            return 0.0, math.nan, math.inf
        if age + horizon <= frontier:
            return self.afr(age + horizon)
        line = self._line(frontier, 0, self.window_days)
        if line is None:
            return 0.0, math.nan, math.inf
        level, rise = line
        value, error = self._weighed(level + (age + horizon - frontier) * rise, frontier)
        _, _, hi = self.afr(frontier)  # no failures make no error: the count's own interval still holds
        return max(0.0, value - self._z * error), max(0.0, value), max(hi, value + self._z * error)

    def _line(self, age: int, since: int, window: int) -> tuple[Floats, Floats] | None:
        """Return what each day's failures before `age` (included) count in the line's level at `age` and its slope."""
        first = max(since, age + 1 - window)
        days = self._disk_days[first : age + 1]
        if np.count_nonzero(days) < 2:
            return None
        offset = np.arange(first - age, first - age + len(days), dtype=np.float64)
        weight = 1 - (offset / window) ** 2
        s0, s1, s2 = (float(np.sum(weight * days * offset**power)) for power in range(3))
        scaled = DAYS_PER_YEAR * weight / (s0 * s2 - s1 * s1)
        return scaled * (s2 - s1 * offset), scaled * (s0 * offset - s1)

    def _weighed(self, coefficients: Floats, age: int) -> tuple[float, float]:
        """Return a weighted sum of the failures up to `age`, and its standard error as Poisson counts."""
        fails = self._failures[age + 1 - len(coefficients) : age + 1]
        return float(coefficients @ fails), math.sqrt(float(coefficients**2 @ fails))

    def _quantile(self, mean: Floats, variance: Floats, z: float) -> Floats:
        """Return the gamma quantile at `z` of that mean and variance (Wilson-Hilferty); 0 for no mean, NaN for NaN."""
        some = mean > 0
        shape = np.where(some, mean, 1.0) ** 2 / np.where(some, variance, 1.0)
        root = 1 - 1 / (9 * shape) + z / (3 * np.sqrt(shape))
        return np.where(some | np.isnan(mean), mean * np.maximum(root, 0) ** 3, 0.0)


def poisson_interval(failures: float, disk_days: float, *, confidence: float = 0.95) -> tuple[float, float, float]:
    """Return (lower end, estimate, upper end) of the AFR that `failures` in `disk_days` tell of, ages aside.

    >>> [round(x, 4) for x in poisson_interval(10, 182_500)]
    [0.0096, 0.02, 0.0368]
    """
    model = AfrModel(confidence=confidence, window_days=2)
    model.add(disk_days, failures, 0)
    return model.afr(0)


def _smooth(values: Floats, weights: Floats) -> Floats:
    """Return the sums of `values` round each place, weighted by an odd number of weights centred on it."""
    half = len(weights) // 2
    return np.convolve(values, weights)[half : half + len(values)]


def _trailing(values: Floats, window: int) -> Floats:
    """Return the sum of the last `window` values at each place."""
    sums = np.cumsum(values)
    sums[window:] -= sums[:-window].copy()
    return sums


def _fall(disk_days: Floats, failures: Floats, least: float) -> int | None:
    """Return the likeliest day on which a Poisson rate falls, None when one rate explains all nearly as well.

    Nearly: the best of all days, with `least` disk-days and a month beyond it, gains less than
    `CHANGE_GAIN` of log-likelihood.
    """
    ages = np.flatnonzero(disk_days)
    if len(ages) < 2:
        return None
    d1, f1 = np.cumsum(disk_days[ages])[:-1], np.cumsum(failures[ages])[:-1]
    d, f = float(disk_days.sum()), float(failures.sum())
    gain = _log_likelihood(f1, d1) + _log_likelihood(f - f1, d - d1) - _log_likelihood(np.array(f), np.array(d))
    rises = f1 * (d - d1) <= (f - f1) * d1  # a rise is not the end of infancy
    short = (d - d1 < least) | (ages[1:] + LEAST_DAYS > len(disk_days))
    gain[rises | short] = 0.0
    best = int(np.argmax(gain))
    return int(ages[best + 1]) if gain[best] > CHANGE_GAIN else None


def _log_likelihood(failures: Floats, disk_days: Floats) -> Floats:
    """Return the log-likelihood of the best Poisson rate, less what no rate changes."""
    rate = np.where(failures > 0, failures / disk_days, 1.0)
    return np.asarray(failures * np.log(rate))


def _check(disk_days: Floats, failures: Floats, ages: Floats) -> None:
    """See that a piece of a failure log can be true."""
    if not (disk_days.ndim == 1 and disk_days.shape == failures.shape == ages.shape):
        raise InputError(
            f"{disk_days.size} disk-days, {failures.size} failures and {ages.size} ages: pass as many of each."
        )
    for name, values in (("disk-days", disk_days), ("failures", failures), ("ages", ages)):
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(wrong):
            raise InputError(f"entry {wrong[0]}: {name} are {values[wrong[0]]:g}; pass finite numbers >= 0.")
    if np.any(ages != np.floor(ages)) or np.any(np.diff(ages) <= 0):
        raise InputError("the ages are not whole days in rising order; sort the log by age and add up equal ages.")
    wrong = np.flatnonzero(failures > disk_days)
    if len(wrong):
        raise InputError(
            f"{failures[wrong[0]]:g} failures in {disk_days[wrong[0]]:g} disk-days at age {ages[wrong[0]]:.0f}: each "
            "disk that fails has lived a day. Correct the log; are the columns swapped?"
        )
