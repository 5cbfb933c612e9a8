"""ETTR of a job that saves and fails, and how often it should save.

Plain formulas over seconds and counts; each names its source. `*_s` are
seconds, fractions lie in [0, 1].

>>> round(ettr(10_000.0, restart_s=600.0, interval_s=300.0, save_s=10.0), 3)
0.897
>>> round(optimal_interval_s(10_000.0, save_s=10.0))
441
"""

from __future__ import annotations

import math

from headway.core.errors import InputError
from headway.core.search import threshold


def ettr(mtbf_s: float, *, restart_s: float, interval_s: float, save_s: float) -> float:
    """Return productive time / wall time of a job that saves every `interval_s` and fails at random.

    Failures are exponential with mean `mtbf_s` and may strike at any time, restarts and saves included; a save blocks
    for `save_s`, a restart takes `restart_s`:
    E[wall] / T = M exp(u / M) (exp((dt + c) / M) - 1) / dt.
    Raises `InputError` on a value that cannot be.
    """
    _check(mtbf_s=mtbf_s, interval_s=interval_s)
    _check_not_negative(restart_s=restart_s, save_s=save_s)
    exponent = (interval_s + save_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700.0:  # exp() would overflow: such a job practically never finishes.
        return 0.0
    wall_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent)
    return interval_s / wall_s


def ettr_of_steps(productive_s: float, *, wall_s: float) -> float:
    """Return the wall time of the steps whose result was kept / the wall time of the job, at most 1."""
    _check(wall_s=wall_s)
    _check_not_negative(productive_s=productive_s)
    return min(productive_s / wall_s, 1.0)


def ettr_first_order(mtbf_s: float, *, restart_s: float, interval_s: float, save_s: float) -> float:
    """Return the first-order form (1 - (u + dt / 2) / M) / (1 + c / dt), never below 0.

    Within 1 point of `ettr` while the interval and the restart are short against `mtbf_s`.
    """
    _check(mtbf_s=mtbf_s, interval_s=interval_s)
    _check_not_negative(restart_s=restart_s, save_s=save_s)
    return max(0.0, (1.0 - (restart_s + interval_s / 2.0) / mtbf_s) / (1.0 + save_s / interval_s))


def daly_interval_s(mtbf_s: float, *, save_s: float) -> float:
    """Return Daly's higher-order interval: Young's with a correction for saves that are not short against `mtbf_s`."""
    _check(mtbf_s=mtbf_s, save_s=save_s)
    if save_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_s / (2.0 * mtbf_s))
    return math.sqrt(2.0 * save_s * mtbf_s) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - save_s


def optimal_interval_s(mtbf_s: float, *, save_s: float) -> float:
    """Return the interval that maximises `ettr` exactly; it does not depend on the restart time.

    With x = dt / M and a = c / M: the root of (1 - x) exp(x + a) = 1 in (0, 1), by bisection.
    """
    _check(mtbf_s=mtbf_s, save_s=save_s)
    a = save_s / mtbf_s
    # log(1 - x) + x + a falls from a > 0 without bound; near x = sqrt(2a) its slope is about -x, so 1e-9 of that
    # resolves the root to nine digits however small a is.
    root = threshold(lambda x: x >= 1 or math.log1p(-x) + x + a <= 0, 0.0, 1.0, tolerance=1e-9 * min(1.0, math.sqrt(a)))
    assert root is not None, "the slope changes its sign in (0, 1)"
    return root * mtbf_s


def _check(**values: float) -> None:
    """Raise unless every value is finite and above zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} is {value}; it must be above 0. Pass a positive number.")


def _check_not_negative(**values: float) -> None:
    """Raise unless every value is finite and at least zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name} is {value}; it must be 0 or more. Pass a non-negative number.")
