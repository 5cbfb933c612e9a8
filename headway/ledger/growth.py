"""Whether a series rises over a whole run: told from medians of blocks of it, which a few odd steps do not move.

    step, ms    |  9  10   9 | 14  13  15 | 21  19  90 | 27  26  28 |
    medians            9           14           21           27        rising, 3.0 times

The ledger of a finished run and the live one tell steps that get slower by the same rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCKS = 8
"""Parts of a run whose medians are compared."""

LEAST_STEPS = 5 * BLOCKS
"""Shorter runs show no trend."""

GROWN = 1.5
"""Steps get slower where those of the last block take so many times as long as those of the first."""

MOST_AT_ONCE = 0.7
"""Share of the growth between two neighbouring blocks above which it is one change, and no growth."""


def rising(
    values: Sequence[float] | NDArray[np.generic], blocks: int = BLOCKS, most_at_once: float = MOST_AT_ONCE
) -> tuple[float, float] | None:
    """Return the medians of the first and last of `blocks` equal parts of a series; None where it does not rise.

    It does where all medians but one are above the one before, and no two neighbours lie most of the growth apart:
    that is a change that came once, a library that was loaded late for example.

    >>> rising(range(16), 4), rising([1.0] * 16, 4), rising([1, 2, 9, 9, 1, 2, 1, 1], 4)
    ((1.5, 13.5), None, None)
    >>> rising([693, 700, 1416, 1417], 4)
    """
    medians = [
        float(np.median(block)) for block in np.array_split(np.asarray(values, np.float64), blocks) if len(block)
    ]
    rises = [after - before for before, after in itertools.pairwise(medians)]
    if len(medians) < blocks or sum(rise > 0 for rise in rises) < blocks - 2 or medians[-1] <= medians[0]:
        return None
    if max(rises) > most_at_once * (medians[-1] - medians[0]):
        return None
    return medians[0], medians[-1]


def slowed(steps: NDArray[np.floating]) -> tuple[float, float] | None:
    """Return what a step took at the start of a run and at its end, where steps get slower; None elsewhere.

    `steps` [n] are the lengths of steps behind the first one.

    >>> slowed(np.linspace(1.0, 3.0, 81)), slowed(np.ones(80)), slowed(np.linspace(1.0, 3.0, 8))
    ((1.125, 2.8875), None, None)
    """
    ends = rising(steps) if len(steps) >= LEAST_STEPS else None
    return None if ends is None or ends[1] < GROWN * ends[0] else ends
