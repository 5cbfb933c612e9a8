"""How unlike two sets of embeddings are, and the transform of skewed labels: what training across devices needs.

>>> points = np.array([[0.0, 1.0], [2.0, 5.0]])
>>> central_moment_discrepancy(points, points)
0.0
>>> central_moment_discrepancy(points, points + [3.0, 4.0])         # moved as a whole: the means differ
5.0
>>> bool(np.allclose(box_cox_inverse(box_cox(points + 1, 0.3), 0.3), points + 1))
True
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import InputError

Floats = NDArray[np.float64]

MOMENTS = 5
"""Highest order that is compared (K)."""

POWERS = np.linspace(-1, 1, 41)
"""Powers of the transform that are tried."""


def central_moment_discrepancy(first: Floats, second: Floats, moments: int = MOMENTS) -> float:
    """Return |difference of the means| + sum over k = 2 .. `moments` of |difference of the k-th central moments|.

    Of [n, d] and [m, d] embeddings; norms are Euclidean (Zellinger et al., arXiv 1702.08811, without its ranges).
    Raises `InputError` where a set is empty, or the widths differ.
    """
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1] or not (len(first) and len(second)):
        raise InputError(
            f"the sets have shapes {first.shape} and {second.shape}; pass [n, d] and [m, d], n and m at least 1."
        )
    means = first.mean(0), second.mean(0)
    total = np.linalg.norm(means[0] - means[1])
    for order in range(2, moments + 1):
        total += np.linalg.norm(((first - means[0]) ** order).mean(0) - ((second - means[1]) ** order).mean(0))
    return float(total)


def box_cox(values: Floats, power: float) -> Floats:
    """Return (v^p - 1) / p, and log v for p = 0, of positive `values`."""
    found: Floats = np.log(values) if abs(power) < 1e-9 else (values**power - 1) / power
    return found


def box_cox_inverse(labels: Floats, power: float) -> Floats:
    """Return the positive values of `labels`; what lies beyond the transform's range becomes its end."""
    found: Floats = np.exp(labels) if abs(power) < 1e-9 else np.maximum(power * labels + 1, 1e-12) ** (1 / power)
    return found


def box_cox_power(values: Floats) -> float:
    """Return the power of `POWERS` under which [n] `values` are most nearly normal: the greatest likelihood."""
    logs = np.log(values)
    scores = [-0.5 * len(logs) * np.log(box_cox(values, p).var()) + (p - 1) * logs.sum() for p in POWERS]
    return float(POWERS[int(np.argmax(scores))])
