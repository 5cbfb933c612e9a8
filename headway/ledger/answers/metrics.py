"""Ratios and rates: goodput, ETTR, MFU, bubble fraction, throughput.

Plain formulas over seconds and counts; each names its source. `*_s` are
seconds, fractions lie in [0, 1].

>>> round(ettr(10_000.0, restart_s=600.0, interval_s=300.0, save_s=10.0), 3)
0.897
>>> bubble_fraction(4, 8), round(optimal_interval_s(10_000.0, save_s=10.0))
(0.2727272727272727, 441)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headway.core.errors import InputError
from headway.core.search import threshold
from headway.cost import transformer as flops


def goodput(ledger_ns: Mapping[str, int]) -> float:
    """Return useful device-time whose result was kept / allocated device-time; 0 for an empty ledger."""
    total = sum(ledger_ns.values())
    return ledger_ns.get("useful", 0) / total if total else 0.0


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


def young_interval_s(mtbf_s: float, *, save_s: float) -> float:
    """Return Young's interval between saves, sqrt(2 c M)."""
    _check(mtbf_s=mtbf_s, save_s=save_s)
    return math.sqrt(2.0 * save_s * mtbf_s)


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


def mfu(model_flops: float, *, duration_s: float, devices: int, peak_flops: float | None) -> float | None:
    """Return model FLOPs / (time x peak of all devices): model FLOPs utilisation.

    `model_flops` counts forward and backward once (`headway.cost.transformer.flops_per_token`); give recomputed ones
    too and the result is HFU. None when the peak is not known or precisions mix. Raises `InputError` on a value that
    cannot be.
    """
    _check(duration_s=duration_s, devices=devices)
    _check_not_negative(model_flops=model_flops)
    return flops.mfu(model_flops / (duration_s * devices), peak_flops)


def bubble_fraction(num_stages: int, num_microbatches: int, *, stages_per_rank: int = 1) -> float:
    """Return stage idle time / stage time of a flush schedule, (p - 1) / (v m + p - 1).

    `num_stages` counts pipeline ranks p; `stages_per_rank` v > 1 is the interleaved schedule (PTD-P, section 2.2).
    """
    _check(num_stages=num_stages, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    return (num_stages - 1) / (stages_per_rank * num_microbatches + num_stages - 1)


def bubble_overhead(num_stages: int, num_microbatches: int, *, stages_per_rank: int = 1) -> float:
    """Return bubble time / ideal time, (p - 1) / (v m): PTD-P's ratio, not a fraction."""
    _check(num_stages=num_stages, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    return (num_stages - 1) / (stages_per_rank * num_microbatches)


def examples_per_s(num_steps: int, *, batch_size: int, duration_s: float, replicas: int = 1) -> float:
    """Return examples per second of the whole job: steps x batch of one replica x replicas / time."""
    _check(batch_size=batch_size, duration_s=duration_s, replicas=replicas)
    _check_not_negative(num_steps=num_steps)
    return num_steps * batch_size * replicas / duration_s


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
